"""The files of a save: copied, written with their checksums, made durable, then published by one rank.

Nothing here communicates with other ranks. A Writer runs in the training process, or in a separate
process, so that it does not hold Python's lock while the trainer needs it. The separate process
starts and ends with the run. It shares the memory of the copies (Staging), so a save sends little.

All copies are in one piece of shared memory, which is pinned if there is a GPU. Copying a model to it
hardly slows a step down: the GPU's copy engine uses a separate stream during the next forward and
backward, and only the next update waits for it.
"""

import ctypes
import functools
import hashlib
import heapq
import io
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

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

_ALIGNMENT = 512
"""Bytes; for the GPU's copy engine."""

_PR_SET_PDEATHSIG = 1

_PROGRAM = f"import sys; from {__name__} import serve; serve(*map(int, sys.argv[1:]))"

Tensors = dict[MetadataIndex, Tensor]
Slots = dict[MetadataIndex, tuple[int, torch.Size, torch.dtype]]
"""Where each tensor lies in the shared memory: its offset in bytes, its shape and its dtype."""


class HashedFile(io.FileIO):
    """A new file that computes the sha256 of what is written to it. It is durable once closed.

    The sum covers exactly the bytes that are passed to the operating system, without a buffer in
    between. So it detects any damage from there to the disk and back.
    """

    def __init__(self, path: Path):
        super().__init__(path, "xb")
        self.sum = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`. Both parts of it let other threads run."""
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


@dataclass
class Save:
    """A save in progress: where it goes, and what is equal on all ranks."""

    incomplete: Path
    checkpoint: Path
    texts: dict[str, str]
    """files that go in as they are: name -> text"""
    keep: int
    """checkpoints that stay, this one among them; 0: all"""

    def begin(self) -> None:
        """Make the folder, without what an earlier attempt has left in it. On one rank."""
        shutil.rmtree(self.incomplete, ignore_errors=True)
        self.incomplete.mkdir(parents=True)


class Writer:
    """Writes the part of one rank in each save, in at most `threads` files."""

    def __init__(self, rank: int, threads: int):
        self.rank = rank
        self.threads = threads

    def use(self, tensors: Tensors, metadata: Metadata | None) -> None:
        """What the next saves are of. metadata: of all ranks, for publish()."""
        self.tensors = tensors
        self.metadata = metadata

    def use_memory(self, path: str, slots: Slots, metadata: Metadata | None) -> None:
        """use() of the copies of a Staging in another process."""
        self.use(open_memory(path, slots)[1], metadata)

    def write(self, save: Save, values: dict[MetadataIndex, bytes]) -> bytes:
        """Write this rank's part. values: as torch.save() writes them.

        Returns what publish() has to know of it, pickled: where each part lies, and the sha256 of
        each file.
        """
        sizes = {index: tensor.nbytes for index, tensor in self.tensors.items()}
        sizes |= {index: len(data) for index, data in values.items()}
        places: dict[MetadataIndex, _StorageInfo] = {}
        sums: dict[str, str] = {}

        def write_file(number: int, part: list[MetadataIndex]) -> None:
            path = save.incomplete / f"__{self.rank}_{number}.distcp"
            with HashedFile(path) as file:
                for index in part:
                    offset = file.tell()
                    if index in values:
                        file.write(values[index])
                    else:
                        torch.save(_alone(self.tensors[index].cpu()), file)
                    places[index] = _StorageInfo(path.name, offset, file.tell() - offset)
            sums[path.name] = file.sum.hexdigest()

        with ThreadPoolExecutor(self.threads) as pool:
            parts = share_out(sizes, self.threads)
            for _ in pool.map(write_file, range(len(parts)), parts):
                pass
        sync_folder(save.incomplete)
        return pickle.dumps((places, sums))

    def publish(self, save: Save, written: list[bytes]) -> None:
        """Write the list of all ranks' files, rename the folder to step-N, and delete old checkpoints.

        One rank calls this after all ranks have written. written: what write() returned on each rank.
        """
        places, sums = {}, {}
        for places_of_rank, sums_of_rank in map(pickle.loads, written):
            places |= places_of_rank
            sums |= sums_of_rank
        self.metadata.storage_data = places
        self.metadata.version = CURRENT_DCP_VERSION
        self.metadata.storage_meta = StorageMeta(checkpoint_id=str(save.checkpoint))
        contents = {name: text.encode() for name, text in save.texts.items()}
        contents[METADATA] = pickle.dumps(self.metadata)
        for name, data in contents.items():
            sums[name] = _write_bytes(save.incomplete / name, data)
        # The format of sha256sum, which can check a checkpoint by hand.
        lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
        _write_bytes(save.incomplete / CHECKSUMS, "".join(lines).encode())
        publish(save.incomplete, save.checkpoint)
        rotate(save.checkpoint.parent, save.keep)

    def close(self) -> None:
        """Release the tensors."""
        self.use({}, None)


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


def as_bytes(value: object) -> bytes:
    """`value` as it stands in a checkpoint."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def share_out(sizes: dict[MetadataIndex, int], files: int) -> list[list[MetadataIndex]]:
    """Parts for each of at most `files` files, about as many bytes in each. sizes: bytes."""
    heap: list[tuple[int, int]] = [(0, number) for number in range(files)]
    parts: list[list[MetadataIndex]] = [[] for _ in range(files)]
    for index in sorted(sizes, key=sizes.__getitem__, reverse=True):
        total, number = heap[0]
        parts[number].append(index)
        heapq.heapreplace(heap, (total + sizes[index], number))
    return [part for part in parts if part]


def open_memory(path: str, slots: Slots) -> tuple[mmap.mmap, Tensors]:
    """Open shared memory, and the tensors in it. Each has its own storage, which torch.save() needs."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    tensors = {}
    for index, (offset, shape, dtype) in slots.items():
        # torch.frombuffer() takes no empty piece.
        flat = torch.empty(0, dtype=dtype)
        if prod(shape):
            flat = torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset)
        tensors[index] = flat.view(shape)
    return memory, tensors


class Staging:
    """Copies of `tensors` (this rank's parts of model and optimizer, on their devices).

    The memory is taken at once, as much as the tensors have together, and kept. It has no name that
    could outlive the process, and no limit but the host's memory.
    """

    def __init__(self, tensors: Tensors, device: torch.device, pinned: bool):
        self.device = device
        self.sources = list(tensors.values())
        self.slots: Slots = {}
        size = 0
        for index, tensor in tensors.items():
            self.slots[index] = (size, tensor.shape, tensor.dtype)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.descriptor = os.memfd_create("titan_sparse checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, max(size, 1))
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        """for a process of the same user, as long as this one lives"""
        memory, self.copies = open_memory(self.path, self.slots)
        self.pinned: Tensor | None = None
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None
        self.ordered = Event()
        """all copies are in the stream, or done"""
        self.ordered.set()
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            if pinned:
                self._pin(torch.frombuffer(memory, dtype=torch.uint8))

    def begin(self) -> None:
        """The tensors are to be copied as they are now. Call it where they were last changed."""
        self.ordered.clear()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self) -> None:
        """Copy them, on any thread; returns when the copies are there. Call begin() first."""
        try:
            with torch.no_grad(), self._on_stream():
                if self.sources:
                    # One call: Python's lock is training's meanwhile.
                    copies = list(self.copies.values())
                    non_blocking = self.pinned is not None
                    torch._foreach_copy_(copies, self.sources, non_blocking=non_blocking)
                if self.stream is not None:
                    self.done = torch.cuda.Event()
                    self.done.record(self.stream)
        finally:
            self.ordered.set()
        if self.done is not None:
            self.done.synchronize()

    def before_update(self) -> None:
        """The tensors may change after this: the GPU waits for the copies, the host does not."""
        self.ordered.wait()
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    def close(self) -> None:
        """Give the memory back."""
        if self.pinned is not None:
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self.pinned.data_ptr())
            self.pinned = None
        self.copies = {}
        os.close(self.descriptor)

    def _pin(self, memory: Tensor) -> None:
        result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(result) != 0:
            raise ValueError(
                f"checkpoint.async_mode: {memory.nbytes / 2**30:.1f} GiB of memory can't be pinned "
                f'({result}); write "async", or raise the limit of locked memory (ulimit -l)'
            )
        self.pinned = memory

    def _on_stream(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class WriterProcess:
    """A Writer in a separate process. Calls wait for the answer, and raise the errors of that process."""

    def __init__(self, rank: int, threads: int) -> None:
        self.connection, other = multiprocessing.Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",  # it must take no memory of a GPU
        }
        command = [sys.executable, "-c", _PROGRAM, *map(str, (other.fileno(), rank, threads))]
        self.process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment)
        other.close()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """The Writer's method of that name, done there."""
        return functools.partial(self._call, method)

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            self.connection.send((method, arguments))
            answer = self.connection.recv()
        except (EOFError, OSError):
            status = self.process.wait()
            raise OSError(
                f"the process that writes checkpoints has died (status {status})"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End it. A save that it is writing is finished first."""
        self.connection.close()
        self.process.wait()


def serve(file: int, rank: int, threads: int) -> None:
    """Main function of that process: answer calls until the training process is gone."""
    # The training process answers stop signals, because it may still want to save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(file)
    writer = Writer(rank, threads)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(writer, method)(*arguments)
        except OSError as error:
            answer = error
        except Exception:
            answer = RuntimeError(traceback.format_exc())
        connection.send(answer)
