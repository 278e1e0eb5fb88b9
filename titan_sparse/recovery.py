"""Whether a run may save and go on, by what its guard reports, and the way back to a good checkpoint."""

import logging
import os
import weakref

from titan_sparse.build import Parts
from titan_sparse.training.guard import all_finite, optimizer_states
from titan_sparse.training.launcher import Poisoned
from titan_sparse.training.optimizer import resume_schedule

logger = logging.getLogger("titan_sparse")


class Recovery:
    """Decides whether a run may save and go on, by what its guard reports. The same on every rank."""

    def __init__(self, run: Parts):
        # The run owns this object. Held both ways, a run that is done would keep its process groups
        # until a garbage collection, and they may abort the process when Python ends.
        self.run: Parts = weakref.proxy(run)
        # Bad steps up to now, without a good one between, as far as the host knows.
        self.bad_in_a_row = 0
        # A save was due in the middle of bad steps.
        self.save_is_late = False
        # The checkpoint that the run has gone back to, as long as it has saved none since.
        self.gone_back_to: int | None = None

    def read_guard(self, all_of_them: bool) -> None:
        """Log and count the updates that the guard has skipped. all_of_them: Guard.reports()."""
        for report in self.run.guard.reports(all_of_them):
            self.bad_in_a_row = report.in_a_row
            if report.skipped:
                self.run.progress.skipped_updates += 1
                logger.warning(
                    "step %d: update skipped, as %s (%d in a row, %d in this run)",
                    report.step,
                    report.reason(),
                    report.in_a_row,
                    self.run.progress.skipped_updates,
                )

    def problem(self, saves: bool, is_last: bool) -> str:
        """Why the run cannot go on from here; empty if it can. Collective.

        saves: a checkpoint is due, which must hold nothing but finite numbers.
        """
        section = self.run.config.guard
        if not section.enable:
            return ""
        saves = saves or self.save_is_late
        self.read_guard(all_of_them=saves or is_last)
        if self.bad_in_a_row >= section.max_skips_in_a_row:
            return f"{self.bad_in_a_row} updates in a row were skipped"
        if saves and not self._is_finite():
            return "weights or optimizer states are not finite"
        return ""

    def _is_finite(self) -> bool:
        tensors = [*self.run.model.parameters(), *optimizer_states(self.run.optimizers)]
        return all_finite(tensors, self.run.guard.device)

    def may_save(self, is_due: bool, is_last: bool) -> bool:
        """Whether to save now: what is due, or was while steps were bad.

        A checkpoint in the middle of bad steps would be no place to go back to.
        """
        is_due = is_due or self.save_is_late
        self.save_is_late = is_due and self.bad_in_a_row > 0 and not is_last
        return is_due and not self.save_is_late

    def go_back(self, problem: str) -> None:
        """Load the last good checkpoint, without its place in the data: the batches that led here
        are not seen again. Collective.

        Raises Poisoned if there is none, or if that was done guard.max_rollbacks times.
        """
        step, skipped = self.run.progress.step, self.run.progress.skipped_updates
        times, limit = self.run.progress.times_gone_back, self.run.config.guard.max_rollbacks
        metrics_file = os.path.join(self.run.config.training.output_dir, "metrics.jsonl")
        advice = f"look at loss and grad_norm in {metrics_file} before step {step}"
        if times >= limit:
            raise Poisoned(
                f"step {step}: {problem}, and the run has gone back {times} times "
                f"(guard.max_rollbacks = {limit}); {advice}"
            )
        # A checkpoint that did not help is not tried again: then it is the one before.
        first_bad = step - self.bad_in_a_row + 1
        before = first_bad if self.gone_back_to is None else self.gone_back_to
        good = self.run.checkpointer.go_back(before)
        if good is None:
            raise Poisoned(
                f"step {step}: {problem}, and there is no good checkpoint before step {before}; {advice}"
            )
        run = self.run
        resume_schedule(run.optimizers, run.schedule, run.config.optimizer, good)
        self.gone_back_to = good
        self.save_is_late = False
        self.bad_in_a_row = 0
        self.run.progress.skipped_updates = skipped
        self.run.progress.times_gone_back = times + 1
        logger.warning(
            "step %d: %s; gone back to the checkpoint of step %d, on with the batches after step %d",
            step,
            problem,
            good,
            step,
        )
