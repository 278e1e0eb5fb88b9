"""Count exactly what each rank computes, using only integers.

There are no process groups here and no S x S tensor. count_visits() says what the queries of each
rank compute on the keys of each rank. by_step() puts that in the order of a schedule.
The degrees of imbalance summarize the result.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.schedule import SCHEDULES, vertical_steps
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.reach import queries_seeing, tile_weights
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.moba import MoBAIndex
from titan_sparse.attention.patterns.vertical_slash.pattern import (
    VerticalSlashIndex,
    heads_selecting,
    values_on_slashes,
)
from titan_sparse.attention.tiles.blocks import all_blocks, covered_verticals

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
        in_tiles = self.pairs.sum(-1)
        # Of all blocks of verticals.
        outside_tiles = self.vertical_pairs.sum(-1)
        return in_tiles + outside_tiles


def count_visits(index: BlockIndex, ranges: MaskRanges, table: Tensor) -> Visits:
    """Visits of each head. table: int64 [W, n], the layout's blocks of each rank."""
    return _count(index, ranges, table, sum_heads=False)


def count_visits_of_all_heads(index: BlockIndex, ranges: MaskRanges, table: Tensor) -> Visits:
    """Visits summed over heads (H = 1). table: int64 [W, n], the layout's blocks of each rank.

    For a vertical-slash index this is about Hq times cheaper than count_visits().
    """
    return _count(index, ranges, table, sum_heads=True)


def _count(index: BlockIndex, ranges: MaskRanges, table: Tensor, sum_heads: bool) -> Visits:
    ranks = len(table)
    k_blocks = table.flatten()
    batch, heads, capacity = index.verticals.shape
    if sum_heads:
        heads = 1
    # By kind (full, partial, pairs), as the fields of Visits.
    counts = torch.zeros(3, batch, heads, ranks, ranks, dtype=torch.int64)
    vertical_blocks = capacity // index.block_size
    verticals = torch.zeros(batch, heads, ranks, vertical_blocks, dtype=torch.int64)
    tiles_of_q_block = batch * heads * len(k_blocks)
    q_blocks_at_once = max(1, _ELEMENTS // tiles_of_q_block)
    for rank, rank_blocks in enumerate(table):
        for q_blocks in rank_blocks.split(q_blocks_at_once):
            # [B or 1, H or 1, nq, nk]
            if sum_heads:
                selected = heads_selecting(index, q_blocks, k_blocks)
            else:
                selected = index.selects(q_blocks, k_blocks)
            weights = tile_weights(ranges, q_blocks, k_blocks, index.block_size)
            for kind, weight in enumerate(weights):
                # [B, H, nq, nk]
                counted = selected * weight[:, None]
                by_k_block = counted.sum(2)
                # k_blocks lists the blocks rank by rank.
                by_k_rank = by_k_block.unflatten(-1, (ranks, -1))
                counts[kind, :, :, rank] += by_k_rank.sum(-1)
        pairs_with_verticals = vertical_pairs(index, ranges, rank_blocks)
        verticals[:, :, rank] = _over_heads(pairs_with_verticals, sum_heads)
        if isinstance(index, MoBAIndex):
            _tell_queries_apart(counts[:, :, :, rank], index, ranges, table, rank, sum_heads)
    full, partial, pairs = counts
    return Visits(full, partial, pairs, verticals)


def _over_heads(counts: Tensor, sum_heads: bool) -> Tensor:
    if sum_heads:
        return counts.sum(1, keepdim=True)
    return counts


def _tell_queries_apart(
    counts: Tensor,
    index: MoBAIndex,
    ranges: MaskRanges,
    table: Tensor,
    rank: int,
    sum_heads: bool,
) -> None:
    """Correct one rank's counts [3, B, H, W] in place.

    Queries of one block may choose different blocks of keys. A tile that not all of its queries
    chose is partial, and has fewer pairs.
    """
    ranks = len(table)
    k_blocks = table.flatten()
    tiles_of_q_block = index.words.shape[1] * len(k_blocks)
    q_blocks_at_once = max(1, _ELEMENTS // tiles_of_q_block)
    for q_blocks in table[rank].split(q_blocks_at_once):
        seen_whole = tile_weights(ranges, q_blocks, k_blocks, index.block_size).whole
        chosen_by_any = index.selects(q_blocks, k_blocks)
        chosen_by_all = index.selects_for_all(q_blocks, k_blocks)
        # [B, Hq, nq, nk]: counted as full so far
        chosen_by_some = chosen_by_any & ~chosen_by_all
        divided = chosen_by_some * seen_whole[:, None]
        by_k_block = _over_heads(divided.sum(2), sum_heads)
        # k_blocks lists the blocks rank by rank.
        by_k_rank = by_k_block.unflatten(-1, (ranks, -1))
        no_longer_full = by_k_rank.sum(-1)
        # Kinds are full, partial and pairs.
        counts[0] -= no_longer_full
        counts[1] += no_longer_full
    pairs_of_head = index.pairs(ranges, table[rank], table)
    counts[2] = _over_heads(pairs_of_head, sum_heads)


def vertical_pairs(index: BlockIndex, ranges: MaskRanges, q_blocks: Tensor) -> Tensor:
    """Pairs of these blocks' queries with verticals, outside the tiles that they compute.

    q_blocks: int64 [nq], global. Returns int64 [B, Hq, C], C blocks of verticals.
    """
    block_size = index.block_size
    capacity = index.verticals.shape[-1]
    # Lists are filled up with the sequence length. Only the blocks with any vertical are looked at.
    longest = 0
    if index.verticals.numel():
        is_vertical = index.verticals < index.seq_len
        longest = int(is_vertical.sum(-1).max())
    used_blocks = -(-longest // block_size)
    # [B, Hq, c]
    verticals = index.verticals[..., : used_blocks * block_size]
    first_query, behind_query = queries_seeing(ranges, verticals)
    # [B, Hq, 1, c]
    first_query = first_query[:, :, None]
    behind_query = behind_query[:, :, None]
    counted = torch.zeros_like(verticals, dtype=torch.int64)
    q_blocks_at_once = max(1, _ELEMENTS // max(1, verticals.numel()))
    for q_blocks_now in q_blocks.split(q_blocks_at_once):
        # [n, 1]
        begin = q_blocks_now.int() * block_size
        begin = begin[:, None]
        # [B, Hq, n, c]: the block's queries that see each vertical
        first_seeing = torch.maximum(first_query, begin)
        behind_seeing = torch.minimum(behind_query, begin + block_size)
        seeing = behind_seeing - first_seeing
        seeing = seeing.clamp(min=0)
        outside_tiles = ~_covered(index, q_blocks_now, verticals)
        pairs = seeing * outside_tiles
        counted += pairs.sum(2)
    # Unused blocks of verticals count 0.
    unused = capacity - verticals.shape[-1]
    counted = torch.nn.functional.pad(counted, (0, unused))
    # [B, Hq, C, block_size]
    blocks_of_verticals = capacity // block_size
    by_block = counted.unflatten(-1, (blocks_of_verticals, block_size))
    return by_block.sum(-1)


def _covered(index: BlockIndex, q_blocks: Tensor, verticals: Tensor) -> Tensor:
    """Whether each vertical lies in a tile that the query block computes, bool [B, Hq, nq, C]."""
    if isinstance(index, VerticalSlashIndex):
        k_blocks = verticals // index.block_size
        # [B, Hq, 1, C]
        k_blocks = k_blocks[:, :, None]
        slashes = index.slashes.to(torch.int8)
        on_slash = values_on_slashes(index, slashes, 1, q_blocks, k_blocks)
        return on_slash.bool()
    k_blocks = all_blocks(index)
    selected = index.selects(q_blocks, k_blocks)
    covered = covered_verticals(index, selected)
    # The caller may have left out blocks of verticals that are not used.
    looked_at = verticals.shape[-1]
    return covered[..., :looked_at]


def step_sources(schedule: str, inter: int, intra: int) -> Tensor:
    """The rank whose keys and values rank r computes on at step t: int64 [W, W].

    schedule: a name in the table of schedules. W = inter * intra.
    """
    named_schedule = SCHEDULES[schedule]
    sources = named_schedule.step_sources(inter, intra)
    return torch.tensor(sources)


def by_step(
    visits: Visits,
    sources: Tensor,
    backward: bool = False,
    windows: int = 1,
    needed: Tensor | None = None,
) -> Tensor:
    """Pairs of tokens that each rank computes at each step, int64 [B, H, W, W].

    sources: from step_sources(). windows: of the schedule (inter for a double ring).

    Steps are counted as in the forward, in the backward too. With several windows the backward
    takes them in another order. It computes the same tiles, but meets the verticals at other steps.

    needed: bool [W, W], the chunks that ranks compute on. A rank meets verticals at their steps.
    For a ring's real steps it is needs.needed_chunks_of(), which says yes for a few chunks without
    a tile. The default is computed_chunks().
    """
    # [B, H, W, W]: in the last dim steps take the place of ranks.
    source_of_step = sources.expand_as(visits.pairs)
    work = visits.pairs.gather(-1, source_of_step)
    if needed is None:
        needed = computed_chunks(visits)
    for rank, computes in enumerate(computing_steps(needed, sources)):
        add_verticals(
            work[:, :, rank],
            visits.vertical_pairs[:, :, rank],
            computes,
            backward,
            windows,
        )
    return work


def computing_steps(needed: Tensor, sources: Tensor) -> list[list[bool]]:
    """By rank and step, whether the rank computes.

    needed: bool [W, W], the chunks that ranks compute on. A rank always computes on its own one.
    """
    own = torch.eye(len(sources), dtype=torch.bool)
    computed = needed | own
    # [W, steps]
    computes = computed.gather(-1, sources)
    return computes.tolist()


def add_verticals(
    work: Tensor,
    vertical_pairs: Tensor,
    computes: list[bool],
    backward: bool = False,
    windows: int = 1,
) -> None:
    """Add one rank's pairs with verticals to its work, in place, at the steps that meet them.

    work: [..., steps]. vertical_pairs: [..., C]. computes: by step, in the forward's order.
    backward, windows: as in by_step().
    """
    blocks = vertical_pairs.shape[-1]
    steps = vertical_steps(computes, blocks, backward, windows)
    stride = len(steps)
    for first_block, step in enumerate(steps):
        # Each step meets every len(steps)-th block of verticals.
        pairs_of_blocks = vertical_pairs[..., first_block::stride]
        work[..., step] += pairs_of_blocks.sum(-1)


def computed_chunks(visits: Visits) -> Tensor:
    """Whether a query of rank r, in any sequence and head, computes a tile of the chunk of rank s.

    bool [W, W]. Verticals do not count: they are gathered on their own.
    """
    tiles = visits.full + visits.partial
    # [B * H, W, W]
    tiles = tiles.flatten(0, 1)
    return tiles.any(0)


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
    # [..., steps, ranks]
    ranks_of_step = work.double().transpose(-1, -2)
    # [..., steps]
    imbalance = worker_imbalance(ranks_of_step)
    return imbalance.mean(-1)


def step_imbalance(work: Tensor) -> Tensor:
    """Step-level imbalance degree, float64 [...]: mean over ranks of max / mean over their steps.

    It says how much the load of one worker fluctuates across its steps (MTraining, section 3.3;
    figures 12 and 13, right; table 3). work: [..., ranks, steps].
    """
    # [..., ranks]
    imbalance = worker_imbalance(work)
    return imbalance.mean(-1)
