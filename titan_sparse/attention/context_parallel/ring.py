"""Attention by the schedules that move chunks from rank to rank: ring and double_ring.

Inside a window a chunk moves one inner hop per step. From one window to the next it moves one outer
hop, which can take the whole window. Gradients follow one step behind. Hops that no rank needs are
not made (ring_routing.py).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import Queries, Sum
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel import verticals
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.context_parallel.dense import rectangle_of
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.context_parallel.loop import Group, Step, Transport
from titan_sparse.attention.context_parallel.needed_keys import needed_chunks
from titan_sparse.attention.context_parallel.ring_routing import Route, route_of
from titan_sparse.attention.context_parallel.schedules import circulates_queries, head_groups
from titan_sparse.kernels.block_sparse import Piece

Chunk = list[Tensor]


class Ring(Transport):
    """Moves the keys and values of each group of heads as one tensor [2, B, Hkv, S_local, D].

    All heads are one group, but up to four in a double ring. With several groups, the first chunk
    from another node is computed while the next is on its way, and its gradient leaves while the
    next is computed. With all heads at once a rank of two nodes waits for one transfer with half of
    its work still to do.
    """

    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        super().__init__(call, q, k, v, backward)
        self.route = route_of(*call.cp.rings, call.cp.rank, needed_chunks(call))
        count = head_groups(k.shape[1], call.cp.rings[0])
        self.groups = []
        self.chunks = []
        self.homes = []
        for number in range(count):
            heads, kv_heads = (_slice_of(x.shape[1], number, count) for x in (q, k))
            # The heads of a single group are not taken out of the index.
            group_call = call if count == 1 else call.of_heads(heads)
            self.groups.append(Group(group_call, heads, self.route.computing_steps))
            self.chunks.append([torch.stack([k[:, kv_heads], v[:, kv_heads]])])
            self.homes.append(RingGradients(call.cp, self.route, number))

    def steps(self) -> Iterator[Step]:
        homes = self.homes if self.backward else None
        for at in circulate(self.call.cp, self.route, self.chunks, homes):
            call = self.groups[at.group].call
            tiles = functools.partial(call.tiles_of_rank, at.source)
            k, v = at.chunk[0]
            rectangle = rectangle_of(self.call, self.q.shape[2], at.source)
            step = Step(at.group, k, v, tiles, rectangle)
            yield step
            if self.backward:
                at.gradient = _stacked(step.d_kv, self.call.sum_dtype(self.q))

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        by_group = [home.finish() for home in self.homes]
        # [2, B, Hkv, S_local, D]; a single group is not copied.
        d_kv = by_group[0] if len(by_group) == 1 else torch.cat(by_group, dim=2)
        dk, dv = d_kv
        return _apart(dk, dv, dtype) if dtype == self.q.dtype else (dk, dv)

    @staticmethod
    def backward_otherwise(
        call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """With queries traveling instead of keys, where that sends less."""
        q = queries.q
        gradient_dtype = call.cp.gradient_dtype or call.sum_dtype(q)
        if not circulates_queries(
            call.cp.backward_circulates,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[3],
            width=q.element_size(),
            gradient_width=gradient_dtype.itemsize,
        ):
            return None
        return _backward_with_queries_circulating(call, queries, k, v, vertical_kv)


def _slice_of(heads: int, number: int, count: int) -> slice:
    """One of `count` slices of equal length."""
    length = heads // count
    return slice(number * length, (number + 1) * length)


def _stacked(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """dk and dv in `dtype`: [2, B, Hkv, S_local, D]."""
    dk, dv = gradients
    stacked = dk.new_empty(2, *dk.shape, dtype=dtype)
    stacked[0].copy_(dk)
    stacked[1].copy_(dv)
    return stacked


def _apart(dk: Tensor, dv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dk and dv in `dtype`, each in its own memory: outputs of an op must not share it."""
    return dk.to(dtype, copy=True), dv.to(dtype, copy=True)


def _backward_with_queries_circulating(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward in which keys stay and queries travel.

    With them travel d_out, lse, the product of out and d_out, and dq (BurstEngine, section 3.2).
    """
    q, d_out, out, lse = queries
    dtype = call.sum_dtype(q)
    by_key = call.backend.READS_BY_KEY

    reduced = None
    if vertical_kv.shape[3] > 0:
        # Verticals do not travel: every rank has them. Their gradients hide behind the ring.
        piece = call.vertical_piece(vertical_kv, by_key)
        dq_of_verticals, [d_verticals] = call.backend.backward(
            queries, [piece], call.scale, Sum(dtype)
        )
        reduced = call.cp.start_all_reduce(_stacked(d_verticals, dtype))

    # Queries are needed by the ranks whose keys they meet, the reverse of chunks of keys.
    route = route_of(*call.cp.rings, call.cp.rank, needed_chunks(call).T)
    # [B, Hq, S_local]
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1)
    # [2, B, Hq, S_local, D] and [2, B, Hq, S_local]
    chunk = [torch.stack([q, d_out]), torch.stack([lse, delta])]
    home = RingGradients(call.cp, route, 0)
    d_kv: list[Tensor] = []
    for at in circulate(call.cp, route, [chunk], [home]):
        (passing_q, passing_d_out), (passing_lse, passing_delta) = at.chunk
        passing_out = _out_with(passing_d_out, passing_delta)
        passing = Queries(passing_q, passing_d_out, passing_out, passing_lse)
        tiles = call.tiles_of_rank(call.cp.rank, by_key, at.source)
        dq, [d_kv_here] = call.backend.backward(
            passing, [Piece(k, v, tiles)], call.scale, Sum(dtype)
        )
        at.gradient = dq.to(dtype)
        if not d_kv:
            d_kv = [gradient.to(dtype) for gradient in d_kv_here]
            continue
        for total, gradient in zip(d_kv, d_kv_here, strict=True):
            total.add_(gradient)
    dq = home.finish()
    if reduced is not None:
        dq += dq_of_verticals
        verticals.add_gradients(call, d_kv, reduced.wait())
    dk, dv = d_kv
    return dq.to(q.dtype), *_apart(dk, dv, q.dtype)


def _out_with(d_out: Tensor, delta: Tensor) -> Tensor:
    """An out [B, Hq, S, D] whose product with d_out, summed over the head dim, is delta [B, Hq, S].

    Any such out gives the same gradients. This one is a multiple of d_out, and no longer than the
    true one: rounding it to d_out's dtype costs no more than rounding that.
    """
    dtype = delta.dtype
    # Of unit size, so that no square underflows.
    largest = d_out.abs().amax(-1, keepdim=True).to(dtype)
    # Where d_out is 0, so is delta.
    largest = torch.where(largest == 0, 1, largest)
    direction = d_out.to(dtype) / largest
    square = direction.square().sum(-1, keepdim=True).clamp(min=1)
    length = delta[..., None] / (largest * square)
    return (direction * length).to(d_out.dtype)


@dataclass
class RingStep:
    """A step in which this rank computes, for one group of KV heads.

    source: rank of the chunk. gradient: of what the chunk holds, which the caller leaves here in a
    backward.
    """

    group: int
    source: int
    chunk: Chunk
    gradient: Tensor | None = None


def circulate(
    cp: ContextParallel,
    route: Route,
    chunks: list[Chunk],
    homes: "list[RingGradients] | None" = None,
) -> Iterator[RingStep]:
    """The steps in the schedule's order; transfers run while the caller computes.

    chunks: this rank's, of each group of KV heads. Within a window one group comes after the other,
    so that with several groups the second is still on its way from another node while the first is
    computed.
    homes: of a backward, where the gradients of each group go. Its order lets compute hide their
    transfers: only the first step of the first window, then the other windows, then the rest of the
    first one, while the last gradients come home from other nodes.
    """
    inter, intra = cp.rings
    groups = range(len(chunks))

    def to_next_rank(group: int, window: int, place: int, chunk: Chunk, slot: object) -> Pending:
        hops = route.inner[window][place]
        return cp.shift(chunk, "inner", f"inner {slot} {group}", *hops)

    def to_next_node(group: int, window: int, chunk: Chunk) -> Pending:
        if window + 1 == inter:
            return Pending([])
        # Two slots: one window is computed while the next one travels.
        slot = f"outer {window % 2} {group}"
        return cp.shift(chunk, "outer", slot, *route.outer[window])

    def received(group: int, transfer: Pending) -> Chunk:
        # Where nothing came, this rank's own chunk has the right shape; it is never read.
        return transfer.wait() or chunks[group]

    def steps(group: int, window: int, chunk: Chunk, first: int, stop: int) -> Iterator[RingStep]:
        for place in range(first, stop):
            if place + 1 < stop:
                transfer = to_next_rank(group, window, place, chunk, place % 2)
            if homes and place == first:
                # The window before this one is over. Its gradient leaves for another node before
                # this step is computed, not after: the hop inside the node that it waits for is the
                # shorter.
                homes[group - 1].finish_node()
            step = RingStep(group, route.sources[window][place], chunk)
            if route.computes[window][place]:
                yield step
            if homes:
                homes[group].add(window, place, step.gradient)
            if place + 1 < stop:
                chunk = received(group, transfer)

    outer = [to_next_node(group, 0, chunks[group]) for group in groups]
    held = []
    if homes and intra > 1:
        # Into memory where it stays while other windows are computed.
        held = [to_next_rank(group, 0, 0, chunks[group], "held") for group in groups]
    for group in groups:
        yield from steps(group, 0, chunks[group], 0, 1 if homes else intra)
    for window in range(1, inter):
        for group in groups:
            chunk = received(group, outer[group])
            # The hop to the node after this one has the whole window to take place.
            outer[group] = to_next_node(group, window, chunk)
            yield from steps(group, window, chunk, 0, intra)
    for group, transfer in enumerate(held):
        yield from steps(group, 0, received(group, transfer), 1, intra)


@dataclass
class RingGradients:
    """The gradients of one group's chunks on their way home.

    Where a chunk enters a node, that rank's share waits for what the node's other ranks add up
    along the inner ring. The sums of nodes add up along the outer ring. Each hop has the next
    step's work to hide behind.

    own: this rank's share for its own chunk, which the first step computes. node: of the chunk that
    entered the node here, the window and this rank's share. inner: the transfer that follows the
    current chunk. outer: the one that brings the sums of other nodes.
    """

    cp: ContextParallel
    route: Route
    group: int
    own: Tensor = field(init=False)
    node: tuple[int, Tensor | None] | None = None
    inner: Pending | None = None
    outer: Pending | None = None

    def add(self, window: int, place: int, gradient: Tensor | None) -> None:
        """After the work of a step. gradient: None if there was no work."""
        if place > 0:
            gradient = self._sum(gradient, self.inner)
            hops = self.route.gradient_inner[window][place]
            self.inner = self._shift(gradient, "inner", place, hops)
            return
        # This share waits here, for what comes around the inner ring: nothing travels yet.
        self.inner = None
        if window > 0:
            self.node = (window, gradient)
        else:
            assert gradient is not None  # A rank always computes on its own chunk.
            self.own = gradient

    def finish_node(self) -> None:
        """At the end of a window: send its first chunk's gradient on to the next node."""
        if self.node is None:
            return
        window, gradient = self.node
        gradient = self._sum(gradient, self.inner)
        gradient = self._sum(gradient, self.outer)
        self.outer = self._shift(gradient, "outer", window, self.route.gradient_outer[window])
        self.inner = None
        self.node = None

    def finish(self) -> Tensor:
        """The gradient of this rank's own chunk, summed over ranks, after the last step."""
        self.finish_node()
        # First what this node's other ranks added up, then what other nodes did.
        for transfer in (self.inner, self.outer):
            self._sum(self.own, transfer)
        return self.own

    def _shift(
        self, gradient: Tensor | None, axis: str, number: int, hops: list[bool]
    ) -> Pending | None:
        if not any(hops):
            return None
        if gradient is None:
            # Nothing to send, but what comes has this shape.
            gradient = self.own
        sent_dtype = self.cp.gradient_dtype or gradient.dtype
        slot = f"{axis} gradient {number % 2} {self.group}"
        return self.cp.shift([gradient.to(sent_dtype)], f"{axis}_gradient", slot, *hops)

    def _sum(self, own: Tensor | None, transfer: Pending | None) -> Tensor | None:
        """own + what the transfer brought, in place, either of which may be missing.

        Never the buffer in which it was received.
        """
        received = transfer.wait() if transfer is not None else []
        if not received:
            return own
        [gradient] = received
        if own is None:
            return gradient.to(self.own.dtype, copy=True)
        return own.add_(gradient)
