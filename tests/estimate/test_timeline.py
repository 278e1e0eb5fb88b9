"""Timelines of transfers, against a simulation event by event and by hand."""

from types import SimpleNamespace

import pytest
import torch

from titan_sparse.attention.context_parallel.routing import gradient_hops, hops_needed
from titan_sparse.attention.context_parallel.schedule import DOUBLE_RING, vertical_steps
from titan_sparse.attention.observe.visits import step_sources
from titan_sparse.attention.schedules import transport
from titan_sparse.estimate.timeline import (
    Exchanges,
    RingTransfers,
    VerticalExchange,
    cast_backward,
    cast_forward,
    gather_backward,
    gather_forward,
    ring_backward,
    ring_forward,
    with_verticals,
)

WORLDS = [(1, 1), (1, 3), (1, 4), (2, 2), (3, 2), (2, 3), (4, 2)]


class Recorder:
    """What one rank does in transport.py, in order, instead of a ContextParallel.

    Nothing is sent. Operations are ("post", axis, sends, receives), ("wait", number of the post),
    ("work", step), ("start verticals",) and ("verticals",).
    """

    gradient_dtype = None

    def __init__(self, inter, intra, rank, needed, groups, vertical_blocks):
        self.rank = rank
        self.size = inter * intra
        self.operations = []
        self.posts = 0
        self.vertical_blocks = vertical_blocks
        self.windows = DOUBLE_RING.windows(inter, intra, rank)
        self.order = DOUBLE_RING.step_sources(inter, intra)[rank]
        route = transport.route_of(self, needed)
        self.routes = [route] * groups
        self.computes = route.computes_by_step
        self.chunks = [[torch.zeros(1)] for _ in range(groups)]

    def shift(self, chunk, axis, slot, sends, receives):
        if not sends and not receives:
            return SimpleNamespace(wait=list)
        number = self.posts
        self.posts += 1
        self.operations.append(("post", axis, sends, receives))

        def wait():
            self.operations.append(("wait", number))
            return [torch.zeros(1)] * receives

        return SimpleNamespace(wait=wait)

    def forward(self):
        vertical_steps_here = vertical_steps(self.computes, self.vertical_blocks)  # as in ring.py
        self.operations.append(("start verticals",))
        for circulated in transport.circulate(self, self.routes, self.chunks):
            step = self.order.index(circulated.source)
            if step in vertical_steps_here:
                self.operations.append(("verticals",))
            if self.computes[step]:
                self.operations.append(("work", step))
        return self.operations

    def backward(self):
        shares = len(vertical_steps(self.computes, self.vertical_blocks))
        shares_done = [0] * len(self.chunks)

        def compute(step):
            self.operations.append(("work", self.order.index(step.source)))
            if shares_done[step.group] < shares:  # as in ring.py
                shares_done[step.group] += 1
                if sum(shares_done) == shares * len(shares_done):
                    self.operations.append(("start verticals",))
            return torch.zeros(1)

        transport.circulate_with_gradients(self, self.routes, self.chunks, compute)
        if shares > 0:
            self.operations.append(("verticals",))
        return self.operations


class Events:
    """Plays what all ranks do, event by event.

    A transfer is a kernel on its communicator's stream and starts when the one before is over. A
    message begins when sender and receiver have started, and takes seconds[axis][receiver].
    """

    def __init__(self, inter, intra, programs, compute, seconds, verticals=0.0):
        self.inter = inter
        self.intra = intra
        self.programs = programs
        self.compute = compute
        self.seconds = seconds
        self.verticals = verticals
        # By rank, (place in its program, axis, sends, receives) of each post.
        self.posts = []
        for program in programs:
            posts = [(i, *op[1:]) for i, op in enumerate(program) if op[0] == "post"]
            self.posts.append(posts)
        self.known = {}

    def finish(self):
        longest = max(map(len, self.programs))
        for i in range(longest):  # in step, so that no recursion gets deep
            for rank, program in enumerate(self.programs):
                self.time(rank, min(i, len(program) - 1))
        ends = [self.time(rank, len(program) - 1) for rank, program in enumerate(self.programs)]
        return torch.tensor(ends, dtype=torch.float64)

    def remembered(self, function, *key):
        if (function, *key) not in self.known:
            self.known[(function, *key)] = function(*key)
        return self.known[(function, *key)]

    def time(self, rank, i):
        """When rank's compute stream is past operation i."""
        return self.remembered(self._time, rank, i)

    def _time(self, rank, i):
        if i < 0:
            return 0.0
        now = self.time(rank, i - 1)
        kind, *about = self.programs[rank][i]
        if kind == "work":
            return now + self.compute[rank, about[0]].item()
        if kind == "verticals":
            starts = []
            for other, program in enumerate(self.programs):
                starts.append(self.time(other, program.index(("start verticals",))))
            return max(now, max(starts) + self.verticals)
        if kind == "wait":
            return max(now, self.over(rank, about[0]))
        return now

    def started(self, rank, number):
        """When rank's transfer of this number starts on its stream."""
        return self.remembered(self._started, rank, number)

    def _started(self, rank, number):
        place = self.posts[rank][number][0]
        axis = self.posts[rank][number][1]
        before = [n for n in range(number) if self.posts[rank][n][1] == axis]
        stream_free = self.over(rank, before[-1]) if before else 0.0
        return max(self.time(rank, place), stream_free)

    def over(self, rank, number):
        """When all messages of rank's transfer are there."""
        return self.remembered(self._over, rank, number)

    def _over(self, rank, number):
        _, axis, sends, receives = self.posts[rank][number]
        to_next = (rank, self.neighbor(rank, axis, 1))
        from_previous = (self.neighbor(rank, axis, -1), rank)
        pairs = [to_next] * sends + [from_previous] * receives
        return max(self.message(rank, number, sender, receiver) for sender, receiver in pairs)

    def message(self, rank, number, sender, receiver):
        """When the message of this transfer of rank's is there.

        The n-th that is sent is the n-th that is received.
        """
        sends, receives = 2, 3  # places in a post
        axis = self.posts[rank][number][1]
        if rank == sender:
            mine, other, theirs = sends, receiver, receives
        else:
            mine, other, theirs = receives, sender, sends
        order = sum(post[1] == axis and post[mine] for post in self.posts[rank][:number])
        matching = []
        for n, post in enumerate(self.posts[other]):
            if post[1] == axis and post[theirs]:
                matching.append(n)
        both_started = max(self.started(rank, number), self.started(other, matching[order]))
        return both_started + self.seconds[axis][receiver].item()

    def neighbor(self, rank, axis, hop):
        node, place = divmod(rank, self.intra)
        if axis.startswith("outer"):
            return (node + hop) % self.inter * self.intra + place
        return node * self.intra + (place + hop) % self.intra


@pytest.mark.parametrize("inter, intra", WORLDS)
@pytest.mark.parametrize("density", [0.2, 1.0])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_timelines_are_those_of_the_events(inter, intra, density, groups):
    generator = torch.Generator().manual_seed(groups)
    ranks = inter * intra
    sources = step_sources("double_ring", inter, intra)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    for outer in (1.0, 3.0, 10.0):  # from links that hide to links that never do
        needed = torch.rand(ranks, ranks, generator=generator) < density
        needed |= torch.eye(ranks, dtype=torch.bool)
        computes = needed.gather(1, sources)
        compute = uniform(ranks, ranks) * computes
        seconds = {
            "inner": 0.8 * uniform(ranks),
            "outer": outer * uniform(ranks),
            "inner_gradient": 1.5 * uniform(ranks),
            "outer_gradient": 4 * outer * uniform(ranks),
        }
        keys = RingTransfers(hops_needed(needed, inter, intra), seconds["inner"], seconds["outer"])
        gradients = RingTransfers(
            gradient_hops(needed, inter, intra),
            seconds["inner_gradient"],
            seconds["outer_gradient"],
        )
        blocks = 1 + int(outer)
        first_steps = []
        last_steps = []
        for steps in computes.tolist():
            first_steps.append(vertical_steps(steps, blocks)[0])
            last_steps.append(vertical_steps(steps, blocks, backward=True, windows=inter)[-1])
        vertical_seconds = 2.0 * outer
        vertical_forward = VerticalExchange(vertical_seconds, torch.tensor(first_steps))
        vertical_backward = VerticalExchange(vertical_seconds, torch.tensor(last_steps))
        forward = ring_forward(compute, keys, sources, groups, vertical_forward)
        backward = ring_backward(compute, keys, gradients, sources, groups, vertical_backward)

        for timeline, play in ((forward, Recorder.forward), (backward, Recorder.backward)):
            programs = []
            for rank in range(ranks):
                programs.append(play(Recorder(inter, intra, rank, needed, groups, blocks)))
            events = Events(inter, intra, programs, compute, seconds, vertical_seconds)
            torch.testing.assert_close(timeline.finish(), events.finish())
            assert torch.equal(timeline.compute, compute * groups)
            assert (timeline.waiting >= 0).all()


def test_groups_cross_nodes_one_after_the_other():
    """Two nodes of one rank, two groups of heads: 1 s of work for a group and step.

    An outer hop takes 5 s, its gradient's 7 s.
    """
    everything = torch.ones(2, 2, dtype=torch.bool)
    compute = torch.ones(2, 2, dtype=torch.float64)
    sources = step_sources("double_ring", 2, 1)
    keys = RingTransfers(hops_needed(everything, 2, 1), torch.zeros(2), torch.full((2,), 5.0))
    gradients = RingTransfers(
        gradient_hops(everything, 2, 1), torch.zeros(2), torch.full((2,), 7.0)
    )
    forward = ring_forward(compute, keys, sources, 2)
    assert forward.finish().tolist() == [11.0, 11.0]  # the second group comes at 10, not at 5
    assert forward.waiting[0].tolist() == [3.0, 4.0]  # from 2 to 5 and from 6 to 10
    verticals = VerticalExchange(7.0, torch.tensor([1, 1]))
    forward = ring_forward(compute, keys, sources, 2, verticals)
    assert forward.seconds() == 11.0  # from 5 to 7, then 8 to 10

    # Gradients leave at 10, before the second group is computed, and at 17.
    backward = ring_backward(compute, keys, gradients, sources, 2)
    assert backward.seconds() == 24.0
    # Begun at 2, after the first step of both groups.
    verticals = VerticalExchange(23.0, torch.tensor([0, 0]))
    backward = ring_backward(compute, keys, gradients, sources, 2, verticals)
    assert backward.seconds() == 25.0


def _one_ring(ranks: int, seconds: float) -> RingTransfers:
    """Every chunk goes to every rank."""
    everything = torch.ones(ranks, ranks, dtype=torch.bool)
    hops = hops_needed(everything, 1, ranks)
    return RingTransfers(hops, torch.full((ranks,), seconds), torch.zeros(ranks))


def test_a_sender_waits_for_the_receiver():
    compute = torch.tensor([[1.0, 1.0, 1.0], [9.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    timeline = ring_forward(compute, _one_ring(3, 0.5), step_sources("ring", 1, 3))
    # Ranks 0 and 2 meet rank 1's second transfer at 9.
    assert timeline.finish().tolist() == [10.5, 11.0, 10.5]


def test_a_ring_by_hand():
    compute = torch.tensor([[1.0, 1.0], [4.0, 1.0]], dtype=torch.float64)
    timeline = ring_forward(compute, _one_ring(2, 3.0), step_sources("ring", 1, 2))
    assert timeline.waiting.tolist() == [[2.0, 0.0], [0.0, 0.0]]
    assert timeline.finish().tolist() == [4.0, 5.0]
    assert timeline.seconds() == 5.0
    assert timeline.exposed() == 2.0


def test_gathers_by_hand():
    compute = torch.tensor([[2.0, 2.0], [1.0, 1.0]], dtype=torch.float64)  # two KV heads
    assert gather_forward(compute, 1.5).finish().tolist() == [5.5, 4.0]  # the second one comes at 3
    assert gather_forward(compute, 4.0).finish().tolist() == [10.0, 9.0]
    assert gather_backward(compute, 1.5, 0.5).finish().tolist() == [6.0, 6.0]
    assert gather_backward(compute, 1.5, 3.0).finish().tolist() == [9.5, 9.5]  # 3.5 + 3 + 3
    late = with_verticals(
        gather_forward(compute, 1.5), 10.0, torch.zeros(2), torch.tensor([8.0, 12.0])
    )
    assert late.finish().tolist() == [7.5, 4.0]


def test_stages_of_group_cast_by_hand():
    compute = torch.tensor([[1.0, 2.0, 2.0]] * 2, dtype=torch.float64)
    nothing = torch.zeros(2, 2, dtype=torch.float64)

    def of_both_ranks(*seconds):
        return torch.tensor([seconds] * 2, dtype=torch.float64)

    inside = Exchanges(nothing, of_both_ranks(1.5, 1.0))
    forward = cast_forward(compute, inside, (1, 2))
    assert forward.finish().tolist() == [5.5, 5.5]
    assert forward.waiting[:, 0].tolist() == [0.5, 0.5]
    across = Exchanges(of_both_ranks(3.0, 1.0), nothing)
    assert cast_forward(compute, across, (2, 1)).finish().tolist() == [7.0, 7.0]
    verticals = VerticalExchange(4.0, torch.tensor([1, 2]))
    late = cast_forward(compute, inside, (1, 2), verticals)
    assert late.finish().tolist() == [8.0, 6.0]

    ones = torch.ones(2, 4, dtype=torch.float64)
    keys = Exchanges(nothing, of_both_ranks(1.0, 1.0))
    gradients = Exchanges(nothing, of_both_ranks(3.0, 3.0))
    assert cast_backward(ones, keys, gradients, (1, 2)).finish().tolist() == [8.0, 8.0]
    no_exchange = Exchanges(nothing, nothing)
    assert cast_backward(ones, no_exchange, no_exchange, (1, 2)).finish().tolist() == [4.0, 4.0]
