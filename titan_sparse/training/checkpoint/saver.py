"""Save over all ranks, in the foreground or on a thread. The files are the same.

DCP plans which rank writes which tensors and collects failures. The files are ours: they have
checksums, and a save is made durable before its folder gets the name step-N.

In the background, copies on the CPU are saved. With pinned memory, copying hardly slows a step down:
the GPU's copy engine uses a separate stream during the next forward and backward, and only the next
update waits for it.
"""

import copy
import errno
import hashlib
import io
import logging
import os
import pickle
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _split_by_size_and_type,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_sparse.config import Checkpoint, Refusal
from titan_sparse.training.checkpoint.folders import (
    CHECKSUMS,
    METADATA,
    incomplete_folder,
    publish,
    rotate,
    step_folder,
    sync_folder,
)
from titan_sparse.training.offload import Copier, pin

logger = logging.getLogger("titan_sparse")

PINNED = "async_with_pinned_mem"

_ALIGNMENT = 512
"""Bytes; for the GPU's copy engine."""

_FILES_PER_RANK = 4
"""At most; so many threads hash and write."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SaveError(OSError):
    """A save that failed: one line for the user. The checkpoints before it are as they were."""


def check_async_mode(section: Checkpoint, device: torch.device) -> None:
    """Raises Refusal for pinned memory without a GPU."""
    if section.enable and section.async_mode == PINNED and device.type != "cuda":
        raise Refusal(
            f'checkpoint.async_mode = "{PINNED}" needs a GPU, training.device is '
            f'{device.type}; write "async"'
        )


def expected_bytes(model: nn.Module, optimizers: list[Optimizer]) -> int:
    """Bytes of a save's tensors over all ranks, before the optimizer has made its own.

    Replicas are written once, frozen weights not at all. Adam has two tensors of each parameter's size.
    """
    total = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    moments = 0 if all(isinstance(o, torch.optim.SGD) for o in optimizers) else 2
    return total * (1 + moments)


class HashedFile(io.FileIO):
    """A new file that computes the sha256 of exactly the bytes that are passed to the operating system.
    It is durable once closed.
    """

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


class _Planner(DefaultSavePlanner):
    """Writes copies in place of this rank's shards, where there are copies."""

    def __init__(self, copies: dict[str, Tensor]):
        super().__init__()
        self.copies = copies

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        name = write_item.index.fqn
        return self.copies[name] if name in self.copies else super().resolve_data(write_item)


class _Files(FileSystemWriter):
    """DCP's files, with their sha256. The folder gets its name when all of them are durable.

    texts: name -> text of further files. keep: checkpoints that stay, with this one; 0: all.
    """

    def __init__(self, incomplete: Path, checkpoint: Path, texts: dict[str, str], keep: int):
        super().__init__(incomplete)
        self.checkpoint = checkpoint
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
                    data = planner.resolve_data(item)
                    if isinstance(data, Tensor):
                        torch.save(_alone(data.detach().cpu()), file)
                    else:
                        file.write(data.getbuffer())
                    places[item.index] = _StorageInfo(path.name, offset, file.tell() - offset)
            sums[path.name] = file.sum.hexdigest()

        threads = _threads()
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


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without what else its storage holds, which torch.save() would write too."""
    if tensor.untyped_storage().size() != tensor.nbytes:
        return tensor.clone()
    return tensor


def _threads() -> int:
    """Files that a rank writes at once: its share of the node's cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(_FILES_PER_RANK, len(os.sched_getaffinity(0)) // ranks))


def _memory_like(tensors: dict[str, Tensor], pinned: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """One piece of CPU memory, pinned as long as it lives, and in it tensors like these. Each has its
    own storage, which torch.save() needs.
    """
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
    copies = {}
    for (name, tensor), offset in zip(tensors.items(), offsets, strict=True):
        # torch.frombuffer() takes no empty piece.
        flat = torch.empty(0, dtype=tensor.dtype)
        if count := prod(tensor.shape):
            flat = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=count, offset=offset)
        copies[name] = flat.view(tensor.shape)
    return memory, copies


class Saver:
    """Saves `folder`/step-N. Every method but wait() and raise_failure() is called on all ranks alike."""

    def __init__(
        self, section: Checkpoint, folder: Path, device: torch.device, texts: dict[str, str]
    ):
        self.section = section
        self.folder = folder
        self.texts = texts
        self.last_save_seconds: float | None = None if section.enable else 0.0
        """from save() to the name step-N, of the last save that got it; None before the first"""
        self.pending: Future[None] | None = None
        self.memory: Tensor | None = None
        self.copies: dict[str, Tensor] = {}
        """of this rank's shards, by name, in that memory, for saves in the background"""
        self.copier = Copier(device)
        self.copied: torch.cuda.Event | None = None
        self.group: dist.ProcessGroup | None = None
        self.thread: ThreadPoolExecutor | None = None
        if section.enable and section.async_mode != "disabled":
            # Not the world's group, over which training communicates at the same time.
            self.group = dist.new_group(backend="gloo")
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and values: name of a part -> its state."""
        raise NotImplementedError

    def save(self, step: int) -> float:
        """Save, or begin to. Returns the seconds for which this held up training.

        The tensors must not change between this and the return of before_update().
        Raises SaveError, one line, on all ranks, if this save failed, or in the background the one
        before.
        """
        began = time.perf_counter()
        self.wait()
        tensors, values = self.state()
        if self.thread is None:
            self._write(step, {**tensors, **values}, began)
        else:
            self._copy(tensors)
            state = {**tensors, **copy.deepcopy(values)}
            self.pending = self.thread.submit(self._write, step, state, began)
        return time.perf_counter() - began

    @torch.no_grad()
    def _copy(self, tensors: dict[str, Tensor]) -> None:
        """Copy this rank's shards. With pinned memory the host does not wait for it."""
        shards = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in tensors.items()
        }
        if shards.keys() != self.copies.keys():
            self.memory, self.copies = _memory_like(shards, self.section.async_mode == PINNED)
        for name, shard in shards.items():
            self.copied = self.copier.start(self.copies[name], shard)

    def before_update(self) -> None:
        """The tensors may change after this: the GPU waits for the copies, the host does not."""
        self.copier.wait(self.copied)

    def raise_failure(self) -> None:
        """Raises SaveError if the save in the background has failed. Does not wait."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises SaveError if it failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then give back thread and memory."""
        try:
            self.wait()
        finally:
            if self.thread is not None:
                self.thread.shutdown()
            self.memory, self.copies = None, {}

    def _write(self, step: int, state: dict[str, Any], began: float) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        checkpoint = step_folder(self.folder, step)
        incomplete = incomplete_folder(self.folder, step)
        files = _Files(incomplete, checkpoint, self.texts, self.section.keep_latest_k)
        try:
            dcp.save(
                state,
                storage_writer=files,
                planner=_Planner(self.copies),
                process_group=self.group,
            )
        except CheckpointException as failure:  # the same on all ranks
            if dist.get_rank() == 0:
                shutil.rmtree(incomplete, ignore_errors=True)
            [error, _], *_ = failure.failures.values()
            if not isinstance(error, OSError):
                logger.warning("%s", failure)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            if isinstance(error, OSError) and error.errno in _FULL:
                size = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
                reason = (
                    f"no space left on the disk ({error.strerror}); a save needs "
                    f"{size / 2**30:.3g} GiB more than checkpoint.keep_latest_k of them; "
                    "free some, or write another training.output_dir"
                )
            raise SaveError(f"{checkpoint} could not be saved: {reason}") from None
        self.last_save_seconds = time.perf_counter() - began
        logger.info("saved %s in %.1f s", checkpoint, self.last_save_seconds)
