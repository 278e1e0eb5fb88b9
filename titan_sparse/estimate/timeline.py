"""Plays the transfers and kernels of one attention layer through, on all ranks at once: seconds from integers and rates.

The order of events is that of attention/transport.py, gathered.py and group_cast.py: a transfer is posted before the
step that it hides behind, begins when both its ends have come to it, and is waited for after the step, by the sender too. Those of one
communicator go one after the other; those of different ones are taken not to slow each other down or the kernels.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.routing import Hops

Links = tuple[Tensor, Tensor]
"""Seconds of one transfer from the previous rank of the inner and of the outer ring, float64 [W] each."""


class Timeline(NamedTuple):
    """compute: [W, steps] seconds of kernels and launches. waiting: [W, steps] seconds after each step in which nothing
    was left to compute: exposed communication. Both float64."""

    compute: Tensor
    waiting: Tensor

    def finish(self) -> Tensor:
        """Seconds until each rank is done, [W]."""
        return (self.compute + self.waiting).sum(-1)

    def seconds(self) -> float:
        """Seconds until the last rank is done."""
        return self.finish().max().item()

    def exposed(self) -> float:
        """Largest exposed communication of a rank, in seconds."""
        return self.waiting.sum(-1).max().item()


class VerticalExchange(NamedTuple):
    """Of the gathered verticals, beside a ring's transfers. step: int64 [W], the step before which each rank needs them,
    in the backward that after which it has all their gradients; steps are counted as in the forward."""

    seconds: float
    step: Tensor


class _Rings(NamedTuple):
    """The previous rank of each on the inner and on the outer ring, int64 [W]."""

    inner: Tensor
    outer: Tensor


def _rings(hops: Hops) -> _Rings:
    ranks, inter = hops.inner_to.shape
    intra, rank = ranks // inter, torch.arange(ranks)
    return _Rings(rank // intra * intra + (rank - 1) % intra, (rank - intra) % ranks)


def _sends(hops: Hops, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Does rank r send after step t, after window o, what belongs to the chunk that it computed on: bool [W, steps] and
    [W, inter]."""
    ranks, inter = hops.inner_to.shape
    window, step = torch.arange(ranks) // (ranks // inter), torch.arange(ranks) % (ranks // inter)
    inner = (hops.inner_from[sources, window] <= step) & (step < hops.inner_to[sources, window])
    source, window = sources[:, :: ranks // inter], torch.arange(inter)
    return inner, (hops.outer_from[source] <= window) & (window < hops.outer_to[source])


class _Communicator:
    """Transfers around one ring, one after the other: a rank's next one begins once its send and its receive of the one
    before are over, as they are one kernel on one stream. seconds: of a transfer from the previous rank, [W]."""

    def __init__(self, previous: Tensor, seconds: Tensor):
        self.previous, self.next, self.seconds = previous, previous.argsort(), seconds
        self.free = torch.zeros(len(previous), dtype=torch.float64)

    def post(self, now: Tensor, sends: Tensor) -> Tensor:
        """Each rank comes to a transfer at `now` [W], and sends or does not, bool [W]. Returns when it has sent and
        received its part, [W]; -inf where there is none."""
        ready, receives = torch.maximum(now, self.free), sends[self.previous]
        arrives = torch.where(
            receives, torch.maximum(ready, ready[self.previous]) + self.seconds, -torch.inf
        )
        over = torch.maximum(arrives, torch.where(sends, arrives[self.next], -torch.inf))
        self.free = torch.maximum(self.free, over)
        return over


def _communicators(hops: Hops, links: Links) -> tuple[_Communicator, _Communicator]:
    """Of the inner and of the outer ring."""
    return tuple(_Communicator(previous, seconds) for previous, seconds in zip(_rings(hops), links))


class _Clock:
    """The ranks' compute streams. now: [W] seconds; compute, waiting: [W, steps] of one piece, after a step's pieces;
    ended: [W, steps], when the last piece of each step was done."""

    def __init__(self, compute: Tensor):
        self.now, self.compute = torch.zeros(len(compute), dtype=torch.float64), compute
        self.waiting, self.ended, self.step = (
            torch.zeros_like(compute),
            torch.zeros_like(compute),
            0,
        )

    def work(self, step: int) -> None:
        self.now, self.step = self.now + self.compute[:, step], step
        self.ended[:, step] = self.now

    def wait(self, until: Tensor) -> None:
        now = torch.maximum(self.now, until)
        self.waiting[:, self.step] += now - self.now
        self.now = now


def ring_forward(
    compute: Tensor,
    hops: Hops,
    sources: Tensor,
    links: Links,
    groups: int = 1,
    verticals: VerticalExchange | None = None,
) -> Timeline:
    """A ring or double ring's forward, as transport.circulate(). compute: float64 [W, steps] seconds of one of `groups`
    equal groups of KV heads; sources: of balance.step_sources(); links: of one group's chunk. verticals: begun at the
    start, waited for by the first group. The timeline sums over groups."""
    (inner, outer), (to_next, to_node) = _communicators(hops, links), _sends(hops, sources)
    windows, steps, clock = to_node.shape[1], compute.shape[1] // to_node.shape[1], _Clock(compute)
    chunks = [outer.post(clock.now, to_node[:, 0]) for _ in range(groups)]
    for window, group in itertools.product(range(windows), range(groups)):
        if window:
            clock.wait(chunks[group])
            chunks[group] = outer.post(clock.now, to_node[:, window])
        for step in range(window * steps, (window + 1) * steps):
            chunk = inner.post(clock.now, to_next[:, step])
            if group == 0 and verticals:
                clock.wait(torch.where(verticals.step == step, verticals.seconds, -torch.inf))
            clock.work(step)
            clock.wait(chunk)
    return Timeline(compute * groups, clock.waiting)


def ring_backward(
    compute: Tensor,
    hops: Hops,
    gradients: Hops,
    sources: Tensor,
    links: Links,
    gradient_links: Links,
    groups: int = 1,
    verticals: VerticalExchange | None = None,
) -> Timeline:
    """A ring or double ring's backward, as transport.circulate_with_gradients(): the first step of the first window for
    all groups, the other windows, the rest of the first. Arguments as for ring_forward(); verticals: begun after the last
    group, waited for at the end."""
    (inner, outer), (to_next, to_node) = _communicators(hops, links), _sends(hops, sources)
    windows, steps, clock = to_node.shape[1], compute.shape[1] // to_node.shape[1], _Clock(compute)
    rings, sends = _communicators(gradients, gradient_links), _sends(gradients, sources)
    homes = [_Homeward(clock, rings, sends) for _ in range(groups)]
    chunks = [outer.post(clock.now, to_node[:, 0]) for _ in range(groups)]
    held = [inner.post(clock.now, to_next[:, 0]) for _ in range(groups)]
    for _ in range(groups):
        clock.work(0)
    for window, group in itertools.product([*range(1, windows), 0], range(groups)):
        clock.wait(chunks[group] if window else held[group])
        if window:
            chunks[group] = outer.post(clock.now, to_node[:, window])
        for step in range(window * steps or 1, (window + 1) * steps):
            chunk = inner.post(clock.now, to_next[:, step])
            if step % steps == 0 or (group, step) == (0, 1):
                homes[group - 1].finish_node()
            homes[group].work(step, window if step % steps == 0 else None)
            clock.wait(chunk)
    for home in homes:
        home.finish()
    if verticals:
        clock.wait(clock.ended.gather(1, verticals.step[:, None]).max() + verticals.seconds)
    return Timeline(compute * groups, clock.waiting)


class _Homeward:
    """A group's gradients, as transport._Homeward. inner, outer: when their last transfers are over, [W]; node: the
    window whose sum has not gone on to the next node."""

    def __init__(
        self,
        clock: _Clock,
        rings: tuple[_Communicator, _Communicator],
        sends: tuple[Tensor, Tensor],
    ):
        self.clock, self.rings, self.sends = clock, rings, sends
        self.inner = self.outer = torch.full_like(clock.now, -torch.inf)
        self.node: int | None = None

    def work(self, step: int, begins: int | None) -> None:
        """The work of a step, whose gradient then goes on. begins: the window, if it is the first step of one."""
        self.clock.work(step)
        if begins is None:
            self.clock.wait(self.inner)
        else:
            self.node = begins
        self.inner = self.rings[0].post(self.clock.now, self.sends[0][:, step])

    def finish_node(self) -> None:
        if self.node is None:
            return
        self.clock.wait(torch.maximum(self.inner, self.outer))
        self.outer = self.rings[1].post(self.clock.now, self.sends[1][:, self.node])
        self.inner, self.node = torch.full_like(self.inner, -torch.inf), None

    def finish(self) -> None:
        self.finish_node()
        self.clock.wait(torch.maximum(self.inner, self.outer))


def gather_forward(compute: Tensor, gather: float) -> Timeline:
    """all_gather's forward. compute: [W, KV heads] seconds; gather: of one KV head, under the last one's computing."""
    now, waiting = torch.zeros(len(compute), dtype=torch.float64), torch.zeros_like(compute)
    arrives = gather
    for head in range(compute.shape[1]):
        began = now.clamp(min=arrives)
        arrives = max(now.max().item(), arrives) + gather
        waiting[:, head] = began - now
        now = began + compute[:, head]
    return Timeline(compute, waiting)


def gather_backward(compute: Tensor, gather: float, scatter: float) -> Timeline:
    """As gather_forward(); `scatter` seconds bring the gradient of a KV head home, under the next one's computing."""
    timeline = gather_forward(compute, gather)
    ends = (timeline.compute + timeline.waiting).cumsum(1)
    home = 0.0
    for head in range(compute.shape[1]):
        home = max(home, ends[:, head].max().item()) + scatter
    timeline.waiting[:, -1] += home - ends[:, -1]
    return timeline


def with_verticals(timeline: Timeline, seconds: float, begins: Tensor, needed: Tensor) -> Timeline:
    """The same with an exchange of verticals beside it, from `begins` until it is waited for at `needed`, [W] seconds."""
    late = (begins.max() + seconds - needed).clamp(min=0)
    waiting = timeline.waiting.clone()
    waiting[:, -1] += late
    return Timeline(timeline.compute, waiting)


class Exchanges(NamedTuple):
    """Seconds of the all-to-alls of each stage of group_cast between and inside nodes, float64 [W, stages]; 0: sends and
    receives nothing."""

    outer: Tensor
    inner: Tensor


class _AllToAll:
    """The all-to-alls of one communicator, one after the other. shape: (inter, intra); dim: along which its members are."""

    def __init__(self, shape: tuple[int, int], dim: int):
        self.shape, self.dim = shape, dim
        self.free = torch.zeros(shape[0] * shape[1], dtype=torch.float64)

    def post(self, now: Tensor, seconds: Tensor) -> Tensor:
        """Each rank comes to an exchange at `now` [W]; returns when it is over, -inf where no member sends anything. It
        begins when all members have come."""
        ready, seconds = torch.maximum(now, self.free).view(self.shape), seconds.view(self.shape)
        some = (seconds > 0).any(self.dim, keepdim=True)
        over = torch.where(some, ready.amax(self.dim, keepdim=True) + seconds, -torch.inf).flatten()
        self.free = torch.maximum(self.free, over)
        return over


def cast_forward(
    compute: Tensor,
    keys: Exchanges,
    shape: tuple[int, int],
    verticals: VerticalExchange | None = None,
) -> Timeline:
    """group_cast's forward, as group_cast.py. compute: float64 [W, 1 + stages] seconds of the own blocks and of each stage;
    shape: (inter, intra)."""
    clock, arrivals = _Clock(compute), _arrivals(keys, shape)
    arrives = next(arrivals)(clock.now)
    for step in range(compute.shape[1]):
        if step:
            clock.wait(arrives)
            arrives = next(arrivals)(clock.now)
        if verticals:
            clock.wait(torch.where(verticals.step == step, verticals.seconds, -torch.inf))
        clock.work(step)
    return Timeline(compute, clock.waiting)


def cast_backward(
    compute: Tensor,
    keys: Exchanges,
    gradients: Exchanges,
    shape: tuple[int, int],
    verticals: VerticalExchange | None = None,
) -> Timeline:
    """As cast_forward(). compute: [W, 1 + stages + 1], the own blocks in two parts; verticals: waited for at the end."""
    clock, arrivals = _Clock(compute), _arrivals(keys, shape)
    inner, outer = _AllToAll(shape, 1), _AllToAll(shape, 0)
    arrives = next(arrivals)(clock.now)
    for step in range(compute.shape[1] - 1):
        if step:
            clock.wait(arrives)
            arrives = next(arrivals)(clock.now)
        clock.work(step)
        if step:
            handed = inner.post(clock.now, gradients.inner[:, step - 1])
            outer.post(torch.maximum(clock.now, handed), gradients.outer[:, step - 1])
    clock.work(compute.shape[1] - 1)
    clock.wait(torch.maximum(inner.free, outer.free))
    if verticals:
        clock.wait(clock.ended.gather(1, verticals.step[:, None]).max() + verticals.seconds)
    return Timeline(compute, clock.waiting)


def _arrivals(keys: Exchanges, shape: tuple[int, int]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Of each stage a function that posts its exchange inside the node and says when it is over; those between nodes have
    begun at the start. Then of one that brings nothing."""
    outer, inner = _AllToAll(shape, 0), _AllToAll(shape, 1)
    start = torch.zeros_like(outer.free)
    came = [outer.post(start, seconds) for seconds in keys.outer.unbind(1)]
    for crossing, seconds in zip(came, keys.inner.unbind(1)):
        yield lambda now, crossing=crossing, seconds=seconds: torch.maximum(
            inner.post(torch.maximum(now, crossing), seconds), crossing
        )
    yield lambda now: torch.full_like(now, -torch.inf)
