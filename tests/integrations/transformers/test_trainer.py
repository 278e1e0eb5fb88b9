"""Trainer under context parallelism: losses, norms and evaluation are those of one process."""

import pytest

from tests.distributed import run_processes
from tests.integrations.transformers.trainer_runs import RUNS, assert_same, read, run_all

NAMES = [run.__name__ for run in RUNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of one process, two and three."""
    folder = str(tmp_path_factory.mktemp("runs"))
    run_all(folder, NAMES)
    run_processes(2, run_all, folder, NAMES)
    run_processes(3, run_all, folder, ["plain"])
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_like_one(folder, name):
    assert_same(read(folder, name, 2), read(folder, name, 1))


def test_three_processes_train_like_one(folder):
    assert_same(read(folder, "plain", 3), read(folder, "plain", 1))
