"""One small run in this process: everything that it does, in order, and what it leaves behind.

How a run begins, resumes and stops is in test_trainer_starts.py.
"""

import fcntl
import gc
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.runs import metrics_of, tiny_config, write_texts
from titan_sparse import trainer
from titan_sparse.trainer import Trainer

LONG, SHORT = 300, 200
"""Seconds of the two timeouts."""

SETTINGS = {
    "training__steps": 5,
    "training__seq_len": 64,
    "training__seed": 7,
    "training__gradient_accumulation_steps": 3,
    "training__gc_interval": 4,
    "attention__pattern": "dense",
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
    "checkpoint__last_save_in_hf": True,
    "lr_scheduler__warmup_steps": 0,
    "metrics__log_every": 2,
    "metrics__recall_every": 0,
    "parallelism__first_step_timeout_seconds": LONG,
    "parallelism__timeout_seconds": SHORT,
}


class _Output(io.StringIO):
    """flushed: what was printed when it was last flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def _is_locked(folder: Path) -> bool:
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _note(patch: pytest.MonkeyPatch, owner: object, name: str, note: Callable) -> None:
    """Call note(*args) before owner.name(*args)."""
    function = getattr(owner, name)

    def noted(*args, **kwargs):
        note(*args)
        return function(*args, **kwargs)

    patch.setattr(owner, name, noted)


def _watch(patch: pytest.MonkeyPatch, run: Trainer, events: list) -> None:
    """Note in `events` what the run calls."""
    parts = {
        run.checkpointer: ("check_disk", "prepare", "before_update", "save", "close"),
        run.metrics: ("count", "close"),
    }
    for owner, names in parts.items():
        for name in names:
            _note(patch, owner, name, lambda *args, name=name: events.append((name, *args)))
    # Transformers has nothing like the tiny model.
    patch.setattr(
        run.checkpointer, "save_in_hf", lambda step, *_: events.append(("save_in_hf", step))
    )
    _note(patch, run.optimizers, "step", lambda: events.append(("update",)))
    _note(patch, run, "_forward_backward", lambda *args: events.append(("forward", gc.isenabled())))
    _note(patch, run, "_lacks_time", lambda _, done, of: events.append(("time?", done, of)))
    _note(patch, run, "_set_timeout", lambda seconds: events.append(("timeout", seconds)))
    _note(patch, run, "_after_step", lambda *_: events.append(("watched", run.watch.step)))
    _note(patch, run.recovery, "read_guard", lambda *_: events.append(("read guard",)))
    _note(
        patch,
        run,
        "_recording",
        lambda step, is_logged: events.append(("record", step, is_logged)),
    )
    _note(patch, trainer, "barrier", lambda: events.append(("meet",)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_texts(folder / "texts")
    return folder


@pytest.fixture(scope="module")
def whole(folder) -> Iterator[SimpleNamespace]:
    """The run, with its events, what it printed, and whether others were kept out."""
    config = tiny_config(folder, "whole", **SETTINGS)
    events, timeouts = [], []
    with pytest.MonkeyPatch.context() as patch:
        _note(patch, trainer, "set_timeout", timeouts.append)
        run = Trainer(config)
        assert run.step_seconds == 0  # there was none yet
        seed, at_start = torch.initial_seed(), list(timeouts)
        _watch(patch, run, events)
        locked = _is_locked(folder / "whole")
        output = _Output()
        patch.setattr(sys, "stdout", output)
        run.train()
    return SimpleNamespace(
        config=config,
        run=run,
        events=events,
        seed=seed,
        at_start=at_start,
        locked=locked,
        output=output,
        collects=gc.isenabled(),
    )


def _step(step: int, logged: bool) -> list[tuple]:
    """What a step does, of three micro-batches with 64 tokens each."""
    return [
        ("record", step, False),
        ("forward", False),
        ("time?", 1, 3),
        ("record", step, False),
        ("forward", False),
        ("time?", 2, 3),
        ("record", step, logged),
        ("forward", False),
        ("before_update",),
        ("update",),
        ("count", 3 * 64),
        ("read guard",),
        ("watched", step),
        ("read guard",),
    ]


def _saved(step: int) -> list[tuple]:
    return [("timeout", LONG), ("save", step), ("meet",), ("timeout", SHORT)]


def test_all_that_a_run_does(whole):
    assert whole.at_start == [LONG]
    wanted = [("check_disk", 5)]
    # Timeouts are short after the first step.
    wanted += [*_step(1, True), ("prepare",), ("meet",), ("timeout", SHORT)]
    wanted += _step(2, True)
    wanted += [*_step(3, False), *_saved(3)]
    wanted += _step(4, True)
    wanted += [*_step(5, True), *_saved(5)]
    wanted += [("close",), ("timeout", LONG), ("save_in_hf", 5), ("meet",), ("close",)]
    assert whole.events == wanted


def test_what_a_run_leaves(whole, folder):
    """No lock, the garbage collector as it was, the resolved config, lines."""
    assert whole.locked and not _is_locked(folder / "whole")
    assert whole.collects
    assert whole.seed == 7
    assert (folder / "whole/config.toml").exists()
    assert [line["step"] for line in metrics_of(whole.config)] == [1, 2, 4, 5]
    assert [line["tokens_seen"] for line in metrics_of(whole.config)] == [192, 384, 768, 960]
    assert whole.run.step_seconds > 0 and whole.run.saved_step == 5


def test_the_banner_is_printed_at_once(whole):
    assert "attention" in whole.output.flushed
    assert whole.output.flushed == whole.output.getvalue()
