"""Kills at random moments of a run's life: nothing is lost, to the bit. Also a long job under torchrun."""

import pytest
import torch

from tests.faults.jobs import SETTINGS
from tests.faults.kills import Case, kill_many
from tests.faults.soak import soak

NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.faults
@pytest.mark.parametrize(
    "case, kills",
    [
        (Case("async", 1, "all"), 3),
        (Case("disabled", 2, "one"), 3),
        pytest.param(Case("async", 2, "one"), 40, marks=pytest.mark.slow),
        pytest.param(Case("async_with_pinned_mem", 1, "all", "cuda"), 20, marks=NEEDS_A_GPU),
    ],
)
def test_kills(tmp_path, case, kills):
    assert kill_many(case, kills, 1, tmp_path) == []


@pytest.mark.faults
def test_sixty_steps_with_three_kills_and_a_poisoned_gradient(tmp_path):
    settings = SETTINGS | {"training.steps": 60, "checkpoint.interval": 4}
    found = soak(tmp_path, settings, ranks=2, kill_every=15)
    assert not found["problems"], found
    assert found["kills"] == 3 and found["lines_equal_to_the_bit"] == found["lines"] > 60
    assert found["skipped_updates"] == 1
