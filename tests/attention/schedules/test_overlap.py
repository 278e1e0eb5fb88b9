"""Transfers overlap with work: what work runs between the start of a transfer and its wait."""

from collections import deque

import pytest

from tests.attention.schedules.events import events_of_attention
from titan_sparse.attention.patterns import Dense, VerticalSlash

VERTICAL = VerticalSlash(recall=0.8, sinks=2, max_verticals=64, min_slashes=10**6, dense_below=16)
"""All diagonals are on: in a made-up world ranks choose from codes that they never said."""


def work_behind(events: list[str], name: str) -> list[int]:
    """For each transfer of this name: units of work between its start and the wait for it."""
    begun: deque[int] = deque()
    work = []
    computed = 0
    for event in events:
        if event == "compute":
            computed += 1
        elif event == f"start {name}":
            begun.append(computed)
        elif event == f"wait {name}":
            work.append(computed - begun.popleft())
    assert not begun
    return work


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.split(",")]


# By hand, from docs/context_parallel.md, "Schedules" and "Backward".
RING_FORWARD = "start inner, compute, wait inner, start inner, compute, wait inner, compute"
RING_BACKWARD = (
    "start inner, compute, wait inner, start inner, compute, start inner_gradient, wait inner, "
    "compute, wait inner_gradient, start inner_gradient, wait inner_gradient"
)
# The chunk of the other node leaves first and has the whole window.
DOUBLE_RING_FORWARD = (
    "start outer, start inner, compute, wait inner, compute, "
    "wait outer, start inner, compute, wait inner, compute"
)
# Of the first window one step, then the second window, then the rest of the first, behind which the
# gradient comes home from the other node.
DOUBLE_RING_BACKWARD = (
    "start outer, start inner, compute, "
    "wait outer, start inner, compute, wait inner, compute, start inner_gradient, "
    "wait inner, wait inner_gradient, start outer_gradient, compute, start inner_gradient, "
    "wait inner_gradient, wait outer_gradient"
)
# The first head travels while tables are made.
ALL_GATHER_FORWARD = (
    "start k, start v, tables, start k, start v, wait k, wait v, compute, "
    "start k, start v, wait k, wait v, compute, wait k, wait v, compute"
)
# A head's gradients are on their way while the next head is computed.
ALL_GATHER_BACKWARD = (
    "start k, start v, tables, start k, start v, wait k, wait v, compute, "
    "start scatter, start scatter, start k, start v, wait k, wait v, compute, "
    "wait scatter, wait scatter, start scatter, start scatter, wait k, wait v, compute, "
    "wait scatter, wait scatter, start scatter, start scatter, wait scatter, wait scatter"
)
GROUP_CAST_FORWARD = RING_FORWARD
# Sums in the node are waited for on a side stream. Own blocks are left to the end.
GROUP_CAST_BACKWARD = (
    "start inner, compute, wait inner, start inner, compute, "
    "start inner_gradient, wait inner_gradient, wait inner, compute, "
    "start inner_gradient, wait inner_gradient, compute"
)


@pytest.mark.parametrize(
    "schedule, axes, kv_heads, forward, backward",
    [
        ("ring", (1, 3), 1, RING_FORWARD, RING_BACKWARD),
        ("double_ring", (2, 2), 1, DOUBLE_RING_FORWARD, DOUBLE_RING_BACKWARD),
        ("all_gather", (1, 3), 3, ALL_GATHER_FORWARD, ALL_GATHER_BACKWARD),
        ("group_cast", (1, 3), 1, GROUP_CAST_FORWARD, GROUP_CAST_BACKWARD),
    ],
)
def test_order_by_hand(monkeypatch, schedule, axes, kv_heads, forward, backward):
    events = events_of_attention(monkeypatch, schedule, axes, Dense(), kv_heads)
    assert events == (lines(forward), lines(backward))


@pytest.mark.parametrize("inter, intra", [(2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_hop_between_nodes_has_the_work_of_a_window(monkeypatch, inter, intra, kv_heads):
    """Each KV head travels alone, so the work on the other heads also hides its transfer."""
    axes = (inter, intra)
    forward, backward = events_of_attention(monkeypatch, "double_ring", axes, Dense(), kv_heads)
    window = intra * kv_heads
    later_hops = [window] * (inter - 2) * kv_heads
    # At first all heads leave at once, and each is wanted when those before it are done.
    heads_before = [intra * head for head in range(kv_heads)]
    assert work_behind(forward, "outer") == [window + x for x in heads_before] + later_hops
    assert work_behind(forward, "inner") == [1] * inter * (intra - 1) * kv_heads
    # In the backward the first window is one step a head.
    assert work_behind(backward, "outer") == [kv_heads + x for x in heads_before] + later_hops
    if kv_heads == 1:
        # The last gradient has the rest of the first window.
        homeward = work_behind(backward, "outer_gradient")
        assert homeward == [intra] * (inter - 2) + [intra - 1]


@pytest.mark.parametrize(
    "schedule, axes, kv_heads",
    [
        ("ring", (1, 3), 1),
        ("double_ring", (2, 2), 2),
        ("all_gather", (1, 3), 2),
        ("group_cast", (1, 3), 1),
    ],
)
def test_the_exchange_of_verticals_hides(monkeypatch, schedule, axes, kv_heads):
    """It starts before everything else, and its gradients leave before the last unit of work."""
    forward, backward = events_of_attention(monkeypatch, schedule, axes, VERTICAL, kv_heads)
    assert forward[0] == "start verticals"
    [behind] = work_behind(forward, "verticals")
    [behind_gradients] = work_behind(backward, "verticals")
    if schedule == "all_gather":
        # Every head meets verticals. Only the transfers of keys and gradients hide theirs.
        first_work = forward.index("compute")
        assert forward.index("wait verticals") == first_work - 1
        assert backward[-1] == "wait verticals"
        assert backward[-3:-1] == ["wait scatter", "wait scatter"]
    else:
        assert behind >= 1 and behind_gradients >= 1
        assert backward[-1] == "wait verticals"
