"""A checkpoint runs no code and names no file outside its folder."""

import io
import os
import pickle
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tests.refusals import refused
from tests.training.checkpoint.helpers import Run, flip_bit, names_in, write_sums
from titan_sparse.config import Refusal
from titan_sparse.training.checkpoint import reader
from titan_sparse.training.checkpoint.reader import Broken, read_into, read_metadata, verify

pytestmark = pytest.mark.usefixtures("alone")


class Command:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return Run(tmp_path / "run").train(1).folder / "step-1"


def test_metadata_runs_nothing(tmp_path, checkpoint):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Command(tmp_path / "ran")))
    write_sums(checkpoint)
    with pytest.raises(Broken, match=r"\.metadata can't be read: it asks for posix\.system"):
        read_metadata(checkpoint)
    with pytest.raises(Refusal, match="initial_load_path"):
        Run(tmp_path / "other", initial_load_path=str(checkpoint)).checkpointer.load()
    with pytest.raises(Refusal, match="posix.system"):
        Run(tmp_path / "run").checkpointer.load()
    assert not (tmp_path / "ran").exists()
    # The plant is live: an ordinary unpickler runs it.
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()


def test_values_run_nothing(tmp_path, checkpoint, monkeypatch):
    """Also where the user has asked torch to trust every file. The command
    stands where the step is."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    metadata = read_metadata(checkpoint)
    index = next(i for i in metadata.storage_data if i.fqn == "train_state.step")
    buffer = io.BytesIO()
    torch.save(Command(tmp_path / "ran"), buffer)
    (checkpoint / "hostile.distcp").write_bytes(buffer.getvalue())
    metadata.storage_data[index] = _StorageInfo("hostile.distcp", 0, len(buffer.getvalue()))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    write_sums(checkpoint)
    verify(checkpoint)
    with refused("no checkpoint in .* is whole", Refusal):
        Run(tmp_path / "run").checkpointer.load()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "place, problem",
    [
        (_StorageInfo("../step-1/__0_0.distcp", 0, 1), "which is not a file of this folder"),
        (_StorageInfo("", 0, 1), "step-1 is missing"),
        (_StorageInfo("__0_0.distcp", 0, 0, ["zstd"]), r"it wants \['zstd'\] applied"),
        (_StorageInfo("__0_0.distcp", -1, 1), "can't be read"),
        (_StorageInfo("__0_0.distcp", "far", 1), "can't be read"),
        (torch.Size([3]), "can't be read"),
    ],
)
def test_files_outside_the_folder_are_not_opened(checkpoint, place, problem):
    """Nor is anything read from a place that cannot be."""
    metadata = read_metadata(checkpoint)
    metadata.storage_data[MetadataIndex("weight")] = place
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    write_sums(checkpoint)
    with pytest.raises(Broken, match=problem):
        verify(checkpoint)


@pytest.mark.parametrize(
    "thing",
    [
        [],
        Metadata([], storage_data={}),
        Metadata({"weight": 1}, storage_data={}),
        Metadata({"weight": TensorStorageMetadata(None, 5, [])}, storage_data={}),
        Metadata({"weight": TensorStorageMetadata(None, torch.Size([5]), 5)}, storage_data={}),
        Metadata({}, storage_data={"weight": _StorageInfo("__0_0.distcp", 0, 1)}),
    ],
)
def test_a_pickle_of_something_else_is_named(checkpoint, thing):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(thing))
    with pytest.raises(Broken, match="metadata can't be read"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_metadata_is_read_with_its_dtypes(tmp_path, dtype):
    """As DCP reads them, though fewer classes may be asked for. Another dtype is cast to."""
    weight = torch.randn(3, dtype=dtype)
    dcp.save({"weight": weight, "nothing": weight[:0]}, checkpoint_id=tmp_path, no_dist=True)
    saved = read_metadata(tmp_path).state_dict_metadata["weight"]
    assert saved.properties.dtype == dtype
    assert saved == dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["weight"]
    state = {"weight": torch.zeros(3, dtype=torch.float64)}
    read_into(state, tmp_path)
    assert torch.equal(state["weight"], weight.double())


def test_without_a_process_group_every_file_is_checked(checkpoint, monkeypatch):
    """As by programs that only read a checkpoint."""
    monkeypatch.setattr(reader, "dist", SimpleNamespace(is_initialized=lambda: False))
    verify(checkpoint)
    for name in names_in(checkpoint) - {"checksums.sha256"}:
        flip_bit(checkpoint / name)
        with pytest.raises(Broken, match=name):
            verify(checkpoint)
        flip_bit(checkpoint / name)


METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
MEMBER = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(K\x00tR"
FUNCTION = b"ctorch.serialization\n_get_layout\n"
# (None, {"version": "changed"}) goes to setattr(), {"version": "changed"} into __dict__.
BY_SETATTR = b"N}S'version'\nS'changed'\ns\x86b."
BY_DICT = b"}S'version'\nS'changed'\nsb."


@pytest.mark.parametrize(
    "written, problem",
    [
        (METADATA + BY_SETATTR, "did not make"),
        (FUNCTION + BY_SETATTR, "did not make"),
        (MEMBER + BY_DICT, "did not make"),
        # The same by other opcodes: INST, OBJ, NEWOBJ_EX, STACK_GLOBAL, an extension.
        (b"(S'true'\niposix\nsystem\n.", "posix.system"),
        (b"(cposix\nsystem\nS'true'\no.", "posix.system"),
        (METADATA + b")}S'x'\nK\x01s\x92.", "can't be read"),
        (b"\x80\x04\x8c\x05torch\x8c\x0a_utils.sys\x93.", "torch._utils.sys"),
        (b"\x82\x01.", "extension"),
        # A name of torch's, elsewhere.
        (b"cposix\nfloat32\n.", r"posix\.float32"),
        (b"cbuiltins\ngetattr\n(" + METADATA + b"S'__init__'\ntR.", "can't be read"),
        # 256 MiB for a place in the memo, and for a bytearray. It could be 64 GiB.
        (b"Nr" + (2**24).to_bytes(4, "little") + b".", "can't be read"),
        (b"\x80\x05\x96" + (2**28).to_bytes(8, "little") + b".", "can't be read"),
    ],
)
def test_a_pickle_written_by_hand_changes_nothing(checkpoint, written, problem):
    """What belongs to the process stays as it was, and no memory is reserved."""
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    owned = (Metadata, torch.serialization._get_layout, member)
    before = [dict(vars(thing)) for thing in owned]
    (checkpoint / ".metadata").write_bytes(written)
    tracemalloc.start()
    try:
        with pytest.raises(Broken, match=problem):
            read_metadata(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 2**22
        assert [dict(vars(thing)) for thing in owned] == before
    finally:
        tracemalloc.stop()
        Metadata.version = None
        for thing in owned[1:]:
            vars(thing).pop("version", None)
