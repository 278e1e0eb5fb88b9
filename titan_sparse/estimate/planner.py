"""What a layout and a schedule will cost, from an index and a few measured constants.

There is no GPU and there are no processes. plan_layer() counts the work of every rank and step and
the bytes on every link. It plays the forward and the backward of one attention layer through,
transfer by transfer (timeline.py). titan-sparse plan prints the result.
"""

from typing import NamedTuple

from torch import Tensor

from titan_sparse.attention.context_parallel import balanced
from titan_sparse.attention.context_parallel.schedule import SCHEDULES, Moves
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.reach import visible_pairs
from titan_sparse.attention.observe.visits import (
    Visits,
    computed_chunks,
    count_visits_of_all_heads,
)
from titan_sparse.attention.patterns import BlockIndex
from titan_sparse.estimate.constants import Constants, load_constants
from titan_sparse.estimate.planner_costs import (
    BACKWARD_FLOPS,
    FORWARD_FLOPS,
    Costs,
    Layer,
    Setting,
    Shape,
    table_of,
)
from titan_sparse.estimate.planner_group_cast import play_group_cast
from titan_sparse.estimate.planner_rings import play_all_gather, play_rings
from titan_sparse.estimate.timeline import Timeline

__all__ = [
    "BACKWARD_FLOPS",
    "FORWARD_FLOPS",
    "Constants",
    "Layer",
    "LayerPlan",
    "Plan",
    "Setting",
    "Shape",
    "count",
    "load_constants",
    "plan",
    "plan_layer",
    "table_of",
]


class LayerPlan(NamedTuple):
    """One layer's attention on W = inter * intra ranks.

    layout, schedule: their names. density: share of the visible pairs that are computed.
    work: pairs of tokens of all heads and sequences, float64 [W, steps], in the forward.
    needed: share of (rank, chunk) pairs in which the rank needs the chunk.
    chunk_bytes, gradient_bytes: K and V, dK and dV of one rank.
    verticals: seconds of their exchange, forward and backward.
    traffic: bytes that each rank sends, int64 [W], by name: forward_ and backward_, inside a node
        and across.
    forward, backward: timelines. They and `traffic` are of a schedule that skips nothing.
    skipping_...: the same where things go only as far as they are needed.
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


Plan = LayerPlan
"""The old name, for callers that have not moved yet."""

_PLAYS = {
    Moves.NOTHING: play_rings,
    Moves.CHUNKS: play_rings,
    Moves.HEADS: play_all_gather,
    Moves.BLOCKS: play_group_cast,
}
"""How a schedule is played through, by what moves between ranks."""


def count(
    index: BlockIndex,
    ranges: MaskRanges,
    layout: str,
    ranks: int,
    balance: balanced.Costs = balanced.DEFAULT_COSTS,
) -> Visits:
    """What a layout gives each rank to compute, all heads together. balance: as in Setting."""
    table = table_of(ranges, layout, ranks, index.block_size, balance)
    return count_visits_of_all_heads(index, ranges, table)


def plan_layer(visits: Visits, layer: Layer, setting: Setting, constants: Constants) -> LayerPlan:
    """The plan of one layer in one setting. visits: from count() for the same layout."""
    costs = Costs(layer, setting, constants)
    played = _PLAYS[setting.schedule.moves](visits, costs)
    return LayerPlan(
        layout=setting.layout,
        schedule=setting.schedule.name,
        inter=setting.inter,
        intra=setting.intra,
        density=_density(played.work, layer),
        work=played.work,
        needed=computed_chunks(visits).double().mean().item(),
        chunk_bytes=costs.chunk_bytes,
        gradient_bytes=costs.gradient_bytes,
        verticals=costs.vertical_seconds(),
        traffic=played.everything.traffic,
        forward=played.everything.forward,
        backward=played.everything.backward,
        skipping_traffic=played.only_needed.traffic,
        skipping_forward=played.only_needed.forward,
        skipping_backward=played.only_needed.backward,
    )


def _density(work: Tensor, layer: Layer) -> float:
    """Share of the pairs that the mask allows that are computed."""
    index = layer.index
    # One mask may stand for all sequences.
    masks = len(layer.ranges.start)
    sequences_per_mask = len(index.verticals) // masks
    # The mask is the same for all heads.
    visible_to_head = visible_pairs(layer.ranges).sum().item()
    visible = visible_to_head * index.heads * sequences_per_mask
    computed = work.sum().item()
    return computed / visible


def plan(
    visits: Visits,
    index: BlockIndex,
    ranges: MaskRanges,
    layout: str,
    schedule: str,
    inter: int,
    intra: int,
    shape: Shape,
    constants: Constants,
    overlap_stages: tuple[int, int] = (2, 2),
) -> LayerPlan:
    """plan_layer() with everything written out, and the schedule by its name."""
    layer = Layer(index, ranges, shape)
    setting = Setting(
        layout=layout,
        schedule=SCHEDULES[schedule],
        inter=inter,
        intra=intra,
        overlap_stages=overlap_stages,
    )
    return plan_layer(visits, layer, setting, constants)
