"""Timelines of transfers, against a simulation event by event and by hand."""

import functools
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
    """What one rank does in transport.py, in order: ("post", axis, sends, receives), ("wait", number of the post),
    ("work", step), ("start verticals",), ("verticals",). It stands where a ContextParallel does, and nothing is sent."""

    gradient_dtype = None

    def __init__(self, inter, intra, rank, needed, groups, vertical_blocks):
        self.rank, self.size, self.done, self.posts, self.vertical_blocks = (
            rank,
            inter * intra,
            [],
            0,
            vertical_blocks,
        )
        self.windows = DOUBLE_RING.windows(inter, intra, rank)
        self.route, self.order = transport.route(self, needed), sum(self.windows, [])
        self.chunks = [[torch.zeros(1)] for _ in range(groups)]

    def shift(self, chunk, axis, slot, sends, receives):
        if not sends and not receives:
            return SimpleNamespace(wait=list)
        number, self.posts = self.posts, self.posts + 1
        self.done.append(("post", axis, sends, receives))
        return SimpleNamespace(
            wait=lambda: self.done.append(("wait", number)) or [torch.zeros(1)] * receives
        )

    def forward(self):
        computes = sum(self.route.compute, [])
        met = vertical_steps(computes, self.vertical_blocks)  # as in ring.py
        self.done.append(("start verticals",))
        for _, o, t, source, _ in transport.circulate(self, self.route, self.chunks):
            step = self.order.index(source)
            self.done += [("verticals",)] * (step in met) + [("work", step)] * computes[step]
        return self.done

    def backward(self):
        parts = len(vertical_steps(sum(self.route.compute, []), self.vertical_blocks))
        met = [0] * len(self.chunks)

        def piece(group, source, chunk):
            self.done.append(("work", self.order.index(source)))
            if met[group] < parts:  # as in ring.py
                met[group] += 1
                self.done += [("start verticals",)] * (sum(met) == parts * len(met))
            return torch.zeros(1)

        transport.circulate_with_gradients(self, self.route, self.chunks, piece)
        self.done += [("verticals",)] * (parts > 0)
        return self.done


class Events:
    """Plays what all ranks do, event by event. A transfer is a kernel on its communicator's stream and starts when the one
    before is over; a message begins when sender and receiver have started, and takes seconds[axis][receiver]."""

    def __init__(self, inter, intra, programs, compute, seconds, verticals=0.0):
        self.inter, self.intra, self.programs = inter, intra, programs
        self.compute, self.seconds, self.verticals = compute, seconds, verticals
        self.posts = [
            [(i, *op[1:]) for i, op in enumerate(program) if op[0] == "post"]
            for program in programs
        ]

    def finish(self):
        for i in range(max(map(len, self.programs))):  # in step, so that no recursion gets deep
            for rank, program in enumerate(self.programs):
                self.time(rank, min(i, len(program) - 1))
        return torch.tensor(
            [self.time(rank, len(program) - 1) for rank, program in enumerate(self.programs)],
            dtype=torch.float64,
        )

    @functools.cache
    def time(self, rank, i):
        """When rank's compute stream is past operation i."""
        if i < 0:
            return 0.0
        now, (kind, *about) = self.time(rank, i - 1), self.programs[rank][i]
        if kind == "work":
            return now + self.compute[rank, about[0]].item()
        if kind == "verticals":
            started = [
                self.time(rank, program.index(("start verticals",)))
                for rank, program in enumerate(self.programs)
            ]
            return max(now, max(started) + self.verticals)
        return max(now, self.over(rank, about[0])) if kind == "wait" else now

    @functools.cache
    def started(self, rank, number):
        i, axis, *_ = self.posts[rank][number]
        before = [n for n in range(number) if self.posts[rank][n][1] == axis]
        return max(self.time(rank, i), self.over(rank, before[-1]) if before else 0.0)

    @functools.cache
    def over(self, rank, number):
        _, axis, sends, receives = self.posts[rank][number]
        pairs = [(rank, self.neighbour(rank, axis, 1))] * sends + [
            (self.neighbour(rank, axis, -1), rank)
        ] * receives
        return max(self.message(rank, number, *pair) for pair in pairs)

    def message(self, rank, number, sender, receiver):
        """When the message of this transfer of rank's is there; the n-th that is sent is the n-th that is received."""
        axis, place = self.posts[rank][number][1], 2 if rank == sender else 3
        order = sum(post[1] == axis and post[place] for post in self.posts[rank][:number])
        other, place = (receiver, 3) if rank == sender else (sender, 2)
        matching = [
            n for n, post in enumerate(self.posts[other]) if post[1] == axis and post[place]
        ][order]
        return (
            max(self.started(rank, number), self.started(other, matching))
            + self.seconds[axis][receiver].item()
        )

    def neighbour(self, rank, axis, hop):
        node, place = divmod(rank, self.intra)
        if axis.startswith("outer"):
            return (node + hop) % self.inter * self.intra + place
        return node * self.intra + (place + hop) % self.intra


@pytest.mark.parametrize("inter, intra", WORLDS)
@pytest.mark.parametrize("density", [0.2, 1.0])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_timelines_are_those_of_the_events(inter, intra, density, groups):
    g, ranks = torch.Generator().manual_seed(groups), inter * intra
    sources = step_sources("double_ring", inter, intra)
    keys = ("inner", "outer", "inner_gradient", "outer_gradient")
    for outer in (1.0, 3.0, 10.0):  # from links that hide to links that never do
        needed = (torch.rand(ranks, ranks, generator=g) < density) | torch.eye(
            ranks, dtype=torch.bool
        )
        compute = torch.rand(ranks, ranks, generator=g, dtype=torch.float64) * needed.gather(
            1, sources
        )
        seconds = {
            axis: scale * torch.rand(ranks, generator=g, dtype=torch.float64)
            for axis, scale in zip(keys, (0.8, outer, 1.5, 4 * outer))
        }
        links, gradient_links = ([seconds[axis] for axis in some] for some in (keys[:2], keys[2:]))
        hops, back = hops_needed(needed, inter, intra), gradient_hops(needed, inter, intra)
        blocks, computing = 1 + int(outer), needed.gather(1, sources).tolist()
        met = [vertical_steps(x, blocks)[0] for x in computing]
        left = [vertical_steps(x, blocks, backward=True, windows=inter)[-1] for x in computing]
        verticals = [VerticalExchange(2.0 * outer, torch.tensor(x)) for x in (met, left)]
        forward = ring_forward(compute, hops, sources, links, groups, verticals[0])
        backward = ring_backward(
            compute, hops, back, sources, links, gradient_links, groups, verticals[1]
        )
        recorder = functools.partial(
            Recorder, inter, intra, needed=needed, groups=groups, vertical_blocks=blocks
        )
        for timeline, play in ((forward, Recorder.forward), (backward, Recorder.backward)):
            programs = [play(recorder(rank=rank)) for rank in range(ranks)]
            events = Events(inter, intra, programs, compute, seconds, 2.0 * outer)
            torch.testing.assert_close(timeline.finish(), events.finish())
            assert torch.equal(timeline.compute, compute * groups) and (timeline.waiting >= 0).all()


def test_groups_cross_nodes_one_after_the_other():
    """Two nodes of one rank, two groups of heads: 1 s of work a piece, 5 s an outer hop, 7 s its gradient's."""
    everything, compute = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.float64)
    hops, back = hops_needed(everything, 2, 1), gradient_hops(everything, 2, 1)
    sources = step_sources("double_ring", 2, 1)
    links, gradient_links = (
        (torch.zeros(2), torch.full((2,), 5.0)),
        (torch.zeros(2), torch.full((2,), 7.0)),
    )
    forward = ring_forward(compute, hops, sources, links, 2)
    assert forward.finish().tolist() == [11.0, 11.0]  # the second group comes at 10, not at 5
    assert forward.waiting[0].tolist() == [3.0, 4.0]  # from 2 to 5 and from 6 to 10
    verticals = VerticalExchange(7.0, torch.tensor([1, 1]))
    assert (
        ring_forward(compute, hops, sources, links, 2, verticals).seconds() == 11.0
    )  # from 5 to 7, then 8 to 10
    backward = ring_backward(compute, hops, back, sources, links, gradient_links, 2)
    assert backward.seconds() == 24.0  # gradients leave at 10, before the second piece, and at 17
    verticals = VerticalExchange(
        23.0, torch.tensor([0, 0])
    )  # begun at 2, after the first step of both groups
    assert (
        ring_backward(compute, hops, back, sources, links, gradient_links, 2, verticals).seconds()
        == 25.0
    )


def test_a_sender_waits_for_the_receiver():
    hops, sources = (
        hops_needed(torch.ones(3, 3, dtype=torch.bool), 1, 3),
        step_sources("ring", 1, 3),
    )
    compute = torch.tensor([[1.0, 1.0, 1.0], [9.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    timeline = ring_forward(compute, hops, sources, (torch.full((3,), 0.5), torch.zeros(3)))
    assert timeline.finish().tolist() == [
        10.5,
        11.0,
        10.5,
    ]  # ranks 0 and 2 meet rank 1's second transfer at 9


def test_a_ring_by_hand():
    hops, sources = (
        hops_needed(torch.ones(2, 2, dtype=torch.bool), 1, 2),
        step_sources("ring", 1, 2),
    )
    compute = torch.tensor([[1.0, 1.0], [4.0, 1.0]], dtype=torch.float64)
    timeline = ring_forward(compute, hops, sources, (torch.tensor([3.0, 3.0]), torch.zeros(2)))
    assert timeline.waiting.tolist() == [[2.0, 0.0], [0.0, 0.0]]
    assert (
        timeline.finish().tolist() == [4.0, 5.0]
        and timeline.seconds() == 5.0
        and timeline.exposed() == 2.0
    )


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
    compute, none = (
        torch.tensor([[1.0, 2.0, 2.0]] * 2, dtype=torch.float64),
        torch.zeros(2, 2, dtype=torch.float64),
    )
    both = lambda *seconds: torch.tensor([seconds] * 2, dtype=torch.float64)
    inside = cast_forward(compute, Exchanges(none, both(1.5, 1.0)), (1, 2))
    assert inside.finish().tolist() == [5.5, 5.5] and inside.waiting[:, 0].tolist() == [0.5, 0.5]
    across = cast_forward(compute, Exchanges(both(3.0, 1.0), none), (2, 1))
    assert across.finish().tolist() == [7.0, 7.0]
    late = cast_forward(
        compute,
        Exchanges(none, both(1.5, 1.0)),
        (1, 2),
        VerticalExchange(4.0, torch.tensor([1, 2])),
    )
    assert late.finish().tolist() == [8.0, 6.0]
    ones = torch.ones(2, 4, dtype=torch.float64)
    assert cast_backward(
        ones, Exchanges(none, both(1.0, 1.0)), Exchanges(none, both(3.0, 3.0)), (1, 2)
    ).finish().tolist() == [8.0, 8.0]
    assert cast_backward(
        ones, Exchanges(none, none), Exchanges(none, none), (1, 2)
    ).finish().tolist() == [4.0, 4.0]
