"""Faults in a whole job: its exit status, its one line, and what is left.

Stuck ranks: tests/training/faults/test_lost_ranks.py. Kills in a save: checkpoint/test_saver.py.
"""

from pathlib import Path

import pytest

from tests.faults.jobs import (
    SETTINGS,
    metrics,
    run_job,
    run_under_torchrun,
    whole_checkpoints,
)
from tests.faults.planted import Faults
from tests.faults.soak import soak
from titan_sparse.config.reading import as_words


def _train(folder: Path, name: str, settings: dict, **options: object) -> tuple[int, str]:
    """8 steps of a run. Returns its status and what it has printed."""
    own = {
        "training.output_dir": folder / name,
        "data.source": folder / "texts",
        "training.steps": 8,
        "lr_scheduler.total_steps": 8,
    }
    return run_job(as_words(SETTINGS | own | settings), folder / f"{name}.log", **options)


def _one_line(text: str) -> str:
    """The one line of an error, with no traceback beside it."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


def test_a_disk_that_fills_leaves_the_last_checkpoint(texts):
    status, text = _train(texts, "undisturbed", {"checkpoint.enable": "false"})
    assert status == 0, text
    assert _train(texts, "run", {"training.steps": 4})[0] == 0
    status, text = _train(texts, "run", {}, file_bytes=100_000)
    line = _one_line(text)
    assert status == 1 and "step-6" in line and "no space left" in line and "GiB" in line
    assert whole_checkpoints(texts / "run/checkpoint") == (4, [])
    status, text = _train(texts, "run", {})
    assert status == 0 and "resumed at step 4" in text, text
    losses = [{(x["step"], x["loss"]) for x in metrics(texts / n)} for n in ("run", "undisturbed")]
    assert losses[0] == losses[1]


def test_poison_without_end_ends_with_status_3(texts):
    settings = {"guard.max_skips_in_a_row": 2, "guard.max_rollbacks": 1}
    status, text = _train(texts, "run", settings, faults=Faults(poisoned_from=4))
    assert status == 3, text
    assert f"look at loss and grad_norm in {texts / 'run/metrics.jsonl'}" in _one_line(text)
    assert whole_checkpoints(texts / "run/checkpoint") == (2, [])


@pytest.mark.faults
def test_three_kills_as_saves_begin_and_a_poisoned_gradient_lose_nothing(tmp_path):
    settings = SETTINGS | {"training.steps": 60, "checkpoint.interval": 4}
    found = soak(tmp_path, settings, ranks=2, kill_every=16)
    assert not found["problems"], found
    assert found["kills"] == 3 and found["lines_equal_to_the_bit"] == found["lines"] > 60
    assert found["skipped_updates"] == 1


REFUSE = "from titan_sparse.config import Refusal; raise Refusal('a.b = 1: write 2')"
FILL = "raise OSError(28, 'No space left on device', 'a/b')"


@pytest.mark.faults
@pytest.mark.parametrize(
    "faults, words, status",
    [
        (Faults(code=REFUSE), "write 2", 2),
        (Faults(rank=1, code=FILL), "No space left", 1),
        (Faults(), "attention.pattern", 2),
    ],
)
def test_an_end_is_told_in_one_line(tmp_path, faults, words, status):
    """All ranks report the same line; or only the second does, once there is a process group; or a
    mistake in the configuration ends all before they do anything."""
    settings = {"parallelism.cp": 2} if faults.code else {"attention.patern": "dense"}
    output = run_under_torchrun(tmp_path, 2, settings, faults)
    # torchrun itself ends with a traceback, and then its summary.
    lines, _, summary = output.partition("failed (exitcode")
    assert words in _one_line(lines) and words in summary, output
    assert f"exitcode  : {status} " in summary, output
