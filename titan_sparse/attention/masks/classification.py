"""Which tiles a mask of slices sees whole, in part or not at all, worked out from integers.

A tile is a pair of a query block and a KV block. Cut each slice to one block of rows, a *band*. A band
touches one run of blocks of the other side. Except for at most four blocks, where the slice's edges go
through, it covers them whole for its rows. So tiles are classified run by run, and 1M tokens take well
under a second. A tile that several slices fill together is whole too. Otherwise it is listed once for
each of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.base import MaskRanges
from titan_sparse.attention.masks.geometry import area, overlap, within_runs
from titan_sparse.attention.masks.memo import once_per_mask

_BLOCK_BITS = 24
"""Bits of a block's number in _place(): blocks are numbered below 2**24."""
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1


class Runs(NamedTuple):
    """Runs of tiles, each in one line of blocks. int64 [n] each.

    sequence: which sequence of the batch.
    slice: number in MaskRanges.slices.
    line: the block of one side.
    first, last: the blocks of the other side, `last` not included.
    """

    sequence: Tensor
    slice: Tensor
    line: Tensor
    first: Tensor
    last: Tensor


class Classification(NamedTuple):
    """Every tile that is not empty.

    whole: tiles that are seen whole, each once. `slice` means nothing there.
    cut: tiles that are seen in part, once for each slice in them.
    touched: runs of tiles that a slice holds something of, each slice for itself.
    lines_are_keys: a line is a KV block and its runs are of query blocks. Otherwise the other way
    round.
    """

    whole: Runs
    cut: Runs
    touched: Runs
    lines_are_keys: bool


class Cuts(NamedTuple):
    """Tiles that a slice sees in part, once for each slice. int64 [n] each.

    pairs: pairs of tokens that the slice holds in the tile.
    """

    sequence: Tensor
    slice: Tensor
    q_block: Tensor
    k_block: Tensor
    pairs: Tensor


class TileWeights(NamedTuple):
    """What a mask sees of each tile. int32 [Bm, nq, nk] each.

    whole: 1 if it is seen whole, else 0.
    partial: how many slices see it in part. For a mask without slices, 1 if it is seen in part.
    pairs: visible pairs of tokens.
    """

    whole: Tensor
    partial: Tensor
    pairs: Tensor


class _Bands(NamedTuple):
    """Slices line by line. touched: blocks that a band touches. inner: those that it covers whole for
    its rows. rows: int64 [n], how many rows a band has."""

    touched: Runs
    inner: Runs
    rows: Tensor


class _Coverage(NamedTuple):
    """How many rows of each tile are covered, as a staircase over places in the order of _place().

    Every tile from place[i] to before place[i + 1] has rows[i] covered rows.
    """

    place: Tensor
    rows: Tensor

    @classmethod
    def of(cls, runs: Runs, rows: Tensor) -> "_Coverage":
        """Each run covers `rows` rows of its tiles, int64 [n], and no two runs the same rows."""
        begin = _place(runs, runs.first)
        end = _place(runs, runs.last)
        place, order = torch.cat([begin, end]).sort()
        change = torch.cat([rows, -rows])
        return cls(place, change[order].cumsum(0))

    def at(self, place: Tensor) -> Tensor:
        """int64 [n]: covered rows of the tiles at these places."""
        step = torch.searchsorted(self.place, place, right=True)
        return torch.nn.functional.pad(self.rows, (1, 0))[step]

    def at_least(self, rows: int) -> Runs:
        """Runs of tiles with `rows` covered rows or more."""
        begin = self.place[:-1]
        end = self.place[1:]
        step = (self.rows[:-1] >= rows) & (begin < end)
        first = begin[step]
        last = end[step]
        return Runs(
            sequence=first >> 2 * _BLOCK_BITS,
            slice=torch.zeros_like(first),
            line=(first >> _BLOCK_BITS) & _BLOCK_MASK,
            first=first & _BLOCK_MASK,
            last=last & _BLOCK_MASK,
        )

    def below(self, runs: Runs, rows: int) -> Runs:
        """What remains of these runs where fewer than `rows` rows are covered."""
        # The staircase has a step at both ends of every run that it was made of.
        begin = torch.searchsorted(self.place, _place(runs, runs.first))
        end = torch.searchsorted(self.place, _place(runs, runs.last))
        steps = end - begin
        step = torch.repeat_interleave(begin, steps) + within_runs(steps)
        next_step = (step + 1).clamp(max=len(self.place) - 1)
        split = Runs(
            sequence=torch.repeat_interleave(runs.sequence, steps),
            slice=torch.repeat_interleave(runs.slice, steps),
            line=torch.repeat_interleave(runs.line, steps),
            first=self.place[step] & _BLOCK_MASK,
            last=self.place[next_step] & _BLOCK_MASK,
        )
        return _selected(split, (self.rows[step] < rows) & (split.first < split.last))


def classify(slices: Tensor, size: int) -> Classification:
    """Classifies every tile, exactly.

    slices: int [Bm, N, 6], tightened, as in MaskRanges.slices. size: tokens of a block.
    """
    slices = slices.long()
    swapped = _sides_swapped(slices)
    _, count = _lines(slices, size)
    _, swapped_count = _lines(swapped, size)
    # The fewer lines there are, the less there is to do.
    lines_are_keys = bool(swapped_count.sum() < count.sum())
    if lines_are_keys:
        slices = swapped
    bands = _bands(slices, size)
    edges, pairs = _edges(slices, bands, size)
    coverage = _Coverage.of(bands.inner, bands.rows)
    filled = _filled(edges, pairs, coverage, size)
    # From here on a tile that edges fill counts as covered in all its rows.
    rows = torch.cat([bands.rows, torch.full_like(filled.line, size)])
    coverage = _Coverage.of(_joined(bands.inner, filled), rows)
    open_edges = _selected(edges, coverage.at(_place(edges, edges.first)) < size)
    cut = _joined(open_edges, coverage.below(bands.inner, size))
    return Classification(coverage.at_least(size), cut, bands.touched, lines_are_keys)


def classified(ranges: MaskRanges, size: int) -> Classification:
    """classify(), remembered for the mask."""
    key = ("classification", size)
    return once_per_mask(ranges, key, lambda: classify(ranges.slices, size))


def _sides_swapped(slices: Tensor) -> Tensor:
    """The same slices with queries and keys exchanged, [..., 6]."""
    q_start, q_stop, k_start, k_stop, low, high = slices.unbind(-1)
    return torch.stack([k_start, k_stop, q_start, q_stop, -high, -low], dim=-1)


def _selected(runs: Runs, which: Tensor) -> Runs:
    return Runs._make(values[which] for values in runs)


def _joined(a: Runs, b: Runs) -> Runs:
    return Runs._make(torch.cat(values) for values in zip(a, b))


def _lines(slices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First block of rows of each slice, and how many it touches. int64 [Bm * N] each."""
    start = slices[..., 0].flatten()
    stop = slices[..., 1].flatten()
    first = start // size
    last = (stop + size - 1) // size
    return first, (last - first) * (start < stop)


def _bands(slices: Tensor, size: int) -> _Bands:
    """slices: int64 [Bm, N, 6]. All bands of the first slice, then those of the second, and so on."""
    flat = slices.flatten(0, 1)
    begin, count = _lines(slices, size)
    number = torch.repeat_interleave(torch.arange(len(flat), device=flat.device), count)
    line = begin[number] + within_runs(count)
    q_start, q_stop, k_start, k_stop, low, high = flat[number].unbind(-1)
    top = torch.maximum(q_start, line * size)  # first row of the band
    bottom = torch.minimum(q_stop, line * size + size) - 1  # last row
    touched = Runs(
        sequence=number // slices.shape[1],
        slice=number % slices.shape[1],
        line=line,
        first=torch.maximum(k_start, top + low) // size,
        last=(torch.minimum(k_stop, bottom + high + 1) - 1) // size + 1,
    )
    # Seen by all rows: from where the last row begins to where the first row ends.
    first = (torch.maximum(k_start, bottom + low) + size - 1) // size
    last = torch.minimum(k_stop, top + high + 1) // size
    any_inner = first < last
    inner = touched._replace(
        first=first.where(any_inner, touched.first), last=last.where(any_inner, touched.first)
    )
    return _Bands(touched, inner, bottom - top + 1)


def _edges(slices: Tensor, bands: _Bands, size: int) -> tuple[Runs, Tensor]:
    """The single tiles that bands touch but do not cover, sorted by place, and their pairs of tokens."""
    before = bands.touched._replace(last=bands.inner.first)
    after = bands.touched._replace(first=bands.inner.last)
    edges = _single_tiles(_joined(before, after))
    edges = _selected(edges, _place(edges, edges.first).argsort(stable=True))
    tiles = _tile(edges.line, edges.first, size)
    held, _ = overlap(slices[edges.sequence, edges.slice], tiles)
    return edges, area(held)


def _single_tiles(runs: Runs) -> Runs:
    """The same tiles, as runs of one tile each."""
    count = runs.last - runs.first
    first = torch.repeat_interleave(runs.first, count) + within_runs(count)
    return Runs(
        sequence=torch.repeat_interleave(runs.sequence, count),
        slice=torch.repeat_interleave(runs.slice, count),
        line=torch.repeat_interleave(runs.line, count),
        first=first,
        last=first + 1,
    )


def _tile(q_block: Tensor, k_block: Tensor, size: int) -> Tensor:
    """A whole tile as a slice, int64 [n, 6]."""
    q = q_block * size
    k = k_block * size
    return torch.stack([q, q + size, k, k + size, k - q - size + 1, k - q + size - 1], dim=-1)


def _place(runs: Runs, block: Tensor) -> Tensor:
    """int64 [n]: one number for each tile, ascending in sequence, then line, then block."""
    return (runs.sequence << 2 * _BLOCK_BITS) + (runs.line << _BLOCK_BITS) + block


def _filled(edges: Runs, pairs: Tensor, coverage: _Coverage, size: int) -> Runs:
    """Tiles that an edge goes through and that all slices together fill.

    Slices share no pair, so it is enough to count pairs.
    """
    place, tile, count = torch.unique_consecutive(
        _place(edges, edges.first), return_inverse=True, return_counts=True
    )
    pairs_of_edges = torch.zeros_like(count).index_add_(0, tile, pairs)
    total = coverage.at(place) * size + pairs_of_edges
    first_edge = count.cumsum(0) - count
    return _selected(edges, first_edge[total == size * size])


def cut_tiles(ranges: MaskRanges, size: int) -> Cuts:
    """The tiles that are seen in part, remembered for the mask."""
    return once_per_mask(ranges, ("cuts", size), lambda: _cut_tiles(ranges, size))


def _cut_tiles(ranges: MaskRanges, size: int) -> Cuts:
    classification = classified(ranges, size)
    tiles = _single_tiles(classification.cut)
    if classification.lines_are_keys:
        q_block, k_block = tiles.first, tiles.line
    else:
        q_block, k_block = tiles.line, tiles.first
    slices = ranges.slices[tiles.sequence, tiles.slice].long()
    held, _ = overlap(slices, _tile(q_block, k_block, size))
    return Cuts(tiles.sequence, tiles.slice, q_block, k_block, area(held))


def whole_tiles(ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> Tensor:
    """bool [Bm, nq, nk]: the mask lets every query of the block see every key of the block."""
    classification = classified(ranges, size)
    blocks = _count_blocks(ranges, size)
    lines, others = q_blocks, k_blocks
    if classification.lines_are_keys:
        lines, others = k_blocks, q_blocks
    row_of_line = _places_in(lines, blocks)
    listed = row_of_line[classification.whole.line] >= 0
    runs = _selected(classification.whole, listed)
    row = (runs.sequence * len(lines) + row_of_line[runs.line]) * (blocks + 1)
    # A run adds 1 where it begins and takes it away where it ends.
    shape = (len(ranges.slices), len(lines), blocks + 1)
    changes = torch.zeros(shape, dtype=torch.int8, device=row.device)
    ones = torch.ones_like(row, dtype=torch.int8)
    changes.view(-1).scatter_add_(0, row + runs.first, ones)
    changes.view(-1).scatter_add_(0, row + runs.last, -ones)
    whole = changes.cumsum(-1, dtype=torch.int8)[..., others] > 0
    return whole.mT if classification.lines_are_keys else whole


def tile_weights(ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> TileWeights:
    """TileWeights of a mask with slices. counts.tile_weights() takes any mask."""
    whole = whole_tiles(ranges, q_blocks, k_blocks, size).int()
    cuts = cut_tiles(ranges, size)
    which, q, k = cuts_between_blocks(cuts, q_blocks, k_blocks, _count_blocks(ranges, size))
    tile = (cuts.sequence[which], q, k)
    ones = torch.ones_like(q, dtype=torch.int32)
    partial = torch.zeros_like(whole).index_put_(tile, ones, accumulate=True)
    pairs = whole * size * size
    pairs.index_put_(tile, cuts.pairs[which].int(), accumulate=True)
    return TileWeights(whole, partial, pairs)


def seen_blocks(ranges: MaskRanges, table: Tensor, size: int) -> Tensor:
    """reach.seen_blocks() of a mask with slices: bool [W, blocks], from the layout int64 [W, n]."""
    classification = classified(ranges, size)
    runs = classification.touched
    blocks = _count_blocks(ranges, size)
    ranks = len(table)
    if classification.lines_are_keys:
        # A rank sees a KV block if a run of it holds any of the rank's query blocks.
        owned = torch.zeros(blocks + 1, ranks, dtype=torch.int32, device=table.device)
        for rank, own_blocks in enumerate(table):
            owned[own_blocks + 1, rank] = 1
        owned_before = owned.cumsum(0, dtype=torch.int32)
        holds_any = owned_before[runs.last] > owned_before[runs.first]  # [n, W]
        seen = torch.zeros(blocks, ranks, dtype=torch.int32, device=table.device)
        return seen.index_add_(0, runs.line, holds_any.int()).T > 0
    # Blocks that no rank of the table owns count for one rank more, which is left out at last.
    owner = torch.full((blocks,), ranks, device=table.device)
    owner[table] = torch.arange(ranks, device=table.device)[:, None]
    # A run adds 1 where it begins and takes it away where it ends.
    changes = torch.zeros(ranks + 1, blocks + 1, dtype=torch.int32, device=table.device)
    rank = owner[runs.line]
    changes.index_put_((rank, runs.first), changes.new_full((), 1), accumulate=True)
    changes.index_put_((rank, runs.last), changes.new_full((), -1), accumulate=True)
    return changes.cumsum(1)[:ranks, :blocks] > 0


def cuts_between_blocks(
    cuts: Cuts, q_blocks: Tensor, k_blocks: Tensor, blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The cuts of tiles between these blocks: their numbers, and the places of both blocks in the lists.

    q_blocks int64 [nq], k_blocks int64 [nk]: global blocks out of `blocks`. Returns int64 [n] each.
    """
    q = _places_in(q_blocks, blocks)[cuts.q_block]
    k = _places_in(k_blocks, blocks)[cuts.k_block]
    which = ((q >= 0) & (k >= 0)).nonzero().flatten()
    return which, q[which], k[which]


def _places_in(listed: Tensor, blocks: int) -> Tensor:
    """int64 [blocks]: where each global block is in the list, -1 if it is not in it."""
    place = torch.full((blocks,), -1, device=listed.device)
    place[listed.long()] = torch.arange(len(listed), device=listed.device)
    return place


def _count_blocks(ranges: MaskRanges, size: int) -> int:
    """Blocks of the sequence, the last one of which may be short."""
    return -(-ranges.start.shape[1] // size)
