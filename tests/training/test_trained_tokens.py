"""Chat tokens that the base model was never trained on: the log names them, and what it advises
teaches a run with adapters where an answer ends."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.data.chat_helpers import CHATML, write_tokenizer
from tests.models.helpers import change_tensors
from tests.models.transformers_models import save_model
from tests.training.wired_run import read_model, run
from titan_sparse.commands.export_hf import main as export_hf
from titan_sparse.config import ConfigError
from titan_sparse.models.huggingface import untrained_tokens

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the answer"}]
ENDS = {"<|im_start|>", "<|im_end|>"}
SETTINGS: dict[str, object] = {
    "data.format": "messages",
    "training.steps": 40,
    "training.seq_len": 128,
    "optimizer.lr": 0.02,
    "lr_scheduler.warmup_steps": 0,
    "lora.rank": 4,
    "checkpoint.last_save_in_hf": False,
    "guard.enable": False,
}


def zero(rows: Tensor) -> None:
    rows.zero_()


def make_alike(rows: Tensor) -> None:
    rows.copy_(rows[:1].clone())


def read_tokenizer(base: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(base)


@pytest.fixture(params=[(False, zero), (True, make_alike)], ids=["untied, zero", "tied, alike"])
def folder(request, tmp_path) -> Path:
    tied, spoil = request.param
    base = tmp_path / "base"
    write_tokenizer(base, CHATML)
    # transformers does not read a token that is described by a table.
    (base / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tokenizer = read_tokenizer(base)
    # More rows than tokens, as most models have.
    save_model(base, "llama", vocab_size=len(tokenizer) + 30, tie_word_embeddings=tied)
    ids = tokenizer.convert_tokens_to_ids([*sorted(ENDS), "<|observation|>"])

    def change(tensors: dict[str, Tensor]) -> None:
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
            rows = tensors[name][ids]
            spoil(rows)
            tensors[name][ids] = rows

    change_tensors(base, change)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    return tmp_path


def train(folder: Path, output: str, **settings: object) -> None:
    paths = {
        "data.source": folder / "chats.jsonl",
        "data.tokenizer": folder / "base",
        "model.initial_hf": folder / "base",
    }
    named = {key.replace("__", "."): value for key, value in settings.items()}
    run(folder, output, SETTINGS | paths | named)


@torch.no_grad()
def probability_of_the_end(folder: Path, output: str) -> float:
    out = folder / f"{output}-whole"
    words = ["--merge"] if output != "full" else []
    assert export_hf([str(folder / output), str(out), *words]) == 0
    tokenizer = read_tokenizer(folder / "base")
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    place = (ids[0] == end).nonzero()[-1].item()
    logits = read_model(out)(ids[:, :place]).logits[0, -1]
    return logits.softmax(-1)[end].item()


def test_the_log_names_tokens_that_were_never_trained(folder, caplog):
    with caplog.at_level(logging.WARNING):
        train(folder, "adapters")
    [line] = [r.getMessage() for r in caplog.records if "never trained" in r.getMessage()]
    advice = re.search('write lora.trainable_tokens = "(.*)"$', line)[1]
    # <|observation|> is as bad, but no chat has it.
    assert set(advice.split(",")) == ENDS
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train(folder, "advised", lora__trainable_tokens=advice)
        train(folder, "full", lora__rank=0)
    assert "never trained" not in caplog.text
    ends = {name: probability_of_the_end(folder, name) for name in ("adapters", "advised", "full")}
    assert ends["full"] > 0.98 and ends["advised"] > 0.95
    assert ends["adapters"] < 0.9


@pytest.mark.parametrize(
    "names, message",
    [
        ("<|im_end|>,<|nothing|>", '"<|nothing|>" is not a token of data.tokenizer'),
        ("<|im_end|>, <|im_end|>", 'names "<|im_end|>" twice; leave one out'),
    ],
)
@pytest.mark.parametrize("folder", [(True, zero)], indirect=True, ids=["tied"])
def test_names_that_are_not_tokens_are_refused(folder, names, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train(folder, "refused", lora__trainable_tokens=names)
    with pytest.raises(ConfigError, match="would be ignored with lora.rank = 0"):
        train(folder, "refused", lora__trainable_tokens=names, lora__rank=0)


@pytest.mark.parametrize("folder", [(False, zero)], indirect=True, ids=["untied"])
def test_rows_that_look_untrained(folder):
    """Trained rows of other tokens do not. Rows of a padded table count, and new ones of transformers,
    which are nearly alike."""
    base = str(folder / "base")
    names = [*sorted(ENDS), "<|user|>", "<|system|>"]
    tokenizer = read_tokenizer(folder / "base")
    ids = tokenizer.convert_tokens_to_ids(names)
    added = set(tokenizer.added_tokens_decoder)
    count = len(tokenizer)
    assert untrained_tokens(base, ids, added, count) == sorted(ids[:2])

    def like_padding(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][[ids[2], count + 4]] = 0.3

    change_tensors(Path(base), like_padding)
    assert untrained_tokens(base, ids, added, count) == sorted(ids[:3])
    model = read_model(folder / "base")
    model.resize_token_embeddings(model.config.vocab_size + 2)
    model.save_pretrained(folder / "base")
    new = [model.config.vocab_size - 2, model.config.vocab_size - 1]
    assert untrained_tokens(base, new, added, model.config.vocab_size) == new
