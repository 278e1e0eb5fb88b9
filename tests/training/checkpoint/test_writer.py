"""The files of a save: on disk before they have a name, and no larger than what is in them.

Also the copies that they are written from, and the process that writes them.
"""

import errno
import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.training.checkpoint.helpers import names_in
from titan_sparse.training.checkpoint import read_metadata
from titan_sparse.training.checkpoint.writer import (
    HashedFile,
    Save,
    Staging,
    Writer,
    WriterProcess,
    share_out,
)

CPU = torch.device("cpu")
WEIGHT = MetadataIndex("weight")


def save_of(folder: Path, step: int = 1) -> Save:
    folder = folder / "checkpoint"
    save = Save(
        folder / f"step-{step}.incomplete", folder / f"step-{step}", {"a.toml": "a = 1\n"}, 0
    )
    save.begin()
    return save


def writer_of(tensor: torch.Tensor) -> Writer:
    writer = Writer(0, 1)
    writer.use({WEIGHT: tensor}, Metadata({}))
    return writer


def test_everything_is_durable_before_it_has_its_name(tmp_path, events):
    writer, save = writer_of(torch.ones(3)), save_of(tmp_path)
    written = writer.write(save, {})
    assert events == ["__0_0.distcp", "step-1.incomplete"]
    events.clear()
    writer.publish(save, [written])
    assert events == [
        "a.toml",
        ".metadata",
        "checksums.sha256",
        "step-1.incomplete",
        "step-1.incomplete > step-1",
        "checkpoint",
    ]


def test_metadata_says_what_dcps_own_would(tmp_path):
    writer, save = writer_of(torch.ones(3)), save_of(tmp_path)
    writer.publish(save, [writer.write(save, {})])
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ours, theirs = read_metadata(save.checkpoint), read_metadata(tmp_path / "dcp")
    assert ours.version == theirs.version
    assert Path(ours.storage_meta.checkpoint_id) == save.checkpoint
    assert Path(theirs.storage_meta.checkpoint_id) == tmp_path / "dcp"


def test_a_save_begins_without_what_an_earlier_one_left(tmp_path):
    for _ in range(2):
        save = save_of(tmp_path)
        assert names_in(save.incomplete) == set()
        writer_of(torch.ones(3)).write(save, {})


def test_a_part_is_written_without_the_rest_of_its_storage(tmp_path):
    part = torch.arange(100_000.0)[:10]
    save = save_of(tmp_path)
    writer_of(part).write(save, {})
    file = save.incomplete / "__0_0.distcp"
    assert file.stat().st_size < 10_000
    assert torch.equal(torch.load(file), part)


def test_a_hashed_file_keeps_nothing_back(tmp_path):
    """What the system has not been given, fsync() could not make durable."""
    path = tmp_path / "file"
    with HashedFile(path) as file:
        assert file.write(b"abc") == 3
        assert path.read_bytes() == b"abc"
    assert file.closed
    assert file.sum.hexdigest() == hashlib.sha256(b"abc").hexdigest()


def test_files_get_about_as_many_bytes():
    sizes = {MetadataIndex(name): size for name, size in [("a", 3), ("b", 5), ("c", 4), ("d", 3)]}
    parts = share_out(sizes, 2)
    assert sorted(sum(sizes[index] for index in part) for part in parts) == [7, 8]
    assert sorted(index.fqn for part in parts for index in part) == ["a", "b", "c", "d"]
    # No file is empty.
    assert sorted(len(part) for part in share_out(sizes, 6)) == [1, 1, 1, 1]
    assert share_out({}, 2) == []


SOURCES = [
    torch.arange(6.0).view(2, 3),
    torch.zeros(0, 3, dtype=torch.bfloat16),
    torch.tensor(5),
]


@pytest.mark.parametrize("sources", [SOURCES, []], ids=["some", "a rank without a part"])
def test_copies_are_like_the_tensors_the_empty_ones_too(sources):
    indices = [MetadataIndex(str(number)) for number in range(len(sources))]
    staging = Staging(dict(zip(indices, sources, strict=True)), CPU, pinned=False)
    staging.before_update()  # Nothing is being copied: it does not wait.
    staging.begin()
    staging.copy()
    staging.before_update()
    for source, copy in zip(sources, staging.copies.values(), strict=True):
        assert copy.dtype == source.dtype and torch.equal(copy, source)
        assert copy.untyped_storage().nbytes() == source.nbytes
        assert copy.numel() == 0 or copy.data_ptr() % 512 == 0
    staging.close()
    assert not staging.copies  # nothing holds the memory


def test_a_process_writes_answers_and_ends(tmp_path):
    staging = Staging({WEIGHT: torch.arange(6.0)}, CPU, pinned=False)
    staging.begin()
    staging.copy()
    writer = WriterProcess(0, 1)
    # To stop is the training process's to decide, which may still want a save.
    writer.use_memory(staging.path, staging.slots, Metadata({}))
    os.kill(writer.process.pid, signal.SIGINT)
    os.kill(writer.process.pid, signal.SIGTERM)
    for step in (1, 2):
        save = save_of(tmp_path, step)
        writer.publish(save, [writer.write(save, {})])
        assert torch.equal(torch.load(save.checkpoint / "__0_0.distcp"), torch.arange(6.0))

    save = save_of(tmp_path, 3)
    writer.write(save, {})
    with pytest.raises(FileExistsError) as caught:
        writer.write(save, {})
    assert caught.value.errno == errno.EEXIST
    assert caught.value.strerror == os.strerror(errno.EEXIST)
    assert Path(caught.value.filename) == save.incomplete / "__0_0.distcp"
    with pytest.raises(RuntimeError, match="TypeError: 'NoneType'"):
        writer.publish(save, None)
    writer.close()
    assert writer.process.returncode == 0
    staging.close()


def _train_and_be_killed(answer: int) -> None:
    """Training dies while its writing process does not respond. That process is stopped."""
    try:
        writer = WriterProcess(0, 1)
        writer.use_memory(Staging({}, CPU, pinned=False).path, {}, None)
        os.kill(writer.process.pid, signal.SIGSTOP)
        os.write(answer, str(writer.process.pid).encode())
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_ends_with_training():
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
