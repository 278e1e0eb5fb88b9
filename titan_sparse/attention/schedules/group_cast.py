"""Attention by the schedule group_cast: blocks of keys and values go only to the ranks that need them, in stages.

A rank computes on its own blocks first while the first part of the others' comes, on that while the second comes, and so
on. The backward fetches them again and sends their gradients back, summed in each node on the way; half of the own blocks
are left to the end, for the last gradients to hide behind, where that pays. group_cast_plan.py says who sends what.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan_sparse.attention import timing
from titan_sparse.attention.call import Run
from titan_sparse.attention.context_parallel.group import ContextParallel, Pending
from titan_sparse.attention.context_parallel.group_cast_plan import (
    Exchange,
    Plan,
    blocks_before_others,
    plan,
)
from titan_sparse.attention.context_parallel.windows import vertical_steps
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.merge import at_last, results
from titan_sparse.attention.patterns import pattern_by_key
from titan_sparse.attention.schedules.needs import needed_blocks
from titan_sparse.attention.schedules.verticals import (
    add_verticals,
    gather_verticals,
    new_gradients,
    put_part,
    reduce_verticals,
    vertical_part,
)


@timing.timed
def forward(run: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the gathered verticals' KV [2, B, Hq, C, D]."""
    run.count_plain_ring(k)
    verticals, total = gather_verticals(run, k, v), None
    plan, own = _plan(run, run.cp.overlap_stages[0]), run.blocks()
    steps = [own, *(stage.k_blocks for stage in plan.stages), own[len(own) :]]
    with_verticals, places, dtype = (
        _vertical_steps(run, steps, verticals.result),
        _places(steps, q),
        run.sum_dtype(q),
    )
    for step, (blocks, kv) in enumerate(zip(steps, _keys_and_values(run, plan, k, v, len(own)))):
        if not len(blocks):
            continue
        vertical_kv = verticals.wait() if step in with_verticals else None
        with timing.computing(step):
            inputs = (
                q,
                *kv,
                run.tiles(
                    len(q),
                    False,
                    (len(steps), "forward", step),
                    k_blocks=blocks,
                    room=_blocks(run, kv),
                ),
            )
            if vertical_kv is None:
                total = run.backend.forward(*inputs, run.scale, dtype, total, next(places))
            else:
                part = vertical_part(
                    run, vertical_kv, with_verticals.index(step), len(with_verticals)
                )
                total = run.backend.forward_with_verticals(
                    *inputs, *part, run.scale, dtype, total, next(places)
                )
    return *total, verticals.wait()


def backward(
    run: Run,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    vertical_kv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    run.count_plain_ring(k, backward=True)
    plan, own = _plan(run, run.cp.overlap_stages[1]), run.blocks()
    by_key, dtype = run.backend.READS_BY_KEY, run.sum_dtype(q)
    remote = sum(len(stage.k_blocks) for stage in plan.stages)
    first = blocks_before_others(
        len(own), remote, q.shape[1], k.shape[1], q.element_size(), run.cp.inter
    )
    steps = [own[:first], *(stage.k_blocks for stage in plan.stages), own[first:]]
    with_verticals, d_verticals = (
        _vertical_steps(run, steps, vertical_kv, backward=True),
        new_gradients(vertical_kv),
    )
    places, home, dq, verticals = _places(steps, q), _Home(run.cp, plan, k, dtype), None, None
    for step, (blocks, kv) in enumerate(zip(steps, _keys_and_values(run, plan, k, v, first))):
        d_kv = None
        if len(blocks):
            tiles = run.tiles(
                len(q),
                by_key,
                (len(steps), "backward", step),
                k_blocks=blocks,
                room=_blocks(run, kv),
            )
            inputs = (d_out, q, *kv, out, lse, tiles)
            if step in with_verticals:
                part, parts = with_verticals.index(step), len(with_verticals)
                gathered = vertical_part(run, vertical_kv, part, parts, by_key)
                dq, *d_kv, dk2, dv2 = run.backend.backward_with_verticals(
                    *inputs, *gathered, run.scale, dtype, dq, next(places)
                )
                put_part(d_verticals, [dk2, dv2], part, parts, run.cp.block_size)
                verticals = reduce_verticals(run, d_verticals) if part + 1 == parts else None
            else:
                dq, *d_kv = run.backend.backward(*inputs, run.scale, dtype, dq, next(places))
        if step == 0:
            home.begin(d_kv)
        elif step <= len(plan.stages):
            home.send(step - 1, d_kv and [x[:, :, : len(blocks) * run.cp.block_size] for x in d_kv])
    d_kv = home.finish(d_kv, q.dtype if verticals is None else dtype)
    if verticals is not None:
        add_verticals(run, d_kv, verticals.wait())
    return tuple(x.to(q.dtype) for x in (dq, *d_kv))


def stages(run: Run) -> list[Tensor]:
    """Global blocks, int64 [n], that this rank gets from others in each stage of the forward."""
    return [stage.k_blocks for stage in _plan(run, run.cp.overlap_stages[0]).stages]


def _plan(run: Run, stages: int) -> Plan:
    """This rank's plan on the data's device, the same for all layers where the pattern is static."""
    cp = run.cp

    def make() -> Plan:
        table = once_per_mask(
            run.rows, ("table on the host", cp.key), lambda: cp.table(run.rows).cpu()
        )[:, : run.last]
        return plan(needed_blocks(run), table, cp.inter, cp.intra, cp.rank, stages).to(
            run.rows.start.device
        )

    if pattern_by_key(run.pattern).dynamic:
        return make()
    return once_per_mask(run.rows, ("group cast", cp.key, stages, run.first, run.last), make)


def _places(steps: list[Tensor], q: Tensor) -> Iterator[Tensor | None]:
    """Where the sum over each step that computes is written: the last one's in q's dtype."""
    computing = sum(len(blocks) > 0 for blocks in steps)
    return at_last(computing, results(q, [slice(None)], computing).parts[0])


def _vertical_steps(
    run: Run, steps: list[Tensor], vertical_kv: Tensor, backward: bool = False
) -> list[int]:
    """Steps that meet a part of the verticals; none where there are none."""
    return vertical_steps(
        [len(blocks) > 0 for blocks in steps], vertical_kv.shape[3] // run.cp.block_size, backward
    )


# Keys and values ----------------------------------------------------------------------------------------------------


def _keys_and_values(
    run: Run, plan: Plan, k: Tensor, v: Tensor, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """k and v [B, Hkv, n, D] of the first own blocks, of each stage, and of the other own blocks; while the caller computes
    on one stage the next is on its way."""
    device, split = k.device, first * run.cp.block_size
    _meet("keys", device)  # what a call before may still read of the memory
    hand_on = _hands_on(run.cp, plan, k, v)
    following = hand_on(0)
    yield k[:, :, :split], v[:, :, :split]
    for number in range(len(plan.stages)):
        _meet("keys", device)
        kv = (
            _side_by_side(*_with_room(run, following.wait()))
            if following
            else (k[:, :, :0], v[:, :, :0])
        )
        following = hand_on(number + 1)
        yield kv
    yield k[:, :, split:], v[:, :, split:]


def _hands_on(
    cp: ContextParallel, plan: Plan, k: Tensor, v: Tensor
) -> Callable[[int], Pending | None]:
    """A function that starts the exchange inside the node of a stage, once what it hands on has come from other nodes; their
    exchanges start now."""
    nothing = _block_by_block(k[:, :, :0], v[:, :, :0], cp.block_size)
    take, crossing = functools.partial(_own_blocks, k, v, cp.block_size), [None] * len(plan.stages)
    if cp.inter > 1:
        memory = cp.rows("group cast", nothing, plan.memory)
        _block_by_block(k, v, cp.block_size, memory[: k.shape[2] // cp.block_size])
        take = functools.partial(memory.index_select, 0)
        with _beside("keys", k.device):
            crossing = [
                _start(cp, take, stage.outer, "outer", memory[slice(*stage.relayed)])
                for stage in plan.stages
            ]

    def hand_on(number: int) -> Pending | None:
        if number == len(plan.stages):
            return None
        stage = plan.stages[number]
        with _beside("keys", k.device):
            if crossing[number]:
                crossing[number].wait()
            return _start(
                cp,
                take,
                stage.inner,
                "inner",
                cp.rows("group cast received", nothing, len(stage.k_blocks)),
            )

    return hand_on


def _start(
    cp: ContextParallel,
    take: Callable[[Tensor], Tensor],
    exchange: Exchange | None,
    axis: str,
    out: Tensor,
) -> Pending | None:
    """take: of rows that this rank has the blocks."""
    return exchange and cp.start_exchange(
        take(exchange.rows), exchange.sends, exchange.receives, axis, out
    )


def _own_blocks(k: Tensor, v: Tensor, size: int, rows: Tensor) -> Tensor:
    """Some blocks of k and v [B, H, S, D], in the order in which they are sent."""
    return _block_by_block(
        *(x.unflatten(2, (-1, size)).index_select(2, rows).flatten(2, 3) for x in (k, v)), size
    )


def _block_by_block(
    k: Tensor, v: Tensor, size: int, out: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """k and v, or their gradients, [B, H, S, D] -> [S / size, 2, B, H, size, D], in which blocks are sent."""
    parts = [x.unflatten(2, (x.shape[2] // size, size)).movedim(2, 0) for x in (k, v)]
    if out is None:
        out = k.new_empty(len(parts[0]), 2, *parts[0].shape[1:], dtype=dtype or k.dtype)
    for place, part in zip(out.unbind(1), parts):
        place.copy_(part)
    return out


def _with_room(run: Run, x: Tensor) -> tuple[Tensor, int]:
    """A stage's blocks, and how many there are to be: where each number of keys is compiled for, a power of two."""
    return x, 1 << (len(x) - 1).bit_length() if run.backend.COMPILES_BY_LENGTH else len(x)


def _side_by_side(x: Tensor, blocks: int = 0) -> tuple[Tensor, Tensor]:
    """The inverse of _block_by_block(); with zeros behind, up to so many blocks."""
    # Always a copy: what is received next lies where this does.
    n, out = len(x), x.new_empty(*x.shape[1:4], max(blocks, len(x)), *x.shape[4:])
    out[:, :, :, :n], out[:, :, :, n:] = x.movedim(0, 3), 0
    return out.flatten(3, 4).unbind(0)


def _blocks(run: Run, kv: tuple[Tensor, Tensor]) -> int:
    return kv[0].shape[2] // run.cp.block_size


# Gradients ----------------------------------------------------------------------------------------------------------


class _Home:
    """Gradients of remote blocks on their way home: inside the node to where the keys came from, which adds them up, and
    from there to the owner.

    sums: this rank's own blocks, with what has come for them, and behind them those that it hands on.
    """

    def __init__(self, cp: ContextParallel, plan: Plan, k: Tensor, dtype: torch.dtype):
        self.cp, self.plan, self.own = cp, plan, k.shape[2] // cp.block_size
        shape = (plan.memory, 2, *k.shape[:2], cp.block_size, k.shape[3])
        self.sums = torch.empty(shape, dtype=dtype, device=k.device)
        self.sent_dtype = cp.gradient_dtype or dtype
        self.crossing: tuple[Pending, Exchange] | None = None

    def begin(self, d_kv: list[Tensor]) -> None:
        """Start the sums with this rank's own dk and dv [B, Hkv, n, D] of its first blocks."""
        size = self.cp.block_size
        self.first = d_kv[0].shape[2] // size
        _block_by_block(*d_kv, size, self.sums[: self.first])
        self.sums[self.first :] = 0

    def send(self, number: int, d_kv: list[Tensor] | None) -> None:
        """Start the way of a stage's dk and dv [B, Hkv, n, D]; None if this rank got no blocks in it."""
        stage, sums = self.plan.stages[number], self.sums
        packed = sums[:0].to(self.sent_dtype)
        if d_kv:
            packed = _block_by_block(*d_kv, self.cp.block_size, dtype=self.sent_dtype)
        if packed.is_cuda:
            packed.record_stream(_stream("gradients", packed.device))
        with _beside("gradients", sums.device):
            if stage.inner:
                self._add(self._start(packed, stage.inner, "inner_gradient"), stage.inner)
            if stage.outer:
                self._arrive()
                relayed = sums[slice(*stage.relayed)].to(self.sent_dtype)
                self.crossing = self._start(relayed, stage.outer, "outer_gradient"), stage.outer

    def finish(self, d_kv: list[Tensor] | None, dtype: torch.dtype) -> list[Tensor]:
        """dk and dv [B, Hkv, S_local, D] of this rank's blocks, from all ranks, in dtype. d_kv: its own of the blocks behind
        the first, if there are any."""
        with _beside("gradients", self.sums.device):
            self._arrive()
        _meet("gradients", self.sums.device)
        own = self.sums[: self.own]
        if d_kv:
            own[self.first :] += _block_by_block(*d_kv, self.cp.block_size)
        return [_in_order(x, dtype) for x in own.unbind(1)]

    def _start(self, x: Tensor, exchange: Exchange, axis: str) -> Pending:
        """The way back: what was received is sent."""
        out = self.cp.rows(axis, x, len(exchange.rows))
        return self.cp.start_exchange(x, exchange.receives, exchange.sends, axis, out)

    def _arrive(self) -> None:
        if self.crossing:
            self._add(*self.crossing)
        self.crossing = None

    def _add(self, pending: Pending, exchange: Exchange) -> None:
        """Sender by sender, so that nothing is added to the same place at a time and the order is always the same."""
        for rows, part in zip(
            exchange.rows.split(exchange.sends), pending.wait().split(exchange.sends)
        ):
            self.sums.index_add_(0, rows, part.to(self.sums.dtype))


def _in_order(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, B, H, size, D] -> [B, H, n * size, D] in dtype."""
    x = x.movedim(0, 2)
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x).flatten(2, 3)


# Streams ------------------------------------------------------------------------------------------------------------


@functools.cache
def _stream(name: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def _beside(name: str, device: torch.device) -> Iterator[None]:
    """What a GPU is given inside is done beside what the caller's stream is given later, and after what it has been given.

    A block is handed on, and a gradient, as soon as it has come: on the caller's stream that would be after the kernels of
    the present stage."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(name, device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _meet(name: str, device: torch.device) -> None:
    """What the caller's stream is given from now on comes after what was given to _beside(name)."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(name, device))
