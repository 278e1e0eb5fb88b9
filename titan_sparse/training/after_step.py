"""The decision what a run does after a step, from facts that are the same on all ranks."""

from typing import NamedTuple


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
    """The decision.

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
