"""Chunks on their way around the ranks of a ring while the caller computes, forward and backward.

Inside a window a chunk moves one inner hop per step. From one window to the next it moves one outer
hop, which can take the whole window. Gradients follow one step behind. Hops that no rank needs are
not made (context_parallel/routing.py). Received data goes to buffers that are kept from call to
call.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import routing
from titan_sparse.attention.context_parallel.comm import Transfer
from titan_sparse.attention.context_parallel.group import ContextParallel

Chunk = list[Tensor]


class Hops:
    """Which hops this rank takes part in: of chunks, or of their gradients."""

    def __init__(self, windows: tuple[tuple[int, ...], ...], made: routing.Hops):
        """windows: of this rank. made: the hops that the chunks of all ranks make."""
        self.windows = windows
        self.made = routing.Hops(*(places.tolist() for places in made))

    def inner(self, window: int, place: int) -> tuple[bool, bool]:
        """Whether this rank sends the chunk of a step, and whether it receives the next one."""
        sources = self.windows[window]
        following = sources[(place + 1) % len(sources)]

        def is_made(source: int) -> bool:
            begin = self.made.inner_from[source][window]
            return begin <= place < self.made.inner_to[source][window]

        return is_made(sources[place]), is_made(following)

    def outer(self, window: int) -> tuple[bool, bool]:
        """The same for the first chunk of a window, which goes to the next node.

        After the last window a chunk's gradient comes home, to the rank that had it in the first.
        """
        following = (window + 1) % len(self.windows)

        def is_made(source: int) -> bool:
            return self.made.outer_from[source] <= window < self.made.outer_to[source]

        return is_made(self.windows[window][0]), is_made(self.windows[following][0])


class Route(NamedTuple):
    """What this rank does. computes: by [window][step], whether it computes on the chunk.

    kv, gradient: the hops of the chunks, and of their gradients.
    """

    computes: list[list[bool]]
    kv: Hops
    gradient: Hops

    @property
    def computing_steps(self) -> int:
        return sum(sum(window) for window in self.computes)


class Step(NamedTuple):
    """A step of a schedule, for one group of KV heads.

    place: counted in its window. source: rank of the chunk. computes: whether this rank computes on
    the chunk. If not, the chunk may not be there.
    """

    group: int
    window: int
    place: int
    source: int
    chunk: Chunk
    computes: bool


def route_of(cp: ContextParallel, needed: Tensor | None) -> Route:
    """The route of this rank.

    needed: bool [W, W] on the host, rank r computes on the chunk of rank s; None if every rank
    computes on every chunk.
    """
    if needed is None:
        needed = torch.ones(cp.size, cp.size, dtype=torch.bool)
    # The cache of _route() needs values that it can hash.
    windows = tuple(tuple(window) for window in cp.windows)
    needed_bytes = needed.numpy().tobytes()
    return _route(windows, cp.rank, needed_bytes)


@functools.lru_cache(maxsize=64)
def _route(windows: tuple[tuple[int, ...], ...], rank: int, needed_bytes: bytes) -> Route:
    """The route, remembered by plain values.

    All layers ask alike, and a GPU would wait for the hundred small operations that it takes.
    """
    inter = len(windows)
    intra = len(windows[0])
    ranks = inter * intra
    needed = torch.frombuffer(bytearray(needed_bytes), dtype=torch.bool)
    needed = needed.view(ranks, ranks)
    computes = []
    for window in windows:
        # A rank always computes on its own chunk.
        on_window = [source == rank or bool(needed[rank, source]) for source in window]
        computes.append(on_window)
    return Route(
        computes=computes,
        kv=Hops(windows, routing.hops_needed(needed, inter, intra)),
        gradient=Hops(windows, routing.gradient_hops(needed, inter, intra)),
    )


def circulate(
    cp: ContextParallel, routes: list[Route], chunks: list[Chunk], backward: bool = False
) -> Iterator[Step]:
    """The steps in the schedule's order; transfers run while the caller computes.

    routes, chunks: this rank's, of each group of KV heads. Within a window one group comes after the
    other, so that with several groups the second is still on its way from another node while the
    first is computed.
    backward: in the order that lets compute hide the transfers of gradients: only the first step of
    the first window, then the other windows, then the rest of the first one, while the last
    gradients come home from other nodes.
    """
    outer = []
    for group, own_chunk in enumerate(chunks):
        outer.append(_outer_hop(cp, routes[group], own_chunk, group, window=0))
    held: list[Transfer] = []
    if backward:
        if len(cp.windows[0]) > 1:
            # The first hop inside the node, into memory where it stays while other windows are
            # computed.
            for group, chunk in enumerate(chunks):
                hops = routes[group].kv.inner(window=0, place=0)
                held.append(cp.shift(chunk, "inner", f"inner held {group}", *hops))
        for group, chunk in enumerate(chunks):
            yield _step(cp, routes[group], group, 0, 0, chunk)
    else:
        for group, chunk in enumerate(chunks):
            yield from _circulate_in_window(cp, routes[group], group, 0, 0, chunk, chunk)
    for window in range(1, len(cp.windows)):
        for group, own_chunk in enumerate(chunks):
            chunk = _received(outer[group], own_chunk)
            # The hop to the node after this one has the whole window to take place.
            outer[group] = _outer_hop(cp, routes[group], chunk, group, window)
            yield from _circulate_in_window(cp, routes[group], group, window, 0, chunk, own_chunk)
    for group, transfer in enumerate(held):
        chunk = _received(transfer, chunks[group])
        yield from _circulate_in_window(cp, routes[group], group, 0, 1, chunk, chunks[group])


def _circulate_in_window(
    cp: ContextParallel,
    route: Route,
    group: int,
    window: int,
    first_place: int,
    chunk: Chunk,
    own_chunk: Chunk,
) -> Iterator[Step]:
    """The steps of one window from `first_place` on.

    chunk: the one that this rank holds at `first_place`. own_chunk: this rank's own.
    """
    steps = len(cp.windows[window])
    for place in range(first_place, steps):
        transfer = None
        if place + 1 < steps:
            hops = route.kv.inner(window, place)
            transfer = cp.shift(chunk, "inner", f"inner {place % 2} {group}", *hops)
        yield _step(cp, route, group, window, place, chunk)
        if transfer is not None:
            chunk = _received(transfer, own_chunk)


def _step(
    cp: ContextParallel, route: Route, group: int, window: int, place: int, chunk: Chunk
) -> Step:
    return Step(
        group=group,
        window=window,
        place=place,
        source=cp.windows[window][place],
        chunk=chunk,
        computes=route.computes[window][place],
    )


def _received(transfer: Transfer, own_chunk: Chunk) -> Chunk:
    """What a transfer brought.

    If it brought nothing, this rank's own chunk: a placeholder with the right shape, never read.
    """
    return transfer.wait() or own_chunk


def _outer_hop(
    cp: ContextParallel, route: Route, chunk: Chunk, group: int, window: int
) -> Transfer | None:
    """Start to send a chunk to the next node, at the start of a window; None in the last one."""
    if window + 1 == len(cp.windows):
        return None
    hops = route.kv.outer(window)
    return cp.shift(chunk, "outer", f"outer {window % 2} {group}", *hops)


def circulate_with_gradients(
    cp: ContextParallel,
    routes: list[Route],
    chunks: list[Chunk],
    gradient_of: Callable[[Step], Tensor],
) -> list[Tensor]:
    """The gradient of this rank's chunk of each group, summed over ranks and brought home.

    gradient_of(step) is the gradient of the step's chunk through this rank's work.

    Where a chunk enters a node, that rank's share waits for what the node's other ranks add up
    along the inner ring. The sums of nodes add up along the outer ring. Each hop has the next
    step's work to hide behind.
    """
    homes = []
    for group, route in enumerate(routes):
        homes.append(_Homeward(cp, route, group))
    for step in circulate(cp, routes, chunks, backward=True):
        starts_rest_of_first_window = (step.group, step.window, step.place) == (0, 0, 1)
        if step.place == 0 or starts_rest_of_first_window:
            # The window before this one is over. Its gradient leaves for another node before this
            # step is computed, not after: the hop inside the node that it waits for is the shorter.
            homes[step.group - 1].finish_node()
        gradient = gradient_of(step) if step.computes else None
        homes[step.group].step(step.window, step.place, gradient)
    return [home.finish() for home in homes]


class _Homeward:
    """The gradients of one group's chunks on their way home.

    own: this rank's share of the gradient of its own chunk.
    node: of the chunk that entered the node here, the window and this rank's share.
    like: any gradient, for its shape and dtype.
    inner: the transfer that follows the current chunk.
    outer: the transfer that brings the sums of other nodes.
    """

    def __init__(self, cp: ContextParallel, route: Route, group: int):
        self.cp = cp
        self.hops = route.gradient
        self.group = group
        self.own: Tensor | None = None
        self.node: tuple[int, Tensor | None] | None = None
        self.like: Tensor | None = None
        self.inner: Transfer | None = None
        self.outer: Transfer | None = None

    def step(self, window: int, place: int, gradient: Tensor | None) -> None:
        """After the work of a step. gradient: None if there was no work."""
        if gradient is not None:
            self.like = gradient
        if place == 0:
            # This share waits here, for what comes around the inner ring: nothing travels yet.
            if window == 0:
                self.own = gradient
                self.node = None
            else:
                self.node = (window, gradient)
            self.inner = None
            return
        gradient = self._sum(gradient, self.inner)
        self.inner = self._shift(
            gradient,
            "inner_gradient",
            f"inner gradient {place % 2}",
            self.hops.inner(window, place),
        )

    def finish(self) -> Tensor:
        """The gradient of this rank's own chunk, after the last step."""
        self.finish_node()
        # First what this node's other ranks added up, then what other nodes did.
        of_node = self._sum(self.own, self.inner)
        return self._sum(of_node, self.outer)

    def finish_node(self) -> None:
        """At the end of a window: send its first chunk's gradient on to the next node.

        What the node's other ranks added to it has come around the inner ring by now.
        """
        if self.node is None:
            return
        window, gradient = self.node
        gradient = self._sum(gradient, self.inner)
        gradient = self._sum(gradient, self.outer)
        self.outer = self._shift(
            gradient,
            "outer_gradient",
            f"outer gradient {window % 2}",
            self.hops.outer(window),
        )
        self.inner = None
        self.node = None

    def _shift(
        self, gradient: Tensor | None, axis: str, slot: str, hops: tuple[bool, bool]
    ) -> Transfer | None:
        if not any(hops):
            return None
        if gradient is None:
            # Nothing to send, but what comes has this shape.
            gradient = self.like
        sent_dtype = self.cp.gradient_dtype or gradient.dtype
        sent = gradient.to(sent_dtype)
        return self.cp.shift([sent], axis, f"{slot} {self.group}", *hops)

    def _sum(self, own: Tensor | None, transfer: Transfer | None) -> Tensor | None:
        """own + what the transfer brought, either of which may be missing.

        Never the buffer in which it was received.
        """
        received = []
        if transfer is not None:
            received = transfer.wait()
        if not received:
            return own
        [gradient] = received
        if own is None:
            return gradient.to(self.like.dtype, copy=True)
        return own.add_(gradient)
