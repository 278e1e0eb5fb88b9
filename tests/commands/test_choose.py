"""titan-sparse choose: its numbers against transformers, its choice by hand, and one rank against two."""

import json

import pytest
import torch
import transformers

from tests.distributed import run_program
from titan_sparse.commands.choose import choice, main

TEXT = "every word of this is written many times over, and a few are not. " * 7
"""462 letters: a sequence of 400 tokens, and the next one to learn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The text, and a random model of transformers."""
    folder = tmp_path_factory.mktemp("choose")
    (folder / "text.txt").write_text(TEXT)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Logits of attention and of the head are large enough that the selection matters.
        initializer_range=0.5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


def _words(folder, out: str) -> list[str]:
    words = f"""
        --model {folder}/model --seq-len 400 --batches 2 --out {folder}/{out}
        --data.source {folder}/text.txt --data.sequences fixed --training.device cpu --training.dtype float64
        --data.tokenizer bytes --attention.block_size 16 --attention.vertical_slash.dense_below 32
        --attention.vertical_slash.local_slashes 1 --metrics.recall_rows 400
    """
    return words.split()


def _rows(folder, out: str) -> dict[str, dict[str, float]]:
    return json.loads((folder / out / "choose.json").read_text())


def test_a_table_and_a_choice(folder, capsys):
    assert main(_words(folder, "one")) == 0
    rows = _rows(folder, "one")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    tokens = torch.tensor([[*TEXT[:401].encode()]])
    assert rows["dense"]["loss"] == pytest.approx(
        model(tokens, labels=tokens).loss.item(), rel=1e-6
    )

    assert list(rows) == ["dense", "recall 0.9", "recall 0.95", "recall 0.97", "recall 0.99"]
    for name in ("density", "recall"):
        dense, *sparse = [row[name] for row in rows.values()]
        assert sparse == sorted(sparse) and dense == 1.0 > sparse[-1]
    assert len({row["loss"] for row in rows.values()}) == len(rows)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"choice: {choice(rows)}"
    (line,) = (line for line in printed if line.startswith("recall 0.95"))
    assert f"{rows['recall 0.95']['density']:.1%}" in line


def test_two_ranks_measure_what_one_does(folder):
    if not (folder / "one").exists():
        assert main(_words(folder, "one")) == 0
    run_program(2, main, [*_words(folder, "two"), "--parallelism.cp", "2"])
    for name, row in _rows(folder, "two").items():
        wanted = _rows(folder, "one")[name]
        for key in ("loss", "density"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-6), (name, key)
        # Each rank draws rows of its own to measure it.
        assert row["recall"] == pytest.approx(wanted["recall"], abs=0.02), name


def test_the_fewest_pairs_that_lose_little():
    rows = {
        "dense": {"loss": 2.0, "density": 1.0},
        "recall 0.9": {"loss": 2.02, "density": 0.1},
        "recall 0.95": {"loss": 2.01, "density": 0.2},
        "recall 0.97": {"loss": 1.99, "density": 0.3},
    }
    assert choice(rows) == "recall 0.95"
    rows["recall 0.95"]["loss"] = 2.011
    assert choice(rows) == "recall 0.97"
