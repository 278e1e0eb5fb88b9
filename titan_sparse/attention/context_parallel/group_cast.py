"""Attention by the schedule group_cast: blocks of keys and values go only to ranks that need them.

They come in stages. A rank computes on its own blocks while the first stage comes, on the first
stage while the second comes, and so on. The backward fetches them again and sends their gradients
back, summed in each node on the way. Where it pays, half of the own blocks are left to the end to
hide the last gradients. group_cast_plan.py defines who sends what.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.context_parallel.group_cast_plan import (
    CastPlan,
    Exchange,
    Stage,
    blocks_before_others,
    plan,
)
from titan_sparse.attention.context_parallel.loop import Group, Step, Transport
from titan_sparse.attention.context_parallel.needed_keys import needed_blocks
from titan_sparse.attention.masks.ranges import once_per_mask


class GroupCast(Transport):
    """blocks: of the keys of each step, global numbers int64 [n]: the first `first` own blocks,
    those of each stage, and the other own blocks.

    In a backward, sums: gradients [blocks, 2, B, Hkv, size, D] of this rank's own blocks, and
    behind them of those that it hands on. rest: of own blocks that are computed at the end.
    crossing: what comes from other nodes.
    """

    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        super().__init__(call, q, k, v, backward)
        self.plan = _plan(call, call.cp.overlap_stages[backward])
        own = call.key_blocks()
        self.first = len(own)
        if backward:
            self.first = blocks_before_others(
                own=len(own),
                remote=sum(len(stage.k_blocks) for stage in self.plan.stages),
                heads=q.shape[1],
                kv_heads=k.shape[1],
                element_bytes=q.element_size(),
                nodes=call.cp.inter,
            )
            batch, kv_heads, _, head_dim = k.shape
            shape = (self.plan.memory, 2, batch, kv_heads, call.cp.block_size, head_dim)
            self.sums = k.new_empty(shape, dtype=call.sum_dtype(q))
            self.sums[self.first :] = 0
            self.sent_dtype = call.cp.gradient_dtype or self.sums.dtype
        self.rest: tuple[Tensor, Tensor] | None = None
        self.crossing: tuple[Pending, Exchange] | None = None
        of_stages = [stage.k_blocks for stage in self.plan.stages]
        self.blocks = [own[: self.first], *of_stages, own[self.first :]]
        steps = sum(len(blocks) > 0 for blocks in self.blocks)
        self.groups = [Group(call, slice(None), steps)]

    def steps(self) -> Iterator[Step]:
        for number, (blocks, (k, v)) in enumerate(zip(self.blocks, self._arriving(), strict=True)):
            d_kv = None
            if len(blocks) > 0:
                name = None
                if not self.call.pattern.dynamic:
                    name = (len(self.blocks), self.backward, number, len(blocks))
                step = Step(0, k, v, functools.partial(self.call.tiles_of_blocks, blocks, name))
                yield step
                d_kv = step.d_kv if self.backward else None
            if self.backward:
                self._put(number, d_kv)

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        with _beside("gradients", self.sums.device):
            self._arrive()
        _wait_for("gradients", self.sums.device)
        # [own blocks, 2, B, Hkv, size, D]
        own_sums = self.sums[: len(self.call.key_blocks())]
        if self.rest is not None:
            own_sums[self.first :] += _block_by_block(self.rest, self.call.cp.block_size)
        return _in_order(own_sums, dtype)

    def _arriving(self) -> Iterator[tuple[Tensor, Tensor]]:
        """k and v [B, Hkv, n, D] of the first own blocks, of each stage, and of
        the other own blocks.

        The next stage is transferred while the caller computes on one. The exchanges between nodes
        start at once for all stages. Those inside a node wait, beside compute, for what they hand
        on.
        """
        cp = self.call.cp
        k, v = self.k, self.v
        stages = self.plan.stages
        size = cp.block_size
        device = k.device
        empty = _block_by_block((k[:, :, :0], v[:, :, :0]), size)
        # An earlier call may still read the memory that blocks arrive in.
        _wait_for("keys", device)
        crossing: list[Pending | None] = [None] * len(stages)
        if cp.inter > 1:
            # This rank's own blocks, and behind them those of other nodes that it hands on.
            memory = cp.rows("group cast", empty, self.plan.memory)
            _block_by_block((k, v), size, memory[: k.shape[2] // size])

        def start(exchange: Exchange | None, axis: str, out: Tensor) -> Pending | None:
            if exchange is None:
                return None
            if cp.inter > 1:
                blocks = memory.index_select(0, exchange.rows)
            else:
                taken = (x.unflatten(2, (-1, size)).index_select(2, exchange.rows) for x in (k, v))
                blocks = _block_by_block((x.flatten(2, 3) for x in taken), size)
            return cp.start_exchange(blocks, exchange.sends, exchange.receives, axis=axis, out=out)

        def start_stage(number: int) -> Pending | None:
            if number == len(stages):
                return None
            with _beside("keys", device):
                # What came from another node is handed on inside this one.
                came = crossing[number]
                if came is not None:
                    came.wait()
                received = cp.rows("group cast received", empty, len(stages[number].k_blocks))
                return start(stages[number].inner, "inner", received)

        with _beside("keys", device):
            for number, stage in enumerate(stages):
                if stage.outer is not None:
                    crossing[number] = start(stage.outer, "outer", memory[slice(*stage.relayed)])
        following = start_stage(0)
        split = self.first * size
        yield k[:, :, :split], v[:, :, :split]
        for number in range(len(stages)):
            _wait_for("keys", device)
            blocks = empty if following is None else following.wait()
            kv = _in_order(blocks, k.dtype)
            following = start_stage(number + 1)
            yield kv
        yield k[:, :, split:], v[:, :, split:]

    def _put(self, number: int, d_kv: tuple[Tensor, Tensor] | None) -> None:
        """Take dk and dv [B, Hkv, n, D] of a step; None if there was nothing to compute.

        Those of a stage go home: inside the node to the rank where the keys came from, which adds
        them up, and from there to the owner.
        """
        if 0 < number <= len(self.plan.stages):
            self._send(self.plan.stages[number - 1], d_kv)
        elif number > 0:
            self.rest = d_kv
        elif d_kv is not None:
            _block_by_block(d_kv, self.call.cp.block_size, self.sums[: self.first])

    def _send(self, stage: Stage, d_kv: tuple[Tensor, Tensor] | None) -> None:
        shape = (len(stage.k_blocks), *self.sums.shape[1:])
        packed = self.sums.new_empty(shape, dtype=self.sent_dtype)
        if d_kv is not None:
            _block_by_block(d_kv, self.call.cp.block_size, packed)
        if packed.is_cuda:
            # The allocator must not reuse this memory before the side stream has read it.
            packed.record_stream(_stream("gradients", packed.device))
        with _beside("gradients", self.sums.device):
            if stage.inner:
                self._add(self._send_back(packed, stage.inner, "inner_gradient"), stage.inner)
            if stage.outer:
                self._arrive()
                # This node's sums for other nodes' blocks are complete now.
                relayed = self.sums[slice(*stage.relayed)].to(self.sent_dtype)
                pending = self._send_back(relayed, stage.outer, "outer_gradient")
                self.crossing = (pending, stage.outer)

    def _send_back(self, blocks: Tensor, exchange: Exchange, axis: str) -> Pending:
        """Start an exchange of the keys the other way around: what was received is sent."""
        cp = self.call.cp
        out = cp.rows(axis, blocks, len(exchange.rows))
        return cp.start_exchange(blocks, exchange.receives, exchange.sends, axis=axis, out=out)

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


def _plan(call: AttentionCall, stages: int) -> CastPlan:
    """This rank's plan on the data's device, the same for all layers if the pattern is static."""
    cp = call.cp

    def make() -> CastPlan:
        # int64 [W, n]: the blocks that each rank owns
        table = cp.table(call.mask).cpu()[:, : call.last]
        device = call.mask.start.device
        return plan(needed_blocks(call), table, cp.inter, cp.intra, cp.rank, stages, device)

    if call.pattern.dynamic:
        return make()
    key = ("group cast", cp.key, stages, call.first, call.last)
    return once_per_mask(call.mask, key, make)


def _block_by_block(kv: Iterable[Tensor], size: int, out: Tensor | None = None) -> Tensor:
    """k and v, or their gradients, as they are sent: [B, H, S, D] -> [S / size, 2, B, H, size, D].

    out: memory for the result, in any dtype.
    """
    k, v = kv
    # Not -1: there may be no tokens at all, which leaves the number of blocks open.
    count = k.shape[2] // size
    # [blocks, B, H, size, D]
    k_blocks, v_blocks = (x.unflatten(2, (count, size)).movedim(2, 0) for x in (k, v))
    if out is None:
        out = k.new_empty(count, 2, *k_blocks.shape[1:])
    out[:, 0].copy_(k_blocks)
    out[:, 1].copy_(v_blocks)
    return out


def _in_order(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of _block_by_block(), copied to `dtype`: k and v, each in its own memory."""
    count, _, batch, heads, size, head_dim = blocks.shape
    found = []
    for x in blocks.unbind(1):
        out = x.new_empty(batch, heads, count, size, head_dim, dtype=dtype)
        found.append(out.copy_(x.movedim(0, 2)).flatten(2, 3))
    k, v = found
    return k, v


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
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(name, device))
