"""Names on disk: they survive a loss of power, and nothing that has one is written over."""

from functools import partial
from pathlib import Path

import pytest

from tests.training.checkpoint.helpers import names_in, open_files
from titan_sparse.training.checkpoint import folders


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / folders.METADATA).write_text(name)


def test_only_complete_folders_of_exact_names_count(tmp_path):
    make(tmp_path, "step-10", "step-9", "step-010", "step-8.broken", "xstep-7", "step-6.incomplete")
    (tmp_path / "step-11").mkdir()
    (tmp_path / "step-12").write_text("a file")
    (tmp_path / "step-13.incomplete").write_text("a file")
    assert folders.saved_steps(tmp_path) == [9, 10, 11]
    assert folders.complete_steps(tmp_path) == [9, 10]
    assert folders.delete_incomplete(tmp_path) == ["step-6.incomplete"]


@pytest.mark.parametrize(
    "work, wanted",
    [
        # The files' names first, so that step-N never lacks one.
        (
            lambda folder: folders.publish(folder / "step-3.incomplete", folder / "step-3"),
            ["step-3.incomplete", "step-3.incomplete > step-3"],
        ),
        (
            lambda folder: folders.move_aside(folder / "step-2", "broken"),
            ["step-2 > step-2.broken"],
        ),
        # The newest first.
        (
            partial(folders.roll_back, step=0),
            ["step-2 > step-2", "step-1 > step-1", "rolled-back-1"],
        ),
    ],
    ids=["publish", "move_aside", "roll_back"],
)
def test_a_name_is_durable(tmp_path, events, work, wanted):
    make(tmp_path, "step-1", "step-2", "step-3.incomplete")
    work(tmp_path)
    assert events == [*wanted, tmp_path.name]
    assert open_files(str(tmp_path)) == 0


def test_each_that_is_moved_aside_has_a_name_of_its_own(tmp_path):
    for name in ("step-2.broken", "step-2.broken-2", "step-2.broken-3"):
        make(tmp_path, "step-2")
        assert folders.move_aside(tmp_path / "step-2", "broken") == tmp_path / name


@pytest.mark.parametrize("keep, left", [(0, {1, 2, 3}), (1, {3}), (2, {2, 3}), (5, {1, 2, 3})])
def test_rotation(tmp_path, keep, left):
    make(tmp_path, "step-1", "step-2", "step-3")
    if keep == 1:
        # A rotation that was cut short. This name is in the way of the renaming.
        make(tmp_path, "step-1.incomplete")
    folders.rotate(tmp_path, keep)
    assert names_in(tmp_path) == {f"step-{step}" for step in left}
