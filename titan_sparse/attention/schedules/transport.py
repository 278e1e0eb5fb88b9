"""Moving chunks around the ranks of a schedule while the caller computes, forward and backward.

Inside a window a chunk moves one inner hop a step; from one window to the next, one outer hop, which has the whole
window to take place. Gradients follow one step behind. A hop that serves nobody is not made (routing.py). What is
received lies in buffers that are kept from call to call.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import routing
from titan_sparse.attention.context_parallel.group import ContextParallel, Transfer

Chunk = list[Tensor]
Windows = tuple[tuple[int, ...], ...]
"""ContextParallel.windows, as what can be remembered."""


class Route(NamedTuple):
    """What this rank does, by window and step: compute on the chunk, send it on, receive the next one.

    kv, gradient: (sends, receives) of inner hops [window][step], then of outer hops [window].
    """

    compute: list[list[bool]]
    kv: tuple[list, list, list, list]
    gradient: tuple[list, list, list, list]


def route(cp: ContextParallel, needed: Tensor | None) -> Route:
    """needed: bool [W, W] on the host, rank r computes on the chunk of rank s; None: everybody on every chunk."""
    if needed is None:
        needed = torch.ones(cp.size, cp.size, dtype=torch.bool)
    return _route(tuple(map(tuple, cp.windows)), cp.rank, needed.numpy().tobytes())


@functools.lru_cache(maxsize=64)
def _route(windows: Windows, rank: int, needed: bytes) -> Route:
    """Remembered, as all layers ask alike: a GPU would wait for its hundred small operations. By plain values, since a
    ContextParallel that is remembered would keep its process groups beyond their end."""
    inter, intra = len(windows), len(windows[0])
    needed = torch.frombuffer(bytearray(needed), dtype=torch.bool).view(inter * intra, -1)
    compute = [
        [bool(needed[rank, source]) or source == rank for source in window] for window in windows
    ]
    return Route(
        compute,
        _own_hops(windows, routing.hops_needed(needed, inter, intra)),
        _own_hops(windows, routing.gradient_hops(needed, inter, intra)),
    )


def _own_hops(windows: Windows, hops: routing.Hops) -> tuple[list, list, list, list]:
    """inner sends, inner receives, outer sends, outer receives: of the chunk in hand, and of the one to come."""
    inner = lambda source, o, t: bool(hops.inner_from[source, o] <= t < hops.inner_to[source, o])
    outer = lambda source, o: bool(hops.outer_from[source] <= o < hops.outer_to[source])
    following = [window[1:] + window[:1] for window in windows]
    # After the last window a chunk's gradient comes home, to the rank that had it in the first.
    bases = [window[0] for window in windows]
    return (
        [
            [inner(source, o, t) for t, source in enumerate(window)]
            for o, window in enumerate(windows)
        ],
        [
            [inner(source, o, t) for t, source in enumerate(window)]
            for o, window in enumerate(following)
        ],
        [outer(source, o) for o, source in enumerate(bases)],
        [outer(source, o) for o, source in enumerate(bases[1:] + bases[:1])],
    )


def circulate(
    cp: ContextParallel, route: Route, chunks: list[Chunk]
) -> Iterator[tuple[int, int, int, int, Chunk]]:
    """(group, window, step, source rank, its chunk) in the schedule's order; transfers run while the caller computes.

    chunks: of each group of KV heads. Within a window one group is computed after the other, so that with several the
    second is still on its way from another node while the first is computed.
    """
    sends, receives, *_ = route.kv
    groups, windows = range(len(chunks)), cp.windows
    outer = [_outer_hop(cp, route, chunk, group, 0) for group, chunk in enumerate(chunks)]
    for (o, window), group in itertools.product(enumerate(windows), groups):
        # What was not worth receiving is stood in for by the own chunk, for its shape: nobody reads it.
        chunk = (outer[group].wait() or chunks[group]) if o else chunks[group]
        outer[group] = _outer_hop(cp, route, chunk, group, o) if o else outer[group]
        for t, source in enumerate(window):
            inner = None
            if t + 1 < len(window):
                inner = cp.shift(
                    chunk, "inner", f"inner {t % 2} {group}", sends[o][t], receives[o][t]
                )
            yield group, o, t, source, chunk
            chunk = (inner.wait() or chunks[group]) if inner else chunk


def circulate_backward(
    cp: ContextParallel, route: Route, chunks: list[Chunk]
) -> Iterator[tuple[int, int, int, int, Chunk]]:
    """As circulate(), in the order in which gradients can hide: of the first window only its first step, then the other
    windows, then the rest of the first one, which the last gradients from other nodes have to come home."""
    sends, receives, *_ = route.kv
    groups, windows = range(len(chunks)), cp.windows
    outer = [_outer_hop(cp, route, chunk, group, 0) for group, chunk in enumerate(chunks)]
    held = [_held_hop(cp, route, chunk, group) for group, chunk in enumerate(chunks)]
    for group in groups:
        yield group, 0, 0, windows[0][0], chunks[group]
    for o, group in itertools.product([*range(1, len(windows)), 0], groups):
        first = 0 if o else 1
        if o:
            chunk = outer[group].wait() or chunks[group]
            outer[group] = _outer_hop(cp, route, chunk, group, o)
        elif held[group]:
            chunk = held[group].wait() or chunks[group]
        for t in range(first, len(windows[o])):
            inner = None
            if t + 1 < len(windows[o]):
                inner = cp.shift(
                    chunk, "inner", f"inner {t % 2} {group}", sends[o][t], receives[o][t]
                )
            yield group, o, t, windows[o][t], chunk
            chunk = (inner.wait() or chunks[group]) if inner else chunk


def _outer_hop(
    cp: ContextParallel, route: Route, chunk: Chunk, group: int, window: int
) -> Transfer | None:
    """To the next node, at the start of a window; None after the last one."""
    if window + 1 == len(cp.windows):
        return None
    return cp.shift(
        chunk, "outer", f"outer {window % 2} {group}", route.kv[2][window], route.kv[3][window]
    )


def _held_hop(cp: ContextParallel, route: Route, chunk: Chunk, group: int) -> Transfer | None:
    """The first hop inside the node, into memory where it stays while other windows are computed."""
    if len(cp.windows[0]) == 1:
        return None
    return cp.shift(chunk, "inner", f"inner held {group}", route.kv[0][0][0], route.kv[1][0][0])


def circulate_with_gradients(
    cp: ContextParallel,
    route: Route,
    chunks: list[Chunk],
    piece: Callable[[int, int, Chunk], Tensor],
) -> list[Tensor]:
    """Of each group: the sum over ranks of piece(group, source, chunk), the gradient of a rank's chunk through another's
    work, brought home.

    The share of the rank where a chunk enters a node waits there for what the node's other ranks add up along the inner
    ring; the sums of nodes add up along the outer ring. Each hop has the following piece's work to hide behind.
    """
    homes = [_Homeward(cp, route, group) for group in range(len(chunks))]
    for group, o, t, source, current in circulate_backward(cp, route, chunks):
        if t == 0 or (group, o, t) == (0, 0, 1):
            # The window before this one is over. Its gradient leaves for another node before this piece is computed,
            # not after: the hop inside the node that it waits for is the shorter one.
            homes[group - 1].finish_node()
        homes[group].step(o, t, piece(group, source, current) if route.compute[o][t] else None)
    return [home.finish() for home in homes]


class _Homeward:
    """A group's gradients on their way: `inner` follows the chunk in hand; `node`, the share of a window's first step, waits for
    it; `outer` brings other nodes' sums.

    own: this rank's share of its own chunk. like: any gradient, for its shape.
    """

    def __init__(self, cp: ContextParallel, route: Route, group: int):
        self.cp, self.hops, self.group = cp, route.gradient, group
        self.own, self.node, self.like = None, None, None
        self.inner: Transfer | None = None
        self.outer: Transfer | None = None

    def step(self, o: int, t: int, part: Tensor | None) -> None:
        """After the work of a step; part: its gradient, None if there was no work."""
        self.like = self.like if part is None else part
        if t == 0:
            self.own, self.node = (part, None) if o == 0 else (self.own, (o, part))
        else:
            part = self._sum(part, self.inner)
        sends, receives = self.hops[0][o][t], self.hops[1][o][t]
        self.inner = self._shift(part, "inner_gradient", f"inner gradient {t % 2}", sends, receives)

    def finish(self) -> Tensor:
        """This rank's own gradient, after the last step."""
        self.finish_node()
        return self._sum(self._sum(self.own, self.inner), self.outer)

    def finish_node(self) -> None:
        """A window is over: what the other ranks of the node found out about its first chunk has come round, and goes on."""
        if self.node is None:
            return
        o, part = self.node
        part = self._sum(self._sum(part, self.inner), self.outer)
        sends, receives = self.hops[2][o], self.hops[3][o]
        self.outer = self._shift(part, "outer_gradient", f"outer gradient {o % 2}", sends, receives)
        self.inner = self.node = None

    def _shift(
        self, part: Tensor | None, axis: str, slot: str, sends: bool, receives: bool
    ) -> Transfer | None:
        if not sends and not receives:
            return None
        part = self.like if part is None else part  # nothing to send, but its shape is what comes
        sent = [part.to(self.cp.gradient_dtype or part.dtype)]
        return self.cp.shift(sent, axis, f"{slot} {self.group}", sends, receives)

    def _sum(self, own: Tensor | None, transfer: Transfer | None) -> Tensor | None:
        """own + what the transfer brought, either of which may be missing; never the buffer that it was received in."""
        received = transfer.wait() if transfer else None
        if not received:
            return own
        return received[0].to(self.like.dtype, copy=True) if own is None else own.add_(received[0])
