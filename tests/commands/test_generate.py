"""titan-sparse generate: its text against transformers, from folders and runs, on
one rank and on two."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist
import transformers

from tests.distributed import run_program
from tests.models.transformers_models import tiny_model
from tests.refusals import error_of
from titan_sparse.commands import export_hf
from titan_sparse.commands.generate import main
from titan_sparse.data.tokenizer import ByteTokenizer
from titan_sparse.evaluation.generation import _choose, decoded

WORDS = [f"w{number}" for number in range(60)]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
PROMPT = "w3 w14 w15 w9"


def _write_tokenizer(folder, end: str) -> None:
    words = ["<user>", "<assistant>", *WORDS]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random model, a tokenizer, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    settings = {"vocab_size": 62, "initializer_range": 0.6, "eos_token_id": 61}
    tiny_model("LlamaConfig", **settings).save_pretrained(folder)
    _write_tokenizer(folder, end="w59")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _by_transformers(folder, ids: list[int], **options) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([ids])
    # Without a mask, transformers would take the first word, 0, for padding.
    seen = torch.ones_like(tokens)
    out = model.generate(tokens, attention_mask=seen, do_sample=False, pad_token_id=0, **options)
    return out[0, len(ids) :].tolist()


def _printed(capsys, *words: str) -> str:
    assert main(["--training.device=cpu", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_folder_answers_and_continues(model, capsys):
    """A prompt is a message where there is a template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=True
    )
    plain = tokenizer(PROMPT, add_special_tokens=False)
    texts = {}
    for style, prompt in (("chat", chat), ("text", plain)):
        found = _by_transformers(model, prompt["input_ids"], max_new_tokens=12)
        texts[style] = tokenizer.decode(found, skip_special_tokens=True)
        words = (model, PROMPT, "--tokens", 12, "--as", style)
        assert _printed(capsys, *words) == texts[style] + "\n"
    assert texts["chat"] != texts["text"]
    assert _printed(capsys, model, PROMPT, "--tokens", 12) == texts["chat"] + "\n"


def test_a_text_ends_with_a_special_token(model, capsys, tmp_path):
    """One that transformers stops at too. It is not printed."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PROMPT)["input_ids"]
    found = _by_transformers(model, ids, max_new_tokens=12)
    end = next(token for place, token in enumerate(found) if place and token not in found[:place])
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    _write_tokenizer(tmp_path, end=tokenizer.decode([end]))
    wanted = _by_transformers(model, ids, max_new_tokens=12, eos_token_id=end)
    assert wanted[-1] == end and len(wanted) < 12
    words = (tmp_path, PROMPT, "--tokens", 12, "--as", "text")
    assert _printed(capsys, *words) == tokenizer.decode(wanted[:-1]) + "\n"


def test_a_run_continues_as_what_it_exports(folder, capsys, tmp_path):
    """On one rank and on two that share the prompt."""
    assert export_hf.main([str(folder / "run"), str(tmp_path / "hf"), "--dtype=float32"]) == 0
    capsys.readouterr()
    prompt = [*b"abc def"]
    found = _by_transformers(tmp_path / "hf", prompt, max_new_tokens=16)
    wanted = ByteTokenizer().decode(found) + "\n"
    words = [str(folder / "run"), "abc def", "--tokens", "16"]
    assert _printed(capsys, *words) == wanted
    dist.destroy_process_group()
    assert wanted in run_program(2, main, [*words, "--parallelism.cp=2"])
    drawn = [_printed(capsys, *words, "--temperature=1", f"--seed={seed}") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_as_often_as_the_softmax_says(temperature):
    logits = torch.tensor([[2.0, 0.0, 1.0, -torch.inf]]).expand(20_000, -1)
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(_choose(logits, temperature, generator), minlength=4)
    shares = np.exp(np.array([2.0, 0.0, 1.0, -np.inf]) / temperature)
    assert counts / 20_000 == pytest.approx(shares / shares.sum(), abs=0.015)


def test_a_letter_arrives_when_it_is_whole():
    text = "aé€😀b"
    columns = ([byte] for byte in [*text.encode(), 256])
    pieces = list(decoded(columns, ByteTokenizer(), {256}))
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "b"]
    # What never becomes whole is shown at the end.
    assert "".join(decoded(([byte] for byte in b"a\xe2\x82"), ByteTokenizer(), ())) == "a\ufffd"


@pytest.mark.parametrize(
    "words, reason",
    [
        (["", "--as=text"], "the prompt has no tokens"),
        (["a\udcff"], "PROMPT = 'a\\udcff' is not text in UTF-8"),
        (["a", "--temperature=-1"], "-1 is not a temperature; write 0 or more"),
        (["a", "--temperature=nan"], "nan is not a temperature"),
        (["a", "--tokens=0"], "0 is too small"),
        (["a", "--data.tokenizer=bytes"], "has other tokens than model.initial_hf"),
        (["a", "--data.tokenizer=none"], "does not exist"),
        (["a", "--dry-run"], "flags of train.py would be ignored"),
        (["a", "--data.source=b"], "data.source would be ignored; leave out what says which"),
        (["a", "--training.steps=2"], "training.steps would be ignored; leave out what only"),
        (["a", "--training.seq_len=9"], "training.seq_len would be ignored as the prompt is as"),
        (["a", "--training.loss_chunk_tokens=9"], "chunk_tokens would be ignored as there is no"),
        (["a", "--data.add_bos=false"], "data.add_bos would be ignored with a chat template"),
        (["a", "--attention.moba.top_k=9"], 'would be ignored with attention.pattern = "dense"'),
    ],
)
def test_what_cannot_be_generated_is_refused(model, capsys, words, reason):
    assert reason in error_of(capsys, main, str(model), *words, "--training.device=cpu")


def test_a_template_may_be_named(model, capsys, tmp_path):
    """Of a folder, and of a run on texts."""
    template = tmp_path / "own.jinja"
    template.write_text("w1 {{ kind }} " + TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    options = {"chat_template": template.read_text(), "add_generation_prompt": True}
    chat = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(chat, **options, kind="w7", return_dict=True)["input_ids"]
    found = _by_transformers(model, ids, max_new_tokens=8)
    words = [model, PROMPT, "--tokens=8", "--data.chat_template", template]
    words += ["--data.chat_template_kwargs", '{"kind": "w7"}']
    assert _printed(capsys, *words) == tokenizer.decode(found, skip_special_tokens=True) + "\n"
    of_run = tmp_path / "run.toml"
    of_run.write_text('[data]\nsource = "texts.jsonl"\ntext_field = "body"\n')
    assert _printed(capsys, *words, "--config", of_run)
    refusal = error_of(capsys, main, *map(str, words), "--as=text")
    assert "data.chat_template would be ignored with --as text; leave it out" in refusal


def test_options_may_stand_before_the_prompt(model, capsys):
    """The value of a key is not taken for the folder or the prompt, nor is
    the prompt for a value."""
    words = [str(model), PROMPT, "--tokens=4"]
    wanted = _printed(capsys, *words)
    for key in (
        ["--config", str(model.parent / "none.toml")],
        ["--data.tokenizer", "none"],
        ["--data.sourc=a b"],
        ["--validation.every", "x"],
    ):
        refusals = {
            error_of(capsys, main, *words[:place], *key, *words[place:]) for place in range(4)
        }
        assert len(refusals) == 1 and PROMPT not in refusals.pop()
    for key in (["--data.add_bos"], ["--data.add_bos", "true"], ["--training.dtype", "float32"]):
        for place in range(4):
            assert _printed(capsys, *words[:place], *key, *words[place:]) == wanted


def test_folders_that_lack_what_is_needed_are_refused(model, tmp_path, capsys):
    def refusal(*words: str) -> str:
        return error_of(capsys, main, str(tmp_path), "a", "--training.device=cpu", *words)

    assert "holds no complete checkpoint" in refusal()
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds adapters alone; write the run, or what export_hf --merge" in refusal()
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    assert "model.initial_hf: " in refusal()
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    assert "has a chat template" in refusal("--as=chat")
