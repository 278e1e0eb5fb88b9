"""titan-sparse init, options, and show_data: what they print."""

import json
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.data.helpers import ANSWER, CHAT, CHATML, write_rows, write_tokenizer
from tests.models.transformers_models import tiny_model
from tests.refusals import error_of, refused
from titan_sparse.commands import init, options, show_data, train
from titan_sparse.commands.init import EXAMPLES
from titan_sparse.config import load, load_and_check
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe

SMALL = """
    --training.steps 2 --training.seq_len 128 --training.device cpu --training.dtype float32
    --attention.block_size 16 --attention.vertical_slash.dense_below 32
    --validation.windows 2 --validation.prompt abc --metrics.tensorboard false
""".split()


@pytest.fixture
def example(request, tmp_path, monkeypatch, capsys):
    """The file as `titan-sparse init KIND > run.toml` writes it."""
    monkeypatch.chdir(tmp_path)
    assert init.main([request.param]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    return request.param


def _write_model_and_chats(folder) -> None:
    """What the examples name."""
    model = tiny_model("LlamaConfig", vocab_size=400, num_hidden_layers=1)
    model.save_pretrained(folder / "MODEL_FOLDER")
    write_tokenizer(folder / "MODEL_FOLDER", CHATML)
    chat = [{"role": "user", "content": "how so"}, {"role": "assistant", "content": "like this"}]
    write_rows(folder / "chats.jsonl", [{"messages": chat * 3}] * 20)


@pytest.mark.parametrize("example", EXAMPLES, indirect=True)
def test_an_example_trains(example, tmp_path):
    words = ["--config", "run.toml", *SMALL]
    if example == "pretrain":
        # A model that a CPU trains in no time, and less text.
        (tmp_path / "text.txt").write_text("some words to learn. " * 60)
        words += ["--model.flavour=debug", "--data.source=text.txt", "--data.join_packages=false"]
    else:
        _write_model_and_chats(tmp_path)
    assert train.main(words) == 0
    lines = (tmp_path / f"outputs/{example}/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("example", EXAMPLES, indirect=True)
def test_an_example_says_what_its_keys_mean(example, tmp_path):
    text = (tmp_path / "run.toml").read_text()
    lines = text.splitlines()
    for before, line in zip(lines, lines[1:]):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("# ") and max(map(len, lines)) <= 100
    config, _ = load(["--config", "run.toml"])
    assert config.training.output_dir == f"outputs/{example}"
    assert config.lora.rank == (16 if example == "lora" else 0)
    if example == "pretrain":
        load_and_check(["--config", "run.toml"], 1, 1)
        report = ["--dry-run", "--device-memory", "79", "--ranks", "1"]
        assert train.main(["--config", "run.toml", "--training.device=cuda", *report]) == 0
    else:
        with refused("MODEL_FOLDER"):
            load_and_check(["--config", "run.toml"], 1, 1)


def test_another_word_is_refused(capsys):
    for words in ([], ["finetune"], ["sft", "more"]):
        error_of(capsys, init.main, *words)


def test_options_and_refused_combinations_are_printed(capsys):
    """Of the configuration that the other words say."""
    assert options.main(["--parallelism.cp", "1", "--parallelism.cp_intra", "0"]) == 0
    printed = capsys.readouterr().out
    assert "--attention.pattern dense|vertical_slash|xattention|moba" in printed
    assert '* attention.backend = "cudnn" does not go with attention.pattern' in printed
    assert 'attention.schedule = "double_ring" does not go with parallelism.cp = 1' in printed
    assert "attention.blocks" in error_of(capsys, options.main, "--attention.blocks", "100")
    assert "flags of train.py would be ignored" in error_of(capsys, options.main, "--dry-run")


def test_readers_that_have_seen_enough():
    """Such as head."""
    program = [sys.executable, "-m", "titan_sparse"]
    for words in (["options"], ["--help"]):
        process = subprocess.Popen(
            [*program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 141


COLOR = re.compile("\033\\[\\d+m")


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    long = [CHAT[1], {**ANSWER, "content": "yes " * 200}]
    write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": long}])
    source = str(tmp_path / "chats.jsonl")
    options = {"source": source, "format": "messages", "tokenizer": folder}
    words = ["--training.seq_len", "100", "--parallelism.cp", "4"]
    for name, value in options.items():
        words += [f"--data.{name}", value]
    return words


def test_marks_colors_and_lengths(words, capsys):
    assert show_data.main([*words, "--samples", "1", "--plain"]) == 0
    printed = capsys.readouterr().out
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    for answer in ("the answer\n\nis \U0001f600 4", "yes"):
        text = text.replace(f"\n{answer}<|im_end|>", f"\n⟦{answer}<|im_end|>⟧")
    assert f"learned\n{text}<|endoftext|>\n" in printed
    assert "sample 2" not in printed

    assert show_data.main([*words, "--samples", "1"]) == 0
    colored = capsys.readouterr().out
    assert "⟦" not in colored
    assert "\033[32myes\033[0m\033[32m\033[1m<|im_end|>\033[0m\033[2m\n\033[0m" in colored
    plain = re.sub("[⟦⟧]", "", printed)
    assert COLOR.sub("", colored) == plain


def test_prepared_chats_and_text_are_shown_too(words, tmp_path, capsys):
    tokenizer = str(tmp_path / "tokenizer")
    recipe = Recipe(str(tmp_path / "chats.jsonl"), tokenizer=tokenizer, format="messages")
    prepare(recipe, str(tmp_path / "out"))
    write_rows(tmp_path / "text.jsonl", [{"text": "hello"}])
    source = f"{tmp_path}/out:0.5, {tmp_path}/text.jsonl:0.5"
    options = ["--data.source", source, "--data.tokenizer", tokenizer]
    assert show_data.main([*options, "--plain"]) == 0
    printed = capsys.readouterr().out
    assert "out: 2 samples, messages" in printed and "⟦yes<|im_end|>⟧" in printed
    assert "text.jsonl: 1 samples, text" in printed
    assert "⟦<|begin_of_text|>hello<|endoftext|>⟧" in printed


def test_what_training_leaves_out_is_not_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_rows(tmp_path / "text.jsonl", [{"text": text} for text in ("abc", "", "abcd", "abcde")])
    words = ["--data.source", f"{tmp_path}/text.jsonl", "--plain", "--samples", "2"]
    for least, shown in (("0", ["abc", "abcd"]), ("4", ["abcd", "abcde"]), ("5", ["abcde"])):
        assert show_data.main([*words, f"--data.min_document_length={least}"]) == 0
        assert re.findall("⟦(abc[a-z]*)", capsys.readouterr().out) == shown


def test_mistakes_are_one_line(words, tmp_path, capsys):
    negative = error_of(capsys, show_data.main, *words, "--samples", "-1")
    assert "--samples: -1 is too small" in negative
    assert "flags" in error_of(capsys, show_data.main, *words, "--dry-run")
    write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT[:2]}])
    error = error_of(capsys, show_data.main, *words)
    assert 'chats.jsonl, row 1: "messages" holds no message of the role "assistant"' in error
