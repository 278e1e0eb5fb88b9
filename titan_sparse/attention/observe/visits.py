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
    """What the queries of rank r compute on the keys of rank s, all sequences and heads together.

    All int64. W is the number of ranks.
    full: [W, W], tiles (pairs of blocks) in which the mask lets every query see every key.
    partial: [W, W], tiles that the mask cuts through, once for each slice of the mask.
    pairs: [W, W], pairs of tokens computed in both kinds of tiles.
    vertical_pairs: [W], pairs of tokens with gathered verticals, without those in computed tiles.
    """

    full: Tensor
    partial: Tensor
    pairs: Tensor
    vertical_pairs: Tensor

    def total(self) -> Tensor:
        """Pairs of tokens that each rank computes, int64 [W].

        Their sum over ranks is what statistics.py calls visited.
        """
        return self.pairs.sum(-1) + self.vertical_pairs


def count_visits(index: BlockIndex, ranges: MaskRanges, table: Tensor) -> Visits:
    """What the queries of each rank compute. table: int64 [W, n], the layout's blocks of each rank."""
    ranks = len(table)
    k_blocks = table.flatten()
    batch, heads = index.verticals.shape[:2]
    size = index.block_size
    # By kind (full, partial, pairs), as the fields of Visits.
    counts = torch.zeros(3, ranks, ranks, dtype=torch.int64)
    verticals = torch.zeros(ranks, dtype=torch.int64)
    at_once = max(1, _ELEMENTS // (batch * heads * len(k_blocks)))
    for rank, rank_blocks in enumerate(table):
        for q_blocks in rank_blocks.split(at_once):
            # [B or 1, nq, nk]: how many heads compute a tile, and for how many all of its queries do.
            some, every = index.heads_selecting(q_blocks, k_blocks)
            # A mask or an index may stand for all sequences.
            alike = batch // max(len(some), len(ranges.start))
            whole, partial, pairs = tile_weights(ranges, q_blocks, k_blocks, size)
            kinds = (every * whole, some * partial + (some - every) * whole, some * pairs)
            for kind, tiles in enumerate(kinds):
                # k_blocks lists the blocks rank by rank.
                by_rank = tiles.sum((0, 1)).unflatten(-1, (ranks, -1)).sum(-1)
                counts[kind, rank] += by_rank * alike
        verticals[rank] = vertical_pairs(index, ranges, rank_blocks).sum()
        if isinstance(index, MoBAIndex):
            # Of a tile that not all of its queries chose, fewer pairs are computed.
            counts[2, rank] = index.pairs(ranges, rank_blocks, table).sum((0, 1))
    return Visits(*counts, verticals)


def vertical_pairs(index: BlockIndex, ranges: MaskRanges, q_blocks: Tensor) -> Tensor:
    """Pairs of these blocks' queries with verticals, outside the tiles that they compute.

    q_blocks: int64 [nq], global. Returns int64 [B, Hq].
    """
    verticals = index.verticals
    counted = torch.zeros(verticals.shape[:2], dtype=torch.int64, device=verticals.device)
    if verticals.numel() and not verticals.is_cuda:  # for which the host would wait
        # Lists are filled up with the sequence length.
        verticals = verticals[..., : int((verticals < index.seq_len).sum(-1).max())]
    if verticals.numel() == 0:
        return counted
    first_query, behind_query = queries_seeing(ranges, verticals)
    for now in q_blocks.split(max(1, _ELEMENTS // verticals.numel())):
        # [n, 1], then [B, Hq, n, C]: the block's queries that see each vertical
        begin = now.int()[:, None] * index.block_size
        first_seeing = torch.maximum(first_query[:, :, None], begin)
        behind_seeing = torch.minimum(behind_query[:, :, None], begin + index.block_size)
        seeing = (behind_seeing - first_seeing).clamp(min=0)
        counted += (seeing * ~index.covers(now, verticals)).sum((2, 3))
    return counted


def by_step(visits: Visits, sources: Tensor, needed: Tensor) -> Tensor:
    """Pairs of tokens that each rank computes at each step, float64 [W, W].

    sources: int64 [W, W], by rank and step the rank whose keys and values are computed on.
    needed: bool [W, W], the chunks that ranks compute on (schedules/needs.py). A rank always computes
    on its own one, first.

    Verticals count evenly for the steps that compute, but not for the first one if there are others.
    """
    # In the last dim steps take the place of ranks.
    work = visits.pairs.gather(-1, sources).double()
    meets = needed.gather(-1, sources)
    meets[:, 0] = ~meets[:, 1:].any(-1)
    return work + visits.vertical_pairs[:, None] * (meets / meets.sum(-1, keepdim=True))


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
