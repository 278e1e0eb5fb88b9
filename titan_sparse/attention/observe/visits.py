"""Count exactly what each rank computes, using only integers.

There are no process groups here and no S x S tensor. count_visits() says what the queries of each
rank compute on the keys of each rank. by_step() puts that in the order of a schedule.
The degrees of imbalance summarize the result.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.reach import queries_seeing, tile_weights
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.moba import MoBAIndex

_ELEMENTS = 1 << 23
"""Tiles looked at together: bounds the memory."""


class Visits(NamedTuple):
    """What the queries of rank r compute on the keys of rank s, all int64.

    W is the number of ranks. H is the number of query heads, or 1 where all heads are summed.

    full: [B, H, W, W], tiles (pairs of blocks) in which the mask lets every query see every key.
    partial: [B, H, W, W], tiles that the mask cuts through, once for each slice of the mask.
    pairs: [B, H, W, W], pairs of tokens computed in both kinds of tiles.
    vertical_pairs: [B, H, W, C], pairs of tokens of each block of gathered verticals, without
        those in computed tiles.
    """

    full: Tensor
    partial: Tensor
    pairs: Tensor
    vertical_pairs: Tensor

    def total(self) -> Tensor:
        """Pairs of tokens that each rank computes, int64 [B, H, W].

        Their sum over ranks is what statistics.py calls visited.
        """
        return self.pairs.sum(-1) + self.vertical_pairs.sum(-1)


def count_visits(
    index: BlockIndex, ranges: MaskRanges, table: Tensor, sum_heads: bool = False
) -> Visits:
    """What the queries of each rank compute. table: int64 [W, n], the layout's blocks of each rank.

    sum_heads: H = 1. For a vertical-slash index this is about Hq times cheaper.
    """
    ranks = len(table)
    k_blocks = table.flatten()
    batch, heads, capacity = index.verticals.shape
    if sum_heads:
        heads = 1
    # By kind (full, partial, pairs), as the fields of Visits.
    counts = torch.zeros(3, batch, heads, ranks, ranks, dtype=torch.int64)
    vertical_blocks = capacity // index.block_size
    verticals = torch.zeros(batch, heads, ranks, vertical_blocks, dtype=torch.int64)

    def over_heads(x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) if sum_heads else x

    def by_k_rank(x: Tensor) -> Tensor:
        """[B, H, nq, nk] -> [B, H, W]; k_blocks lists the blocks rank by rank."""
        return x.sum(2).unflatten(-1, (ranks, -1)).sum(-1)

    for rank, rank_blocks in enumerate(table):
        for q_blocks in rank_blocks.split(max(1, _ELEMENTS // (batch * heads * len(k_blocks)))):
            # [B or 1, H or 1, nq, nk]
            if sum_heads:
                selected = index.heads_selecting(q_blocks, k_blocks)
            else:
                selected = index.selects(q_blocks, k_blocks)
            weights = tile_weights(ranges, q_blocks, k_blocks, index.block_size)
            for kind, weight in enumerate(weights):
                counts[kind, :, :, rank] += by_k_rank(selected * weight[:, None])
        verticals[:, :, rank] = over_heads(vertical_pairs(index, ranges, rank_blocks))
        if not isinstance(index, MoBAIndex):
            continue
        # Queries of one block may choose different blocks of keys. A tile that not all of its
        # queries chose is partial, and has fewer pairs.
        for q_blocks in rank_blocks.split(max(1, _ELEMENTS // (index.heads * len(k_blocks)))):
            whole = tile_weights(ranges, q_blocks, k_blocks, index.block_size).whole
            chosen_by_any = index.selects(q_blocks, k_blocks)
            chosen_by_some = chosen_by_any & ~index.selects_for_all(q_blocks, k_blocks)
            no_longer_full = over_heads(by_k_rank(chosen_by_some * whole[:, None]))
            counts[0, :, :, rank] -= no_longer_full
            counts[1, :, :, rank] += no_longer_full
        counts[2, :, :, rank] = over_heads(index.pairs(ranges, rank_blocks, table))
    return Visits(*counts, verticals)


def vertical_pairs(index: BlockIndex, ranges: MaskRanges, q_blocks: Tensor) -> Tensor:
    """Pairs of these blocks' queries with verticals, outside the tiles that they compute.

    q_blocks: int64 [nq], global. Returns int64 [B, Hq, C], C blocks of verticals.
    """
    block_size = index.block_size
    batch, heads, capacity = index.verticals.shape
    if capacity == 0:
        return torch.zeros(batch, heads, 0, dtype=torch.int64, device=index.verticals.device)
    # Lists are filled up with the sequence length. Only the blocks with any vertical are looked at, on the CPU.
    longest = capacity
    if index.verticals.numel() and not index.verticals.is_cuda:  # for which the host would wait
        longest = int((index.verticals < index.seq_len).sum(-1).max())
    # [B, Hq, c]
    verticals = index.verticals[..., : -(-longest // block_size) * block_size]
    first_query, behind_query = queries_seeing(ranges, verticals)
    counted = torch.zeros_like(verticals, dtype=torch.int64)
    for now in q_blocks.split(max(1, _ELEMENTS // max(1, verticals.numel()))):
        # [n, 1], then [B, Hq, n, c]: the block's queries that see each vertical
        begin = now.int()[:, None] * block_size
        first_seeing = torch.maximum(first_query[:, :, None], begin)
        behind_seeing = torch.minimum(behind_query[:, :, None], begin + block_size)
        seeing = (behind_seeing - first_seeing).clamp(min=0)
        counted += (seeing * ~index.covers(now, verticals)).sum(2)
    # Unused blocks of verticals count 0.
    counted = torch.nn.functional.pad(counted, (0, capacity - verticals.shape[-1]))
    return counted.unflatten(-1, (capacity // block_size, block_size)).sum(-1)


def by_step(visits: Visits, sources: Tensor, needed: Tensor) -> Tensor:
    """Pairs of tokens that each rank computes at each step, float64 [B, H, W, W].

    sources: int64 [W, W], by rank and step the rank whose keys and values are computed on.
    needed: bool [W, W], the chunks that ranks compute on (schedules/needs.py). A rank always computes
    on its own one, first.

    Verticals count evenly for the steps that compute, but not for the first one if there are others.
    """
    # [B, H, W, W]: in the last dim steps take the place of ranks.
    work = visits.pairs.gather(-1, sources.expand_as(visits.pairs)).double()
    meets = needed.gather(-1, sources)
    meets[:, 0] = ~meets[:, 1:].any(-1)
    verticals = visits.vertical_pairs.sum(-1, keepdim=True)
    return work + verticals * (meets / meets.sum(-1, keepdim=True))


def worker_imbalance(work: Tensor) -> Tensor:
    """Work of the busiest rank / mean over ranks, float64 [...] (MTraining, figure 7).

    work: [..., ranks]. 1 is perfect, and the degree where there is no work at all.
    """
    work = work.double()
    mean = work.mean(-1)
    has_work = mean > 0
    # The divisor keeps a division by zero out of the branch that torch.where() drops.
    return torch.where(has_work, work.amax(-1) / mean.where(has_work, 1.0), 1.0)


def worker_imbalance_per_step(work: Tensor) -> Tensor:
    """Mean over steps of max / mean over ranks within the step, float64 [...].

    It is what imbalance costs if ranks wait for each other at every step (MTraining, figures 12
    and 13, left). work: [..., ranks, steps].
    """
    return worker_imbalance(work.transpose(-1, -2)).mean(-1)


def step_imbalance(work: Tensor) -> Tensor:
    """Step-level imbalance degree, float64 [...]: mean over ranks of max / mean over their steps.

    It says how much the load of one worker fluctuates across its steps (MTraining, section 3.3;
    figures 12 and 13, right; table 3). work: [..., ranks, steps].
    """
    return worker_imbalance(work).mean(-1)
