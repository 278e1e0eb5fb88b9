"""Whether the disk has room for what a run will save, checked before the first step."""

import shutil

import pytest
import torch

from tests.training.checkpoint.helpers import Run
from titan_sparse.config import Refusal
from titan_sparse.training.checkpoint import saver

pytestmark = pytest.mark.usefixtures("alone")

ONE_SAVE = 3 * (5 * 6 + 5) * 4
"""Bytes: the weights and Adam's two moments."""


@pytest.fixture
def leave_free(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)

    def leave(size: int) -> None:
        monkeypatch.setattr(saver.shutil, "disk_usage", lambda _: usage._replace(free=size))

    return leave


def test_a_disk_too_small_is_refused(tmp_path, leave_free):
    run = Run(tmp_path, keep_latest_k=3)
    for saves, steps, fits in [(4, 100, True), (3, 100, False), (3, 3, True), (2, 3, False)]:
        leave_free(saves * ONE_SAVE)
        if fits:
            run.checkpointer.check_disk(steps)
            continue
        with pytest.raises(Refusal, match=r"GiB free, a save needs .*keep_latest_k = 3"):
            run.checkpointer.check_disk(steps)


@pytest.mark.parametrize("step, steps, interval, saves", [(0, 3, 2, 2), (2, 3, 1, 1), (3, 3, 1, 1)])
def test_it_is_asked_for_the_saves_that_are_left(
    tmp_path, leave_free, step, steps, interval, saves
):
    """The last step is saved as well, off the interval too."""
    run = Run(tmp_path, keep_latest_k=5, interval=interval)
    run.progress.step = step
    leave_free(saves * ONE_SAVE)
    run.checkpointer.check_disk(steps)
    leave_free(saves * ONE_SAVE - 1)
    with pytest.raises(Refusal, match=f"up to {saves} more will be there"):
        run.checkpointer.check_disk(steps)


def test_checkpoints_that_are_there_have_their_room(tmp_path, leave_free):
    run = Run(tmp_path, keep_latest_k=3).train(2)
    leave_free(2 * ONE_SAVE)
    run.checkpointer.check_disk(100)
    leave_free(2 * ONE_SAVE - 1)
    with pytest.raises(Refusal, match="up to 2 more will be there"):
        run.checkpointer.check_disk(100)


def test_all_that_are_kept_need_room_for_the_next_only(tmp_path, leave_free):
    """A disk need not hold all of them at once."""
    run = Run(tmp_path, keep_latest_k=0)
    leave_free(ONE_SAVE)
    run.checkpointer.check_disk(100)
    leave_free(ONE_SAVE - 1)
    text = "has 3.9e-07 GiB free, a save needs 3.91e-07 GiB and up to 1 more"
    with pytest.raises(Refusal, match=text):
        run.checkpointer.check_disk(100)


def test_what_optimizers_will_have(tmp_path):
    """SGD has nothing beside the weights. With an AdamW among several, all are counted as its."""
    model = Run(tmp_path).model
    sgd = torch.optim.SGD(model.parameters())
    adam = torch.optim.AdamW(model.parameters())
    assert saver.expected_bytes(model, [sgd]) == ONE_SAVE // 3
    assert saver.expected_bytes(model, [sgd, adam]) == ONE_SAVE


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "checkpoint").write_text("a file")
    run = Run(tmp_path)
    with pytest.raises(Refusal, match="checkpoints can't be written to .*checkpoint"):
        run.checkpointer.check_disk(10)
