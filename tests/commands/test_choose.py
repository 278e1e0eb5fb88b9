"""titan-sparse choose: its numbers against transformers, its choice by hand, and
one rank against two."""

import fcntl
import json
import re
import signal
import sys

import numpy as np
import pytest
import torch
import transformers

from tests.distributed import run_program
from tests.models.transformers_models import tiny_model
from tests.refusals import error_of
from titan_sparse import __main__
from titan_sparse.commands import choose
from titan_sparse.commands.choose import (
    choice,
    configurations,
    crossing_length,
    faster,
    main,
    reason,
    toml_lines,
    words_of_runs,
)
from titan_sparse.config import load
from titan_sparse.training.checkpoint import folders

TEXT = "every word of this is written many times over, and a few are not. " * 7
"""462 letters: a sequence of 400 tokens, and the next one to learn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The text, and a random model of transformers."""
    folder = tmp_path_factory.mktemp("choose")
    (folder / "text.txt").write_text(TEXT)
    # Logits of attention and of the head are large enough that the selection matters.
    model = tiny_model("LlamaConfig", vocab_size=258, initializer_range=0.5)
    model.save_pretrained(folder / "model")
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
    assert all(len(row["losses"]) == 2 for row in rows.values())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    tokens = torch.tensor([[*TEXT[:401].encode()]])
    wanted = model(tokens, labels=tokens).loss.item()
    assert rows["dense"]["loss"] == pytest.approx(wanted, rel=1e-6)

    assert list(rows) == ["dense", "recall 0.9", "recall 0.95", "recall 0.97", "recall 0.99"]
    for name in ("density", "recall"):
        dense, *sparse = [row[name] for row in rows.values()]
        assert sparse == sorted(sparse) and dense == 1.0 > sparse[-1]
    assert len({row["loss"] for row in rows.values()}) == len(rows)
    printed = capsys.readouterr().out
    (line,) = re.findall(r"^recall 0\.95 .*", printed, re.MULTILINE)
    above = np.subtract(rows["recall 0.95"]["losses"], rows["dense"]["losses"])
    assert f"{above.mean():+.4f} +- {above.std(ddof=1):.4f}" in line
    assert f"{rows['recall 0.95']['density']:.1%}" in line
    # What is recommended is what a run with these lines has.
    name, lines = re.search(r"^choice: (.*)\n\n((?:.*\n)*)", printed, re.MULTILINE).groups()
    assert name == choice(rows)
    (folder / "chosen.toml").write_text(lines)
    chosen = load(["--config", str(folder / "chosen.toml")])[0].attention
    assert chosen.block_size == 16
    assert chosen.pattern == ("dense" if name == "dense" else "vertical_slash")
    # On two processors sparse attention mostly does not pay at 400 tokens.
    dense_is_fastest = not faster(rows)
    assert ("dense is faster here" in printed) == dense_is_fastest
    assert ("sparse pays from" in printed or "which sparse pays" in printed) == dense_is_fastest


def test_heads_at_their_caps_are_counted(folder, capsys):
    words = [*_words(folder, "capped"), "--attention.vertical_slash.max_verticals=8"]
    assert main(words) == 0
    dense, *sparse = _rows(folder, "capped").values()
    # Each of 400 keys is a vertical of its own, of which a head may have 8.
    assert dense["heads_capped"] == 0 and all(row["heads_capped"] > 0.5 for row in sparse)
    printed = capsys.readouterr().out
    assert "max_verticals or max_slashes of [attention.vertical_slash] keeps" in printed
    (line,) = re.findall(r"^recall 0\.95 .*", printed, re.MULTILINE)
    assert f" {sparse[1]['heads_capped']:.0%} " in line


def test_the_lines_to_write_hold_what_was_measured(folder):
    words = [*_words(folder, "lines"), "--attention.xattention.stride=8"]
    words = words_of_runs(str(folder / "model"), 2, words[8:])
    for name, config in configurations(words, 400, folder / "lines").items():
        path = folder / "lines.toml"
        path.write_text(toml_lines(config))
        read = load(["--config", str(path)])[0].attention
        pattern = config.attention.pattern
        assert pattern == read.pattern and (pattern == "dense") == (name == "dense")
        assert getattr(read, pattern) == getattr(config.attention, pattern)
        assert "xattention" not in path.read_text() and read.block_size == 16


def test_nothing_is_measured_where_nothing_is_sparse(folder, capsys):
    """Before anything starts if the length says so, else after one setting."""
    # As a configuration for training has them.
    (folder / "run.toml").write_text(
        "[validation]\nenable = true\nevery = 9\n[metrics]\npictures_every = 10\n"
        "[checkpoint]\nenable = true\nlast_save_in_hf = true\n[profiling]\nenable = true\n"
    )
    words = [*_words(folder, "short"), "--config", str(folder / "run.toml")]
    below = words.index("--attention.vertical_slash.dense_below") + 1
    words[below] = "401"
    assert "--seq-len 400: everything would be dense" in error_of(capsys, main, *words)
    assert not (folder / "short").exists()
    words[words.index("fixed")] = "packed"
    words[below] = "390"
    (folder / "short.txt").write_text(TEXT[:300])
    words[words.index("--data.source") + 1] = str(folder / "short.txt")
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count("measured ") == 1 and "no document of these batches has 390" in printed
    assert sorted(path.name for path in (folder / "short").iterdir()) == [".lock", "recall_0.9"]


@pytest.mark.parametrize("step", [1, 2])
def test_an_interrupt_ends_all_measurements(folder, monkeypatch, step):
    """Not one run alone, which itself stops as a training run does."""
    steps = iter(range(1, step + 1))
    one_step = choose.Trainer.step

    def interrupted(trainer):
        if next(steps, None) == step:
            signal.raise_signal(signal.SIGINT)
        return one_step(trainer)

    monkeypatch.setattr(choose.Trainer, "step", interrupted)
    out = f"interrupted-{step}"
    monkeypatch.setattr(sys, "argv", ["titan-sparse", "choose", *_words(folder, out)])
    assert __main__.main() == 130
    assert [path.name for path in (folder / out).glob("*/")] == ["recall_0.9"]


@pytest.mark.parametrize(
    "word",
    [
        *("--optimizer.lr=1", "--attention.vertical_slash.recall=0.5", "--validation.every=3"),
        *("--guard.enable=false", "--lr_scheduler.decay_type=linear"),
        "--profiling.steps=3",
    ],
)
def test_what_it_would_ignore_is_refused(folder, capsys, word):
    error = error_of(capsys, main, *_words(folder, "none"), word)
    assert f"choose itself sets {word[2:].partition('=')[0]}; leave it out" in error


def test_a_folder_in_use_is_refused_by_the_name_of_its_option(folder, capsys, monkeypatch):
    """Before a model is built, and with advice that is taken: choose sets training.output_dir."""
    monkeypatch.setattr(folders, "LEASE_SECONDS", 0.0)
    out = folder / "taken"
    out.mkdir()
    (out / folders.LOCK).write_text("host other, process 1")
    with open(out / folders.LOCK) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        error = error_of(capsys, main, *_words(folder, "taken"))
    assert f"--out = {out} is in use by another run (host other, process 1); end that one" in error
    assert [path.name for path in out.iterdir()] == [folders.LOCK]


@pytest.mark.parametrize("a, b, c, d", [(3.0, 2.0, 50.0, 0.5), (0.0, 1.0, 1.0, 0.0)])
def test_the_length_from_which_sparse_pays(a, b, c, d):
    """Times of the model of costs, and where its two curves meet by bisection."""

    def dense(n):
        return a * n + b * n**2

    def sparse(n):
        return a * n + c + d * n**2

    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if sparse(middle) < dense(middle) else (middle, high)
    times = [[curve(n) for n in (2.0, 4.0)] for curve in (dense, sparse)]
    assert crossing_length(4, *times) == pytest.approx(low)
    # Steps that wait for the host, and pairs that cost more than dense ones.
    assert crossing_length(4, [1.0, 1.2], [2.0, 2.3]) is None
    assert crossing_length(4, [1.0, 3.0], [2.0, 8.0]) is None


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


def test_the_fewest_pairs_that_lose_little_and_take_less_time():
    rows = {
        "dense": {"loss": 2.0, "density": 1.0, "step_seconds": 1.0},
        "recall 0.9": {"loss": 2.02, "density": 0.1, "step_seconds": 0.5},
        "recall 0.95": {"loss": 2.01, "density": 0.2, "step_seconds": 0.6},
        "recall 0.97": {"loss": 1.99, "density": 0.3, "step_seconds": 0.9},
    }
    assert choice(rows) == "recall 0.95"
    assert "1.67 times as fast" in reason(rows, "recall 0.95")
    rows["recall 0.95"]["loss"] = 2.011
    assert choice(rows) == "recall 0.97"
    rows["recall 0.97"]["step_seconds"] = 1.1
    assert choice(rows) == "dense"
    assert "what is faster loses more" in reason(rows, "dense")
    for name in ("recall 0.9", "recall 0.95"):
        rows[name]["step_seconds"] = 1.25
    assert "dense is faster here" in reason(rows, choice(rows)) and "0.91" in reason(rows, "dense")
