"""The files of a save: on disk before they have a name, and no larger than what is in them."""

import hashlib
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
    begin,
    publish_save,
    share_out,
    write_share,
)

WEIGHT = MetadataIndex("weight")


@pytest.fixture
def save(tmp_path) -> Save:
    folder = tmp_path / "checkpoint"
    return Save(folder / "step-1.incomplete", folder / "step-1", {"config.toml": "a = 1\n"}, 0)


def test_everything_is_durable_before_it_has_its_name(save, events):
    begin(save)
    share_sum = write_share(save, 0, {WEIGHT: torch.ones(3)}, {}, 1)
    assert events == ["__0_0.distcp", "written-0", "step-1.incomplete"]
    events.clear()
    publish_save(save, Metadata({}), [share_sum])
    assert events == [
        "config.toml",
        ".metadata",
        "checksums.sha256",
        "step-1.incomplete",
        "step-1.incomplete > step-1",
        "checkpoint",
    ]


def test_metadata_says_what_dcps_own_would(save, tmp_path):
    begin(save)
    publish_save(save, Metadata({}), [write_share(save, 0, {WEIGHT: torch.ones(3)}, {}, 1)])
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ours, theirs = read_metadata(save.checkpoint), read_metadata(tmp_path / "dcp")
    assert ours.version == theirs.version
    assert Path(ours.storage_meta.checkpoint_id) == save.checkpoint
    assert Path(theirs.storage_meta.checkpoint_id) == tmp_path / "dcp"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_metadata_is_read_with_its_dtypes(tmp_path, dtype):
    """As DCP reads them, though fewer classes may be asked for."""
    dcp.save({"weight": torch.ones(3, dtype=dtype)}, checkpoint_id=tmp_path, no_dist=True)
    weight = read_metadata(tmp_path).state_dict_metadata["weight"]
    assert weight.properties.dtype == dtype
    assert weight == dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["weight"]


def test_a_list_that_has_changed_on_the_way_is_not_published(save):
    """What ranks have written goes through the folder, their sums do not."""
    begin(save)
    write_share(save, 0, {WEIGHT: torch.ones(3)}, {}, 1)
    with pytest.raises(OSError, match="written-0 is not what rank 0 has written"):
        publish_save(save, Metadata({}), ["0" * 64])
    assert not save.checkpoint.exists()


def test_a_save_begins_without_what_an_earlier_one_left(save):
    for _ in range(2):
        begin(save)
        assert names_in(save.incomplete) == set()
        write_share(save, 0, {WEIGHT: torch.ones(3)}, {}, 1)


def test_a_part_is_written_without_the_rest_of_its_storage(save):
    begin(save)
    part = torch.arange(100_000.0)[:10]
    write_share(save, 0, {WEIGHT: part}, {}, 1)
    file = save.incomplete / "__0_0.distcp"
    assert file.stat().st_size < 10_000
    assert torch.equal(torch.load(file), part)


def test_a_hashed_file_keeps_nothing_back(tmp_path):
    """What the system has not been given, fsync() could not make durable."""
    path = tmp_path / "file"
    with HashedFile(path) as file:
        assert file.write(b"abc") == 3
        assert path.read_bytes() == b"abc"
    assert file.file.closed
    assert file.sum.hexdigest() == hashlib.sha256(b"abc").hexdigest()


def test_files_get_about_as_many_bytes():
    sizes = {MetadataIndex(name): size for name, size in [("a", 3), ("b", 5), ("c", 4), ("d", 3)]}
    parts = share_out(sizes, 2)
    assert sorted(sum(sizes[index] for index in part) for part in parts) == [7, 8]
    assert sorted(index.fqn for part in parts for index in part) == ["a", "b", "c", "d"]
    # No file is empty.
    assert sorted(len(part) for part in share_out(sizes, 6)) == [1, 1, 1, 1]
    assert share_out({}, 2) == []
