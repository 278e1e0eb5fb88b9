"""Two ranks: one changes the folder, each checks and writes its share, and they fail together."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.training.checkpoint.helpers import Run, flip_bit, names_in, same
from titan_sparse.models import huggingface
from titan_sparse.training.checkpoint import (
    Broken,
    SaveError,
    checkpointer,
    read_into,
    saver,
    verify,
)


def _fails(work: Callable[[], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        work()
    dist.barrier()


def _refuse(*_, **__) -> None:
    raise AssertionError("this is rank 0's")


def _save(folder: Path) -> None:
    rank = dist.get_rank()
    assert saver.save_bytes([torch.zeros(rank + 1)]) == 3 * 4
    done = []

    def work() -> str:
        done.append(rank)
        return "the answer"

    assert checkpointer._on_first_rank(work) == "the answer"
    assert done == ([0] if rank == 0 else [])

    if rank == 1:
        saver.begin = saver.publish_save = saver.shutil.rmtree = _refuse
    run = Run(folder).train(2)
    again = Run(folder)
    assert again.checkpointer.load() and same(again.state(), run.state())

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver.write_share = full
    run.step()
    _fails(lambda: run.checkpointer.save(3), SaveError, "no space left on the disk")
    assert names_in(run.folder) == {"step-1", "step-2"}


def test_rank_0_alone_changes_the_folder(tmp_path):
    run_processes(2, _save, tmp_path)


def _read(folder: Path) -> None:
    rank = dist.get_rank()
    run = Run(folder).train(1)
    checkpoint = run.folder / "step-1"
    verify(checkpoint)
    for name in sorted(names_in(checkpoint) - {"checksums.sha256"}):
        dist.barrier()
        if rank == 0:
            flip_bit(checkpoint / name)
        dist.barrier()
        _fails(lambda: verify(checkpoint), Broken, name)
        if rank == 0:
            flip_bit(checkpoint / name)

    dist.barrier()
    load = torch.load
    if rank == 1:
        torch.load = _refuse
    weight = torch.zeros(5, 6)
    _fails(lambda: read_into({"weight": weight}, checkpoint), Broken, "this is rank 0's")
    torch.load = load

    def export_weights(_, read: Callable[[dict], None], *__, **___) -> None:
        read({"weight": weight})

    huggingface.export_weights = export_weights
    if rank == 0:  # the other one does not take part
        run.checkpointer.save_in_hf(1, None, torch.float32, "")
        assert torch.equal(weight, run.model.weight)
    dist.barrier()


def test_a_problem_of_one_is_the_problem_of_both(tmp_path):
    run_processes(2, _read, tmp_path)
