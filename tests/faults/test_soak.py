"""A long job with kills and one poisoned gradient, under torchrun."""

import pytest

from tests.faults.jobs import SETTINGS
from tests.faults.soak import soak


@pytest.mark.faults
def test_sixty_steps_with_three_kills_and_a_poisoned_gradient(tmp_path):
    settings = SETTINGS | {"training.steps": 60, "checkpoint.interval": 4}
    found = soak(tmp_path, settings, ranks=2, kill_every=15)
    assert not found["problems"], found
    assert found["kills"] == 3 and found["lines_equal_to_the_bit"] == found["lines"] > 60
    assert found["skipped_updates"] == 1
