"""The process that writes saves: its requests, its answers, and how it ends."""

import errno
import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from titan_sparse.training.checkpoint import writer as writer_module
from titan_sparse.training.checkpoint.writer import Save, Staging, WriterProcess, begin

CPU = torch.device("cpu")


def save_of(folder: Path, step: int) -> Save:
    save = Save(folder / f"step-{step}.incomplete", folder / f"step-{step}", {}, 0)
    begin(save)
    return save


def test_it_writes_answers_and_ends(tmp_path):
    staging = Staging({MetadataIndex("weight"): torch.arange(6.0)}, CPU, pinned=False)
    staging.begin()
    staging.copy()
    writer = WriterProcess()
    writer.use_memory(staging)
    # To stop is the training process's to decide, which may still want a save.
    os.kill(writer.process.pid, signal.SIGINT)
    os.kill(writer.process.pid, signal.SIGTERM)
    metadata = Metadata({})
    for step in (1, 2):
        save = save_of(tmp_path, step)
        share_sum = writer.write_share(save, 0, {}, 1)
        share = (save.incomplete / "written-0").read_bytes()
        assert hashlib.sha256(share).hexdigest() == share_sum
        writer.publish_save(save, metadata, [share_sum])
        assert (save.checkpoint / ".metadata").is_file()

    save = save_of(tmp_path, 3)
    writer.write_share(save, 0, {}, 1)
    with pytest.raises(FileExistsError) as caught:
        writer.write_share(save, 0, {}, 1)
    assert caught.value.errno == errno.EEXIST
    assert caught.value.strerror == os.strerror(errno.EEXIST)
    assert Path(caught.value.filename) == save.incomplete / "__0_0.distcp"
    with pytest.raises(OSError, match="written-0 is not what rank 0 has written"):
        writer.publish_save(save, metadata, ["another sum"])
    with pytest.raises(RuntimeError, match="TypeError: 'NoneType'"):
        writer.publish_save(save, metadata, None)
    writer.close()
    assert writer.process.returncode == 0
    staging.close()


def test_a_dead_one_is_told_at_once(monkeypatch):
    monkeypatch.setattr(writer_module, "_PROGRAM", "raise SystemExit(3)")
    writer = WriterProcess()
    writer.process.wait()
    staging = Staging({}, CPU, pinned=False)
    with pytest.raises(OSError, match=r"has died \(status 3\)"):
        writer.use_memory(staging)
    staging.close()


def _train_and_be_killed(answer: int) -> None:
    """Training dies while its writing process does not respond. That process is stopped."""
    try:
        writer = WriterProcess()
        writer.use_memory(Staging({}, CPU, pinned=False))
        os.kill(writer.process.pid, signal.SIGSTOP)
        os.write(answer, str(writer.process.pid).encode())
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def test_it_ends_with_training():
    """It ends at once, even during a save, which would otherwise be written into the next run's folder."""
    reading, writing = os.pipe()
    training = os.fork()
    if training == 0:
        _train_and_be_killed(writing)
    os.close(writing)
    pid = int(os.read(reading, 100))
    os.close(reading)
    os.waitpid(training, 0)
    deadline = time.monotonic() + 5
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    if _lives(pid):
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("it has outlived training")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
