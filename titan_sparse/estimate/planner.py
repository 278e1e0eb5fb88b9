"""What a layout and a schedule will cost, from an index and a few measured constants: no GPU, no processes.

plan() counts the work of every rank and step and the bytes on every link, and plays the forward and the backward of one
attention layer through, transfer by transfer (timeline.py). For scripts/plan.py.
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import balanced, layouts, routing
from titan_sparse.attention.context_parallel import windows as schedules
from titan_sparse.attention.context_parallel.group_cast_plan import (
    assign_stages,
    blocks_before_others,
    wanted_blocks,
)
from titan_sparse.attention.context_parallel.group_cast_plan import (
    traffic as cast_traffic,
)
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.observe import visits as balance
from titan_sparse.attention.observe.statistics import visible_pairs
from titan_sparse.attention.observe.visits import Visits
from titan_sparse.attention.patterns import BlockIndex
from titan_sparse.attention.patterns.dense import DenseIndex
from titan_sparse.attention.schedules.needs import met_blocks, needed_chunks_of, seen_blocks
from titan_sparse.estimate.timeline import (
    Exchanges,
    Timeline,
    VerticalExchange,
    cast_backward,
    cast_forward,
    gather_backward,
    gather_forward,
    ring_backward,
    ring_forward,
    with_verticals,
)

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10
"""Per visited pair of tokens, query head and element of D: 2 and 5 products, as in scripts/bench_attention.py."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """Rates of a machine. TFLOP/s of visited pairs; launch: ms a step for tables and kernels; GB/s = 1e9 bytes/s that a
    rank sends in a ring, and ms until a transfer's first byte, inside a node and across nodes."""

    forward_tflops: float
    backward_tflops: float
    launch_ms: float
    inside_gb_s: float
    across_gb_s: float
    inside_latency_ms: float
    across_latency_ms: float


def load_constants(path: str | Path) -> Constants:
    """From JSON: each field of Constants with its "value" and "source". Raises ValueError naming the key."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = {name: float(entry["value"]) for name, entry in data["constants"].items()}
    except OSError as error:
        raise ValueError(f"--constants {path}: cannot read it: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'--constants {path}: write {{"constants": {{NAME: {{"value": NUMBER, "source": TEXT}}, '
            f"...}}}}"
        ) from error
    names = [field.name for field in dataclasses.fields(Constants)]
    for name in {*names} ^ {*found}:
        raise ValueError(
            f"--constants {path}: {name} is {'missing' if name in names else 'unknown'}; "
            f"it has {', '.join(names)}"
        )
    for name in names:
        if not found[name] >= 0 or (found[name] == 0 and "_ms" not in name):
            raise ValueError(
                f"--constants {path}: {name} = {found[name]} is no rate; write a number above 0"
            )
    return Constants(**found)


class Shape(NamedTuple):
    """kv_heads, head_dim; element_bytes of K and V, gradient_bytes of an element of dK and dV, as they are sent."""

    kv_heads: int
    head_dim: int
    element_bytes: int
    gradient_bytes: int


class Plan(NamedTuple):
    """One layer's attention on W ranks.

    work: pairs of tokens float64 [W, W] (rank, step of the forward), all heads and sequences. needed: share of (rank,
    chunk) pairs in which the rank needs the chunk. chunk_bytes, gradient_bytes: K and V, dK and dV of one rank. verticals:
    seconds of their exchange, forward and backward. traffic: bytes that each rank sends, int64 [W], by name, forward_ and
    backward_, inside a node and across. It and the timelines are of a schedule that skips nothing; skipping_: of one in
    which chunks go only as far as they are needed.
    """

    layout: str
    schedule: str
    inter: int
    intra: int
    density: float
    work: Tensor
    needed: float
    chunk_bytes: int
    gradient_bytes: int
    verticals: tuple[float, float]
    traffic: dict[str, Tensor]
    forward: Timeline
    backward: Timeline
    skipping_traffic: dict[str, Tensor]
    skipping_forward: Timeline
    skipping_backward: Timeline


def count(index: BlockIndex, rows: MaskRanges, layout: str, ranks: int) -> Visits:
    """What a layout gives each rank to compute, all heads together."""
    return balance.count_visits_of_all_heads(
        index, rows, table_of(rows, layout, ranks, index.block_size)
    )


def table_of(rows: MaskRanges, layout: str, ranks: int, block_size: int) -> Tensor:
    """int64 [ranks, n]: the blocks of each rank under this mask; ValueError if the sequence does not divide."""
    if layout == "balanced":
        return balanced.block_table(rows, ranks, block_size)
    return layouts.block_ids(layout, ranks, rows.start.shape[1], block_size)


def plan(
    visits: Visits,
    index: BlockIndex,
    rows: MaskRanges,
    layout: str,
    schedule: str,
    inter: int,
    intra: int,
    shape: Shape,
    constants: Constants,
    overlap_stages: tuple[int, int] = (2, 2),
) -> Plan:
    """The plan of one setting on `inter` nodes of `intra` ranks. visits: of count() for the same layout. overlap_stages: of
    group_cast, forward and backward."""
    if schedule == "group_cast":
        return _plan_group_cast(
            visits, index, rows, layout, (inter, intra), shape, constants, overlap_stages
        )
    sources, needed = balance.step_sources(schedule, inter, intra), balance.computed_chunks(visits)
    ranks = inter * intra
    rings = (inter, intra) if schedule == "double_ring" else (1, ranks)
    if layout == "balanced":
        rows = rows._replace(table=table_of(rows, layout, ranks, index.block_size))
    computed = needed_chunks_of(index, rows, layout, ranks)
    work, backward = (
        balance.by_step(visits, sources, back, rings[0], computed).sum((0, 1)).double()
        for back in (False, True)
    )
    vertical_steps = _vertical_steps(index, balance.computing_steps(computed, sources), rings[0])
    chunk = _chunk_elements(index, rows, ranks, shape)
    case = _Case(
        work,
        backward,
        sources,
        intra,
        shape,
        chunk * shape.element_bytes,
        chunk * shape.gradient_bytes,
        _vertical_seconds(index, shape, inter, intra, constants),
        vertical_steps,
        constants,
    )
    play = _gathered if schedule == "all_gather" else _circulated
    everything, only_needed = (
        play(case, which, *rings) for which in (torch.ones_like(needed), needed)
    )
    return Plan(
        layout,
        schedule,
        inter,
        intra,
        _density(work, index, rows),
        work,
        needed.double().mean().item(),
        case.chunk_bytes,
        case.gradient_bytes,
        case.verticals,
        *everything,
        *only_needed,
    )


def _chunk_elements(index: BlockIndex, rows: MaskRanges, ranks: int, shape: Shape) -> int:
    """Elements of K and V of one rank."""
    return 2 * len(index.verticals) * shape.kv_heads * rows.start.shape[1] // ranks * shape.head_dim


def _density(work: Tensor, index: BlockIndex, rows: MaskRanges) -> float:
    return work.sum().item() / (
        visible_pairs(rows).sum().item() * index.heads * (len(index.verticals) // len(rows.start))
    )


class _Case(NamedTuple):
    """work, backward_work: pairs [W, W] by step of the forward, of the backward. node: ranks of a node. verticals:
    seconds of their exchange, forward and backward; vertical_steps: of _vertical_steps(). Of group_cast steps are its stages,
    and there are no sources."""

    work: Tensor
    backward_work: Tensor
    sources: Tensor | None
    node: int
    shape: Shape
    chunk_bytes: int
    gradient_bytes: int
    verticals: tuple[float, float]
    vertical_steps: tuple[Tensor, Tensor] | None
    constants: Constants

    def forward_seconds(self, work: Tensor) -> Tensor:
        return _seconds(
            work, FORWARD_FLOPS * self.shape.head_dim, self.constants.forward_tflops, self.constants
        )

    def backward_seconds(self, work: Tensor) -> Tensor:
        return _seconds(
            work,
            BACKWARD_FLOPS * self.shape.head_dim,
            self.constants.backward_tflops,
            self.constants,
        )


def _seconds(work: Tensor, flops: int, tflops: float, constants: Constants) -> Tensor:
    """Seconds of `work` pairs; a step without work is not launched."""
    return work * flops / (tflops * 1e12) + (work > 0) * constants.launch_ms / 1e3


def _circulated(
    case: _Case, needed: Tensor, inter: int, intra: int
) -> tuple[dict[str, Tensor], Timeline, Timeline]:
    """Bytes and timelines of a ring (inter = 1) or a double ring whose chunks go where they are needed."""
    keys, gradients = (
        routing.hops_needed(needed, inter, intra),
        routing.gradient_hops(needed, inter, intra),
    )
    groups = schedules.head_groups(case.shape.kv_heads, inter)
    links, gradient_links = (
        _link_seconds(size / groups, case.node, keys, case.constants)
        for size in (case.chunk_bytes, case.gradient_bytes)
    )
    sent, back = routing.traffic(keys, case.node), routing.traffic(gradients, case.node)
    # A group of heads is launched on its own at every step.
    forward, backward = (
        case.forward_seconds(case.work / groups),
        case.backward_seconds(case.backward_work / groups),
    )
    met, left = (
        map(VerticalExchange, case.verticals, case.vertical_steps)
        if case.vertical_steps
        else (None, None)
    )
    forward = ring_forward(forward, keys, case.sources, links, groups, met)
    backward = ring_backward(
        backward, keys, gradients, case.sources, links, gradient_links, groups, left
    )
    return _traffic(sent, back, case), forward, backward


def _traffic(keys: routing.Traffic, gradients: routing.Traffic, case: _Case) -> dict[str, Tensor]:
    forward = {f"forward_{name}": sent * case.chunk_bytes for name, sent in keys._asdict().items()}
    backward = (
        sent * case.chunk_bytes + back * case.gradient_bytes for sent, back in zip(keys, gradients)
    )
    return forward | dict(zip(("backward_inside", "backward_across"), backward))


def _link_seconds(
    size: float, node: int, hops: routing.Hops, constants: Constants
) -> tuple[Tensor, Tensor]:
    """Seconds that `size` bytes take from the previous rank of the inner, of the outer ring, float64 [W] each."""
    ranks, inter = hops.inner_to.shape
    intra, rank = ranks // inter, torch.arange(ranks)
    inside = constants.inside_latency_ms / 1e3 + size / (constants.inside_gb_s * 1e9)
    across = constants.across_latency_ms / 1e3 + size / (constants.across_gb_s * 1e9)
    previous = (rank // intra * intra + (rank - 1) % intra, (rank - intra) % ranks)
    return tuple(
        torch.where(rank // node == sender // node, inside, across).double() for sender in previous
    )


def _gathered(
    case: _Case, needed: Tensor, inter: int, intra: int
) -> tuple[dict[str, Tensor], Timeline, Timeline]:
    """As _circulated() for all_gather, which sends everything to everybody, one KV head at a time."""
    sent = routing.all_gather_traffic(len(needed), case.node)
    heads, constants = case.shape.kv_heads, case.constants
    gather, scatter = (
        _collective_seconds(sent, size / heads, constants)
        for size in (case.chunk_bytes, case.gradient_bytes)
    )
    by_head = (case.work.sum(1, keepdim=True) / heads).expand(-1, heads)
    forward = gather_forward(case.forward_seconds(by_head), gather)
    backward = gather_backward(case.backward_seconds(by_head), gather, scatter)
    forward = with_verticals(
        forward, case.verticals[0], torch.zeros(len(needed)), forward.waiting[:, 0]
    )
    ends = backward.finish()
    return (
        _traffic(sent, sent, case),
        forward,
        with_verticals(backward, case.verticals[1], ends - scatter, ends),
    )


def _collective_seconds(sent: routing.Traffic, size: float, constants: Constants) -> float:
    """Seconds until every rank has sent its chunks of `size` bytes; inside and across go at the same time."""
    inside, across = (x.max().item() * size / 1e9 for x in sent)
    return max(
        inside / constants.inside_gb_s + (inside > 0) * constants.inside_latency_ms / 1e3,
        across / constants.across_gb_s + (across > 0) * constants.across_latency_ms / 1e3,
    )


def _vertical_steps(
    index: BlockIndex, computes: list[list[bool]], windows: int
) -> tuple[Tensor, Tensor] | None:
    """int64 [W] each: a rank's first step with verticals of the forward, its last one of the backward; None without any."""
    blocks = index.verticals.shape[-1] // index.block_size
    if not blocks:
        return None
    met, left = (
        [schedules.vertical_steps(x, blocks, back, windows) for x in computes]
        for back in (False, True)
    )
    return torch.tensor([steps[0] for steps in met]), torch.tensor([steps[-1] for steps in left])


def _vertical_seconds(
    index: BlockIndex, shape: Shape, inter: int, intra: int, constants: Constants
) -> tuple[float, float]:
    """Seconds of the verticals' all-reduce, K and V in the forward, their gradients in the backward."""
    ranks, elements = inter * intra, 2 * index.verticals.numel() * shape.head_dim
    if ranks == 1 or not elements:
        return 0.0, 0.0
    # An all-reduce is a reduce-scatter and an all-gather of 1 / ranks of the whole.
    sent = routing.all_gather_traffic(ranks, intra)
    return tuple(
        2 * _collective_seconds(sent, elements * size / ranks, constants)
        for size in (shape.element_bytes, shape.gradient_bytes)
    )


# Group cast -----------------------------------------------------------------------------------------------------------


def _plan_group_cast(
    visits: Visits,
    index: BlockIndex,
    rows: MaskRanges,
    layout: str,
    nodes: tuple[int, int],
    shape: Shape,
    constants: Constants,
    stages: tuple[int, int],
) -> Plan:
    """plan() for group_cast. What skips nothing has every block needed by every rank."""
    ranks = nodes[0] * nodes[1]
    table = table_of(rows, layout, ranks, index.block_size)
    dense = isinstance(index, DenseIndex)
    needed = seen_blocks(rows, table, index.block_size) if dense else met_blocks(rows, index, table)
    chunk, verticals = (
        _chunk_elements(index, rows, ranks, shape),
        _vertical_seconds(index, shape, *nodes, constants),
    )
    sizes = chunk * shape.element_bytes, chunk * shape.gradient_bytes
    found = []
    for every in (torch.ones_like(needed), needed):
        wanted = wanted_blocks(every, table, *nodes)
        work, back = (
            _work_by_stage(visits, wanted, number, backward)
            for number, backward in zip(stages, (None, _first_share(wanted, index, shape)))
        )
        case = _Case(
            work,
            back,
            None,
            nodes[1],
            shape,
            *sizes,
            verticals,
            _steps_with_verticals(index, work, back),
            constants,
        )
        found.append((work, _cast(case, wanted, stages, table.shape[1])))
    (_, everything), (work, only_needed) = found
    chunks = balance.computed_chunks(visits).double().mean().item()
    return Plan(
        layout,
        "group_cast",
        *nodes,
        _density(work, index, rows),
        work,
        chunks,
        *sizes,
        verticals,
        *everything,
        *only_needed,
    )


def _first_share(wanted: Tensor, index: BlockIndex, shape: Shape) -> Tensor:
    """float64 [W, 1]: the share of a rank's own blocks that its backward computes before those of others."""
    inter, own = wanted.shape[0], wanted.shape[-1]
    first = [
        blocks_before_others(own, remote, index.heads, shape.kv_heads, shape.element_bytes, inter)
        for remote in wanted.flatten(2).sum(-1).flatten().tolist()
    ]
    return torch.tensor(first, dtype=torch.float64)[:, None] / own


def _work_by_stage(visits: Visits, wanted: Tensor, stages: int, first: Tensor | None) -> Tensor:
    """Pairs of tokens float64 [W, steps]: own blocks, each stage, and, where `first` is given, that share of the own ones at
    the start and the rest at the end, as in a backward. What a rank computes on another's chunk is taken to be spread evenly
    over the blocks of it that it needs."""
    pairs, ranks = visits.pairs.sum((0, 1)).double(), visits.pairs.shape[-1]
    stage, wanted = assign_stages(wanted, stages), wanted.flatten(2, 3)
    came = [
        (wanted & (stage == number).flatten(1, 2)[:, None]).sum(-1).view(ranks, ranks)
        for number in range(stages)
    ]
    share = pairs / wanted.sum(-1).view(ranks, ranks).clamp(min=1)
    own, last = pairs.diagonal()[:, None], []
    if first is not None:
        own, last = own * first, [own * (1 - first)]
    work = torch.cat([own, *((x * share).sum(1, keepdim=True) for x in came), *last], dim=1)
    for row, vertical_pairs in zip(work, visits.vertical_pairs.sum((0, 1)).double()):
        balance.add_verticals(row, vertical_pairs, (row > 0).tolist(), first is not None)
    return work


def _steps_with_verticals(
    index: BlockIndex, work: Tensor, backward: Tensor
) -> tuple[Tensor, Tensor] | None:
    """As _vertical_steps(), where every step with work computes."""
    blocks = index.verticals.shape[-1] // index.block_size
    if not blocks:
        return None
    met, left = (
        [schedules.vertical_steps(x, blocks, back) for x in (which > 0).tolist()]
        for back, which in ((False, work), (True, backward))
    )
    return torch.tensor([steps[0] for steps in met]), torch.tensor([steps[-1] for steps in left])


def _cast(
    case: _Case, wanted: Tensor, stages: tuple[int, int], blocks: int
) -> tuple[dict[str, Tensor], Timeline, Timeline]:
    """Bytes and timelines of group_cast. blocks: of a rank."""
    nodes, (key, gradient) = (
        wanted.shape[:2],
        (size // blocks for size in (case.chunk_bytes, case.gradient_bytes)),
    )
    sent = [cast_traffic(wanted, number) for number in stages]
    back = [cast_traffic(wanted, number, backward=True) for number in stages]
    keys = [_exchange_seconds(a, b, key, case.constants) for a, b in zip(sent, back)]
    gradients = _exchange_seconds(back[1], sent[1], gradient, case.constants)
    met, left = (
        map(VerticalExchange, case.verticals, case.vertical_steps)
        if case.vertical_steps
        else (None, None)
    )
    total = {}
    for name in routing.Traffic._fields:
        by_key, by_gradient = (getattr(x[1], name).sum(1) for x in (sent, back))
        total |= {
            f"forward_{name}": by_key * key,
            f"backward_{name}": by_key * key + by_gradient * gradient,
        }
    forward = cast_forward(case.forward_seconds(case.work), keys[0], nodes, met)
    return (
        total,
        forward,
        cast_backward(case.backward_seconds(case.backward_work), keys[1], gradients, nodes, left),
    )


def _exchange_seconds(
    sent: routing.Traffic, received: routing.Traffic, size: int, constants: Constants
) -> Exchanges:
    """Seconds of all-to-alls of blocks of `size` bytes; a rank sends and receives at the same time."""
    inside, across = (torch.maximum(a, b).double() * size for a, b in zip(sent, received))
    return Exchanges(
        across / (constants.across_gb_s * 1e9) + (across > 0) * constants.across_latency_ms / 1e3,
        inside / (constants.inside_gb_s * 1e9) + (inside > 0) * constants.inside_latency_ms / 1e3,
    )
