"""The decision what a run does after a step, and its recovery from bad updates."""

import logging
from typing import NamedTuple

from titan_sparse.config import Config
from titan_sparse.training.checkpoint.checkpointer import Checkpointer, Progress
from titan_sparse.training.faults.guard import Guard, all_finite, optimizer_states
from titan_sparse.training.faults.launcher import Poisoned

logger = logging.getLogger("titan_sparse")


class Decision(NamedTuple):
    goes_back: bool = False
    """to the last good checkpoint; then nothing else is done"""
    saves: bool = False
    save_is_late: bool = False
    """a save is due, and waits until the updates are good again"""
    validates: bool = False


def decide(
    *,
    save_is_due: bool,
    validation_is_due: bool,
    is_last: bool,
    stopped: bool,
    has_problem: bool,
    bad_in_a_row: int,
) -> Decision:
    """Decide what to do after a step, from facts that are the same on all ranks.

    save_is_due: now, or since a step that left it late. is_last: no step follows. stopped: by a
    signal. has_problem: training cannot go on from these weights. bad_in_a_row: updates that were
    skipped up to now, without a good one between.
    """
    if has_problem:
        # Whoever stopped the run does not wait for a step that was good.
        return Decision(validates=validation_is_due) if stopped else Decision(goes_back=True)
    # A checkpoint in the middle of bad steps would be no place to go back to.
    is_late = save_is_due and bad_in_a_row > 0 and not is_last
    return Decision(
        saves=save_is_due and not is_late, save_is_late=is_late, validates=validation_is_due
    )


class Recovery:
    """Reads what the guard has skipped, and decides whether the run can go on from its weights."""

    def __init__(
        self, config: Config, guard: Guard, checkpointer: Checkpointer, progress: Progress
    ):
        self.section = config.guard
        self.output_dir = config.training.output_dir
        self.guard = guard
        self.checkpointer = checkpointer
        self.progress = progress
        self.bad_in_a_row = 0
        """skipped updates up to now, without a good one between, as far as the host knows"""
        self.gone_back_to: int | None = None
        """the checkpoint that the run has gone back to, as long as it has saved none since"""

    def count(self, all_of_them: bool) -> None:
        """Log and count the updates that the guard has skipped. all_of_them: Guard.reports()."""
        for report in self.guard.reports(all_of_them):
            self.bad_in_a_row = report.in_a_row
            if report.skipped:
                self.progress.skipped_updates += 1
                logger.warning(
                    "step %d: update skipped, as %s (%d in a row, %d in this run)",
                    report.step,
                    report.reason(),
                    report.in_a_row,
                    self.progress.skipped_updates,
                )

    def problem(self, saves: bool, is_last: bool) -> str:
        """The reason why the run cannot go on from here; empty if it can. Collective.

        saves: a checkpoint is due, which must hold nothing but finite numbers.
        """
        if not self.section.enable:
            return ""
        self.count(all_of_them=saves or is_last)
        if self.bad_in_a_row >= self.section.max_skips_in_a_row:
            return f"{self.bad_in_a_row} updates in a row were skipped"
        if saves:
            saved = self.checkpointer
            tensors = [*saved.model.parameters(), *optimizer_states(saved.optimizer)]
            if not all_finite(tensors, self.progress.device):
                return "weights or optimizer states are not finite"
        return ""

    def go_back(self, problem: str) -> int:
        """Load the last good checkpoint, without its place in the data: the batches that led here
        are not seen again. Returns its step. Collective. Raises Poisoned if there is none."""
        progress = self.progress
        step, skipped = progress.step, progress.skipped_updates
        times, limit = progress.times_gone_back, self.section.max_rollbacks
        # A checkpoint that did not help is not tried again: then it is the one before.
        first_bad = step - self.bad_in_a_row + 1
        before = first_bad if self.gone_back_to is None else self.gone_back_to
        reason = f"the run has gone back {times} times (guard.max_rollbacks = {limit})"
        good = None
        if times < limit:
            reason = f"there is no good checkpoint before step {before}"
            good = self.checkpointer.go_back(before)
        if good is None:
            raise Poisoned(
                f"step {step}: {problem}, and {reason}; look at loss and grad_norm in "
                f"{self.output_dir}/metrics.jsonl before step {step}"
            )
        self.gone_back_to = good
        self.bad_in_a_row = 0
        progress.skipped_updates = skipped
        progress.times_gone_back = times + 1
        logger.warning(
            "step %d: %s; gone back to the checkpoint of step %d, on with the batches after step %d",
            step,
            problem,
            good,
            step,
        )
        return good
