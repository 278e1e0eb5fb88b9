"""Copies of the tensors of a save, so that training goes on while they are written.

All copies lie in one piece of shared memory, pinned where there is a GPU. Copying a model to it
costs a step next to nothing: the GPU's copy engine works on a stream of its own during the next
forward and backward, and only the next update waits for it.
"""

import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from threading import Event

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

_ALIGNMENT = 512
"""Bytes; for the GPU's copy engine."""


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
