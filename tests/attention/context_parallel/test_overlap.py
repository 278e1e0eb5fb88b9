"""Transfers overlap with work: what work runs between the start of a transfer and its wait.

The process group's collectives transfer nothing, so nothing depends on timing.
"""

import functools
from collections import deque
from collections.abc import Callable

import pytest
import torch

from tests.attention.context_parallel.against_one import mesh_of
from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel import schedules
from titan_sparse.attention.context_parallel.comm import Communicator, Pending
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash

eager = BACKENDS["eager"]

BLOCK = 16


def _record(patch: pytest.MonkeyPatch) -> list[str]:
    """What happens from now on.

    "start NAME", "wait NAME" (the first time only), "compute", and "tables" where those of all
    ranks' blocks are made.
    """
    lines: list[str] = []

    def starting(method: str, name_of: Callable[[tuple], str]) -> None:
        start = getattr(Communicator, method)

        def started(cp: Communicator, *args, **kwargs) -> Pending:
            pending_name = kwargs.get("axis") or name_of(args)
            lines.append(f"start {pending_name}")
            pending = start(cp, *args, **kwargs)
            pending.name = pending_name
            return pending

        patch.setattr(Communicator, method, started)

    starting("shift", lambda args: args[1])
    starting("start_exchange", lambda args: args[3])
    starting("start_all_gather", lambda args: args[1].split()[0])
    starting("start_reduce_scatter", lambda args: "scatter")
    starting("start_all_reduce", lambda args: "verticals")

    def waited(pending: Pending, wait=Pending.wait):
        name = vars(pending).pop("name", None)
        if name is not None:
            lines.append(f"wait {name}")
        return wait(pending)

    def tiles(call, source, transpose, make=AttentionCall.tiles_of_rank):
        if source is None:
            lines.append("tables")
        return make(call, source, transpose)

    def computed(*args, compute: Callable):
        lines.append("compute")
        return compute(*args)

    patch.setattr(Pending, "wait", waited)
    patch.setattr(AttentionCall, "tiles_of_rank", tiles)
    for name in ("forward", "backward"):
        compute = functools.partial(computed, compute=getattr(eager, name))
        patch.setattr(eager, name, compute)
    return lines


def events_of_attention(
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    axes: tuple[int, int],
    pattern: Pattern,
    kv_heads: int = 1,
) -> tuple[list[str], list[str]]:
    """The events of a forward and of its backward, on rank 0; every rank needs every chunk. Keys
    and values circulate."""
    ranks = axes[0] * axes[1]
    with fake_world(ranks):
        is_ring = schedule in ("ring", "double_ring")
        options = {"backward_circulates": "kv"} if is_ring else {}
        cp = ContextParallel(mesh_of(axes), "striped", schedule, BLOCK, **options)
        events = _record(monkeypatch)
        generator = torch.Generator().manual_seed(0)
        seq_len = 4 * BLOCK
        q = torch.randn(1, kv_heads, seq_len, 8, generator=generator, requires_grad=True)
        k = torch.randn(1, kv_heads, seq_len, 8, generator=generator, requires_grad=True)
        out = attend(q, k, k.detach().clone(), Causal(), pattern, cp, "eager")
        count = len(events)
        out.sum().backward()
        return events[:count], events[count:]


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
    # As if sequences were long.
    monkeypatch.setattr(schedules, "_GATHERED_BYTES", 1)
    events = events_of_attention(monkeypatch, schedule, axes, Dense(), kv_heads)
    assert events == (lines(forward), lines(backward))


def test_small_heads_are_gathered_together(monkeypatch):
    """In two groups, so that one is computed on while the other one arrives,
    and keys with values."""
    events = events_of_attention(monkeypatch, "all_gather", (1, 3), Dense(), kv_heads=5)
    starts = [sum(event.startswith("start ") for event in of_pass) for of_pass in events]
    # Of two groups; and in the backward their gradients.
    assert starts == [2, 4]


@pytest.mark.parametrize(
    "kv_heads, mib_a_head, together",
    [(8, 4, 4), (8, 8, 4), (8, 16, 2), (8, 32, 1), (8, 512, 1), (1, 1, 1), (2, 1, 1), (5, 12, 3)],
)
def test_how_many_heads_are_gathered_together(kv_heads, mib_a_head, together):
    """32 MiB of them, or half of the heads."""
    assert schedules.heads_gathered(kv_heads, mib_a_head << 20) == together


@pytest.mark.parametrize("inter, intra, kv_heads", [(2, 3, 1), (3, 2, 2), (4, 1, 4), (3, 2, 1)])
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
    # A gradient leaves when the next head begins. The last one has the rest of the first window.
    heads_after = [intra * (kv_heads - 1 - head) for head in range(kv_heads)]
    rest = (intra - 1) * kv_heads
    assert work_behind(backward, "outer_gradient") == later_hops + [rest + x for x in heads_after]


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
