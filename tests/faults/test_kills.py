"""Kills at random moments of a run's life: nothing is lost, to the bit. Also a long job under torchrun."""

import pytest
import torch

from tests.faults.jobs import SETTINGS
from tests.faults.kills import Case, cases_of, kill_many
from tests.faults.soak import soak

NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.faults
@pytest.mark.parametrize(
    "cases, kills",
    [
        # One rank that saves in the background, and one of two ranks.
        ([Case("async", 1, "all"), Case("disabled", 2, "one")], 6),
        (cases_of(["disabled", "async"], [1, 2]), 130),
        pytest.param(cases_of(["async_with_pinned_mem"], [1], "cuda"), 70, marks=NEEDS_A_GPU),
    ],
)
def test_kills(tmp_path, cases, kills):
    found = kill_many(cases, kills, seed=1, folder=tmp_path, jobs=2 if kills > 6 else 1)
    assert found["recovered"] == found["kills"] == kills, found["problems"]
    # No part of a save was left out.
    moments = {"writing", "publishing", "rotating", "before the first step"}
    assert kills == 6 or moments <= set(found["hit"])


@pytest.mark.faults
def test_sixty_steps_with_three_kills_and_a_poisoned_gradient(tmp_path):
    settings = SETTINGS | {"training.steps": 60, "checkpoint.interval": 4}
    found = soak(tmp_path, settings, ranks=2, kill_every=15)
    assert not found["problems"], found
    assert found["kills"] == 3 and found["lines_equal_to_the_bit"] == found["lines"] > 60
    assert found["skipped_updates"] == 1
