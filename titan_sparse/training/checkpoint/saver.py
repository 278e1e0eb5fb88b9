"""Write a checkpoint over all ranks.

DCP plans which rank writes which tensors and collects failures. The files are ours: they have
checksums, and a save is made durable before its folder gets the name step-N. (DCP's own threads
lose their exceptions.)
"""

import hashlib
import io
import logging
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _split_by_size_and_type,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from titan_sparse.config import Checkpoint, Refusal
from titan_sparse.config.start import cores_of_rank
from titan_sparse.options.values import FULL_DISK
from titan_sparse.training.checkpoint.folders import (
    CHECKSUMS,
    METADATA,
    publish,
    rotate,
    sync_folder,
)
from titan_sparse.training.offload import pin

logger = logging.getLogger("titan_sparse")

PINNED = "async_with_pinned_mem"

_ALIGNMENT = 512
"""Bytes; for the GPU's copy engine."""

_FILES_PER_RANK = 4
"""At most; so many threads hash and write."""


class SaveError(OSError):
    """A save that failed: one line for the user. The checkpoints before it are as they were."""


def check_async_mode(section: Checkpoint, device: torch.device) -> None:
    """Raises Refusal for pinned memory without a GPU."""
    if section.enable and section.async_mode == PINNED and device.type != "cuda":
        raise Refusal(
            f'checkpoint.async_mode = "{PINNED}" needs a GPU, training.device is '
            f'{device.type}; write "async"'
        )


class HashedFile(io.FileIO):
    """A new file that computes the sha256 of what is written. It is durable once closed."""

    def __init__(self, path: Path):
        super().__init__(path, "xb")
        self.sum = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self.sum.update(view)
        written = 0
        try:
            while written < len(view):
                written += super().write(view[written:])
        except OSError as error:
            self.failure = error
            raise
        return written

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            os.fsync(self.fileno())
        self.close()
        if self.failure is not None:
            # torch.save() would hide it behind another error.
            raise self.failure


def _write_bytes(path: Path, data: bytes) -> str:
    with HashedFile(path) as file:
        file.write(data)
    return file.sum.hexdigest()


class _Files(FileSystemWriter):
    """DCP's files, with their sha256. The folder gets its name when all of them are durable. The
    arguments are those of write().
    """

    def __init__(
        self, checkpoint: Path, copies: dict[str, Tensor], texts: dict[str, str], keep: int
    ):
        super().__init__(checkpoint.with_name(f"{checkpoint.name}.incomplete"))
        self.checkpoint = checkpoint
        self.copies = copies
        self.texts = texts
        self.keep = keep

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder anew. DCP calls it on rank 0."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: DefaultSavePlanner) -> torch.futures.Future:
        """Write this rank's part: where each tensor or value lies, and the sha256 of each file."""
        places: dict = {}
        sums: dict[str, str] = {}

        def write_file(number: int, items: list[WriteItem]) -> None:
            path = self.path / f"__{dist.get_rank()}_{number}.distcp"
            with HashedFile(path) as file:
                for item in items:
                    offset = file.tell()
                    data = self.copies.get(item.index.fqn)
                    if data is None:
                        data = planner.resolve_data(item)
                    if isinstance(data, Tensor):
                        # A copy, as torch.save() writes all that the storage holds.
                        torch.save(data.detach().cpu().clone(), file)
                    else:
                        file.write(data.getbuffer())
                    places[item.index] = _StorageInfo(path.name, offset, file.tell() - offset)
            sums[path.name] = file.sum.hexdigest()

        threads = min(_FILES_PER_RANK, cores_of_rank())
        parts = list(filter(None, _split_by_size_and_type(threads, plan.items)))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write_file, range(len(parts)), parts))
        sync_folder(self.path)
        done = torch.futures.Future()
        done.set_result((places, sums))
        return done

    def finish(self, metadata: Metadata, results: list[tuple[dict, dict]]) -> None:
        """Rename the folder to step-N. DCP calls it on rank 0, once all ranks have written."""
        sums: dict[str, str] = {}
        metadata.storage_data = {}
        for places_of_rank, sums_of_rank in results:
            metadata.storage_data |= places_of_rank
            sums |= sums_of_rank
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.checkpoint))
        contents = {name: text.encode() for name, text in self.texts.items()}
        contents[METADATA] = pickle.dumps(metadata)
        for name, data in contents.items():
            sums[name] = _write_bytes(self.path / name, data)
        # The format of sha256sum, which can check a checkpoint by hand.
        lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
        _write_bytes(self.path / CHECKSUMS, "".join(lines).encode())
        publish(self.path, self.checkpoint)
        rotate(self.checkpoint.parent, self.keep)


def memory_like(tensors: dict[str, Tensor], pinned: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """One piece of CPU memory, pinned as long as it lives, and in it tensors like these."""
    offsets, size = [], 0
    for tensor in tensors.values():
        offsets.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned and size and (error := pin(memory)):
        logger.warning(
            "%.1f GiB of memory for saves can't be pinned (CUDA error %d), so saves hold up training "
            "for longer; raise the limit of locked memory (ulimit -l)",
            size / 2**30,
            error,
        )
    copies = {
        name: memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
    }
    return memory, copies


def write(
    checkpoint: Path,
    state: dict[str, Any],
    copies: dict[str, Tensor],
    texts: dict[str, str],
    keep: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Write `state` as the folder `checkpoint`, which appears once it is complete. Collective.

    copies: of this rank's shards, by name, which are written in place of the tensors in `state`.
    texts: name -> text of further files. keep: checkpoints that stay, with this one; 0: all. Raises
    SaveError, one line, on all ranks.
    """
    files = _Files(checkpoint, copies, texts, keep)
    try:
        dcp.save(state, storage_writer=files, process_group=group)
    except CheckpointException as failure:  # the same on all ranks
        if dist.get_rank() == 0:
            shutil.rmtree(files.path, ignore_errors=True)
        [error, _], *_ = failure.failures.values()
        if not isinstance(error, OSError):
            logger.warning("%s", failure)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            size = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
            reason = (
                f"no space left on the disk ({error.strerror}); a save needs "
                f"{size / 2**30:.3g} GiB more than checkpoint.keep_latest_k of them; "
                "free some, or write another training.output_dir"
            )
        raise SaveError(f"{checkpoint} could not be saved: {reason}") from None
