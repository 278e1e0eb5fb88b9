"""titan-sparse init: each example loads, says what its keys mean, fits a GPU, and trains."""

import json

import pytest
import torch.distributed as dist
import transformers

from titan_sparse.commands import train
from titan_sparse.commands.init import EXAMPLES, main
from titan_sparse.config import load, load_and_check

SMALL = """
    --training.steps 2 --training.seq_len 128 --training.device cpu --training.dtype float32
    --attention.block_size 16 --attention.vertical_slash.dense_below 32
    --validation.windows 2 --validation.prompt abc --metrics.tensorboard false
""".split()
SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)


@pytest.fixture
def example(request, tmp_path, monkeypatch, capsys):
    """The file as `titan-sparse init KIND > run.toml` writes it."""
    monkeypatch.chdir(tmp_path)
    assert main([request.param]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    return request.param


def _write_model_and_chats(folder) -> None:
    """What the examples name, and a tokenizer of bytes with a chat template."""
    import tokenizers

    config = transformers.LlamaConfig(
        **SHAPE, vocab_size=300, num_attention_heads=2, num_key_value_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "MODEL_FOLDER")
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz <|endoftext|>"))
    vocabulary = {letter: number for number, letter in enumerate(["<|endoftext|>", *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="a"))
    tokenizer.save(str(folder / "MODEL_FOLDER/tokenizer.json"))
    (folder / "MODEL_FOLDER/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    chat = [{"role": "user", "content": "how so"}, {"role": "assistant", "content": "like this"}]
    rows = [json.dumps({"messages": chat * 3})] * 20
    (folder / "chats.jsonl").write_text("\n".join(rows))


@pytest.mark.parametrize("example", EXAMPLES, indirect=True)
def test_an_example_trains(example, tmp_path, capsys):
    words = ["--config", "run.toml", *SMALL]
    if example == "pretrain":
        # A model that a CPU trains in no time, and less text.
        (tmp_path / "text.txt").write_text("some words to learn. " * 60)
        words += ["--model.flavour=debug", "--data.source=text.txt", "--data.join_packages=false"]
    else:
        pytest.importorskip("peft")
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
        with pytest.raises(ValueError, match="MODEL_FOLDER"):
            load_and_check(["--config", "run.toml"], 1, 1)


def test_another_word_is_refused(capsys):
    for words in ([], ["finetune"], ["sft", "more"]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("error: ")
