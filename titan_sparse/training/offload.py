"""Offload of what activation checkpointing keeps: to pinned CPU memory in the forward, back in the backward.

OffloadedBlocks runs the decoder's blocks and sees through saved_tensors_hooks what each one keeps for its backward: its
input and attention's out and LSE. A second stream copies them while the next block computes. In the backward, a block's
tensors are on their way back while the block after it computes. The last block's stay where they are: they are needed
at once. (The scheme is that of BurstEngine's and ALST's checkpoint offload, arXiv 2506.13996, section 3.3.)
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MIN_BYTES = 2**20
"""Smaller tensors stay on the device: their copies would cost more than they free."""


def bytes_offloaded(
    layers: int, tokens: int, hidden_size: int, heads: int, head_dim: int, itemsize: int
) -> int:
    """Bytes of pinned CPU memory that one forward of a rank takes: the input [tokens, hidden_size], attention's out
    [tokens, heads, head_dim] and fp32 LSE [tokens, heads] of each block but the last.

    tokens: of all sequences of this rank. itemsize: of training.dtype. Columns that a pattern has gathered come on top.
    """
    block = tokens * (
        hidden_size * itemsize + heads * head_dim * itemsize + heads * max(itemsize, 4)
    )
    return (layers - 1) * block


class BufferPool:
    """CPU buffers of given sizes, kept when they are given back; pinned where there is a GPU to copy from.

    count, nbytes: of all buffers there are, in use or not.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned, self.count, self.nbytes = pinned, 0, 0
        self.free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor:
        """A buffer, uint8 [nbytes]: one that was given back, else a new one."""
        if self.free[nbytes]:
            return self.free[nbytes].pop()
        self.count, self.nbytes = self.count + 1, self.nbytes + nbytes
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self.pinned:
            self._pin(buffer)
        return buffer

    def _pin(self, buffer: Tensor) -> None:
        """Not pin_memory=True, which rounds sizes up to a power of two."""
        runtime, address = torch.cuda.cudart(), buffer.data_ptr()
        error = int(runtime.cudaHostRegister(address, buffer.nbytes, 1))  # 1: portable
        if error:
            raise RuntimeError(
                f"no {buffer.nbytes:,} bytes of CPU memory could be pinned besides {self.nbytes:,} (CUDA "
                f"error {error}); write activation_checkpoint.offload = false or a smaller training.seq_len"
            )
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)

    def give_back(self, buffer: Tensor) -> None:
        """What was taken may be taken again."""
        self.free[buffer.numel()].append(buffer)


class Copier:
    """Copies between the device and the CPU beside the stream that computes; on the CPU, at once.

    All copies of both directions go through one stream, in order. So a buffer may be taken again as soon as the last
    copy from it is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, destination: Tensor, source: Tensor) -> "torch.cuda.Event | None":
        """Queue a copy behind what the current stream has been given so far; returns what to wait() for.

        Until somebody has waited, both tensors must be kept: the allocator knows nothing of this stream.
        """
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
    """One tensor that a block keeps. Its buffer goes back to the pool when autograd lets go of it."""

    def __init__(self, tensor: Tensor, block: "_Block", copies: bool) -> None:
        self.block, self.size, self.stride, self.dtype, self.device = (
            block,
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        )
        self.on_device: Tensor | None = tensor.detach()
        self.version, self.buffer, self.event = tensor._version, None, None
        if copies:
            self.buffer = block.owner.pool.take(tensor.nbytes)
            self.event = block.owner.copier.start(self._in_buffer(), self.on_device)

    def _in_buffer(self) -> Tensor:
        return self.buffer.view(self.dtype).as_strided(self.size, self.stride)

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
        """Start the copy back, unless the tensor is there or on its way."""
        if self.on_device is None:
            # Made by the stream that computes, so that its memory is free for that stream's next tensor afterwards.
            self.on_device = torch.empty_strided(
                self.size, self.stride, dtype=self.dtype, device=self.device
            )
            self.event = self.block.owner.copier.start(self.on_device, self._in_buffer())

    def get(self) -> Tensor:
        """The tensor, for the stream that computes; later calls copy once more."""
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
        # A graph that is dropped half-way: the copy has to be over before the device's memory is used again.
        self._settle()
        if self.buffer is not None:
            self.block.owner.pool.give_back(self.buffer)


class _Block:
    """What one block keeps in one forward; `before` is the block that the backward reaches next."""

    def __init__(self, owner: "OffloadedBlocks", before: "_Block | None", stays: bool) -> None:
        self.owner, self.before, self.stays, self.fetched = owner, before, stays, False
        # By address and shape. Weak: only autograd decides how long a tensor is kept.
        self.saved: weakref.WeakValueDictionary[tuple, _Saved] = weakref.WeakValueDictionary()

    def save(self, tensor: Tensor) -> _Saved:
        """The tensor's record: a new one, or that of the same tensor in this block or the one before."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # An address says who it is as long as the device's memory is held: for this block and the one before.
        saved = self.saved.get(key) or (self.before and self.before.saved.get(key))
        self.saved[key] = saved = saved or _Saved(tensor, self, copies=not self.stays)
        return saved

    def free_device(self) -> None:
        for saved in self.saved.values():
            saved.free_device()

    def fetch(self) -> None:
        """Once: what was used and dropped is not to come again."""
        if not self.fetched:
            self.fetched = True
            for saved in self.saved.values():
                saved.fetch()


class OffloadedBlocks:
    """Runs the blocks as models.decoder.run_blocks() does, with what they keep for the backward on the CPU.

    Forwards may follow each other before their backwards come: each has its own record. Without gradients nothing is
    kept. On the device are at most the tensors of two blocks besides the one that computes, in the forward as in the
    backward. `pool` holds the buffers, which are kept from step to step.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool, self.copier = BufferPool(pinned=device.type == "cuda"), Copier(device)

    def __call__(self, blocks: Iterable[nn.Module], x: Tensor, *shared: Any) -> Tensor:
        """x through all blocks, each called with (x, *shared); tensors in `shared` stay on the device."""
        blocks, kept, record = list(blocks), _storages(_tensors(shared)), None
        for number, block in enumerate(blocks):
            if record is not None and record.before is not None:
                record.before.free_device()
            record = _Block(self, record, stays=number == len(blocks) - 1)
            with torch.autograd.graph.saved_tensors_hooks(_Packing(record, block, kept), _unpack):
                x = block(x, *shared)
        if record is not None and record.before is not None:
            record.before.free_device()
        return x


class _Packing:
    """The pack hook of one block's forward. Called for every tensor that autograd saves in it."""

    def __init__(self, record: _Block, block: nn.Module, kept: set[int]) -> None:
        self.record, self.block, self.kept = record, block, kept
        self.parameters: set[int] | None = None

    def __call__(self, tensor: Tensor) -> Tensor | _Saved:
        if (
            type(tensor) is not Tensor
            or tensor.nbytes < MIN_BYTES
            or not _is_dense(tensor)
            or self._stays(tensor)
        ):
            return tensor
        return self.record.save(tensor)

    def _stays(self, tensor: Tensor) -> bool:
        if self.parameters is None:
            # Asked for inside of the block's forward: only here does FSDP show the gathered parameters.
            self.parameters = _storages(self.block.parameters())
        return tensor.untyped_storage().data_ptr() in self.kept | self.parameters


def _unpack(packed: Tensor | _Saved) -> Tensor:
    if not isinstance(packed, _Saved):
        return packed
    packed.block.fetch()
    tensor = packed.get()
    if packed.block.before is not None:
        packed.block.before.fetch()
    return tensor


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order: then one copy of bytes is enough."""
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if type(tensor) in (Tensor, nn.Parameter)
    }
