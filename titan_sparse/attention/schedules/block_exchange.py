"""The transfers of group_cast: send blocks to the ranks that need them, and their gradients home."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.context_parallel.group_cast_plan import Exchange, Plan


def keys_and_values(
    call: AttentionCall, plan: Plan, k: Tensor, v: Tensor, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """k and v [B, Hkv, n, D] of the first own blocks, of each stage, and of the other own blocks.

    The next stage is transferred while the caller computes on one.
    """
    device = k.device
    split = first * call.cp.block_size
    # An earlier call may still read the memory that blocks arrive in.
    _wait_for("keys", device)
    start_stage = _stage_starter(call.cp, plan, k, v)
    following = start_stage(0)
    yield k[:, :, :split], v[:, :, :split]
    for number in range(len(plan.stages)):
        _wait_for("keys", device)
        if following is None:
            kv = (k[:, :, :0], v[:, :, :0])
        else:
            received = following.wait()
            kv = _side_by_side(received, _capacity(call, len(received)))
        following = start_stage(number + 1)
        yield kv
    yield k[:, :, split:], v[:, :, split:]


def _stage_starter(
    cp: ContextParallel, plan: Plan, k: Tensor, v: Tensor
) -> Callable[[int], Pending | None]:
    """A function that starts a stage's exchange inside the node.

    The function waits, beside compute, for what the stage hands on from other nodes. The exchanges
    between nodes start here, for all stages at once.
    """
    size = cp.block_size
    empty = _block_by_block(k[:, :, :0], v[:, :, :0], size)
    if cp.inter == 1:
        crossing = [None] * len(plan.stages)

        def take(rows: Tensor) -> Tensor:
            return _own_blocks(k, v, size, rows)

    else:
        # This rank's own blocks, and behind them those of other nodes that it hands on.
        memory = cp.rows("group cast", empty, plan.memory)
        own_blocks = k.shape[2] // size
        _block_by_block(k, v, size, memory[:own_blocks])

        def take(rows: Tensor) -> Tensor:
            return memory.index_select(0, rows)

        with _beside("keys", k.device):
            crossing = []
            for stage in plan.stages:
                first, stop = stage.relayed
                relayed = memory[first:stop]
                pending = _start(cp, take, stage.outer, "outer", relayed)
                crossing.append(pending)

    def start_stage(number: int) -> Pending | None:
        if number == len(plan.stages):
            return None
        stage = plan.stages[number]
        relayed = crossing[number]
        with _beside("keys", k.device):
            # What came from another node is handed on inside this one.
            if relayed is not None:
                relayed.wait()
            received = cp.rows("group cast received", empty, len(stage.k_blocks))
            return _start(cp, take, stage.inner, "inner", received)

    return start_stage


def _start(
    cp: ContextParallel,
    take: Callable[[Tensor], Tensor],
    exchange: Exchange | None,
    axis: str,
    out: Tensor,
) -> Pending | None:
    """Start an exchange of the blocks take(rows), received in `out`; None if no rank sends."""
    if exchange is None:
        return None
    blocks = take(exchange.rows)
    return cp.start_exchange(
        blocks,
        sends=exchange.sends,
        receives=exchange.receives,
        axis=axis,
        out=out,
    )


def _own_blocks(k: Tensor, v: Tensor, size: int, rows: Tensor) -> Tensor:
    """Some blocks of k and v [B, H, S, D], in the order in which they are sent.

    Returns [rows, 2, B, H, size, D].
    """
    # [B, H, blocks, size, D]
    k_blocks = k.unflatten(2, (-1, size))
    v_blocks = v.unflatten(2, (-1, size))
    # [B, H, rows * size, D]
    k_taken = k_blocks.index_select(2, rows).flatten(2, 3)
    v_taken = v_blocks.index_select(2, rows).flatten(2, 3)
    return _block_by_block(k_taken, v_taken, size)


def _block_by_block(
    k: Tensor,
    v: Tensor,
    size: int,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """k and v, or their gradients, as they are sent: [B, H, S, D] -> [S / size, 2, B, H, size, D].

    out: memory for the result; else it is new, in `dtype` (default: k's).
    """
    # Not -1: there may be no tokens at all, which leaves the number of blocks open.
    count = k.shape[2] // size
    # [B, H, blocks, size, D] -> [blocks, B, H, size, D]
    k_blocks = k.unflatten(2, (count, size))
    v_blocks = v.unflatten(2, (count, size))
    k_blocks = k_blocks.movedim(2, 0)
    v_blocks = v_blocks.movedim(2, 0)
    if out is None:
        if dtype is None:
            dtype = k.dtype
        shape = (count, 2, *k_blocks.shape[1:])
        out = k.new_empty(shape, dtype=dtype)
    # The copies convert to the dtype of `out`.
    out[:, 0].copy_(k_blocks)
    out[:, 1].copy_(v_blocks)
    return out


def _capacity(call: AttentionCall, blocks: int) -> int:
    """How many blocks to make room for.

    The next power of two where the backend compiles for each number of keys; else just `blocks`.
    """
    if call.backend.COMPILES_BY_LENGTH:
        return 1 << (blocks - 1).bit_length()
    return blocks


def _side_by_side(received: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The inverse of _block_by_block(), with zeros behind, up to `capacity` blocks.

    Returns k and v, [B, H, capacity * size, D].
    """
    # Always a copy: the next stage is received into the same memory.
    count = len(received)
    two, batch, heads, size, head_dim = received.shape[1:]
    room = max(capacity, count)
    # [2, B, H, capacity, size, D]
    out = received.new_empty(two, batch, heads, room, size, head_dim)
    out[:, :, :, :count] = received.movedim(0, 3)
    out[:, :, :, count:] = 0
    # [2, B, H, capacity * size, D]
    k, v = out.flatten(3, 4).unbind(0)
    return k, v


class GradientsHome:
    """Gradients of remote blocks on their way home.

    Inside the node they go to the rank where the keys came from, which adds them up, and from
    there to the owner.

    sums: [blocks, 2, B, Hkv, size, D] of this rank's own blocks, and behind them of those that it
    hands on. first: how many own blocks begin() was given. crossing: the exchange between nodes
    that is on its way.
    """

    def __init__(self, cp: ContextParallel, plan: Plan, k: Tensor, dtype: torch.dtype):
        batch, kv_heads, seq_len, head_dim = k.shape
        self.cp = cp
        self.plan = plan
        self.own_blocks = seq_len // cp.block_size
        self.sums = torch.empty(
            (plan.memory, 2, batch, kv_heads, cp.block_size, head_dim),
            dtype=dtype,
            device=k.device,
        )
        self.sent_dtype = cp.gradient_dtype or dtype
        self.first = 0
        self.crossing: tuple[Pending, Exchange] | None = None

    def begin(self, d_kv: tuple[Tensor, Tensor]) -> None:
        """Start the sums with this rank's own dk and dv [B, Hkv, n, D] of its first blocks."""
        size = self.cp.block_size
        dk, dv = d_kv
        self.first = dk.shape[2] // size
        first_sums = self.sums[: self.first]
        _block_by_block(dk, dv, size, out=first_sums)
        self.sums[self.first :] = 0

    def send(self, number: int, d_kv: tuple[Tensor, Tensor] | None) -> None:
        """Send the dk and dv [B, Hkv, n, D] of a stage on their way home.

        d_kv: None if this rank got no blocks in the stage.
        """
        stage = self.plan.stages[number]
        if d_kv is None:
            packed = self.sums[:0].to(self.sent_dtype)
        else:
            dk, dv = d_kv
            packed = _block_by_block(dk, dv, self.cp.block_size, dtype=self.sent_dtype)
        if packed.is_cuda:
            # The allocator must not reuse this memory before the side stream has read it.
            side_stream = _stream("gradients", packed.device)
            packed.record_stream(side_stream)
        with _beside("gradients", self.sums.device):
            if stage.inner:
                pending = self._start(packed, stage.inner, "inner_gradient")
                self._add(pending, stage.inner)
            if stage.outer:
                self._arrive()
                # This node's sums for other nodes' blocks are complete now.
                first, stop = stage.relayed
                relayed = self.sums[first:stop].to(self.sent_dtype)
                pending = self._start(relayed, stage.outer, "outer_gradient")
                self.crossing = (pending, stage.outer)

    def finish(
        self, d_kv: tuple[Tensor, Tensor] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """dk and dv [B, Hkv, S_local, D] of this rank's blocks, from all ranks, in `dtype`.

        d_kv: this rank's share for its own blocks behind the first, if there are any.
        """
        with _beside("gradients", self.sums.device):
            self._arrive()
        _wait_for("gradients", self.sums.device)
        # [own blocks, 2, B, Hkv, size, D]
        own_sums = self.sums[: self.own_blocks]
        if d_kv is not None:
            dk, dv = d_kv
            own_sums[self.first :] += _block_by_block(dk, dv, self.cp.block_size)
        dk = _in_order(own_sums[:, 0], dtype)
        dv = _in_order(own_sums[:, 1], dtype)
        return dk, dv

    def _start(self, blocks: Tensor, exchange: Exchange, axis: str) -> Pending:
        """Start an exchange of the keys the other way around: what was received is sent."""
        out = self.cp.rows(axis, blocks, len(exchange.rows))
        return self.cp.start_exchange(
            blocks,
            sends=exchange.receives,
            receives=exchange.sends,
            axis=axis,
            out=out,
        )

    def _arrive(self) -> None:
        """Wait for what is on its way between nodes, and add it."""
        if self.crossing is not None:
            pending, exchange = self.crossing
            self._add(pending, exchange)
        self.crossing = None

    def _add(self, pending: Pending, exchange: Exchange) -> None:
        """Add what an exchange brings to the sums, sender by sender.

        So nothing is added to one place twice at a time, and the order is always the same.
        """
        received = pending.wait()
        rows_by_sender = exchange.rows.split(exchange.sends)
        blocks_by_sender = received.split(exchange.sends)
        for rows, blocks in zip(rows_by_sender, blocks_by_sender, strict=True):
            blocks = blocks.to(self.sums.dtype)
            self.sums.index_add_(0, rows, blocks)


def _in_order(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, B, H, size, D] -> [B, H, n * size, D] in `dtype`."""
    # [B, H, n, size, D]
    blocks = blocks.movedim(0, 2)
    out = torch.empty(blocks.shape, dtype=dtype, device=blocks.device)
    out.copy_(blocks)
    return out.flatten(2, 3)


@functools.cache
def _stream(name: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def _beside(name: str, device: torch.device) -> Iterator[None]:
    """Launch the GPU work inside on a side stream.

    It runs after what the caller's stream has been given so far, and beside what it gets later. So
    blocks and gradients are handed on as soon as they have come. On the caller's stream they would
    wait for the kernels of the present stage.
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
    side_stream = _stream(name, device)
    current_stream = torch.cuda.current_stream(device)
    current_stream.wait_stream(side_stream)
