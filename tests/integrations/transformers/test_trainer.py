"""Trainer under context parallelism: losses, norms and evaluation are those of one process."""

import pytest

from tests.distributed import run_processes
from tests.integrations.transformers.trainer_runs import (
    MORE,
    RUNS,
    WIDE,
    assert_same,
    read,
    run_all,
)

NAMES = [run.__name__ for run in RUNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    run_all(folder, NAMES)
    run_processes(2, run_all, folder, NAMES)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_like_one(folder, name):
    assert_same(read(folder, name, 2), read(folder, name, 1))


def test_the_noise_of_neftune_is_that_of_whole_sequences(folder):
    """uniform in +- alpha / sqrt(tokens * dims), of thousands of numbers."""
    assert read(folder, "noisy", 1) == read(folder, "noisy", 2) == [{"noise": 1.0}]


@pytest.mark.slow
def test_three_processes_train_like_one(folder):
    run_processes(3, run_all, folder, ["plain"])
    assert_same(read(folder, "plain", 3), read(folder, "plain", 1))


@pytest.mark.slow
def test_two_processes_train_like_one_with_other_layouts_and_streams(tmp_path):
    names = [run.__name__ for run in MORE]
    run_all(str(tmp_path), names)
    run_processes(2, run_all, str(tmp_path), names)
    for name in names:
        assert_same(read(tmp_path, name, 2), read(tmp_path, name, 1))


@pytest.mark.slow
def test_four_processes_train_like_one(tmp_path):
    names = [run.__name__ for run in WIDE]
    run_all(str(tmp_path), names)
    run_processes(4, run_all, str(tmp_path), names)
    for name in names:
        assert_same(read(tmp_path, name, 4), read(tmp_path, name, 1))
