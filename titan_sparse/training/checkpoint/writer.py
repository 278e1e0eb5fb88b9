"""The files of a save: written with their checksums, made durable, then published by one rank.

Nothing here communicates. It runs in the training process, or in one of its own (process.py).
"""

import hashlib
import io
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from titan_sparse.training.checkpoint.folders import (
    CHECKSUMS,
    METADATA,
    publish,
    rotate,
    sync_folder,
)
from titan_sparse.training.checkpoint.planning import share_out


class HashedFile:
    """A new file to write to, which knows the sha256 of what was written. Durable once closed.

    The sum is taken of what is handed to the system, so that it tells of anything that goes wrong
    from there to the disk and back.
    """

    def __init__(self, path: Path):
        # No buffer between the sum and the system.
        self.file = open(path, "xb", buffering=0)
        self.sum = hashlib.sha256()
        self.position = 0
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`. Both parts of it let other threads run."""
        view = memoryview(data).cast("B")
        self.sum.update(view)
        written = 0
        try:
            while written < len(view):
                written += self.file.write(view[written:])
        except OSError as error:
            self.failure = error
            raise
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        """There is no buffer."""

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            os.fsync(self.file.fileno())
        self.file.close()
        if self.failure is not None:
            # torch.save() raises an error of its own in its place.
            raise self.failure


@dataclass
class Share:
    """What one rank has written of a save."""

    places: dict[MetadataIndex, _StorageInfo]
    sums: dict[str, str]
    """name of a file -> sha256"""


@dataclass
class Save:
    """A save on its way: where it goes, and what is the same on all ranks."""

    incomplete: Path
    checkpoint: Path
    texts: dict[str, str]
    """files that go in as they are: name -> text"""
    keep: int
    """checkpoints that stay, this one among them; 0: all"""


def begin(save: Save) -> None:
    """Make the folder, without what an earlier attempt has left in it. On one rank."""
    shutil.rmtree(save.incomplete, ignore_errors=True)
    save.incomplete.mkdir(parents=True)


def write_share(
    save: Save,
    rank: int,
    tensors: dict[MetadataIndex, Tensor],
    values: dict[MetadataIndex, bytes],
    threads: int,
) -> str:
    """Write this rank's part into at most `threads` files, and a list of them for publish_save().

    values: as torch.save() writes them. Returns the sha256 of that list.
    """
    sizes = {index: tensor.nbytes for index, tensor in tensors.items()}
    sizes |= {index: len(data) for index, data in values.items()}
    parts = share_out(sizes, threads)
    share = Share({}, {})
    with ThreadPoolExecutor(threads) as pool:
        pending = []
        for number, part in enumerate(parts):
            path = save.incomplete / f"__{rank}_{number}.distcp"
            pending.append(pool.submit(_write_file, path, part, tensors, values))
        for future in pending:
            written = future.result()
            share.places |= written.places
            share.sums |= written.sums
    path = _share_path(save, rank)
    with HashedFile(path) as file:
        file.write(pickle.dumps(share))
    sync_folder(save.incomplete)
    return file.sum.hexdigest()


def publish_save(save: Save, metadata: Metadata, share_sums: list[str]) -> None:
    """When all ranks have written: what they have written together, then the name step-N.

    share_sums: what write_share() returned, for each rank. Then old checkpoints go. On one rank.
    """
    sums: dict[str, str] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank, share_sum in enumerate(share_sums):
        path = _share_path(save, rank)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != share_sum:
            raise OSError(f"{path} is not what rank {rank} has written")
        share: Share = pickle.loads(data)
        places |= share.places
        sums |= share.sums
        path.unlink()

    metadata.storage_data = places
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_meta = StorageMeta(checkpoint_id=str(save.checkpoint))
    contents = {name: text.encode() for name, text in save.texts.items()}
    contents[METADATA] = pickle.dumps(metadata)
    for name, data in contents.items():
        sums[name] = _write_bytes(save.incomplete / name, data)
    # The format of sha256sum, which can check a checkpoint by hand.
    lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
    _write_bytes(save.incomplete / CHECKSUMS, "".join(lines).encode())
    publish(save.incomplete, save.checkpoint)
    rotate(save.checkpoint.parent, save.keep)


def _write_file(
    path: Path,
    part: list[MetadataIndex],
    tensors: dict[MetadataIndex, Tensor],
    values: dict[MetadataIndex, bytes],
) -> Share:
    places = {}
    with HashedFile(path) as file:
        for index in part:
            offset = file.position
            if index in values:
                file.write(values[index])
            else:
                torch.save(_alone(tensors[index].cpu()), file)
            places[index] = _StorageInfo(path.name, offset, file.position - offset)
    return Share(places, {path.name: file.sum.hexdigest()})


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without what else its storage holds, which torch.save() would write too."""
    if tensor.untyped_storage().size() != tensor.nbytes:
        return tensor.clone()
    return tensor


def _write_bytes(path: Path, data: bytes) -> str:
    """Write a new file; returns its sha256."""
    with HashedFile(path) as file:
        file.write(data)
    return file.sum.hexdigest()


def _share_path(save: Save, rank: int) -> Path:
    return save.incomplete / f"written-{rank}"


def as_bytes(value: object) -> bytes:
    """`value` as it stands in a checkpoint."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
