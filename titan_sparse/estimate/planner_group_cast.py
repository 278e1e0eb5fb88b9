"""Plays group_cast: what moves is single blocks, from their owners to the ranks that need them."""

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group_cast_plan import (
    Traffic,
    assign_stages,
    blocks_before_others,
    traffic,
    wanted_blocks,
)
from titan_sparse.attention.masks.reach import seen_blocks
from titan_sparse.attention.observe.visits import Visits, add_verticals
from titan_sparse.attention.patterns.dense import DenseIndex
from titan_sparse.attention.schedules.needs import met_blocks
from titan_sparse.estimate.constants import Constants
from titan_sparse.estimate.planner_costs import Costs, Passes, Played, table_of
from titan_sparse.estimate.timeline import Exchanges, cast_backward, cast_forward


def play_group_cast(visits: Visits, costs: Costs) -> Played:
    """group_cast. What skips nothing has every block needed by every rank."""
    index = costs.layer.index
    ranges = costs.layer.ranges
    setting = costs.setting
    table = table_of(ranges, setting.layout, setting.ranks, index.block_size, setting.balance)
    if isinstance(index, DenseIndex):
        # The mask alone says what a dense pattern needs.
        needed = seen_blocks(ranges, table, index.block_size)
    else:
        needed = met_blocks(ranges, index, table)
    _, everything = _play(visits, costs, table, torch.ones_like(needed))
    work, only_needed = _play(visits, costs, table, needed)
    return Played(work, everything, only_needed)


def _play(visits: Visits, costs: Costs, table: Tensor, needed: Tensor) -> tuple[Tensor, Passes]:
    """Work of the forward, float64 [W, 1 + stages], and both passes.

    table: int64 [W, n], the blocks of each rank. needed: bool [W, blocks].
    """
    setting = costs.setting
    shape = (setting.inter, setting.intra)
    forward_stages, backward_stages = setting.overlap_stages
    # [inter, intra, inter, intra, n]
    wanted = wanted_blocks(needed, table, setting.inter, setting.intra)
    forward_work = _work_by_stage(visits, wanted, forward_stages, None)
    first_share = _first_share(wanted, costs)
    backward_work = _work_by_stage(visits, wanted, backward_stages, first_share)
    vertical_forward, vertical_backward = costs.vertical_exchanges(
        (forward_work > 0).tolist(), (backward_work > 0).tolist()
    )

    # Blocks [W, stages]. What a rank receives of keys is what it sends of gradients.
    forward_sent = traffic(wanted, forward_stages)
    forward_received = traffic(wanted, forward_stages, backward=True)
    backward_sent = traffic(wanted, backward_stages)
    backward_received = traffic(wanted, backward_stages, backward=True)
    blocks_of_rank = table.shape[1]
    key_bytes = costs.chunk_bytes // blocks_of_rank
    gradient_bytes = costs.gradient_bytes // blocks_of_rank

    forward = cast_forward(
        costs.forward_seconds(forward_work),
        _exchange_seconds(forward_sent, forward_received, key_bytes, costs.constants),
        shape,
        vertical_forward,
    )
    backward = cast_backward(
        costs.backward_seconds(backward_work),
        _exchange_seconds(backward_sent, backward_received, key_bytes, costs.constants),
        _exchange_seconds(backward_received, backward_sent, gradient_bytes, costs.constants),
        shape,
        vertical_backward,
    )

    # The number of stages does not change the sums over stages.
    keys_inside = backward_sent.inside.sum(1) * key_bytes
    keys_across = backward_sent.across.sum(1) * key_bytes
    gradients_inside = backward_received.inside.sum(1) * gradient_bytes
    gradients_across = backward_received.across.sum(1) * gradient_bytes
    bytes_by_name = {
        "forward_inside": keys_inside,
        "backward_inside": keys_inside + gradients_inside,
        "forward_across": keys_across,
        "backward_across": keys_across + gradients_across,
    }
    return forward_work, Passes(bytes_by_name, forward, backward)


def _first_share(wanted: Tensor, costs: Costs) -> Tensor:
    """The share of a rank's own blocks that its backward computes before those of others.

    float64 [W, 1].
    """
    shape = costs.layer.shape
    inter = wanted.shape[0]
    own_blocks = wanted.shape[-1]
    remote_blocks = wanted.flatten(2).sum(-1).flatten().tolist()
    own_first = []
    for remote in remote_blocks:
        blocks = blocks_before_others(
            own_blocks,
            remote,
            costs.layer.index.heads,
            shape.kv_heads,
            shape.element_bytes,
            inter,
        )
        own_first.append(blocks)
    return torch.tensor(own_first, dtype=torch.float64)[:, None] / own_blocks


def _work_by_stage(
    visits: Visits, wanted: Tensor, stages: int, first_share: Tensor | None
) -> Tensor:
    """Pairs of tokens by step, float64 [W, steps]: own blocks first, then each stage.

    first_share: [W, 1] for a backward, None for a forward. A backward computes that share of the
    own blocks at the start, and the rest at the end. What a rank computes on another's chunk is
    taken to be spread evenly over the blocks of it that it needs.
    """
    # [W, W]
    pairs = visits.pairs.sum((0, 1)).double()
    ranks = len(pairs)
    # [inter, inter, intra, n]: when a node gets a block
    stage_of_block = assign_stages(wanted, stages)
    # [inter, intra, W's blocks in order]
    wanted = wanted.flatten(2, 3)
    wanted_of_chunk = wanted.sum(-1).view(ranks, ranks)
    pairs_per_block = pairs / wanted_of_chunk.clamp(min=1)

    # [W, 1]
    own = pairs.diagonal()[:, None]
    steps = [own]
    if first_share is not None:
        steps = [own * first_share]
    for stage in range(stages):
        arrives_now = (stage_of_block == stage).flatten(1, 2)[:, None]
        blocks_of_chunk = (wanted & arrives_now).sum(-1).view(ranks, ranks)
        pairs_of_chunk = blocks_of_chunk * pairs_per_block
        steps.append(pairs_of_chunk.sum(1, keepdim=True))
    if first_share is not None:
        steps.append(own * (1 - first_share))
    work = torch.cat(steps, dim=1)

    is_backward = first_share is not None
    vertical_pairs = visits.vertical_pairs.sum((0, 1)).double()
    for work_of_rank, vertical_pairs_of_rank in zip(work, vertical_pairs):
        computes = (work_of_rank > 0).tolist()
        add_verticals(work_of_rank, vertical_pairs_of_rank, computes, is_backward)
    return work


def _exchange_seconds(
    sent: Traffic, received: Traffic, block_bytes: int, constants: Constants
) -> Exchanges:
    """Seconds of all-to-alls of blocks; a rank sends and receives at the same time."""
    # Blocks, then bytes: [W, stages].
    inside_blocks = torch.maximum(sent.inside, received.inside)
    across_blocks = torch.maximum(sent.across, received.across)
    inside = inside_blocks.double() * block_bytes
    across = across_blocks.double() * block_bytes
    # Ranks that send and receive nothing in a stage do not wait for a latency either.
    inside_latency = (inside > 0) * constants.inside_latency_ms / 1e3
    across_latency = (across > 0) * constants.across_latency_ms / 1e3
    inside_bytes_s = constants.inside_gb_s * 1e9
    across_bytes_s = constants.across_gb_s * 1e9
    return Exchanges(
        outer=across / across_bytes_s + across_latency,
        inner=inside / inside_bytes_s + inside_latency,
    )
