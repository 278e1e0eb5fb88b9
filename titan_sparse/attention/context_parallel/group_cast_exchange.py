"""The transfers of group_cast: send blocks to the ranks that need them, and their gradients home."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.context_parallel.group_cast_plan import CastPlan, Exchange, Stage


def keys_and_values(
    call: AttentionCall, plan: CastPlan, k: Tensor, v: Tensor, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """k and v [B, Hkv, n, D] of the first own blocks, of each stage, and of the other own blocks.

    The next stage is transferred while the caller computes on one. The exchanges between nodes
    start at once for all stages. Those inside a node wait, beside compute, for what they hand on.
    """
    cp = call.cp
    size = cp.block_size
    device = k.device
    empty = _block_by_block(k[:, :, :0], v[:, :, :0], size)
    # An earlier call may still read the memory that blocks arrive in.
    _wait_for("keys", device)
    crossing: list[Pending | None] = [None] * len(plan.stages)
    if cp.inter > 1:
        # This rank's own blocks, and behind them those of other nodes that it hands on.
        memory = cp.rows("group cast", empty, plan.memory)
        _block_by_block(k, v, size, memory[: k.shape[2] // size])

    def start(exchange: Exchange | None, axis: str, out: Tensor) -> Pending | None:
        if exchange is None:
            return None
        if cp.inter > 1:
            blocks = memory.index_select(0, exchange.rows)
        else:
            taken = [x.unflatten(2, (-1, size)).index_select(2, exchange.rows) for x in (k, v)]
            blocks = _block_by_block(*(x.flatten(2, 3) for x in taken), size)
        return cp.start_exchange(blocks, exchange.sends, exchange.receives, axis=axis, out=out)

    def start_stage(number: int) -> Pending | None:
        if number == len(plan.stages):
            return None
        stage = plan.stages[number]
        with _beside("keys", device):
            # What came from another node is handed on inside this one.
            if crossing[number] is not None:
                crossing[number].wait()
            received = cp.rows("group cast received", empty, len(stage.k_blocks))
            return start(stage.inner, "inner", received)

    with _beside("keys", device):
        for number, stage in enumerate(plan.stages):
            if stage.outer is not None:
                crossing[number] = start(stage.outer, "outer", memory[slice(*stage.relayed)])
    following = start_stage(0)
    split = first * size
    yield k[:, :, :split], v[:, :, :split]
    for number in range(len(plan.stages)):
        _wait_for("keys", device)
        kv = (k[:, :, :0], v[:, :, :0])
        if following is not None:
            blocks = following.wait()
            kv = (_in_order(blocks[:, 0], k.dtype), _in_order(blocks[:, 1], k.dtype))
        following = start_stage(number + 1)
        yield kv
    yield k[:, :, split:], v[:, :, split:]


def _block_by_block(k: Tensor, v: Tensor, size: int, out: Tensor | None = None) -> Tensor:
    """k and v, or their gradients, as they are sent: [B, H, S, D] -> [S / size, 2, B, H, size, D].

    out: memory for the result, in any dtype.
    """
    # Not -1: there may be no tokens at all, which leaves the number of blocks open.
    count = k.shape[2] // size
    # [blocks, B, H, size, D]
    k_blocks, v_blocks = (x.unflatten(2, (count, size)).movedim(2, 0) for x in (k, v))
    if out is None:
        out = k.new_empty(count, 2, *k_blocks.shape[1:])
    out[:, 0].copy_(k_blocks)
    out[:, 1].copy_(v_blocks)
    return out


def _in_order(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of blocks [n, B, H, size, D] as [B, H, n * size, D] in `dtype`."""
    count, batch, heads, size, head_dim = blocks.shape
    out = blocks.new_empty(batch, heads, count, size, head_dim, dtype=dtype)
    return out.copy_(blocks.movedim(0, 2)).flatten(2, 3)


class BlockGradients:
    """Gradients of remote blocks on their way home.

    Inside the node they go to the rank where the keys came from, which adds them up, and from
    there to the owner.

    sums: [blocks, 2, B, Hkv, size, D] of this rank's own blocks, and behind them of those that it
    hands on. first: how many own blocks the first step computed on. rest: of the others.
    """

    def __init__(self, cp: ContextParallel, plan: CastPlan, k: Tensor, dtype: torch.dtype):
        batch, kv_heads, seq_len, head_dim = k.shape
        self.cp = cp
        self.plan = plan
        self.own_blocks = seq_len // cp.block_size
        shape = (plan.memory, 2, batch, kv_heads, cp.block_size, head_dim)
        self.sums = torch.empty(shape, dtype=dtype, device=k.device)
        self.sent_dtype = cp.gradient_dtype or dtype
        self.first = 0
        self.rest: tuple[Tensor, Tensor] | None = None
        self.crossing: tuple[Pending, Exchange] | None = None

    def add(self, number: int, d_kv: tuple[Tensor, Tensor] | None) -> None:
        """dk and dv [B, Hkv, n, D] of a step: of the first own blocks, of a stage, or of the other
        own blocks. None if there was nothing to compute."""
        if number == 0:
            size = self.cp.block_size
            self.first = d_kv[0].shape[2] // size
            _block_by_block(*d_kv, size, out=self.sums[: self.first])
            self.sums[self.first :] = 0
        elif number <= len(self.plan.stages):
            self._send(self.plan.stages[number - 1], d_kv)
        else:
            self.rest = d_kv

    def _send(self, stage: Stage, d_kv: tuple[Tensor, Tensor] | None) -> None:
        size = self.cp.block_size
        count = len(stage.k_blocks)
        packed = self.sums.new_empty(count, *self.sums.shape[1:], dtype=self.sent_dtype)
        if d_kv is not None:
            # Without the memory that lies unused behind the blocks.
            dk, dv = (gradient[:, :, : count * size] for gradient in d_kv)
            _block_by_block(dk, dv, size, packed)
        if packed.is_cuda:
            # The allocator must not reuse this memory before the side stream has read it.
            packed.record_stream(_stream("gradients", packed.device))
        with _beside("gradients", self.sums.device):
            if stage.inner:
                pending = self._start(packed, stage.inner, "inner_gradient")
                self._add(pending, stage.inner)
            if stage.outer:
                self._arrive()
                # This node's sums for other nodes' blocks are complete now.
                relayed = self.sums[slice(*stage.relayed)].to(self.sent_dtype)
                pending = self._start(relayed, stage.outer, "outer_gradient")
                self.crossing = (pending, stage.outer)

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk and dv [B, Hkv, S_local, D] of this rank's blocks, from all ranks, in `dtype`."""
        with _beside("gradients", self.sums.device):
            self._arrive()
        _wait_for("gradients", self.sums.device)
        # [own blocks, 2, B, Hkv, size, D]
        own_sums = self.sums[: self.own_blocks]
        if self.rest is not None:
            own_sums[self.first :] += _block_by_block(*self.rest, self.cp.block_size)
        return _in_order(own_sums[:, 0], dtype), _in_order(own_sums[:, 1], dtype)

    def _start(self, blocks: Tensor, exchange: Exchange, axis: str) -> Pending:
        """Start an exchange of the keys the other way around: what was received is sent."""
        out = self.cp.rows(axis, blocks, len(exchange.rows))
        return self.cp.start_exchange(blocks, exchange.receives, exchange.sends, axis=axis, out=out)

    def _arrive(self) -> None:
        if self.crossing is not None:
            self._add(*self.crossing)
        self.crossing = None

    def _add(self, pending: Pending, exchange: Exchange) -> None:
        """Sender by sender, nothing is added to one place twice at a time, and in a fixed order."""
        blocks_by_sender = pending.wait().split(exchange.sends)
        rows_by_sender = exchange.rows.split(exchange.sends)
        for rows, blocks in zip(rows_by_sender, blocks_by_sender, strict=True):
            self.sums.index_add_(0, rows, blocks.to(self.sums.dtype))


@functools.cache
def _stream(name: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def _beside(name: str, device: torch.device) -> Iterator[None]:
    """Launch the GPU work inside on a side stream, after what the caller's stream has so far.

    On the caller's stream, what is handed on would wait for the kernels of the present stage.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(name, device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _wait_for(name: str, device: torch.device) -> None:
    """Let what the caller's stream gets from now on run after what _beside(name) was given."""
    if device.type != "cuda":
        return
    torch.cuda.current_stream(device).wait_stream(_stream(name, device))
