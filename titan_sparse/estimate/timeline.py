"""Plays the transfers and kernels of one attention layer through, on all ranks at once.

Integers and rates come in, seconds come out. The order of events is that of schedules/transport.py,
all_gather.py and group_cast.py. A transfer is posted before the step that it hides behind. It
begins when both its ends have come to it. It is waited for after the step, by the sender too.
Transfers of one communicator go one after the other. Those of different communicators are taken
not to slow down each other or the kernels.

W is the number of ranks everywhere.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.routing import Hops


class Timeline(NamedTuple):
    """What one pass takes on each rank, both float64 [W, steps].

    compute: seconds of kernels and launches.
    waiting: seconds after each step in which nothing was left to compute: exposed communication.
    """

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
    """The exchange of the gathered verticals, beside the other transfers.

    seconds: that it takes.
    step: int64 [W]. In the forward the step before which each rank needs the verticals; in the
        backward the step after which it has all their gradients. Steps are counted as in the
        forward.
    """

    seconds: float
    step: Tensor


class RingTransfers(NamedTuple):
    """What goes around the inner and the outer ring: chunks, or their gradients.

    hops: which transfers are made.
    inner_seconds, outer_seconds: float64 [W], of one transfer from the previous rank of that ring.
    """

    hops: Hops
    inner_seconds: Tensor
    outer_seconds: Tensor


def previous_ranks(inter: int, intra: int) -> tuple[Tensor, Tensor]:
    """The previous rank of each rank on the inner and on the outer ring, int64 [W] each."""
    ranks = inter * intra
    rank = torch.arange(ranks)
    first_of_node = rank // intra * intra
    inner = first_of_node + (rank - 1) % intra
    outer = (rank - intra) % ranks
    return inner, outer


class _Communicator:
    """Transfers around one ring, one after the other.

    A transfer is one kernel on one stream, which both sends and receives. So the next one of a rank
    begins once its send and its receive of the one before are over.

    previous: int64 [W], the rank before each one. seconds: [W], of a transfer from it.
    """

    def __init__(self, previous: Tensor, seconds: Tensor):
        self.previous = previous
        self.next = previous.argsort()
        self.seconds = seconds
        self.free = torch.zeros(len(previous), dtype=torch.float64)

    def post(self, now: Tensor, sends: Tensor) -> Tensor:
        """Each rank comes to a transfer at `now` [W], and sends or does not, bool [W].

        Returns when it has sent and received its share, [W]; -inf where it has neither.
        """
        ready = torch.maximum(now, self.free)
        # A rank receives what the previous one sends, once both have come to it.
        receives = sends[self.previous]
        sender_ready = ready[self.previous]
        both_ready = torch.maximum(ready, sender_ready)
        arrived = both_ready + self.seconds
        received = torch.where(receives, arrived, -torch.inf)
        # Sending is over when the next rank has received.
        sent = torch.where(sends, received[self.next], -torch.inf)
        over = torch.maximum(received, sent)
        self.free = torch.maximum(self.free, over)
        return over


class _Rings:
    """The inner and the outer ring, and who sends on them when.

    inner_sends: bool [W, steps], rank r sends after step t what belongs to the chunk that it
        computed on. outer_sends: bool [W, inter], the same after window o.
    """

    def __init__(self, transfers: RingTransfers, sources: Tensor):
        hops = transfers.hops
        ranks, inter = hops.inner_to.shape
        intra = ranks // inter
        inner_previous, outer_previous = previous_ranks(inter, intra)
        self.inner = _Communicator(inner_previous, transfers.inner_seconds)
        self.outer = _Communicator(outer_previous, transfers.outer_seconds)

        window = torch.arange(ranks) // intra
        step_of_window = torch.arange(ranks) % intra
        inner_from = hops.inner_from[sources, window]
        inner_to = hops.inner_to[sources, window]
        self.inner_sends = (inner_from <= step_of_window) & (step_of_window < inner_to)

        # What a window works on is the chunk of its first step.
        first_source = sources[:, ::intra]
        windows = torch.arange(inter)
        outer_from = hops.outer_from[first_source]
        outer_to = hops.outer_to[first_source]
        self.outer_sends = (outer_from <= windows) & (windows < outer_to)

    def post_inner(self, now: Tensor, step: int) -> Tensor:
        """The transfer inside nodes after a step; returns when it is over, [W]."""
        sends = self.inner_sends[:, step]
        return self.inner.post(now, sends)

    def post_outer(self, now: Tensor, window: int) -> Tensor:
        """The transfer between nodes after a window; returns when it is over, [W]."""
        sends = self.outer_sends[:, window]
        return self.outer.post(now, sends)


class _Clock:
    """The ranks' compute streams.

    now: [W] seconds. compute: [W, steps] seconds of one unit of work of each step; a step has as
    many as there are groups of heads. waiting: [W, steps], after all units of a step.
    ended: [W, steps], when the last unit of each step was done.
    """

    def __init__(self, compute: Tensor):
        self.now = torch.zeros(len(compute), dtype=torch.float64)
        self.compute = compute
        self.waiting = torch.zeros_like(compute)
        self.ended = torch.zeros_like(compute)
        self.step = 0

    def work(self, step: int) -> None:
        """Compute one unit of a step."""
        self.now = self.now + self.compute[:, step]
        self.step = step
        self.ended[:, step] = self.now

    def wait(self, until: Tensor) -> None:
        """Wait, and count it to the step that was computed last. until: [W], or -inf."""
        now = torch.maximum(self.now, until)
        self.waiting[:, self.step] += now - self.now
        self.now = now

    def wait_for_verticals(self, verticals: VerticalExchange | None, step: int) -> None:
        """Those ranks wait that need the verticals before this step. They were sent at time 0."""
        if verticals is None:
            return
        needed_now = verticals.step == step
        self.wait(torch.where(needed_now, verticals.seconds, -torch.inf))

    def wait_for_vertical_gradients(self, verticals: VerticalExchange | None) -> None:
        """The exchange begins when the last rank has all gradients of its verticals."""
        if verticals is None:
            return
        # [W, 1]
        last_step = verticals.step[:, None]
        complete = self.ended.gather(1, last_step)
        self.wait(complete.max() + verticals.seconds)


def ring_forward(
    compute: Tensor,
    keys: RingTransfers,
    sources: Tensor,
    groups: int = 1,
    verticals: VerticalExchange | None = None,
) -> Timeline:
    """The forward of a ring or double ring, as transport.circulate() runs it.

    compute: float64 [W, steps], seconds of one of `groups` equal groups of KV heads.
    keys: transfers of one group's chunk. sources: from visits.step_sources().
    verticals: their exchange begins at the start, and the first group waits for it.
    The timeline sums over groups.
    """
    rings = _Rings(keys, sources)
    windows = keys.hops.inner_to.shape[1]
    steps = compute.shape[1] // windows
    clock = _Clock(compute)
    # By group, when its chunk from the previous node is here.
    from_node = [rings.post_outer(clock.now, 0) for _ in range(groups)]
    for window, group in itertools.product(range(windows), range(groups)):
        if window:
            clock.wait(from_node[group])
            from_node[group] = rings.post_outer(clock.now, window)
        for step in range(window * steps, (window + 1) * steps):
            next_chunk = rings.post_inner(clock.now, step)
            if group == 0:
                clock.wait_for_verticals(verticals, step)
            clock.work(step)
            clock.wait(next_chunk)
    return Timeline(compute * groups, clock.waiting)


def ring_backward(
    compute: Tensor,
    keys: RingTransfers,
    gradients: RingTransfers,
    sources: Tensor,
    groups: int = 1,
    verticals: VerticalExchange | None = None,
) -> Timeline:
    """The backward of a ring or double ring, as transport.circulate_with_gradients() runs it.

    It takes the first step of the first window for all groups, then the other windows, then the
    rest of the first. Arguments are as for ring_forward(). gradients: transfers of one group's dK
    and dV. verticals: their exchange begins after the last group and is waited for at the end.
    """
    rings = _Rings(keys, sources)
    gradient_rings = _Rings(gradients, sources)
    windows = keys.hops.inner_to.shape[1]
    steps = compute.shape[1] // windows
    clock = _Clock(compute)
    homeward = [_Homeward(clock, gradient_rings) for _ in range(groups)]
    # By group, when the chunk of the next window and that of the first window's next step are here.
    from_node = [rings.post_outer(clock.now, 0) for _ in range(groups)]
    held_back = [rings.post_inner(clock.now, 0) for _ in range(groups)]
    for _ in range(groups):
        clock.work(0)
    first_window_last = [*range(1, windows), 0]
    for window, group in itertools.product(first_window_last, range(groups)):
        first_step = window * steps
        if window:
            clock.wait(from_node[group])
            from_node[group] = rings.post_outer(clock.now, window)
        else:
            clock.wait(held_back[group])
            # Step 0 is done already.
            first_step = 1
        for step in range(first_step, (window + 1) * steps):
            next_chunk = rings.post_inner(clock.now, step)
            begins_window = step % steps == 0
            first_of_rest = group == 0 and step == 1
            if begins_window or first_of_rest:
                # The group before (for group 0 the last one) has finished its window by now.
                homeward[group - 1].finish_node()
            homeward[group].work(step, window if begins_window else None)
            clock.wait(next_chunk)
    for group_homeward in homeward:
        group_homeward.finish()
    clock.wait_for_vertical_gradients(verticals)
    return Timeline(compute * groups, clock.waiting)


class _Homeward:
    """The gradients of one group of heads on their way home, as transport._Homeward.

    inner, outer: [W], when their last transfers on either ring are over. window: whose sum has not
    gone on to the next node; None if there is none.
    """

    def __init__(self, clock: _Clock, rings: _Rings):
        self.clock = clock
        self.rings = rings
        self.inner = torch.full_like(clock.now, -torch.inf)
        self.outer = torch.full_like(clock.now, -torch.inf)
        self.window: int | None = None

    def work(self, step: int, begins: int | None) -> None:
        """The work of a step, whose gradient then goes on.

        begins: the window, if this is the first step of one.
        """
        self.clock.work(step)
        if begins is None:
            # The gradient from the previous rank has to be added.
            self.clock.wait(self.inner)
        else:
            self.window = begins
        self.inner = self.rings.post_inner(self.clock.now, step)

    def finish_node(self) -> None:
        """Send the sum of the last window on to the next node."""
        if self.window is None:
            return
        # What arrives on either ring is added before the sum goes on.
        self.clock.wait(torch.maximum(self.inner, self.outer))
        self.outer = self.rings.post_outer(self.clock.now, self.window)
        self.inner = torch.full_like(self.inner, -torch.inf)
        self.window = None

    def finish(self) -> None:
        """Wait until all gradients are home."""
        self.finish_node()
        self.clock.wait(torch.maximum(self.inner, self.outer))


def gather_forward(compute: Tensor, gather: float) -> Timeline:
    """The forward of all_gather.

    compute: [W, KV heads] seconds. gather: seconds to gather one KV head, which happens while the
    head before is computed.
    """
    now = torch.zeros(len(compute), dtype=torch.float64)
    waiting = torch.zeros_like(compute)
    arrives = gather
    for head in range(compute.shape[1]):
        began = now.clamp(min=arrives)
        # The next gather begins when all ranks have come to it and this one is over.
        arrives = max(now.max().item(), arrives) + gather
        waiting[:, head] = began - now
        now = began + compute[:, head]
    return Timeline(compute, waiting)


def gather_backward(compute: Tensor, gather: float, scatter: float) -> Timeline:
    """The backward of all_gather; see gather_forward().

    scatter: seconds to bring the gradient of one KV head home, while the next head is computed.
    """
    timeline = gather_forward(compute, gather)
    # [W, KV heads]: when each rank is done with each head.
    seconds_of_heads = timeline.compute + timeline.waiting
    ends = seconds_of_heads.cumsum(1)
    home = 0.0
    for head in range(compute.shape[1]):
        # A scatter begins when all ranks have computed the head and the one before is over.
        last_end = ends[:, head].max().item()
        home = max(home, last_end) + scatter
    waiting_at_end = home - ends[:, -1]
    timeline.waiting[:, -1] += waiting_at_end
    return timeline


def with_verticals(timeline: Timeline, seconds: float, begins: Tensor, needed: Tensor) -> Timeline:
    """The timeline with an exchange of verticals beside it.

    begins, needed: [W] seconds. The exchange starts when the last rank begins it, and each rank
    waits for it at `needed`.
    """
    late = (begins.max() + seconds - needed).clamp(min=0)
    waiting = timeline.waiting.clone()
    waiting[:, -1] += late
    return Timeline(timeline.compute, waiting)


class Exchanges(NamedTuple):
    """Seconds of the all-to-alls of each stage of group_cast, float64 [W, stages].

    outer: between nodes. inner: inside nodes. 0 where a rank sends and receives nothing.
    """

    outer: Tensor
    inner: Tensor


_OUTER_DIM = 0
_INNER_DIM = 1
"""Dims of a [inter, intra] table of ranks along which the members of a communicator are."""


class _AllToAll:
    """The all-to-alls of one kind of communicator, one after the other.

    shape: (inter, intra). dim: along which the members of one communicator are.
    """

    def __init__(self, shape: tuple[int, int], dim: int):
        inter, intra = shape
        self.shape = shape
        self.dim = dim
        self.free = torch.zeros(inter * intra, dtype=torch.float64)

    def post(self, now: Tensor, seconds: Tensor) -> Tensor:
        """Each rank comes to an exchange at `now` [W] that takes it `seconds` [W].

        It begins when all members have come. Returns when it is over, [W]; -inf where no member
        sends anything.
        """
        # [inter, intra]
        ready = torch.maximum(now, self.free).view(self.shape)
        seconds = seconds.view(self.shape)
        # One value for each communicator: the dim of its members becomes 1.
        anybody_sends = (seconds > 0).any(self.dim, keepdim=True)
        all_ready = ready.amax(self.dim, keepdim=True)
        ended = all_ready + seconds
        # [W]
        over = torch.where(anybody_sends, ended, -torch.inf).flatten()
        self.free = torch.maximum(self.free, over)
        return over


class _Arrivals:
    """The blocks of keys of each stage on their way to the ranks that need them.

    All exchanges between nodes are begun at the start.
    """

    def __init__(self, keys: Exchanges, shape: tuple[int, int]):
        self.inner = _AllToAll(shape, _INNER_DIM)
        self.inner_seconds = keys.inner
        outer = _AllToAll(shape, _OUTER_DIM)
        start = torch.zeros_like(outer.free)
        # By stage, when its blocks have come from other nodes: [W] each.
        self.crossed = [outer.post(start, seconds) for seconds in keys.outer.unbind(1)]

    def post(self, now: Tensor, stage: int) -> Tensor:
        """Post a stage's exchange inside nodes; returns when all blocks of the stage are here, [W].

        There is none behind the last stage: -inf.
        """
        if stage == len(self.crossed):
            return torch.full_like(now, -torch.inf)
        crossed = self.crossed[stage]
        # Inside a node ranks hand on what has come from other nodes.
        ready = torch.maximum(now, crossed)
        seconds = self.inner_seconds[:, stage]
        handed_on = self.inner.post(ready, seconds)
        return torch.maximum(handed_on, crossed)


def cast_forward(
    compute: Tensor,
    keys: Exchanges,
    shape: tuple[int, int],
    verticals: VerticalExchange | None = None,
) -> Timeline:
    """The forward of group_cast, as group_cast.py runs it.

    compute: float64 [W, 1 + stages], seconds of the own blocks and of each stage.
    shape: (inter, intra). verticals: begun at the start.
    """
    clock = _Clock(compute)
    arrivals = _Arrivals(keys, shape)
    arrives = arrivals.post(clock.now, 0)
    for step in range(compute.shape[1]):
        if step:
            clock.wait(arrives)
            arrives = arrivals.post(clock.now, step)
        clock.wait_for_verticals(verticals, step)
        clock.work(step)
    return Timeline(compute, clock.waiting)


def cast_backward(
    compute: Tensor,
    keys: Exchanges,
    gradients: Exchanges,
    shape: tuple[int, int],
    verticals: VerticalExchange | None = None,
) -> Timeline:
    """The backward of group_cast; see cast_forward().

    compute: float64 [W, 1 + stages + 1], because the own blocks come in two shares, at the start
    and at the end. verticals: waited for at the end.
    """
    clock = _Clock(compute)
    arrivals = _Arrivals(keys, shape)
    inner = _AllToAll(shape, _INNER_DIM)
    outer = _AllToAll(shape, _OUTER_DIM)
    last_step = compute.shape[1] - 1
    arrives = arrivals.post(clock.now, 0)
    for step in range(last_step):
        if step:
            clock.wait(arrives)
            arrives = arrivals.post(clock.now, step)
        clock.work(step)
        if step:
            # Gradients of the stage go home: inside the node first, then between nodes.
            handed_back = inner.post(clock.now, gradients.inner[:, step - 1])
            collected = torch.maximum(clock.now, handed_back)
            outer.post(collected, gradients.outer[:, step - 1])
    clock.work(last_step)
    clock.wait(torch.maximum(inner.free, outer.free))
    clock.wait_for_vertical_gradients(verticals)
    return Timeline(compute, clock.waiting)
