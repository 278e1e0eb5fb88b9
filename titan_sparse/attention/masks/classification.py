"""Tiles of a mask of slices: which (query block, KV block) pairs are seen whole, in part or not at all, from integers.

A slice cut to one block of rows (a *band*) meets one run of other blocks, and except for at most four blocks, where its
edges go through, it covers them whole for its rows. So tiles are classified run by run: 1M tokens in well under a
second. A tile that several slices fill together is whole too; otherwise it is listed once for each of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.slices import area, overlap, within_runs


class Runs(NamedTuple):
    """Runs of tiles in one line of blocks, int64 [n] each: in sequence `sequence`, tiles of block `line` of one side
    with blocks first .. last - 1 of the other. slice: number in MaskRanges.slices."""

    sequence: Tensor
    slice: Tensor
    line: Tensor
    first: Tensor
    last: Tensor


class Classification(NamedTuple):
    """Every tile that is not empty, once in `whole` (whose slice is meaningless), or in `cut` once for each of its
    slices.

    met: runs of tiles that a slice has to do with, each slice for itself. lines_are_keys: a line is a KV block and its
    runs are of query blocks; otherwise the other way round.
    """

    whole: Runs
    cut: Runs
    met: Runs
    lines_are_keys: bool


class Cuts(NamedTuple):
    """Tiles that a slice sees in part, once for each slice; int64 [n] each. pairs: pairs of tokens that it holds
    there."""

    sequence: Tensor
    slice: Tensor
    q_block: Tensor
    k_block: Tensor
    pairs: Tensor


# Classification -----------------------------------------------------------------------------------------------------


def classify(slices: Tensor, size: int) -> Classification:
    """slices: int [Bm, N, 6], tightened, as in MaskRanges.slices. size: tokens of a block. Exact."""
    slices = slices.long()
    swapped = torch.cat(
        [slices[..., 2:4], slices[..., 0:2], -slices[..., 5:], -slices[..., 4:5]], dim=-1
    )
    lines_are_keys = bool(_lines(swapped, size)[1].sum() < _lines(slices, size)[1].sum())
    met, inner, rows = _bands(swapped if lines_are_keys else slices, size)
    edges, pairs = _edges(swapped if lines_are_keys else slices, met, inner, size)
    levels = _Levels.of(inner, rows)
    filled = _filled(edges, pairs, levels, size)
    every = Runs(*(torch.cat(both) for both in zip(inner, filled)))
    levels = _Levels.of(every, torch.cat([rows, torch.full_like(filled.line, size)]))
    edges = _some(edges, levels.at(_place(edges, edges.first)) < size)
    cut = Runs(*(torch.cat(both) for both in zip(edges, levels.parts(inner, size))))
    return Classification(levels.runs(size), cut, met, lines_are_keys)


def classified(rows: MaskRanges, size: int) -> Classification:
    """classify(), remembered for the mask."""
    return once_per_mask(rows, ("classification", size), lambda: classify(rows.slices, size))


def _some(runs: Runs, which: Tensor) -> Runs:
    return Runs(*(x[which] for x in runs))


def _lines(slices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First block of rows of each slice, and how many of them; int64 [Bm * N]."""
    start, stop = slices.flatten(0, 1)[:, :2].unbind(-1)
    return start // size, ((stop + size - 1) // size - start // size) * (start < stop)


def _bands(slices: Tensor, size: int) -> tuple[Runs, Runs, Tensor]:
    """Line by line the blocks that each slice meets, those that it covers whole for its rows, and how many rows it
    has."""
    flat, (begin, count) = slices.flatten(0, 1), _lines(slices, size)
    number = torch.repeat_interleave(torch.arange(len(flat), device=flat.device), count)
    line = begin[number] + within_runs(count)
    q_start, q_stop, k_start, k_stop, low, high = flat[number].unbind(-1)
    top, bottom = torch.maximum(q_start, line * size), torch.minimum(q_stop, line * size + size) - 1
    met = Runs(
        number // slices.shape[1],
        number % slices.shape[1],
        line,
        torch.maximum(k_start, top + low) // size,
        (torch.minimum(k_stop, bottom + high + 1) - 1) // size + 1,
    )
    first = (torch.maximum(k_start, bottom + low) + size - 1) // size
    last = torch.minimum(k_stop, top + high + 1) // size
    inner = met._replace(
        first=first.where(first < last, met.first), last=last.where(first < last, met.first)
    )
    return met, inner, bottom - top + 1


def _edges(slices: Tensor, met: Runs, inner: Runs, size: int) -> tuple[Runs, Tensor]:
    """The single tiles of `met` that are not in `inner`, sorted by place, and the pairs of tokens in them."""
    begin, count = (
        torch.cat([met.first, inner.last]),
        torch.cat([inner.first - met.first, met.last - inner.last]),
    )
    edges = _tiles_of(Runs(*(torch.cat([x, x]) for x in met[:3]), begin, begin + count))
    edges = _some(edges, _place(edges, edges.first).argsort(stable=True))
    return edges, area(
        overlap(slices[edges.sequence, edges.slice], _tile(edges.line, edges.first, size))[0]
    )


def _tiles_of(runs: Runs) -> Runs:
    """The same as runs of one tile each."""
    count = runs.last - runs.first
    sequence, number, line, first = (torch.repeat_interleave(x, count) for x in runs[:4])
    first = first + within_runs(count)
    return Runs(sequence, number, line, first, first + 1)


def _tile(q_block: Tensor, k_block: Tensor, size: int) -> Tensor:
    """A whole tile as a slice, int64 [n, 6]."""
    q, k = q_block * size, k_block * size
    return torch.stack([q, q + size, k, k + size, k - q - size + 1, k - q + size - 1], dim=-1)


def _place(runs: Runs, block: Tensor) -> Tensor:
    """One number for a tile, ascending in sequence, line, block. Blocks are numbered below 2**24."""
    return (runs.sequence << 48) + (runs.line << 24) + block


def _filled(edges: Runs, pairs: Tensor, levels: "_Levels", size: int) -> Runs:
    """Tiles that an edge goes through and all slices together fill: they share no pair, so that counting is enough."""
    place, tile, count = torch.unique_consecutive(
        _place(edges, edges.first), return_inverse=True, return_counts=True
    )
    total = levels.at(place) * size + torch.zeros_like(count).index_add_(0, tile, pairs)
    return _some(edges, (count.cumsum(0) - count)[total == size * size])


class _Levels(NamedTuple):
    """How many rows of a tile are covered by runs, as a staircase: `level` from `place` to before the next place."""

    place: Tensor
    level: Tensor

    @classmethod
    def of(cls, runs: Runs, rows: Tensor) -> "_Levels":
        place, order = torch.cat([_place(runs, runs.first), _place(runs, runs.last)]).sort()
        return cls(place, torch.cat([rows, -rows])[order].cumsum(0))

    def at(self, place: Tensor) -> Tensor:
        """int64 [n]: the level there."""
        found = torch.searchsorted(self.place, place, right=True)
        return torch.nn.functional.pad(self.level, (1, 0))[found]

    def runs(self, least: int) -> Runs:
        """Where the level is `least` or more."""
        step = (self.level[:-1] >= least) & (self.place[:-1] < self.place[1:])
        first, last = self.place[:-1][step], self.place[1:][step]
        block = (1 << 24) - 1
        return Runs(
            first >> 48, torch.zeros_like(first), (first >> 24) & block, first & block, last & block
        )

    def parts(self, runs: Runs, below: int) -> Runs:
        """The parts of these runs where the level is less than `below`."""
        begin, end = (
            torch.searchsorted(self.place, _place(runs, x)) for x in (runs.first, runs.last)
        )
        sequence, number, line, step = (
            torch.repeat_interleave(x, end - begin) for x in (*runs[:3], begin)
        )
        step = step + within_runs(end - begin)
        block, following = (1 << 24) - 1, (step + 1).clamp(max=len(self.place) - 1)
        parts = Runs(
            sequence, number, line, self.place[step] & block, self.place[following] & block
        )
        return _some(parts, (self.level[step] < below) & (parts.first < parts.last))


def cut_tiles(rows: MaskRanges, size: int) -> Cuts:
    """The tiles that are seen in part, remembered for the mask."""
    return once_per_mask(rows, ("cuts", size), lambda: _cut_tiles(rows, size))


def _cut_tiles(rows: MaskRanges, size: int) -> Cuts:
    found = classified(rows, size)
    tiles = _tiles_of(found.cut)
    q_block, k_block = (
        (tiles.first, tiles.line) if found.lines_are_keys else (tiles.line, tiles.first)
    )
    parts, _ = overlap(
        rows.slices[tiles.sequence, tiles.slice].long(), _tile(q_block, k_block, size)
    )
    return Cuts(tiles.sequence, tiles.slice, q_block, k_block, area(parts))


# Tables -------------------------------------------------------------------------------------------------------------


def whole_tiles(rows: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> Tensor:
    """bool [Bm, nq, nk]: the mask lets every query of the block see every key of the block."""
    found, blocks = classified(rows, size), -(-rows.start.shape[1] // size)
    lines, others = (k_blocks, q_blocks) if found.lines_are_keys else (q_blocks, k_blocks)
    row = _local(lines, blocks)
    runs = _some(found.whole, row[found.whole.line] >= 0)
    begin = (runs.sequence * len(lines) + row[runs.line]) * (blocks + 1)
    # A run adds 1 where it begins and takes it away where it ends.
    ends = torch.zeros(
        len(rows.slices), len(lines), blocks + 1, dtype=torch.int8, device=begin.device
    )
    for at, step in ((runs.first, 1), (runs.last, -1)):
        ends.view(-1).scatter_add_(0, begin + at, torch.full_like(begin, step, dtype=torch.int8))
    whole = ends.cumsum(-1, dtype=torch.int8)[..., others] > 0
    return whole.mT if found.lines_are_keys else whole


def tile_weights(
    rows: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each tile whether it is seen whole, how many slices cut it otherwise, and its visible pairs; int32 [Bm, nq,
    nk]."""
    whole = whole_tiles(rows, q_blocks, k_blocks, size).int()
    cuts = cut_tiles(rows, size)
    which, q, k = _of_blocks(cuts, q_blocks, k_blocks, -(-rows.start.shape[1] // size))
    at = (cuts.sequence[which], q, k)
    partial = torch.zeros_like(whole).index_put_(
        at, torch.ones_like(q, dtype=torch.int32), accumulate=True
    )
    return (
        whole,
        partial,
        (whole * size * size).index_put_(at, cuts.pairs[which].int(), accumulate=True),
    )


def seen_blocks(rows: MaskRanges, table: Tensor, size: int) -> Tensor:
    """bool [W, blocks]: the mask lets some query of rank r see a key of block b. table: int64 [W, n], the query blocks
    that each rank owns."""
    found, blocks, ranks = classified(rows, size), -(-rows.start.shape[1] // size), len(table)
    runs = found.met
    if found.lines_are_keys:
        owned = torch.zeros(blocks + 1, ranks, dtype=torch.int32, device=table.device)
        for rank, own in enumerate(table):
            owned[own + 1, rank] = 1
        before = owned.cumsum(0, dtype=torch.int32)
        seen = torch.zeros(blocks, ranks, dtype=torch.int32, device=table.device)
        return seen.index_add_(0, runs.line, (before[runs.last] > before[runs.first]).int()).T > 0
    owner = torch.full((blocks,), ranks, device=table.device)
    owner[table] = torch.arange(ranks, device=table.device)[:, None]
    # A run adds 1 where it begins and takes it away where it ends.
    ends = torch.zeros(ranks + 1, blocks + 1, dtype=torch.int32, device=table.device)
    for at, step in ((runs.first, 1), (runs.last, -1)):
        ends.index_put_((owner[runs.line], at), ends.new_full((), step), accumulate=True)
    return ends.cumsum(1)[:ranks, :blocks] > 0


def _local(blocks: Tensor, total: int) -> Tensor:
    """int64 [total]: where each global block is in the list `blocks`, -1 for nowhere."""
    place = torch.full((total,), -1, device=blocks.device)
    place[blocks.long()] = torch.arange(len(blocks), device=blocks.device)
    return place


def _of_blocks(
    cuts: Cuts, q_blocks: Tensor, k_blocks: Tensor, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The cuts between these blocks: their numbers, and the places of their two blocks in the lists."""
    q, k = _local(q_blocks, total)[cuts.q_block], _local(k_blocks, total)[cuts.k_block]
    which = ((q >= 0) & (k >= 0)).nonzero().flatten()
    return which, q[which], k[which]
