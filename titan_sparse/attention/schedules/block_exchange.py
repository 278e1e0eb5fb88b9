"""The transfers of group_cast: blocks to those who need them, stage by stage, and gradients home."""

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

    While the caller computes on one stage the next is on its way.
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

    It waits, beside compute, for what the stage hands on from other nodes. Those exchanges between
    nodes start here, for all stages.
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
        _block_by_block(k, v, size, memory[: k.shape[2] // size])

        def take(rows: Tensor) -> Tensor:
            return memory.index_select(0, rows)

        with _beside("keys", k.device):
            crossing = []
            for stage in plan.stages:
                relayed = memory[slice(*stage.relayed)]
                crossing.append(_start(cp, take, stage.outer, "outer", relayed))

    def start_stage(number: int) -> Pending | None:
        if number == len(plan.stages):
            return None
        stage = plan.stages[number]
        with _beside("keys", k.device):
            if crossing[number] is not None:
                crossing[number].wait()
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
    """Start an exchange of the blocks take(rows)."""
    if exchange is None:
        return None
    blocks = take(exchange.rows)
    return cp.start_exchange(blocks, exchange.sends, exchange.receives, axis, out)


def _own_blocks(k: Tensor, v: Tensor, size: int, rows: Tensor) -> Tensor:
    """Some blocks of k and v [B, H, S, D], in the order in which they are sent."""
    k_blocks = k.unflatten(2, (-1, size)).index_select(2, rows).flatten(2, 3)
    v_blocks = v.unflatten(2, (-1, size)).index_select(2, rows).flatten(2, 3)
    return _block_by_block(k_blocks, v_blocks, size)


def _block_by_block(
    k: Tensor,
    v: Tensor,
    size: int,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """k and v, or their gradients, [B, H, S, D] -> [S / size, 2, B, H, size, D], as they are sent."""
    # [blocks, B, H, size, D]
    k_blocks = k.unflatten(2, (k.shape[2] // size, size)).movedim(2, 0)
    v_blocks = v.unflatten(2, (v.shape[2] // size, size)).movedim(2, 0)
    if out is None:
        shape = (len(k_blocks), 2, *k_blocks.shape[1:])
        out = k.new_empty(shape, dtype=dtype or k.dtype)
    out[:, 0].copy_(k_blocks)
    out[:, 1].copy_(v_blocks)
    return out


def _capacity(call: AttentionCall, blocks: int) -> int:
    """Blocks to make room for: a power of two where each number of keys is compiled for."""
    if call.backend.COMPILES_BY_LENGTH:
        return 1 << (blocks - 1).bit_length()
    return blocks


def _side_by_side(received: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The inverse of _block_by_block(), with zeros behind, up to `capacity` blocks."""
    # Always a copy: what is received next lies where this does.
    count = len(received)
    two, batch, heads, size, head_dim = received.shape[1:]
    out = received.new_empty(two, batch, heads, max(capacity, count), size, head_dim)
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
    hands on.
    """

    def __init__(self, cp: ContextParallel, plan: Plan, k: Tensor, dtype: torch.dtype):
        self.cp = cp
        self.plan = plan
        self.own_blocks = k.shape[2] // cp.block_size
        shape = (plan.memory, 2, *k.shape[:2], cp.block_size, k.shape[3])
        self.sums = torch.empty(shape, dtype=dtype, device=k.device)
        self.sent_dtype = cp.gradient_dtype or dtype
        self.first = 0
        self.crossing: tuple[Pending, Exchange] | None = None

    def begin(self, d_kv: tuple[Tensor, Tensor]) -> None:
        """Start the sums with this rank's own dk and dv [B, Hkv, n, D] of its first blocks."""
        size = self.cp.block_size
        dk, dv = d_kv
        self.first = dk.shape[2] // size
        _block_by_block(dk, dv, size, self.sums[: self.first])
        self.sums[self.first :] = 0

    def send(self, number: int, d_kv: tuple[Tensor, Tensor] | None) -> None:
        """Start the way of a stage's dk and dv [B, Hkv, n, D].

        None if this rank got no blocks in it.
        """
        stage = self.plan.stages[number]
        if d_kv is None:
            packed = self.sums[:0].to(self.sent_dtype)
        else:
            dk, dv = d_kv
            packed = _block_by_block(dk, dv, self.cp.block_size, dtype=self.sent_dtype)
        if packed.is_cuda:
            packed.record_stream(_stream("gradients", packed.device))
        with _beside("gradients", self.sums.device):
            if stage.inner:
                self._add(self._start(packed, stage.inner, "inner_gradient"), stage.inner)
            if stage.outer:
                self._arrive()
                relayed = self.sums[slice(*stage.relayed)].to(self.sent_dtype)
                pending = self._start(relayed, stage.outer, "outer_gradient")
                self.crossing = (pending, stage.outer)

    def finish(
        self, d_kv: tuple[Tensor, Tensor] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """dk and dv [B, Hkv, S_local, D] of this rank's blocks, from all ranks, in `dtype`.

        d_kv: its own of the blocks behind the first, if there are any.
        """
        with _beside("gradients", self.sums.device):
            self._arrive()
        _wait_for("gradients", self.sums.device)
        own = self.sums[: self.own_blocks]
        if d_kv is not None:
            dk, dv = d_kv
            own[self.first :] += _block_by_block(dk, dv, self.cp.block_size)
        return _in_order(own[:, 0], dtype), _in_order(own[:, 1], dtype)

    def _start(self, blocks: Tensor, exchange: Exchange, axis: str) -> Pending:
        """The way back: what was received is sent."""
        out = self.cp.rows(axis, blocks, len(exchange.rows))
        return self.cp.start_exchange(blocks, exchange.receives, exchange.sends, axis, out)

    def _arrive(self) -> None:
        """Add what is on its way between nodes."""
        if self.crossing is not None:
            self._add(*self.crossing)
        self.crossing = None

    def _add(self, pending: Pending, exchange: Exchange) -> None:
        """Sender by sender: nothing is added to one place twice at a time, and the order is always
        the same."""
        rows = exchange.rows.split(exchange.sends)
        received = pending.wait().split(exchange.sends)
        for rows_of_sender, blocks in zip(rows, received, strict=True):
            self.sums.index_add_(0, rows_of_sender, blocks.to(self.sums.dtype))


def _in_order(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, B, H, size, D] -> [B, H, n * size, D] in `dtype`."""
    blocks = blocks.movedim(0, 2)
    out = torch.empty(blocks.shape, dtype=dtype, device=blocks.device)
    return out.copy_(blocks).flatten(2, 3)


@functools.cache
def _stream(name: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def _beside(name: str, device: torch.device) -> Iterator[None]:
    """GPU work given inside runs beside what the caller's stream gets later, and after what it has.

    A block is handed on, and a gradient, as soon as it has come. On the caller's stream that would
    be after the kernels of the present stage.
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
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(name, device))
