"""Names on disk survive a loss of power and are never written over. A run locks its folder."""

import errno
import fcntl
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.refusals import refused
from tests.training.checkpoint.helpers import names_in, open_files
from titan_sparse.config import Refusal
from titan_sparse.training.checkpoint import folders
from titan_sparse.training.checkpoint.folders import check_lock, lock_run, unlock_run


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
        (lambda folder: folders.move_aside(folder / "step-2", "old"), ["step-2 > step-2.old"]),
        # The newest first.
        (
            partial(folders.roll_back, step=0),
            ["step-2 > step-2", "step-1 > step-1", "rolled-back-1"],
        ),
    ],
    ids=["move_aside", "roll_back"],
)
def test_another_name_is_durable(tmp_path, events, work, wanted):
    make(tmp_path, "step-1", "step-2")
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


def _hold(folder: Path, answer: int) -> None:
    """A run in a forked process, which forks a child of its own. Both live
    until they are killed."""
    try:
        lock_run(str(folder))
        child = os.fork()
        if child:
            os.write(answer, str(child).encode())
        time.sleep(60)
    finally:
        os._exit(0)


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    """A child that it forked lives on and does not count."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        _hold(tmp_path, writing)
    child = int(os.read(reading, 20))
    try:
        with refused(f"in use by another run .*process {holder}", Refusal) as caught:
            lock_run(str(tmp_path), wait_seconds=0.3)
        assert os.uname().nodename in str(caught.value)
        os.kill(holder, signal.SIGKILL)
        lock_run(str(tmp_path), wait_seconds=10)
        unlock_run(str(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(reading)
        os.close(writing)


def test_a_holder_is_named_and_then_waited_for(tmp_path, monkeypatch, caplog):
    """Nothing of its name stays, however long it was and whatever a broken disk has made of it."""
    monkeypatch.setattr(folders, "LEASE_SECONDS", 0.0)
    path = tmp_path / ".lock"
    path.write_bytes(b"host \xff, process 1" + b"0" * 500)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(Refusal, match=r"another run \(host \ufffd, process 10+\); end"):
            lock_run(str(tmp_path), wait_seconds=0)
        assert open_files(str(path)) == 1
        # The holder is on another host, which may be dead. Its server keeps the lock for a while.
        monkeypatch.setattr(folders, "LEASE_SECONDS", 60.0)
        end = threading.Timer(0.5, file.close)
        end.start()
        caplog.clear()
        lock_run(str(tmp_path), wait_seconds=0)
        end.join()
    assert caplog.text.count("waiting up to 60 s for the run of host \ufffd, process 1") == 1
    [line] = path.read_text().splitlines()
    assert line.startswith(f"host {os.uname().nodename}, process {os.getpid()}, ")
    assert "0" * 10 not in line
    unlock_run(str(tmp_path))


def test_a_folder_or_lock_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    for folder in (tmp_path, tmp_path / "precious"):
        with pytest.raises(Refusal, match="training.output_dir = .*can't be written"):
            lock_run(str(folder))
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize("another_comes", [False, True])
def test_a_folder_that_is_gone_is_missed(tmp_path, another_comes):
    run = tmp_path / "run"
    lock_run(str(run))
    check_lock(str(run))
    run.rename(tmp_path / "moved")
    if another_comes:
        run.mkdir()
        (run / ".lock").write_text("of another run")
    with pytest.raises(FileNotFoundError, match="deleted or moved"):
        check_lock(str(run))
    # The next run of this process, as the one before has failed.
    lock_run(str(run))
    check_lock(str(run))
    assert f"process {os.getpid()}," in (run / ".lock").read_text()
    unlock_run(str(run))
    check_lock(str(run))


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    """Another failure is not taken for that."""
    number = errno.EIO

    def flock(*_):
        raise OSError(number, "none")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="none"):
        lock_run(str(tmp_path))
    number = errno.ENOSYS
    began = time.monotonic()
    lock_run(str(tmp_path))
    assert "has no locks" in caplog.text and time.monotonic() - began < 5
    unlock_run(str(tmp_path))
