"""A long job with kills and one poisoned gradient, under torchrun."""

import dataclasses

import pytest

from tests.faults.jobs import SETTINGS
from tests.faults.soak import Run, problems_of, soak

STEPS = 8


def a_run(processes: list[range], restarts: int, **wrong: float) -> Run:
    """What a job leaves whose processes did these steps. wrong: values of the last line."""
    lines = [
        {"step": step, "loss": 1 / step, "memory_gib": 1.0, "skipped_updates": int(step > 2)}
        for steps in processes
        for step in steps
    ]
    lines[-1] |= wrong
    output = "resumed at step 4\n" * restarts
    return Run(0, output, lines, 1.0, [1.0] * restarts)


UNDISTURBED = a_run([range(1, 9)], 0)
GOOD = a_run([range(1, 6), range(5, 9)], 1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (GOOD, ""),
        (a_run([range(1, 6), range(5, 9)], 1, loss=0.1250001), "losses differ"),
        (a_run([range(1, 6), range(5, 9)], 1, skipped_updates=2), "2 skipped updates"),
        (a_run([range(1, 6), range(5, 9)], 1, memory_gib=1.1), "memory grew by 0.100 GiB"),
        (a_run([range(1, 5), range(6, 9)], 1), "lacks steps"),
        (a_run([range(1, 9)], 0), "1 kills were planned"),
        (dataclasses.replace(GOOD, status=1), "ended with 1"),
    ],
)
def test_what_is_wrong_is_seen(wrong, named):
    problems = problems_of(wrong, UNDISTURBED, STEPS, kill_at=[5], tolerance=0.0)
    assert len(problems) == bool(named)
    assert all(named in problem for problem in problems)


@pytest.mark.faults
def test_sixty_steps_with_three_kills_and_a_poisoned_gradient(tmp_path):
    settings = SETTINGS | {"training.steps": 60, "checkpoint.interval": 4}
    found = soak(tmp_path, settings, ranks=2, kill_every=15)
    assert not found["problems"], found
    assert found["kills"] == 3 and found["lines_equal_to_the_bit"] == found["lines"] > 60
    assert found["skipped_updates"] == 1
