"""The resources that a save takes and returns: seconds, a thread, memory, a process, a group.

Also what is logged about a save that is slow or fails.
"""

import errno
import threading
import time

import pytest

from tests.training.checkpoint.helpers import FullFile, Run, open_files
from titan_sparse.training.checkpoint import SaveError, saver, writer

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


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), ValueError("where\nodd")]
)
def test_a_bug_is_logged_with_its_place(alone, tmp_path, monkeypatch, caplog, error):
    """A disk's failure is logged without it, since its message is enough."""

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
