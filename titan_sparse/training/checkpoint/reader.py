"""Reading a checkpoint: is it whole, and what does it hold. A checkpoint can run no code.

.metadata is a pickle of DCP's: only DCP's own classes are made of it. Tensors and values are read
as torch.load(weights_only=True) does. Errors are Refusals: one line each.
"""

import dataclasses
import hashlib
import io
import operator
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from titan_sparse.config import Refusal
from titan_sparse.options.values import one_line
from titan_sparse.training.checkpoint.folders import CHECKSUMS, METADATA

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "collections": "OrderedDict",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
    "torch": "Size",
    "torch.serialization": "_get_layout",
}
"""Module -> names of what .metadata may ask for."""
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")
_THREADS = 8


class Broken(Refusal):
    """A checkpoint is damaged. The message names the file and the problem."""


class _Unpickler(pickle._Unpickler):
    """Only what this pickle made may be changed by it. The unpickler in C can't say this: BUILD
    sets attributes of whatever it finds, also of an allowed class.
    """

    dispatch = dict(pickle._Unpickler.dispatch)
    # Reserves as many bytes as the pickle says.
    del dispatch[pickle.BYTEARRAY8[0]]

    def load_build(self) -> None:
        changed = self.stack[-2]
        # Neither a class, a function nor a member of an enum, which belong to the process.
        if not dataclasses.is_dataclass(type(changed)):
            raise pickle.UnpicklingError("it changes something that it did not make")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, "").split():
            # Python 3.13 writes another module for a path than 3.12 knows.
            return super().find_class(module.removesuffix("._local"), name)
        if (module, name) == ("builtins", "getattr"):
            # How Python 3.11.0 to 3.11.3 write the member of an enum.
            return operator.getitem
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_metadata(checkpoint: str | Path) -> Metadata:
    """The contents of the checkpoint, and where they lie. Runs nothing that .metadata may ask for.
    Raises Broken."""
    path = Path(checkpoint, METADATA)
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        _check_metadata(metadata)
    except FileNotFoundError:
        raise Broken(f"{path} is missing") from None
    except Exception as error:
        # A damaged pickle can raise anything.
        text = one_line(error) or type(error).__name__
        raise Broken(f"{path} can't be read: {text}") from error
    return metadata


def _check_metadata(metadata: Metadata) -> None:
    """A pickle of allowed classes may still be put together wrongly. May raise anything then."""
    is_whole = isinstance(metadata, Metadata)
    for item in metadata.state_dict_metadata.values():
        is_tensor = isinstance(item, TensorStorageMetadata)
        is_whole &= is_tensor or isinstance(item, BytesStorageMetadata)
        if is_tensor:
            is_whole &= isinstance(item.size, torch.Size) and isinstance(item.chunks, list)
    for index, place in metadata.storage_data.items():
        is_whole &= isinstance(index, MetadataIndex) and isinstance(place, _StorageInfo)
        is_whole &= place.offset >= 0 and place.length >= 0
        name = place.relative_path
        if os.path.basename(name) != name:
            raise ValueError(f"it names {name!r}, which is not a file of this folder")
        if place.transform_descriptors:
            raise ValueError(f"it wants {place.transform_descriptors} applied")
    if not is_whole:
        raise ValueError("it is not the metadata of a checkpoint")


def verify(checkpoint: str | Path) -> None:
    """Check every byte. Collective where there is a process group: the ranks share the files out.

    Raises Broken, on all ranks.
    """
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    problems = [""] * world_size
    try:
        _check(Path(checkpoint), rank, world_size)
    except (Broken, OSError) as error:
        problems[rank] = str(error)
    if world_size > 1:
        dist.all_gather_object(problems, problems[rank])
    for text in filter(None, problems):
        raise Broken(text)


def _check(checkpoint: Path, rank: int, world_size: int) -> None:
    """Raises Broken for what is wrong with this rank's share of the files."""
    places = read_metadata(checkpoint).storage_data.values()
    names = {METADATA, *(place.relative_path for place in places)}
    for name in sorted({*names, CHECKSUMS}):
        if not (checkpoint / name).is_file():
            raise Broken(f"{checkpoint / name} is missing")
    path = checkpoint / CHECKSUMS
    matches = list(map(_SUM_LINE.fullmatch, path.read_text(errors="replace").splitlines()))
    if None in matches:
        raise Broken(f"{path} has a line that is not a checksum")
    sums = {match[2]: match[1] for match in matches}
    for name in sorted(names - sums.keys()):
        raise Broken(f"{path} has no line for {name}")

    def check(name: str) -> None:
        if not (checkpoint / name).is_file():
            raise Broken(f"{checkpoint / name} is missing")
        with open(checkpoint / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sums[name]:
                raise Broken(f"{checkpoint / name} is not what was written: its sha256 is another")

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(check, sorted(sums)[rank::world_size]))


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def read_into(
    state: dict[str, Any],
    checkpoint: str | Path,
    alone: bool = False,
    metadata: Metadata | None = None,
) -> None:
    """Read what `state` names: into its tensors, sharded or not, and in place of its values.

    The dtype may differ. verify() the checkpoint before. Collective where there is a process group,
    unless `alone`. metadata: what read_metadata() returned, for callers that read several times.
    Raises Refusal for a tensor that the checkpoint does not have, or has in another shape, and
    Broken for what can't be read.
    """
    metadata = metadata or read_metadata(checkpoint)
    _check_names(state, metadata, checkpoint)
    reader = FileSystemReader(checkpoint)
    # Its own unpickler would run code.
    reader.read_metadata = lambda *_, **__: metadata
    try:
        with warnings.catch_warnings():
            # A process alone is meant to be.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, planner=_LoadPlanner(), no_dist=alone)
    except CheckpointException as failure:
        error = next(iter(failure.failures.values()))[0]
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise Broken(f"{checkpoint} can't be read: {text[0]}") from None


def _check_names(state: Mapping[str, Any], metadata: Metadata, checkpoint: str | Path) -> None:
    wanted, _ = flatten_state_dict(dict(state))
    for name, value in wanted.items():
        saved = metadata.state_dict_metadata.get(name)
        if saved is None:
            raise Refusal(f"{checkpoint} has no {name}; write the config of the run that saved it")
        shape = list(saved.size) if isinstance(saved, TensorStorageMetadata) else None
        wanted_shape = list(value.shape) if isinstance(value, Tensor) else None
        if shape != wanted_shape:
            raise Refusal(
                f"{checkpoint} has {name} of shape {shape}, this run of shape {wanted_shape}; "
                "write the config of the run that saved it"
            )
