"""What a save takes of training, and gives back: seconds, a thread, memory, a process, a group.

Also what is told of one that is slow or fails.
"""

import errno
import os
import threading
import time

import pytest
import torch.distributed as dist

from tests.training.checkpoint.helpers import FullFile, Run, names_in, open_files, same
from titan_sparse.training.checkpoint import SaveError, checkpointer, saver, writer
from titan_sparse.training.checkpoint.staging import Staging

COPIES = "titan_sparse checkpoint"
"""The memory of copies, among a process's open files."""


def test_a_failure_in_the_background_is_found_at_the_next_step(alone, tmp_path, monkeypatch):
    run = Run(tmp_path, async_mode="async")
    run.checkpointer.load()
    run.step()
    monkeypatch.setattr(writer, "HashedFile", FullFile)
    run.checkpointer.save(1)
    deadline = time.monotonic() + 10
    with pytest.raises(SaveError, match="no space left"):
        while time.monotonic() < deadline:
            run.checkpointer.raise_failure()
            time.sleep(0.01)
    run.checkpointer.close()


def test_a_failure_in_the_background_is_told_by_the_next_save(alone, tmp_path, monkeypatch):
    run = Run(tmp_path, async_mode="async")
    run.step()
    monkeypatch.setattr(writer, "HashedFile", FullFile)
    run.checkpointer.save(1)
    run.step()
    with pytest.raises(SaveError, match="step-1 could not be saved: no space left"):
        run.checkpointer.save(2)
    run.checkpointer.close()


@pytest.mark.parametrize("threshold, warns", [(0.1, True), (30.0, False)])
def test_a_save_that_waits_long_for_the_one_before_is_told(
    alone, tmp_path, monkeypatch, caplog, threshold, warns
):
    """And the seconds that it reports are those that have passed."""
    write_share = writer.write_share

    def slow(*args):
        time.sleep(0.2)
        return write_share(*args)

    monkeypatch.setattr(saver, "write_share", slow)
    monkeypatch.setattr(saver, "_LONG_WAIT_SECONDS", threshold)
    run = Run(tmp_path, async_mode="async")
    run.step()
    began = time.perf_counter()
    run.checkpointer.save(1)
    run.checkpointer.raise_failure()  # There is none so far, and it does not wait for one.
    assert not (run.folder / "step-1").exists()
    run.step()
    run.checkpointer.save(2)
    assert 0.1 < run.checkpointer.last_held_seconds < time.perf_counter() - began
    run.checkpointer.close()
    assert 0.2 < run.checkpointer.last_save_seconds < time.perf_counter() - began
    assert ("for the save before" in caplog.text) == warns


def _save_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")}


def test_close_gives_thread_and_memory_back(alone, tmp_path):
    """And a new plan, for tensors that were replaced, that of the one before."""
    threads, copies = _save_threads(), open_files(COPIES)
    run = Run(tmp_path, async_mode="async")
    run.step()
    run.checkpointer.prepare()
    one_more = open_files(COPIES)
    assert one_more > copies
    run.checkpointer.prepare()
    assert open_files(COPIES) == one_more
    run.checkpointer.save(1)
    assert _save_threads() - threads
    for _ in range(2):  # the second finds nothing to give back
        run.checkpointer.close()
        assert open_files(COPIES) == copies and not _save_threads() - threads


def test_in_the_foreground_nothing_is_copied(alone, tmp_path):
    copies = open_files(COPIES)
    run = Run(tmp_path)
    run.step()
    run.checkpointer.save(1)
    assert open_files(COPIES) == copies
    assert run.checkpointer.background_groups() == []
    tensors = run.checkpointer.tensors.all().values()
    assert run.checkpointer.saver.save_bytes == sum(tensor.nbytes for tensor in tensors)


def test_in_the_background_ranks_have_a_group_of_their_own(alone, tmp_path, monkeypatch):
    """Over the CPU; the world's, which training uses at the same time, may be a GPU's."""
    asked, used = [], []
    new_group, gather = dist.new_group, dist.all_gather_object

    def noted_new_group(*args, **settings) -> dist.ProcessGroup:
        asked.append(settings)
        return new_group(*args, **settings)

    def noted_gather(outcomes: list, own: object, group=None) -> None:
        used.append(group)
        gather(outcomes, own, group=group)

    monkeypatch.setattr(dist, "new_group", noted_new_group)
    run = Run(tmp_path, async_mode="async")
    [group] = run.checkpointer.background_groups()
    assert asked == [{"backend": "gloo"}]
    run.step()
    run.checkpointer.prepare()
    monkeypatch.setattr(dist, "all_gather_object", noted_gather)
    run.checkpointer.save(1)
    run.checkpointer.close()
    assert used == [group] * 3


class WriterHere:
    """Stands in for the process that writes, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.copies: dict = {}

    def use_memory(self, staging: Staging) -> None:
        self.asked.append("use_memory")
        self.copies = staging.copies

    def write_share(self, save, rank, values, threads) -> str:
        self.asked.append("write_share")
        return writer.write_share(save, rank, self.copies, values, threads)

    def publish_save(self, *args) -> None:
        self.asked.append("publish_save")
        writer.publish_save(*args)

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
def pinned(monkeypatch) -> list[bool]:
    """Whether pinned memory was asked for, for each Staging that was made."""
    wanted = []

    def make(tensors, device, pinned: bool) -> Staging:
        wanted.append(pinned)
        return Staging(tensors, device, pinned)

    monkeypatch.setattr(saver, "Staging", make)
    return wanted


def test_with_a_process_the_training_process_writes_nothing(alone, tmp_path, monkeypatch, pinned):
    def not_here(*_):
        raise AssertionError("written in the training process")

    here = WriterHere()
    monkeypatch.setattr(saver, "WriterProcess", lambda: here)
    monkeypatch.setattr(saver, "write_share", not_here)
    monkeypatch.setattr(saver, "publish_save", not_here)
    run = Run(tmp_path, async_mode="async_with_pinned_mem").train(1)
    run.checkpointer.close()  # once more
    assert here.asked == ["use_memory", "write_share", "publish_save", "close"]
    assert pinned == [True]
    again = Run(tmp_path)
    assert again.checkpointer.load() and same(again.state(), run.state())


def test_on_a_thread_memory_is_not_pinned(alone, tmp_path, pinned):
    Run(tmp_path, async_mode="async").train(1)
    assert pinned == [False]


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), ValueError("where\nodd")]
)
def test_a_bug_is_logged_with_its_place(alone, tmp_path, monkeypatch, caplog, error):
    """A disk's failure is not: its line says all."""

    def fail(*_):
        raise error

    monkeypatch.setattr(saver, "write_share", fail)
    run = Run(tmp_path)
    run.step()
    with pytest.raises(SaveError, match="step-1 could not be saved: .*(Input/output error|odd)$"):
        run.checkpointer.save(1)
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == isinstance(error, ValueError)


def test_a_folder_that_cannot_be_made_is_told(alone, tmp_path):
    run = Run(tmp_path)
    run.step()
    run.folder.write_text("a file")
    with pytest.raises(SaveError, match="step-1 could not be saved"):
        run.checkpointer.save(1)


@pytest.mark.parametrize(
    "cores, ranks, files", [(64, "8", 4), (5, "2", 2), (4, "8", 1), (3, None, 3), (64, None, 4)]
)
def test_files_at_once_are_a_ranks_share_of_the_cores(monkeypatch, cores, ranks, files):
    cores_of = {0: set(range(cores))}
    monkeypatch.setattr(os, "sched_getaffinity", cores_of.__getitem__)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    threads = saver._threads()
    assert threads == files and isinstance(threads, int)


def test_disabled_it_takes_nothing_and_does_nothing(alone, tmp_path, monkeypatch):
    before = names_in(Run(tmp_path).train(2).folder)
    monkeypatch.setattr(checkpointer, "Saver", None)
    run = Run(tmp_path, enable=False)
    disabled = run.checkpointer
    assert disabled.load() is False and run.progress.step == 0
    disabled.check_disk(10)
    run.step()
    disabled.prepare()
    disabled.raise_failure()
    assert not disabled.is_due(1, last=True)
    assert disabled.go_back(before=2) is None
    assert disabled.background_groups() == []
    assert disabled.last_save_seconds is None and disabled.last_held_seconds is None
    disabled.close()
    assert names_in(run.folder) == before
