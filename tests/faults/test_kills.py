"""Kills at random moments of a run's life: nothing is lost, to the bit."""

import pytest

from tests.faults.kills import Case, cases_of, kill_many, summary


@pytest.mark.faults
def test_six_kills(tmp_path):
    """Of one rank that saves in the background, and of one of two ranks."""
    cases = [Case("async", 1, "all"), Case("disabled", 2, "one")]
    found = summary(kill_many(cases, 6, seed=0, folder=tmp_path))
    assert found["recovered"] == found["kills"] == 6, found["problems"]


@pytest.mark.faults
def test_hundred_and_thirty_kills(tmp_path):
    """The other seventy are on a GPU, with saves from pinned memory."""
    cases = cases_of(["disabled", "async"], [1, 2], "cpu")
    found = summary(kill_many(cases, 130, seed=1, folder=tmp_path, jobs=2))
    assert found["recovered"] == found["kills"] == 130, found["problems"]
    # No part of a save was left out.
    assert {"writing", "publishing", "rotating", "before the first step"} <= set(found["hit"])
