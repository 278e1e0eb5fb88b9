"""The files of a save: copied, written with their checksums, made durable, then published by one rank.

Nothing here communicates with other ranks. Writing runs in the training process, or in a process of
its own, so that Python's lock is not taken from training. That process is started with the run and
ends with it. It shares the memory of the copies (Staging), and what it is sent for a save is small.

All copies lie in one piece of shared memory, pinned where there is a GPU. Copying a model to it costs
a step next to nothing: the GPU's copy engine works on a stream of its own during the next forward and
backward, and only the next update waits for it.
"""

import ctypes
import hashlib
import heapq
import io
import mmap
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
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

_ALIGNMENT = 512
"""Bytes; for the GPU's copy engine."""

_PR_SET_PDEATHSIG = 1

_PROGRAM = f"import sys; from {__name__} import serve; serve(int(sys.argv[1]))"


class HashedFile:
    """A new file to write to, which knows the sha256 of what was written. Durable once closed.

    The sum is taken of what is handed to the system, so that it shows anything that goes wrong
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


def share_out(sizes: dict[MetadataIndex, int], files: int) -> list[list[MetadataIndex]]:
    """Parts for each of at most `files` files, about as many bytes in each. sizes: bytes."""
    heap: list[tuple[int, int]] = [(0, number) for number in range(files)]
    parts: list[list[MetadataIndex]] = [[] for _ in range(files)]
    for index in sorted(sizes, key=sizes.__getitem__, reverse=True):
        total, number = heap[0]
        parts[number].append(index)
        heapq.heapreplace(heap, (total + sizes[index], number))
    return [part for part in parts if part]


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the shared memory."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


def lay_out(tensors: dict[MetadataIndex, Tensor]) -> tuple[dict[MetadataIndex, Slot], int]:
    """A slot for each tensor, and the number of bytes in all."""
    slots = {}
    end = 0
    for index, tensor in tensors.items():
        slots[index] = Slot(end, tensor.shape, tensor.dtype)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return slots, max(end, 1)


def views(memory: mmap.mmap, slots: dict[MetadataIndex, Slot]) -> dict[MetadataIndex, Tensor]:
    """The tensors in the shared memory. Each has a storage of its own, as torch.save() wants it."""
    tensors = {}
    for index, slot in slots.items():
        count = prod(slot.shape)
        if count == 0:
            # torch.frombuffer() takes no empty piece.
            tensors[index] = torch.empty(slot.shape, dtype=slot.dtype)
            continue
        flat = torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.offset)
        tensors[index] = flat.view(slot.shape)
    return tensors


class Staging:
    """Copies of `tensors` (this rank's parts of model and optimizer, on their devices).

    The memory is taken at once, as much as the tensors have together, and kept. It has no name that
    could outlive the process, and no limit but the host's memory.
    """

    def __init__(self, tensors: dict[MetadataIndex, Tensor], device: torch.device, pinned: bool):
        self.device = device
        self.sources = list(tensors.values())
        self.slots, size = lay_out(tensors)
        self.descriptor = os.memfd_create("titan_sparse checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)
        self.copies = views(self.memory, self.slots)
        self.is_pinned = pinned and device.type == "cuda"
        if self.is_pinned:
            self._pin(size)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ordered = Event()
        """all copies are in the stream, or done"""
        self.ordered.set()
        self.done: torch.cuda.Event | None = None

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
                    torch._foreach_copy_(copies, self.sources, non_blocking=self.is_pinned)
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
        if self.is_pinned:
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self.copies = {}
        os.close(self.descriptor)

    def _pin(self, size: int) -> None:
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._address = whole.data_ptr()
        result = torch.cuda.cudart().cudaHostRegister(self._address, size, 0)
        if int(result) != 0:
            raise ValueError(
                f"checkpoint.async_mode: {size / 2**30:.1f} GiB of memory can't be pinned "
                f'({result}); write "async", or raise the limit of locked memory (ulimit -l)'
            )

    def _on_stream(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


@dataclass
class UseMemory:
    """Message: the copies lie there. The memory itself comes along as an open file."""

    slots: dict[MetadataIndex, Slot]
    size: int
    """bytes"""


@dataclass
class Write:
    """Message: write_share() with these arguments."""

    save: Save
    rank: int
    values: dict[MetadataIndex, bytes]
    threads: int


@dataclass
class Publish:
    """Message: publish_save() with these arguments. metadata: None for what came last time."""

    save: Save
    metadata: Metadata | None
    share_sums: list[str]


class WriterProcess:
    """The training process's end. Its calls wait for the answer, and raise what was raised there."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",  # it must take no memory of a GPU
        }
        command = [sys.executable, "-c", _PROGRAM, str(other.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment)
        other.close()
        self.socket = own
        self.connection = Connection(os.dup(own.fileno()))
        self.sent_metadata: Metadata | None = None

    def use_memory(self, staging: Staging) -> None:
        """Write from these copies from now on."""
        self._send(UseMemory(staging.slots, len(staging.memory)))
        socket.send_fds(self.socket, [b"\0"], [staging.descriptor])
        self._receive()

    def write_share(
        self, save: Save, rank: int, values: dict[MetadataIndex, bytes], threads: int
    ) -> str:
        """writer.write_share() of the copies."""
        self._send(Write(save, rank, values, threads))
        return self._receive()

    def publish_save(self, save: Save, metadata: Metadata, share_sums: list[str]) -> None:
        """writer.publish_save()."""
        is_new = metadata is not self.sent_metadata
        self._send(Publish(save, metadata if is_new else None, share_sums))
        self._receive()
        self.sent_metadata = metadata

    def close(self) -> None:
        """End it. A save that it is writing is finished first."""
        self.connection.close()
        self.socket.close()
        self.process.wait()

    def _send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            self._died()

    def _receive(self) -> str:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self._died()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _died(self) -> None:
        status = self.process.wait()
        raise OSError(f"the process that writes checkpoints has died (status {status})")


def serve(file: int) -> None:
    """The other end: do what is asked for until the training process is gone."""
    # A stop signal is the training process's to answer, which may still want a save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(os.dup(file))
    descriptors = socket.socket(fileno=file)
    copies = {}
    metadata = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        answer: object = ""
        try:
            match message:
                case UseMemory():
                    _, [memory], _, _ = socket.recv_fds(descriptors, 1, 1)
                    copies = views(mmap.mmap(memory, message.size), message.slots)
                case Write():
                    answer = write_share(
                        message.save, message.rank, copies, message.values, message.threads
                    )
                case Publish():
                    metadata = message.metadata or metadata
                    publish_save(message.save, metadata, message.share_sums)
        except OSError as error:
            answer = OSError(error.errno, error.strerror or str(error), error.filename)
        except Exception:
            answer = RuntimeError(traceback.format_exc())
        connection.send(answer)
