"""Plays rings, double rings and all_gather: what moves is whole chunks of keys and values."""

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import routing
from titan_sparse.attention.context_parallel.schedule import head_groups
from titan_sparse.attention.observe import visits as visits_of_ranks
from titan_sparse.attention.observe.visits import Visits
from titan_sparse.attention.schedules.needs import needed_chunks_of
from titan_sparse.estimate.planner_costs import Costs, Passes, Played, table_of
from titan_sparse.estimate.timeline import (
    gather_backward,
    gather_forward,
    ring_backward,
    ring_forward,
    with_verticals,
)


def play_rings(visits: Visits, costs: Costs) -> Played:
    """A ring, a double ring, or one rank alone."""
    setting = costs.setting
    outer_ranks, inner_ranks = setting.schedule.rings(setting.inter, setting.intra)
    sources = _sources(costs)
    computed = _computed_chunks(costs)
    forward_work, backward_work = _work_by_step(visits, costs, sources, computed)
    computes = visits_of_ranks.computing_steps(computed, sources)
    vertical_forward, vertical_backward = costs.vertical_exchanges(computes, computes, outer_ranks)

    # Chunks travel in groups of heads, and each group is launched on its own at every step.
    groups = head_groups(costs.layer.shape.kv_heads, outer_ranks)
    forward_seconds = costs.forward_seconds(forward_work / groups)
    backward_seconds = costs.backward_seconds(backward_work / groups)

    def play(needed: Tensor) -> Passes:
        """needed: bool [W, W], the chunks that ranks are sent."""
        key_hops = routing.hops_needed(needed, outer_ranks, inner_ranks)
        gradient_hops = routing.gradient_hops(needed, outer_ranks, inner_ranks)
        keys = costs.ring_transfers(key_hops, costs.chunk_bytes / groups)
        gradients = costs.ring_transfers(gradient_hops, costs.gradient_bytes / groups)
        traffic = costs.traffic(
            routing.traffic(key_hops, setting.intra),
            routing.traffic(gradient_hops, setting.intra),
        )
        forward = ring_forward(forward_seconds, keys, sources, groups, vertical_forward)
        backward = ring_backward(
            backward_seconds, keys, gradients, sources, groups, vertical_backward
        )
        return Passes(traffic, forward, backward)

    needed = visits_of_ranks.computed_chunks(visits)
    return Played(forward_work, play(torch.ones_like(needed)), play(needed))


def play_all_gather(visits: Visits, costs: Costs) -> Played:
    """all_gather, which sends everything to everybody, one KV head at a time."""
    setting = costs.setting
    ranks = setting.ranks
    kv_heads = costs.layer.shape.kv_heads
    forward_work, _ = _work_by_step(visits, costs, _sources(costs), _computed_chunks(costs))
    # [W, KV heads]: heads are taken to be alike.
    work_of_head = (forward_work.sum(1, keepdim=True) / kv_heads).expand(-1, kv_heads)
    sent = routing.all_gather_traffic(ranks, setting.intra)
    gather_seconds = costs.collective_seconds(sent, costs.chunk_bytes / kv_heads)
    scatter_seconds = costs.collective_seconds(sent, costs.gradient_bytes / kv_heads)
    vertical_forward, vertical_backward = costs.vertical_seconds()

    forward = gather_forward(costs.forward_seconds(work_of_head), gather_seconds)
    # The first head needs the verticals, whose exchange begins with the gather.
    start = torch.zeros(ranks)
    first_head = forward.waiting[:, 0]
    forward = with_verticals(forward, vertical_forward, start, first_head)

    backward = gather_backward(
        costs.backward_seconds(work_of_head), gather_seconds, scatter_seconds
    )
    # Their gradients are complete before the last head's gradient goes home.
    ends = backward.finish()
    backward = with_verticals(backward, vertical_backward, ends - scatter_seconds, ends)

    passes = Passes(costs.traffic(sent, sent), forward, backward)
    return Played(forward_work, passes, passes)


def _sources(costs: Costs) -> Tensor:
    """By rank and step, the rank whose keys and values are computed on: int64 [W, W]."""
    setting = costs.setting
    schedule = setting.schedule
    sources = schedule.step_sources(setting.inter, setting.intra)
    return torch.tensor(sources)


def _computed_chunks(costs: Costs) -> Tensor:
    """The chunks that a real run computes on, bool [W, W]: a few more than hold a tile."""
    layer = costs.layer
    setting = costs.setting
    ranges = layer.ranges
    if setting.layout == "balanced":
        size = layer.index.block_size
        table = table_of(ranges, setting.layout, setting.ranks, size, setting.balance)
        ranges = ranges._replace(table=table)
    return needed_chunks_of(layer.index, ranges, setting.layout, setting.ranks)


def _work_by_step(
    visits: Visits, costs: Costs, sources: Tensor, computed: Tensor
) -> tuple[Tensor, Tensor]:
    """Pairs of tokens by step of the forward and of the backward, float64 [W, W] each."""
    setting = costs.setting
    windows, _ = setting.schedule.rings(setting.inter, setting.intra)
    # int64 [B, H, W, W]
    forward = visits_of_ranks.by_step(
        visits,
        sources,
        backward=False,
        windows=windows,
        needed=computed,
    )
    backward = visits_of_ranks.by_step(
        visits,
        sources,
        backward=True,
        windows=windows,
        needed=computed,
    )
    # All sequences and heads together.
    forward_work = forward.sum((0, 1))
    backward_work = backward.sum((0, 1))
    return forward_work.double(), backward_work.double()
