"""Chunks on their way around the ranks of a ring while the caller computes, forward and backward.

Inside a window a chunk moves one inner hop per step. From one window to the next it moves one outer
hop, which can take the whole window. Gradients follow one step behind. Hops that no rank needs are
not made (ring_routing.py).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import ring_routing
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.context_parallel.group import ContextParallel

Chunk = list[Tensor]


class Route(NamedTuple):
    """The actions of this rank in a ring, by [window][step].

    computes: whether it computes on the step's chunk. inner, outer: whether it sends and receives in
    a chunk's hop to the next rank, and by [window] in that of the window's first chunk to the next
    node. gradient_inner, gradient_outer: the same for gradients. After the last window a gradient
    comes home, to the rank that had the chunk in the first.
    """

    computes: list[list[bool]]
    inner: list[list[list[bool]]]
    outer: list[list[bool]]
    gradient_inner: list[list[list[bool]]]
    gradient_outer: list[list[bool]]

    @property
    def computing_steps(self) -> int:
        return sum(sum(window) for window in self.computes)


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


def route_of(cp: ContextParallel, needed: Tensor) -> Route:
    """needed: bool [W, W] on the host, rank r computes on the chunk of rank s."""
    # The cache of _route() needs values that it can hash.
    windows = tuple(tuple(window) for window in cp.windows)
    return _route(windows, cp.rank, needed.numpy().tobytes())


@functools.lru_cache(maxsize=64)
def _route(windows: tuple[tuple[int, ...], ...], rank: int, needed_bytes: bytes) -> Route:
    """All layers ask alike, and a GPU would wait for the hundred small operations that it takes."""
    # [inter, intra]
    sources = torch.tensor(windows)
    inter, intra = sources.shape
    ranks = inter * intra
    needed = torch.frombuffer(bytearray(needed_bytes), dtype=torch.bool)
    needed = needed.view(ranks, ranks)
    window = torch.arange(inter)
    place = torch.arange(intra)
    hops = []
    for find in (ring_routing.hops_needed, ring_routing.gradient_hops):
        made = find(needed, inter, intra)
        # A rank sends what it holds, and receives what it holds next.
        inner = [made.inner[sources.roll(by, 1), window[:, None], place] for by in (0, -1)]
        outer = [made.outer[sources[:, 0].roll(by), window] for by in (0, -1)]
        hops += [torch.stack(inner, -1).tolist(), torch.stack(outer, -1).tolist()]
    # A rank always computes on its own chunk.
    computes = needed[rank, sources] | (sources == rank)
    return Route(computes.tolist(), *hops)


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
    inter = len(cp.windows)
    intra = len(cp.windows[0])
    groups = range(len(chunks))

    def to_next_rank(group: int, window: int, place: int, chunk: Chunk, slot: object) -> Pending:
        hops = route.inner[window][place]
        return cp.shift(chunk, "inner", f"inner {slot} {group}", *hops)

    def to_next_node(group: int, window: int, chunk: Chunk) -> Pending | None:
        if window + 1 == inter:
            return None
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
            step = RingStep(group, cp.windows[window][place], chunk)
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

    own: this rank's share for its own chunk. node: of the chunk that entered the node here, the
    window and this rank's share. like: any gradient, for its shape and dtype. inner: the transfer
    that follows the current chunk. outer: the one that brings the sums of other nodes.
    """

    cp: ContextParallel
    route: Route
    group: int
    own: Tensor | None = None
    node: tuple[int, Tensor | None] | None = None
    like: Tensor | None = None
    inner: Pending | None = None
    outer: Pending | None = None

    def add(self, window: int, place: int, gradient: Tensor | None) -> None:
        """After the work of a step. gradient: None if there was no work."""
        if gradient is not None:
            self.like = gradient
        if place > 0:
            gradient = self._sum(gradient, self.inner)
            hops = self.route.gradient_inner[window][place]
            self.inner = self._shift(gradient, "inner", place, hops)
            return
        # This share waits here, for what comes around the inner ring: nothing travels yet.
        self.inner = None
        if window == 0:
            self.own = gradient
        else:
            self.node = (window, gradient)

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
        of_node = self._sum(self.own, self.inner)
        return self._sum(of_node, self.outer)

    def _shift(
        self, gradient: Tensor | None, axis: str, number: int, hops: list[bool]
    ) -> Pending | None:
        if not any(hops):
            return None
        if gradient is None:
            # Nothing to send, but what comes has this shape.
            gradient = self.like
        sent_dtype = self.cp.gradient_dtype or gradient.dtype
        slot = f"{axis} gradient {number % 2} {self.group}"
        return self.cp.shift([gradient.to(sent_dtype)], f"{axis}_gradient", slot, *hops)

    def _sum(self, own: Tensor | None, transfer: Pending | None) -> Tensor | None:
        """own + what the transfer brought, either of which may be missing.

        Never the buffer in which it was received.
        """
        received = transfer.wait() if transfer is not None else []
        if not received:
            return own
        [gradient] = received
        if own is None:
            return gradient.to(self.like.dtype, copy=True)
        return own.add_(gradient)
