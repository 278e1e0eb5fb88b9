"""Offload of what activation checkpointing keeps: to pinned CPU memory in the forward, back in the
backward.

saved_tensors_hooks show what each block keeps for its backward: its input and attention's out and
LSE. A second stream copies them while the next block computes. In the backward, a block's tensors
come back while the block after it computes. Those of the last block stay. (The scheme is that of
BurstEngine's and ALST's checkpoint offload, arXiv 2506.13996, section 3.3.)
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

MIN_BYTES = 2**20
"""Smaller tensors stay on the device: their copies would cost more than they free."""


def pin(buffer: Tensor) -> int:
    """Pin CPU memory for as long as `buffer` lives, without rounding its size up to a power of two
    as pin_memory=True does. Returns CUDA's error code; 0: it worked."""
    runtime = torch.cuda.cudart()
    address = buffer.data_ptr()
    error = int(runtime.cudaHostRegister(address, buffer.nbytes, 1))  # 1: portable
    if not error:
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return error


class BufferPool:
    """CPU buffers, kept when they are given back. nbytes: of all, in use or not."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.nbytes = 0
        self.free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor:
        """A buffer, uint8 [nbytes]: one that was given back, else a new one."""
        if self.free[nbytes]:
            return self.free[nbytes].pop()
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self.pinned and (error := pin(buffer)):
            raise RuntimeError(
                f"{nbytes:,} bytes of CPU memory can't be pinned in addition to {self.nbytes:,} (CUDA error "
                f"{error}); write activation_checkpoint.offload = false or a smaller training.seq_len"
            )
        self.nbytes += nbytes
        return buffer


class Copier:
    """Copies between the device and the CPU beside the stream that computes; on the CPU, at
    once. One stream keeps their order, so a buffer may be taken again once the last copy from
    it is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, destination: Tensor, source: Tensor) -> "torch.cuda.Event | None":
        """Queue a copy behind what the current stream has been given so far. Returns what to wait()
        for. Until then keep both tensors: the allocator does not know of this stream."""
        if self.stream is None:
            destination.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            destination.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: "torch.cuda.Event | None") -> None:
        """The current stream goes on after the copy. The host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)


class _Saved:
    """One tensor that a block keeps. Its buffer goes back to the pool when autograd drops it."""

    def __init__(self, tensor: Tensor, block: "_Block", copies: bool) -> None:
        self.block = block
        # Its shape, strides and dtype, without memory.
        self.like = tensor.detach().to("meta")
        self.device = tensor.device
        self.version = tensor._version
        self.on_device: Tensor | None = tensor.detach()
        self.buffer: Tensor | None = None
        self.event: torch.cuda.Event | None = None
        # What the last block keeps is needed first, and stays.
        if copies:
            self.buffer = block.owner.pool.take(tensor.nbytes)
            self.event = block.owner.copier.start(self._in_buffer(), self.on_device)

    def _in_buffer(self) -> Tensor:
        elements = self.buffer.view(self.like.dtype)
        return elements.as_strided(self.like.shape, self.like.stride())

    def free_device(self) -> None:
        """The forward goes on after the copy, and the device's memory may be used again."""
        if self.on_device is None or self.buffer is None:
            return
        if self.on_device._version != self.version:
            raise RuntimeError(
                "a tensor that is kept for the backward was changed in place while it was offloaded"
            )
        self._settle()
        self.on_device = None

    def fetch(self) -> None:
        if self.on_device is not None:
            return
        # Allocated on the stream that computes, so that its memory is free for that stream's next
        # tensor afterwards.
        self.on_device = torch.empty_like(self.like, device=self.device)
        self.event = self.block.owner.copier.start(self.on_device, self._in_buffer())

    def get(self) -> Tensor:
        """Later calls copy once more."""
        self.fetch()
        self._settle()
        tensor = self.on_device
        if self.buffer is not None:
            self.on_device = None
        return tensor

    def _settle(self) -> None:
        self.block.owner.copier.wait(self.event)
        self.event = None

    def __del__(self) -> None:
        # A graph that is dropped half-way: the copy has to be over before the device's memory is
        # used again.
        self._settle()
        if self.buffer is not None:
            self.block.owner.pool.free[self.buffer.numel()].append(self.buffer)


@dataclass(eq=False)
class _Block:
    """The tensors that one block keeps in one forward."""

    owner: "OffloadedBlocks"
    module: nn.Module
    shared_storages: set[int]
    before: "_Block | None"
    """the block that the backward reaches next"""
    is_last: bool
    parameter_storages: set[int] | None = None
    fetched: bool = False
    saved: weakref.WeakValueDictionary[tuple, _Saved] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """by address and shape; weak, as only autograd decides how long a tensor is kept"""

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """The pack hook: called for every tensor that autograd saves in this block's forward."""
        is_worth_it = type(tensor) is Tensor and tensor.nbytes >= MIN_BYTES and _is_dense(tensor)
        if not is_worth_it or self._stays(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # An address identifies a tensor as long as the device's memory is held: for this block and
        # the one before.
        saved = self.saved.get(key)
        if saved is None and self.before is not None:
            saved = self.before.saved.get(key)
        if saved is None:
            saved = _Saved(tensor, self, copies=not self.is_last)
        self.saved[key] = saved
        return saved

    def _stays(self, tensor: Tensor) -> bool:
        if self.parameter_storages is None:
            # Asked for inside the block's forward: only there does FSDP show the
            # gathered parameters.
            self.parameter_storages = _storages(self.module.parameters())
        address = tensor.untyped_storage().data_ptr()
        return address in self.shared_storages or address in self.parameter_storages

    def fetch(self) -> None:
        if self.fetched:
            return
        self.fetched = True
        for saved in self.saved.values():
            saved.fetch()


class OffloadedBlocks:
    """Runs the blocks as models.decoder.run_blocks() does, with what they keep for the backward on
    the CPU. The device holds at most the tensors of the block that computes and of two more blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool = BufferPool(pinned=device.type == "cuda")
        self.copier = Copier(device)

    def __call__(self, blocks: Iterable[nn.Module], x: Tensor, *shared: Any) -> Tensor:
        """x through all blocks, each called with (x, *shared), whose tensors stay on the device."""
        blocks = list(blocks)
        shared_storages = _storages(tree_leaves(shared))
        record: _Block | None = None
        for block in blocks:
            record = _Block(self, block, shared_storages, record, block is blocks[-1])
            with torch.autograd.graph.saved_tensors_hooks(record.pack, _unpack):
                x = block(x, *shared)
            # This one's tensors are still being copied.
            for saved in record.before.saved.values() if record.before is not None else ():
                saved.free_device()
        return x


def _unpack(packed: Tensor | _Saved) -> Tensor:
    """Unpack hook. It also starts the copies of the previous block, which the
    backward needs next."""
    if not isinstance(packed, _Saved):
        return packed
    packed.block.fetch()
    tensor = packed.get()
    if packed.block.before is not None:
        packed.block.before.fetch()
    return tensor


def _is_dense(tensor: Tensor) -> bool:
    """True if its elements lie side by side, in whatever order: then one copy of bytes is
    enough."""
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _storages(values: Iterable[Any]) -> set[int]:
    return {v.untyped_storage().data_ptr() for v in values if type(v) in (Tensor, nn.Parameter)}
