"""Compute from integers which tiles a mask of slices sees whole, in part or not at all.

A tile is a pair of a query block and a KV block. Cut each slice to one block of rows, a *band*. A
band touches one run of blocks of the other side. Except for at most four blocks, where the slice's
edges go through, it covers them whole for its rows. So tiles are classified run by run, and 1M
tokens take well under a second. A tile that several slices fill together is whole too. Otherwise
it is listed once for each of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.base import MaskRanges, once_per_mask
from titan_sparse.attention.masks.geometry import area, overlap, within_runs

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
    """Slices line by line.

    touched: blocks that a band touches. inner: those that it covers whole for its rows.
    rows: int64 [n], how many rows a band has.
    """

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
        # A run adds its rows where it begins and takes them away where it ends.
        change = torch.cat([rows, -rows])
        covered = change[order].cumsum(0)
        return cls(place, covered)

    def at(self, place: Tensor) -> Tensor:
        """int64 [n]: covered rows of the tiles at these places."""
        step = torch.searchsorted(self.place, place, right=True)
        # Step 0 is before the staircase begins, where nothing is covered.
        rows = torch.nn.functional.pad(self.rows, (1, 0))
        return rows[step]

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
        split = _repeated(runs, steps)._replace(
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
    # The fewer lines there are, the less there is to do.
    count = _lines(slices, size)[1].sum()
    swapped_count = _lines(swapped, size)[1].sum()
    lines_are_keys = bool(swapped_count < count)
    if lines_are_keys:
        slices = swapped
    bands = _bands(slices, size)
    edges, pairs = _edges(slices, bands, size)
    # Tiles that bands do not cover in all rows may be filled together with edges.
    coverage = _Coverage.of(bands.inner, bands.rows)
    filled = _filled(edges, pairs, coverage, size)
    # From here on those count as covered in all their rows.
    covered = _joined(bands.inner, filled)
    all_rows = torch.full_like(filled.line, size)
    coverage = _Coverage.of(covered, torch.cat([bands.rows, all_rows]))
    # What is not covered in all rows is cut: edges, and tiles that a band covers for its rows only.
    is_open = coverage.at(_place(edges, edges.first)) < size
    open_edges = _selected(edges, is_open)
    open_inner = coverage.below(bands.inner, size)
    return Classification(
        whole=coverage.at_least(size),
        cut=_joined(open_edges, open_inner),
        touched=bands.touched,
        lines_are_keys=lines_are_keys,
    )


def classified(ranges: MaskRanges, size: int) -> Classification:
    """classify(), remembered for the mask."""
    key = ("classification", size)
    return once_per_mask(ranges, key, lambda: classify(ranges.slices, size))


def _sides_swapped(slices: Tensor) -> Tensor:
    """The same slices with queries and keys exchanged, [..., 6]."""
    q_start, q_stop, k_start, k_stop, low, high = slices.unbind(-1)
    return torch.stack([k_start, k_stop, q_start, q_stop, -high, -low], dim=-1)


def _selected(runs: Runs, which: Tensor) -> Runs:
    return Runs._make(field[which] for field in runs)


def _joined(a: Runs, b: Runs) -> Runs:
    return Runs._make(torch.cat(fields) for fields in zip(a, b))


def _repeated(runs: Runs, count: Tensor) -> Runs:
    return Runs._make(torch.repeat_interleave(field, count) for field in runs)


def _lines(slices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First block of rows of each slice, and how many it touches. int64 [Bm * N] each."""
    start = slices[..., 0].flatten()
    stop = slices[..., 1].flatten()
    first = start // size
    last = (stop + size - 1) // size
    any_row = start < stop
    return first, (last - first) * any_row


def _bands(slices: Tensor, size: int) -> _Bands:
    """All bands of the first slice, then those of the second, and so on.

    slices: int64 [Bm, N, 6].
    """
    slices_of_sequence = slices.shape[1]
    # [Bm * N, 6]
    flat = slices.flatten(0, 1)
    begin, count = _lines(slices, size)
    # [bands]: the slice and the line of each band
    number = torch.arange(len(flat), device=flat.device)
    number = torch.repeat_interleave(number, count)
    line = begin[number] + within_runs(count)
    q_start, q_stop, k_start, k_stop, low, high = flat[number].unbind(-1)
    # First and last row of the band, and the keys that each of them sees.
    top = torch.maximum(q_start, line * size)
    bottom = torch.minimum(q_stop, line * size + size) - 1
    top_first = torch.maximum(k_start, top + low)
    top_last = torch.minimum(k_stop, top + high + 1)
    bottom_first = torch.maximum(k_start, bottom + low)
    bottom_last = torch.minimum(k_stop, bottom + high + 1)
    # Seen by any row: from where the first row begins to where the last one ends.
    touched = Runs(
        sequence=number // slices_of_sequence,
        slice=number % slices_of_sequence,
        line=line,
        first=top_first // size,
        last=(bottom_last - 1) // size + 1,
    )
    # Seen by all rows: from where the last row begins to where the first one ends.
    first = (bottom_first + size - 1) // size
    last = top_last // size
    any_inner = first < last
    inner = touched._replace(
        first=first.where(any_inner, touched.first),
        last=last.where(any_inner, touched.first),
    )
    rows = bottom - top + 1
    return _Bands(touched, inner, rows)


def _edges(slices: Tensor, bands: _Bands, size: int) -> tuple[Runs, Tensor]:
    """The single tiles that bands touch but do not cover, and the pairs of tokens in them.

    Sorted by place. pairs: int64 [n].
    """
    before = bands.touched._replace(last=bands.inner.first)
    after = bands.touched._replace(first=bands.inner.last)
    edges = _single_tiles(_joined(before, after))
    order = _place(edges, edges.first).argsort(stable=True)
    edges = _selected(edges, order)
    # [n, 6]: what the slice holds in the tile
    slices_of_edges = slices[edges.sequence, edges.slice]
    tiles = _tile(edges.line, edges.first, size)
    held, _ = overlap(slices_of_edges, tiles)
    return edges, area(held)


def _single_tiles(runs: Runs) -> Runs:
    count = runs.last - runs.first
    tiles = _repeated(runs, count)
    first = tiles.first + within_runs(count)
    return tiles._replace(first=first, last=first + 1)


def _tile(q_block: Tensor, k_block: Tensor, size: int) -> Tensor:
    """A whole tile as a slice, int64 [n, 6]."""
    q = q_block * size
    k = k_block * size
    numbers = [
        q,
        q + size,
        k,
        k + size,
        k - q - size + 1,
        k - q + size - 1,
    ]
    return torch.stack(numbers, dim=-1)


def _place(runs: Runs, block: Tensor) -> Tensor:
    """int64 [n]: one number for each tile, ascending in sequence, then line, then block."""
    sequence = runs.sequence << 2 * _BLOCK_BITS
    line = runs.line << _BLOCK_BITS
    return sequence + line + block


def _filled(edges: Runs, pairs: Tensor, coverage: _Coverage, size: int) -> Runs:
    """Tiles that an edge goes through and that all slices together fill.

    Slices share no pair, so it is enough to count pairs.
    """
    # Edges are sorted: those of one tile stand together.
    place, tile, count = torch.unique_consecutive(
        _place(edges, edges.first),
        return_inverse=True,
        return_counts=True,
    )
    pairs_of_edges = torch.zeros_like(count).index_add_(0, tile, pairs)
    pairs_of_bands = coverage.at(place) * size
    total = pairs_of_bands + pairs_of_edges
    # Of each filled tile, take the first edge.
    first_edge = count.cumsum(0) - count
    return _selected(edges, first_edge[total == size * size])


def cut_tiles(ranges: MaskRanges, size: int) -> Cuts:
    """The tiles that are seen in part, remembered for the mask."""
    key = ("cuts", size)
    return once_per_mask(ranges, key, lambda: _cut_tiles(ranges, size))


def _cut_tiles(ranges: MaskRanges, size: int) -> Cuts:
    classification = classified(ranges, size)
    tiles = _single_tiles(classification.cut)
    if classification.lines_are_keys:
        q_block = tiles.first
        k_block = tiles.line
    else:
        q_block = tiles.line
        k_block = tiles.first
    # [n, 6]: what the slice holds in the tile
    slices = ranges.slices[tiles.sequence, tiles.slice].long()
    held, _ = overlap(slices, _tile(q_block, k_block, size))
    return Cuts(
        sequence=tiles.sequence,
        slice=tiles.slice,
        q_block=q_block,
        k_block=k_block,
        pairs=area(held),
    )


def whole_tiles(ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> Tensor:
    """bool [Bm, nq, nk]: the mask lets every query of the block see every key of the block."""
    classification = classified(ranges, size)
    blocks = _count_blocks(ranges, size)
    if classification.lines_are_keys:
        lines = k_blocks
        others = q_blocks
    else:
        lines = q_blocks
        others = k_blocks
    # Keep the runs in the requested lines.
    row_of_line = _places_in(lines, blocks)
    listed = row_of_line[classification.whole.line] >= 0
    runs = _selected(classification.whole, listed)
    # [Bm, lines, blocks + 1]: a run adds 1 where it begins and takes it away where it ends.
    shape = (len(ranges.slices), len(lines), blocks + 1)
    row = runs.sequence * len(lines) + row_of_line[runs.line]
    row = row * (blocks + 1)
    changes = torch.zeros(shape, dtype=torch.int8, device=row.device)
    ones = torch.ones_like(row, dtype=torch.int8)
    changes.view(-1).scatter_add_(0, row + runs.first, ones)
    changes.view(-1).scatter_add_(0, row + runs.last, -ones)
    # [Bm, lines, others]
    depth = changes.cumsum(-1, dtype=torch.int8)
    whole = depth[..., others] > 0
    if classification.lines_are_keys:
        return whole.mT
    return whole


def tile_weights(ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> TileWeights:
    """TileWeights of a mask with slices. counts.tile_weights() takes any mask."""
    cuts = cut_tiles(ranges, size)
    blocks = _count_blocks(ranges, size)
    which, q, k = cuts_between(cuts, q_blocks, k_blocks, blocks)
    tile = (cuts.sequence[which], q, k)
    # [Bm, nq, nk]
    whole = whole_tiles(ranges, q_blocks, k_blocks, size).int()
    ones = torch.ones_like(q, dtype=torch.int32)
    partial = torch.zeros_like(whole)
    partial.index_put_(tile, ones, accumulate=True)
    pairs_of_cuts = cuts.pairs[which].int()
    pairs = whole * size * size
    pairs.index_put_(tile, pairs_of_cuts, accumulate=True)
    return TileWeights(whole, partial, pairs)


def seen_blocks(ranges: MaskRanges, table: Tensor, size: int) -> Tensor:
    """reach.seen_blocks() of a mask with slices: bool [W, blocks], from the layout int64 [W, n]."""
    classification = classified(ranges, size)
    blocks = _count_blocks(ranges, size)
    if classification.lines_are_keys:
        return _seen_in_lines(classification.touched, table, blocks)
    return _seen_along_lines(classification.touched, table, blocks)


def _seen_in_lines(runs: Runs, table: Tensor, blocks: int) -> Tensor:
    """bool [W, blocks] from runs of query blocks for each KV block.

    A rank sees the KV block if the run holds any of the rank's query blocks.
    """
    ranks = len(table)
    owned = torch.zeros(blocks + 1, ranks, dtype=torch.int32, device=table.device)
    for rank, own_blocks in enumerate(table):
        owned[own_blocks + 1, rank] = 1
    # [blocks + 1, W]: how many blocks of the rank come before a block
    owned_before = owned.cumsum(0, dtype=torch.int32)
    # [n, W]
    holds_any = owned_before[runs.last] > owned_before[runs.first]
    seen = torch.zeros(blocks, ranks, dtype=torch.int32, device=table.device)
    seen.index_add_(0, runs.line, holds_any.int())
    return seen.T > 0


def _seen_along_lines(runs: Runs, table: Tensor, blocks: int) -> Tensor:
    """bool [W, blocks] from runs of KV blocks for each query block."""
    ranks = len(table)
    # Blocks that no rank of the table owns count for one rank more, which is left out at last.
    owner = torch.full((blocks,), ranks, device=table.device)
    owner[table] = torch.arange(ranks, device=table.device)[:, None]
    rank = owner[runs.line]
    # A run adds 1 where it begins and takes it away where it ends.
    changes = torch.zeros(ranks + 1, blocks + 1, dtype=torch.int32, device=table.device)
    plus_one = changes.new_full((), 1)
    minus_one = changes.new_full((), -1)
    changes.index_put_((rank, runs.first), plus_one, accumulate=True)
    changes.index_put_((rank, runs.last), minus_one, accumulate=True)
    seen = changes.cumsum(1) > 0
    return seen[:ranks, :blocks]


def cuts_between(
    cuts: Cuts, q_blocks: Tensor, k_blocks: Tensor, blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The cuts of tiles between these blocks, and the places of both blocks in the lists.

    q_blocks int64 [nq], k_blocks int64 [nk]: global blocks out of `blocks`. Returns int64 [n] each:
    the numbers of the cuts, places in q_blocks, places in k_blocks.
    """
    # [cuts]: -1 where the block is not in the list
    q = _places_in(q_blocks, blocks)[cuts.q_block]
    k = _places_in(k_blocks, blocks)[cuts.k_block]
    listed = (q >= 0) & (k >= 0)
    which = listed.nonzero().flatten()
    return which, q[which], k[which]


def _places_in(listed: Tensor, blocks: int) -> Tensor:
    """int64 [blocks]: where each global block is in the list, -1 if it is not in it."""
    place = torch.full((blocks,), -1, device=listed.device)
    place_in_list = torch.arange(len(listed), device=listed.device)
    place[listed.long()] = place_in_list
    return place


def _count_blocks(ranges: MaskRanges, size: int) -> int:
    seq_len = ranges.start.shape[1]
    return (seq_len + size - 1) // size
