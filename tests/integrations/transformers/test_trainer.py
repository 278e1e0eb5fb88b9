"""Trainer under context parallelism: losses, norms and evaluation are those of one process."""

import pytest

from tests.integrations.transformers.trainer_runs import (
    RUNS,
    WIDE,
    assert_trains_alike,
    plain,
    read,
    streamed,
)


def test_two_processes_train_like_one(tmp_path):
    assert_trains_alike(tmp_path, 2, RUNS)
    # NEFTune's is uniform in +- alpha / sqrt(tokens * dims), of thousands of numbers.
    assert read(tmp_path, "noisy", 2) == [{"noise": 1.0}]


@pytest.mark.slow
@pytest.mark.parametrize("processes, runs", [(2, [streamed]), (3, [plain]), (4, WIDE)])
def test_more_processes_and_runs(tmp_path, processes, runs):
    assert_trains_alike(tmp_path, processes, runs)
