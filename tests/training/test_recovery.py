"""What follows the guard's reports, step by step. Guard, checkpoints and schedule are stand-ins.

Whole poisoned runs are in test_poison.py.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from titan_sparse.config import Config
from titan_sparse.training import guard as module
from titan_sparse.training.checkpoint import Progress
from titan_sparse.training.guard import Recovery, Report
from titan_sparse.training.launcher import Poisoned

CPU = torch.device("cpu")
INTERVAL = 4
"""Steps from checkpoint to checkpoint."""


class _Guard:
    """Gives out `coming` reports. asked: how each was asked for."""

    def __init__(self) -> None:
        self.device = CPU
        self.coming: list[Report] = []
        self.asked: list[bool] = []

    def reports(self, all_of_them: bool) -> list[Report]:
        self.asked.append(all_of_them)
        coming, self.coming = self.coming, []
        return coming


class _Checkpoints:
    """A checkpoint every INTERVAL steps. befores: what it was asked to go back to."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.befores: list[int] = []

    def go_back(self, before: int) -> int | None:
        self.befores.append(before)
        if before <= INTERVAL:
            return None
        good = (before - 1) // INTERVAL * INTERVAL
        self.progress.step = good
        self.progress.skipped_updates = self.progress.times_gone_back = 0  # as it was saved
        return good


def _report(step: int, in_a_row: int) -> Report:
    return Report(step, in_a_row > 0, False, False, 9.0, 4.0, in_a_row)


@pytest.fixture
def parts(monkeypatch) -> SimpleNamespace:
    """A Recovery and its stand-ins. resumed: the schedules that were set."""
    progress, guard, resumed = Progress(CPU), _Guard(), []
    checkpoints = _Checkpoints(progress)
    config = Config()
    config.guard.max_skips_in_a_row = 2
    made = Recovery(config, guard, checkpoints, nn.Linear(1, 1), "optimizers", "schedule", progress)
    monkeypatch.setattr(module, "all_finite", lambda tensors, device: True)
    monkeypatch.setattr(module, "optimizer_states", lambda optimizers: [])
    monkeypatch.setattr(module, "resume_schedule", lambda *args: resumed.append(args))
    return SimpleNamespace(
        recovery=made,
        guard=guard,
        progress=progress,
        checkpoints=checkpoints,
        config=config,
        resumed=resumed,
    )


def _fail_at(parts: SimpleNamespace, step: int) -> None:
    """The updates of `step` and the one before are skipped, and the run goes back."""
    parts.progress.step = step
    parts.guard.coming = [_report(step - 1, 1), _report(step, 2)]
    problem = parts.recovery.problem(saves=False, is_last=False)
    assert problem == "2 updates in a row were skipped"
    parts.recovery.go_back(problem)


def test_skipped_updates_are_counted_and_told(parts, caplog):
    parts.guard.coming = [_report(1, 0), _report(2, 1), _report(3, 2), _report(4, 0)]
    with caplog.at_level(logging.WARNING, "titan_sparse"):
        parts.recovery.read_guard(all_of_them=False)
    assert parts.progress.skipped_updates == 2
    assert parts.recovery.bad_in_a_row == 0
    reason = "update skipped, as the gradient norm 9 is above 4"
    assert [record.message for record in caplog.records] == [
        f"step 2: {reason} (1 in a row, 1 in this run)",
        f"step 3: {reason} (2 in a row, 2 in this run)",
    ]


@pytest.mark.parametrize("saves, is_last", [(False, False), (True, False), (False, True)])
def test_the_last_report_is_waited_for_before_a_save_and_at_the_end(parts, saves, is_last):
    assert parts.recovery.problem(saves, is_last) == ""
    assert parts.guard.asked == [saves or is_last]


def test_a_guard_that_is_off_asks_for_nothing(parts):
    parts.config.guard.enable = False
    parts.recovery.bad_in_a_row = 9
    assert parts.recovery.problem(saves=True, is_last=True) == ""
    assert parts.guard.asked == []


def test_only_finite_weights_are_saved(parts, monkeypatch):
    monkeypatch.setattr(module, "all_finite", lambda tensors, device: False)
    assert parts.recovery.problem(saves=False, is_last=True) == ""
    problem = parts.recovery.problem(saves=True, is_last=False)
    assert problem == "weights or optimizer states are not finite"


def test_a_save_waits_for_a_good_step(parts):
    assert parts.recovery.may_save(is_due=True, is_last=False)
    parts.guard.coming = [_report(4, 1)]
    assert parts.recovery.problem(saves=True, is_last=False) == ""
    assert not parts.recovery.may_save(is_due=True, is_last=False)
    parts.guard.coming = [_report(5, 0)]
    # It is late: this step's report is waited for.
    assert parts.recovery.problem(saves=False, is_last=False) == ""
    assert parts.guard.asked == [True, True]
    assert parts.recovery.may_save(is_due=False, is_last=False)
    assert not parts.recovery.may_save(is_due=False, is_last=False)


def test_after_going_back_nothing_is_late_and_the_counters_go_on(parts):
    parts.guard.coming = [_report(8, 1)]
    parts.recovery.problem(saves=True, is_last=False)
    assert not parts.recovery.may_save(is_due=True, is_last=False)
    _fail_at(parts, 10)
    assert parts.checkpoints.befores == [9]
    assert parts.resumed == [("optimizers", "schedule", parts.config.optimizer, 8)]
    assert (parts.progress.skipped_updates, parts.progress.times_gone_back) == (3, 1)
    assert parts.recovery.problem(saves=False, is_last=False) == ""
    assert not parts.recovery.may_save(is_due=False, is_last=False)
    assert parts.recovery.may_save(is_due=True, is_last=False)


def test_a_checkpoint_that_did_not_help_is_not_tried_again(parts):
    """Unless the run has saved another since."""
    _fail_at(parts, 10)
    _fail_at(parts, 10)
    assert parts.checkpoints.befores == [9, 8]
    parts.recovery.has_saved()
    _fail_at(parts, 12)
    assert parts.checkpoints.befores == [9, 8, 11]


def test_without_a_good_checkpoint_the_run_ends(parts):
    with pytest.raises(Poisoned, match="no good checkpoint before step 3; look at loss"):
        _fail_at(parts, 4)


def test_the_run_goes_back_so_often_and_no_more(parts):
    parts.config.guard.max_rollbacks = 1
    _fail_at(parts, 12)
    with pytest.raises(Poisoned, match="the run has gone back 1 times .guard.max_rollbacks = 1.; "):
        _fail_at(parts, 12)
    assert parts.checkpoints.befores == [11]
