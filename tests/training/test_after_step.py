"""What a run does after a step: every combination of facts, against rules that are written out."""

import itertools

import pytest

from titan_sparse.training.recovery import Decision, decide

GOOD = dict(
    save_is_due=False,
    validation_is_due=False,
    is_last=False,
    stopped=False,
    has_problem=False,
    bad_in_a_row=0,
)
SAVE = dict(save_is_due=True)
TABLE = {
    "nothing is due": ({}, Decision()),
    "a save": (SAVE, Decision(saves=True)),
    "a validation": (dict(validation_is_due=True), Decision(validates=True)),
    "both": (SAVE | dict(validation_is_due=True), Decision(saves=True, validates=True)),
    "a save amid bad updates waits": (SAVE | dict(bad_in_a_row=2), Decision(save_is_late=True)),
    "no save is due amid bad updates": (dict(bad_in_a_row=2), Decision()),
    "but the last step is saved": (
        SAVE | dict(bad_in_a_row=2, is_last=True),
        Decision(saves=True),
    ),
    "a problem": (SAVE | dict(has_problem=True, validation_is_due=True), Decision(goes_back=True)),
    "a problem in the last step": (
        SAVE | dict(has_problem=True, is_last=True),
        Decision(goes_back=True),
    ),
    "a problem in a run that was stopped": (
        SAVE | dict(has_problem=True, is_last=True, stopped=True),
        Decision(),
    ),
    "a stop": (SAVE | dict(is_last=True, stopped=True), Decision(saves=True)),
}


@pytest.mark.parametrize("case", TABLE)
def test_decision(case):
    facts, wanted = TABLE[case]
    assert decide(**GOOD | facts) == wanted


def test_rules_that_always_hold():
    for values in itertools.product((False, True), (False, True), (False, True), (False, True)):
        save_is_due, is_last, stopped, has_problem = values
        for bad_in_a_row, validates in itertools.product((0, 3), (False, True)):
            done = decide(
                save_is_due=save_is_due,
                validation_is_due=validates,
                is_last=is_last or stopped,
                stopped=stopped,
                has_problem=has_problem,
                bad_in_a_row=bad_in_a_row,
            )
            # Bad weights are never saved, and nothing else happens to a run that goes back.
            assert not (has_problem and (done.saves or done.save_is_late))
            assert not done.goes_back or done == Decision(goes_back=True)
            # A save that is due is made, put off, or impossible.
            assert done.saves + done.save_is_late == (save_is_due and not has_problem)
            assert not (done.save_is_late and (is_last or stopped))
