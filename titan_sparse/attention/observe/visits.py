"""How evenly an index spreads over ranks and steps: exact counts from integers, no process groups and no S x S tensor.

count_visits() says what each rank's queries compute on each rank's keys, by_step() puts it in a schedule's order, and the
imbalance functions judge it. They take any [..., ranks, steps] work, so that measured kernel times serve as well.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.context_parallel import windows as schedules
from titan_sparse.attention.masks import classification as slice_tiles
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.reach import block_reach
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.moba import MoBAIndex
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles.blocks import all_blocks, covered_verticals

_ELEMENTS = 1 << 23
"""Tiles looked at together: bounds the memory."""


class Visits(NamedTuple):
    """What the queries of rank r compute on the keys of rank s; int64, H query heads (1: the sum of all heads), W ranks.

    full, partial: [B, H, W, W] tiles (pairs of blocks) that are seen whole, that the mask cuts through; the latter once for
    each slice of the mask.
    pairs: [B, H, W, W] pairs of tokens computed in both kinds of tiles.
    vertical_pairs: [B, H, W, C] pairs of tokens of each block of gathered verticals, without those in computed tiles.
    """

    full: Tensor
    partial: Tensor
    pairs: Tensor
    vertical_pairs: Tensor

    def total(self) -> Tensor:
        """Pairs of tokens computed by each rank, int64 [B, H, W]; summed over ranks what statistics.py calls visited."""
        return self.pairs.sum(-1) + self.vertical_pairs.sum(-1)


# Counting -----------------------------------------------------------------------------------------------------------


def count_visits(index: BlockIndex, rows: MaskRanges, table: Tensor) -> Visits:
    """Visits for each head. table: int64 [W, n], the layout's blocks of each rank."""
    return _count(index, rows, table, index.selects, lambda pairs: pairs)


def count_visits_of_all_heads(index: BlockIndex, rows: MaskRanges, table: Tensor) -> Visits:
    """Visits summed over heads, H = 1: for a vertical-slash index about Hq times cheaper than count_visits()."""
    return _count(
        index,
        rows,
        table,
        lambda q, k: heads_selecting(index, q, k),
        lambda pairs: pairs.sum(1, keepdim=True),
    )


def _count(
    index: BlockIndex,
    rows: MaskRanges,
    table: Tensor,
    selecting: Callable[[Tensor, Tensor], Tensor],
    reduce: Callable[[Tensor], Tensor],
) -> Visits:
    ranks, keys = len(table), table.flatten()
    batch, heads = len(index.verticals), reduce(index.verticals).shape[1]
    step = max(1, _ELEMENTS // (batch * heads * len(keys)))
    counts = torch.zeros(3, batch, heads, ranks, ranks, dtype=torch.int64)
    verticals = torch.zeros(
        batch, heads, ranks, index.verticals.shape[-1] // index.block_size, dtype=torch.int64
    )
    for rank, own in enumerate(table):
        for q_blocks in own.split(step):
            selected = selecting(q_blocks, keys)
            for number, weight in enumerate(_tile_weights(rows, q_blocks, keys, index.block_size)):
                by_key = (selected * weight[:, None]).sum(2)
                counts[number, :, :, rank] += by_key.unflatten(-1, (ranks, -1)).sum(-1)
        verticals[:, :, rank] = reduce(vertical_pairs(index, rows, own))
        if isinstance(index, MoBAIndex):
            _tell_queries_apart(counts[:, :, :, rank], index, rows, own, table, reduce)
    return Visits(*counts, verticals)


def _tell_queries_apart(
    counts: Tensor,
    index: MoBAIndex,
    rows: MaskRanges,
    q_blocks: Tensor,
    table: Tensor,
    reduce: Callable[[Tensor], Tensor],
) -> None:
    """Correct one rank's counts [3, B, H, W]: tiles that not all of their queries chose are partial, with fewer pairs."""
    keys = table.flatten()
    for some in q_blocks.split(max(1, _ELEMENTS // (index.words.shape[1] * len(keys)))):
        whole = _tile_weights(rows, some, keys, index.block_size)[0]
        divided = (index.selects(some, keys) & ~index.selects_for_all(some, keys)) * whole[:, None]
        moved = reduce(divided.sum(2)).unflatten(-1, (len(table), -1)).sum(-1)
        counts[0] -= moved
        counts[1] += moved
    counts[2] = reduce(index.pairs(rows, q_blocks, table))


def _tile_weights(
    rows: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each tile whether it is seen whole, whether in part, and its visible pairs; int32 [Bm, nq, nk] each."""
    if rows.slices is not None:
        return slice_tiles.tile_weights(rows, q_blocks, k_blocks, size)
    reach = block_reach(rows, token_positions(q_blocks, size), size)
    begin = k_blocks * size
    whole = (reach.all_first[..., None] <= begin) & (reach.all_last[..., None] >= begin + size)
    partial = (reach.first[..., None] < begin + size) & (reach.last[..., None] > begin) & ~whole
    pairs = whole.int() * size * size
    which, q, k = partial.nonzero(as_tuple=True)
    positions = token_positions(q_blocks[q], size).view(-1, size)
    start, stop = (x[which[:, None], positions] for x in (rows.start, rows.stop))
    first = begin[k, None]
    seen = (torch.minimum(stop, first + size) - torch.maximum(start, first)).clamp(min=0)
    pairs[which, q, k] = seen.sum(-1).int()
    return whole.int(), partial.int(), pairs


def heads_selecting(index: BlockIndex, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
    """int32 [B or 1, 1, nq, nk]: how many heads compute each pair of global blocks (int64 [nq], [nk])."""
    if not isinstance(index, VerticalSlashIndex):
        selected = index.selects(q_blocks, k_blocks)
        return selected.sum(1, keepdim=True, dtype=torch.int32) * (index.heads // selected.shape[1])
    heads_on = index.slashes.sum(1, keepdim=True, dtype=torch.int32)
    return _on_diagonals(index, heads_on, index.heads, q_blocks, k_blocks.view(1, 1, 1, -1))


def _on_diagonals(
    index: VerticalSlashIndex, values: Tensor, whole: int, q_blocks: Tensor, k_blocks: Tensor
) -> Tensor:
    """values [B, H, E] at the block diagonal of each pair of blocks, `whole` where short documents are computed whole.

    q_blocks [nq], k_blocks [B or 1, H or 1, 1, m] -> [B, H, nq, m]. Of two documents that meet in a query block the later
    one adds the tile on the main diagonal only, which the earlier one has already: local_diagonals is 1 or more.
    """
    begin, first, _, _, dense_from = index.block_spans(q_blocks)[:, None, :, None].unbind(-1)
    delta = q_blocks.int()[:, None] - k_blocks.int()
    in_span = (begin >= 0) & (delta >= 0) & (k_blocks >= first)
    entry = ((begin + delta) * in_span).expand(*values.shape[:2], -1, -1)
    found = values.gather(2, entry.flatten(2).long()).view(entry.shape) * in_span
    short = ((k_blocks >= dense_from) & (delta >= 0)) * torch.tensor(whole, dtype=values.dtype)
    return torch.maximum(found, short)


def vertical_pairs(index: BlockIndex, rows: MaskRanges, q_blocks: Tensor) -> Tensor:
    """Pairs of these blocks' queries with verticals outside the tiles they compute, int64 [B, Hq, C], by block of verticals."""
    size, capacity = index.block_size, index.verticals.shape[-1]
    most = int((index.verticals < index.seq_len).sum(-1).max()) if index.verticals.numel() else 0
    verticals = index.verticals[..., : -(-most // size) * size]
    first, last = _queries_seeing(rows, verticals)
    step = max(1, _ELEMENTS // max(1, verticals.numel()))
    counted = torch.zeros_like(verticals, dtype=torch.int64)
    for some in q_blocks.split(step):
        begin = (some.int() * index.block_size)[:, None]
        seeing = (
            torch.minimum(last, begin + index.block_size) - torch.maximum(first, begin)
        ).clamp(min=0)
        counted += (seeing * ~_covered(index, some, verticals)).sum(2)
    counted = torch.nn.functional.pad(counted, (0, capacity - verticals.shape[-1]))
    return counted.unflatten(-1, (capacity // size, size)).sum(-1)


def _queries_seeing(rows: MaskRanges, verticals: Tensor) -> tuple[Tensor, Tensor]:
    """First and last + 1 query that sees each vertical, int32 [B, H, 1, C]; both vectors of rows are sorted."""
    flat = verticals.flatten(1).contiguous()
    found = (
        torch.searchsorted(x.expand(len(flat), -1).contiguous(), flat, right=True, out_int32=True)
        for x in (rows.stop, rows.start)
    )
    return tuple(x.view(verticals.shape)[:, :, None] for x in found)


def _covered(index: BlockIndex, q_blocks: Tensor, verticals: Tensor) -> Tensor:
    """bool [B, Hq, nq, C]: the vertical lies in a tile that the query block computes."""
    if not isinstance(index, VerticalSlashIndex):
        return covered_verticals(index, index.selects(q_blocks, all_blocks(index)))[
            ..., : verticals.shape[-1]
        ]
    blocks = (verticals // index.block_size)[:, :, None]
    return _on_diagonals(index, index.slashes.to(torch.int8), 1, q_blocks, blocks).bool()


# In the order of a schedule -----------------------------------------------------------------------------------------


def step_sources(schedule: str, inter: int, intra: int) -> Tensor:
    """int64 [W, W]: the rank whose KV rank r computes on at step t; W = inter * intra."""
    windows = schedules.SCHEDULES[schedule]
    return torch.tensor([sum(windows(inter, intra, rank), []) for rank in range(inter * intra)])


def by_step(
    visits: Visits,
    sources: Tensor,
    backward: bool = False,
    windows: int = 1,
    needed: Tensor | None = None,
) -> Tensor:
    """Pairs of tokens that each rank computes at each step, int64 [B, H, W, W]. sources: of step_sources().

    Steps are counted as in the forward, in the backward too, which takes them in another order if the schedule has
    several `windows` (a double ring's inter). It has the same tiles, but the verticals in other steps.

    needed: bool [W, W], the chunks that ranks compute on, at whose steps they meet verticals. For ring.py's own steps it is
    needs.needed_chunks_of(), which says yes here and there without a tile; by default needed_chunks().
    """
    work = visits.pairs.gather(-1, sources.expand_as(visits.pairs))
    for rank, steps in enumerate(
        computing_steps(needed_chunks(visits) if needed is None else needed, sources)
    ):
        add_verticals(work[:, :, rank], visits.vertical_pairs[:, :, rank], steps, backward, windows)
    return work


def computing_steps(needed: Tensor, sources: Tensor) -> list[list[bool]]:
    """By rank and step, whether the rank computes: on the chunks that it needs, bool [W, W], and always on its own."""
    return (needed | torch.eye(len(sources), dtype=torch.bool)).gather(-1, sources).tolist()


def add_verticals(
    work: Tensor,
    vertical_pairs: Tensor,
    computes: list[bool],
    backward: bool = False,
    windows: int = 1,
) -> None:
    """Add a rank's vertical_pairs [..., C] to its work [..., steps], in place, where ring.py meets them; as by_step()."""
    steps = schedules.vertical_steps(computes, vertical_pairs.shape[-1], backward, windows)
    for part, step in enumerate(steps):
        work[..., step] += vertical_pairs[..., part :: len(steps)].sum(-1)


def needed_chunks(visits: Visits) -> Tensor:
    """bool [W, W]: any query of rank r, in any sequence and head, computes a tile of the chunk of rank s.

    Columns do not count: they are gathered on their own. For routing.py.
    """
    return (visits.full + visits.partial).flatten(0, 1).any(0)


# Judging ------------------------------------------------------------------------------------------------------------


def worker_imbalance(work: Tensor) -> Tensor:
    """Worker-level imbalance degree, float64 [...] of work or times [..., ranks, steps]: max / mean over ranks of the
    sum over steps (MTraining, figure 7). 1 is perfect; all the time above 1 is waiting for the slowest rank."""
    return _degree(work.double().sum(-1))


def worker_imbalance_per_step(work: Tensor) -> Tensor:
    """Mean over steps of max / mean over ranks within the step, float64 [...] (MTraining, figures 12 and 13, left): what
    it costs if ranks wait for each other at every step."""
    return _degree(work.double().transpose(-1, -2)).mean(-1)


def step_imbalance(work: Tensor) -> Tensor:
    """Step-level imbalance degree, float64 [...]: mean over ranks of max / mean over the steps of one rank (MTraining,
    section 3.3: fluctuations in one worker's load across the steps; figures 12 and 13, right; table 3)."""
    return _degree(work.double()).mean(-1)


def lockstep_imbalance(work: Tensor) -> Tensor:
    """sum over steps of the slowest rank / mean over ranks of their sums, float64 [...]: worker_imbalance_per_step() with
    every step weighted by its length, that is the slowdown if no rank may run ahead."""
    work = work.double()
    total = work.sum((-1, -2)) / work.shape[-2]
    return torch.where(total > 0, work.amax(-2).sum(-1) / total.clamp(min=1e-300), 1.0)


def computation_ratio(compute: Tensor, elapsed: Tensor) -> Tensor:
    """Mean over ranks and steps of computing time / time of the step, float64 [...] from times [..., ranks, steps].

    MTraining's table 3 gives it without a formula; this is the one that its figure 3 draws: what is not computing is
    bubble. Steps that took no time are left out.
    """
    compute, elapsed = compute.double(), elapsed.double()
    ratio = torch.where(elapsed > 0, compute / elapsed.clamp(min=1e-300), torch.nan)
    return ratio.flatten(-2).nanmean(-1)


def _degree(work: Tensor) -> Tensor:
    """max / mean over the last dim; 1 where there is no work."""
    mean = work.mean(-1)
    return torch.where(mean > 0, work.amax(-1) / mean.clamp(min=1e-300), 1.0)
