"""Chunks on their way around the ranks of a ring while the caller computes, forward and backward.

Inside a window a chunk moves one inner hop a step. From one window to the next it moves one outer
hop, which has the whole window to take place. Gradients follow one step behind. A hop that serves
nobody is not made (context_parallel/routing.py). What is received lies in buffers that are kept
from call to call.
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


class Hops(NamedTuple):
    """Which hops this rank takes part in.

    inner_sends, inner_receives: by [window][step], of the chunk in hand and of the one to come.
    outer_sends, outer_receives: by [window], likewise.
    """

    inner_sends: list[list[bool]]
    inner_receives: list[list[bool]]
    outer_sends: list[bool]
    outer_receives: list[bool]


class Route(NamedTuple):
    """What this rank does. computes: by [window][step], whether it computes on the chunk.

    kv, gradient: the hops of the chunks, and of their gradients.
    """

    computes: list[list[bool]]
    kv: Hops
    gradient: Hops

    @property
    def computes_by_step(self) -> list[bool]:
        """computes, window after window."""
        return sum(self.computes, [])


class Step(NamedTuple):
    """A step of a schedule, for one group of KV heads.

    number: counted over all windows. place: counted in its window. source: rank of the chunk.
    """

    group: int
    window: int
    place: int
    number: int
    source: int
    chunk: Chunk


def route_of(cp: ContextParallel, needed: Tensor | None) -> Route:
    """The route of this rank.

    needed: bool [W, W] on the host, rank r computes on the chunk of rank s; None for everybody on
    every chunk.
    """
    if needed is None:
        needed = torch.ones(cp.size, cp.size, dtype=torch.bool)
    windows = tuple(tuple(window) for window in cp.windows)
    return _route(windows, cp.rank, needed.numpy().tobytes())


@functools.lru_cache(maxsize=64)
def _route(windows: tuple[tuple[int, ...], ...], rank: int, needed_bytes: bytes) -> Route:
    """Remembered by plain values, as all layers ask alike: a GPU would wait for its hundred small
    operations."""
    inter = len(windows)
    intra = len(windows[0])
    needed = torch.frombuffer(bytearray(needed_bytes), dtype=torch.bool)
    needed = needed.view(inter * intra, inter * intra)
    computes = [
        [bool(needed[rank, source]) or source == rank for source in window] for window in windows
    ]
    kv = _own_hops(windows, routing.hops_needed(needed, inter, intra))
    gradient = _own_hops(windows, routing.gradient_hops(needed, inter, intra))
    return Route(computes, kv, gradient)


def _own_hops(windows: tuple[tuple[int, ...], ...], hops: routing.Hops) -> Hops:
    """This rank's share of the hops of all ranks."""

    def inner(source: int, window: int, place: int) -> bool:
        return bool(hops.inner_from[source, window] <= place < hops.inner_to[source, window])

    def outer(source: int, window: int) -> bool:
        return bool(hops.outer_from[source] <= window < hops.outer_to[source])

    # The chunk that comes next in a window, and with the next window. After the last window a
    # chunk's gradient comes home, to the rank that had it in the first.
    next_in_window = [window[1:] + window[:1] for window in windows]
    first = [window[0] for window in windows]
    next_first = first[1:] + first[:1]
    return Hops(
        inner_sends=[
            [inner(source, o, t) for t, source in enumerate(window)]
            for o, window in enumerate(windows)
        ],
        inner_receives=[
            [inner(source, o, t) for t, source in enumerate(window)]
            for o, window in enumerate(next_in_window)
        ],
        outer_sends=[outer(source, o) for o, source in enumerate(first)],
        outer_receives=[outer(source, o) for o, source in enumerate(next_first)],
    )


def circulate(cp: ContextParallel, route: Route, chunks: list[Chunk]) -> Iterator[Step]:
    """The steps in the schedule's order; transfers run while the caller computes.

    chunks: this rank's, of each group of KV heads. Within a window one group comes after the
    other, so that with several groups the second is still on its way from another node while the
    first is computed.
    """
    outer = [_outer_hop(cp, route, chunk, group, 0) for group, chunk in enumerate(chunks)]
    for o in range(len(cp.windows)):
        for group, own_chunk in enumerate(chunks):
            chunk = own_chunk
            if o > 0:
                chunk = _received(outer[group], own_chunk)
                outer[group] = _outer_hop(cp, route, chunk, group, o)
            yield from _circulate_in_window(cp, route, chunk, own_chunk, group, o, first_place=0)


def circulate_backward(cp: ContextParallel, route: Route, chunks: list[Chunk]) -> Iterator[Step]:
    """As circulate(), in the order in which gradients can hide.

    Of the first window only its first step, then the other windows, then the rest of the first
    one, during which the last gradients come home from other nodes.
    """
    outer = [_outer_hop(cp, route, chunk, group, 0) for group, chunk in enumerate(chunks)]
    # The first hop inside the node, into memory where it stays while other windows are computed.
    held: list[Transfer | None] = [None] * len(chunks)
    if len(cp.windows[0]) > 1:
        sends = route.kv.inner_sends[0][0]
        receives = route.kv.inner_receives[0][0]
        for group, chunk in enumerate(chunks):
            held[group] = cp.shift(chunk, "inner", f"inner held {group}", sends, receives)
    for group, chunk in enumerate(chunks):
        yield Step(group, 0, 0, 0, cp.windows[0][0], chunk)
    for o in range(1, len(cp.windows)):
        for group, own_chunk in enumerate(chunks):
            chunk = _received(outer[group], own_chunk)
            outer[group] = _outer_hop(cp, route, chunk, group, o)
            yield from _circulate_in_window(cp, route, chunk, own_chunk, group, o, first_place=0)
    for group, own_chunk in enumerate(chunks):
        if held[group] is not None:
            chunk = _received(held[group], own_chunk)
            yield from _circulate_in_window(cp, route, chunk, own_chunk, group, 0, first_place=1)


def _circulate_in_window(
    cp: ContextParallel,
    route: Route,
    chunk: Chunk,
    own_chunk: Chunk,
    group: int,
    window: int,
    first_place: int,
) -> Iterator[Step]:
    """The steps of one window from `first_place` on; `chunk` is the one in hand there."""
    sources = cp.windows[window]
    for place in range(first_place, len(sources)):
        transfer = None
        if place + 1 < len(sources):
            transfer = cp.shift(
                chunk,
                "inner",
                f"inner {place % 2} {group}",
                route.kv.inner_sends[window][place],
                route.kv.inner_receives[window][place],
            )
        number = window * len(sources) + place
        yield Step(group, window, place, number, sources[place], chunk)
        if transfer is not None:
            chunk = _received(transfer, own_chunk)


def _received(transfer: Transfer, own_chunk: Chunk) -> Chunk:
    """What a transfer brought. If it brought nothing, a placeholder with the right shape, which is
    never read."""
    return transfer.wait() or own_chunk


def _outer_hop(
    cp: ContextParallel, route: Route, chunk: Chunk, group: int, window: int
) -> Transfer | None:
    """To the next node, at the start of a window; None after the last one."""
    if window + 1 == len(cp.windows):
        return None
    sends = route.kv.outer_sends[window]
    receives = route.kv.outer_receives[window]
    return cp.shift(chunk, "outer", f"outer {window % 2} {group}", sends, receives)


def circulate_with_gradients(
    cp: ContextParallel,
    route: Route,
    chunks: list[Chunk],
    gradient_of: Callable[[Step], Tensor],
) -> list[Tensor]:
    """For each group: the gradient of this rank's chunk, summed over ranks and brought home.

    gradient_of(step) is the gradient of the step's chunk through this rank's work.

    Where a chunk enters a node, that rank's share waits for what the node's other ranks add up
    along the inner ring. The sums of nodes add up along the outer ring. Each hop has the next
    step's work to hide behind.
    """
    homes = [_Homeward(cp, route, group) for group in range(len(chunks))]
    for step in circulate_backward(cp, route, chunks):
        starts_rest_of_first_window = step.group == 0 and step.number == 1
        if step.place == 0 or starts_rest_of_first_window:
            # The window before this one is over. Its gradient leaves for another node before this
            # step is computed, not after: the hop inside the node that it waits for is the shorter.
            homes[step.group - 1].finish_node()
        computes = route.computes[step.window][step.place]
        gradient = gradient_of(step) if computes else None
        homes[step.group].step(step.window, step.place, gradient)
    return [home.finish() for home in homes]


class _Homeward:
    """The gradients of one group's chunks on their way home.

    own: this rank's share of its own chunk. node: window and share of the chunk that entered the
    node here. like: any gradient, for its shape. inner follows the chunk in hand, outer brings
    other nodes' sums.
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
            self.hops.inner_sends[window][place],
            self.hops.inner_receives[window][place],
        )

    def finish(self) -> Tensor:
        """This rank's own gradient, after the last step."""
        self.finish_node()
        return self._sum(self._sum(self.own, self.inner), self.outer)

    def finish_node(self) -> None:
        """A window is over: what the node's other ranks added to its first chunk's gradient has
        come around, and goes on to the next node."""
        if self.node is None:
            return
        window, gradient = self.node
        gradient = self._sum(self._sum(gradient, self.inner), self.outer)
        self.outer = self._shift(
            gradient,
            "outer_gradient",
            f"outer gradient {window % 2}",
            self.hops.outer_sends[window],
            self.hops.outer_receives[window],
        )
        self.inner = None
        self.node = None

    def _shift(
        self, gradient: Tensor | None, axis: str, slot: str, sends: bool, receives: bool
    ) -> Transfer | None:
        if not sends and not receives:
            return None
        if gradient is None:
            gradient = self.like  # Nothing to send, but what comes has this shape.
        sent = gradient.to(self.cp.gradient_dtype or gradient.dtype)
        return self.cp.shift([sent], axis, f"{slot} {self.group}", sends, receives)

    def _sum(self, own: Tensor | None, transfer: Transfer | None) -> Tensor | None:
        """own + what the transfer brought, either of which may be missing.

        Never the buffer in which it was received.
        """
        received = transfer.wait() if transfer else None
        if not received:
            return own
        if own is None:
            return received[0].to(self.like.dtype, copy=True)
        return own.add_(received[0])
