"""Compute from integers which tiles a mask of slices sees whole, in part or not at all.

A tile is a pair of a query block and a KV block. Cut each slice to one block of rows, a *band*. A
band touches one run of blocks of the other side. Except for at most four blocks, where the slice's
edges go through, it holds equally many pairs of each. So tiles are counted run by run, and 1M
tokens take well under a second. A tile that several slices fill together is whole too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask
from titan_sparse.attention.masks.slice_geometry import area, overlap, within_runs

_BLOCK_BITS = 24
"""Blocks are numbered below 2**24."""
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1


class Runs(NamedTuple):
    """Runs of tiles, each in one line of blocks. int64 [n] each.

    sequence, slice: which sequence of the batch, and which of its slices in MaskRanges.slices.
    line: the block of one side. first, last: the blocks of the other side, `last` not included.
    pairs: of tokens that the slice holds in each tile.
    """

    sequence: Tensor
    slice: Tensor
    line: Tensor
    first: Tensor
    last: Tensor
    pairs: Tensor

    def select(self, which: Tensor) -> "Runs":
        return Runs._make(field[which] for field in self)


class SliceTiles(NamedTuple):
    """Every tile that is not empty.

    lines_are_keys: a line is a KV block, and its runs are of query blocks. Otherwise the other way
        round.
    touched: what a slice holds anything of, one run for each line of a slice, without `pairs`.
    whole: what all slices together fill, each tile once, without `slice`.
    cut: what the mask sees in part, once for each slice.
    """

    lines_are_keys: bool
    touched: Runs
    whole: Runs
    cut: Runs


class TilesBetween(NamedTuple):
    """Tiles between some query blocks and some KV blocks.

    whole: bool [Bm, nq, nk].
    sequence, slice, q, k, pairs: int64 [cuts], the tiles that a slice sees in part, once for each
        slice. q and k are places in the lists of blocks. pairs: that the slice holds in the tile.
    """

    whole: Tensor
    sequence: Tensor
    slice: Tensor
    q: Tensor
    k: Tensor
    pairs: Tensor


def _slices(ranges: MaskRanges) -> Tensor:
    """The slices of a mask that has them."""
    assert ranges.slices is not None, "the mask is made of ranges"
    return ranges.slices


def tiles_of_slices(ranges: MaskRanges, size: int) -> SliceTiles:
    """The tiles of a mask with slices, remembered for the mask. size: tokens of a block."""
    return once_per_mask(ranges, ("tiles", size), lambda: _tiles(_slices(ranges).long(), size))


def _tiles(slices: Tensor, size: int) -> SliceTiles:
    """slices: int64 [Bm, N, 6], tightened."""
    q_start, q_stop, k_start, k_stop, low, high = slices.unbind(-1)
    swapped = torch.stack([k_start, k_stop, q_start, q_stop, -high, -low], dim=-1)
    # The fewer lines there are, the less there is to do: with 1,000 keys that all of 1M queries see,
    # a slice for each, this takes 2 ms instead of 20 s.
    lines_are_keys = bool(_lines(swapped, size)[1].sum() < _lines(slices, size)[1].sum())
    if lines_are_keys:
        slices = swapped
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
    # Seen by any row: from where the first row begins to where the last one ends. Seen by all
    # rows: from where the last row begins to where the first one ends.
    first = top_first // size
    last = (bottom_last - 1) // size + 1
    inner_first = (bottom_first + size - 1) // size
    inner_last = top_last // size
    any_inner = inner_first < inner_last
    inner_first = inner_first.where(any_inner, first)
    inner_last = inner_last.where(any_inner, first)
    rows = bottom - top + 1
    sequence = number // slices_of_sequence
    # Only the fields that name a band matter here, the others are overwritten.
    bands = Runs(sequence, number % slices_of_sequence, line, first, last, pairs=rows)

    # [edges]: single tiles before and behind the inner runs, where the slice's edges decide.
    edge_first = torch.cat([first, inner_last])
    edges = torch.cat([inner_first, last]) - edge_first
    band = torch.arange(len(line), device=line.device)
    edge_band = torch.repeat_interleave(band.repeat(2), edges)
    block = torch.repeat_interleave(edge_first, edges) + within_runs(edges)
    held, _ = overlap(flat[number[edge_band]], _tile(line[edge_band], block, size))

    # [runs]: all edges, then all inner runs
    runs = bands.select(torch.cat([edge_band, band]))._replace(
        first=torch.cat([block, inner_first]),
        last=torch.cat([block + 1, inner_last]),
        pairs=torch.cat([area(held), rows * size]),
    )
    return SliceTiles(lines_are_keys, bands, *_whole_and_cut(runs, size))


def _whole_and_cut(runs: Runs, size: int) -> tuple[Runs, Runs]:
    """The tiles that runs of single slices fill together, each once, and the others, once for each
    slice. The fields are those of SliceTiles."""
    # One number for each tile, ascending in sequence, then line, then block. A run adds its pairs
    # where it begins and takes them away where it ends. From one such place to the next, all tiles
    # have equally many pairs. Slices share no pair, so a tile with all pairs is whole.
    of_line = ((runs.sequence << _BLOCK_BITS) + runs.line) << _BLOCK_BITS
    ends = torch.cat([of_line + runs.first, of_line + runs.last])
    place, step = ends.unique(return_inverse=True)
    changes = torch.cat([runs.pairs, -runs.pairs])
    is_whole = torch.zeros_like(place).index_add_(0, step, changes).cumsum(0) == size * size
    whole = is_whole.nonzero().flatten()
    begin = place[whole]
    whole_runs = Runs(
        sequence=begin >> 2 * _BLOCK_BITS,
        slice=torch.zeros_like(whole),
        line=(begin >> _BLOCK_BITS) & _BLOCK_MASK,
        first=begin & _BLOCK_MASK,
        last=place[whole + 1] & _BLOCK_MASK,
        pairs=torch.full_like(whole, size * size),
    )
    # Each run, cut at these places, is cut tiles where it is not whole.
    begin, end = step.chunk(2)
    steps = end - begin
    run = torch.repeat_interleave(torch.arange(len(steps), device=steps.device), steps)
    step = begin[run] + within_runs(steps)
    run = run[~is_whole[step]]
    step = step[~is_whole[step]]
    cut = runs.select(run)._replace(
        first=place[step] & _BLOCK_MASK, last=place[step + 1] & _BLOCK_MASK
    )
    return whole_runs, cut


def _lines(slices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First block of rows of each slice, and how many it touches. int64 [Bm * N] each."""
    start = slices[..., 0].flatten()
    stop = slices[..., 1].flatten()
    # Blocks: the first one, and the one behind the last.
    first = start // size
    last = (stop + size - 1) // size
    any_row = start < stop
    return first, (last - first) * any_row


def tiles_between(
    ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int
) -> TilesBetween:
    """The tiles of global blocks int64 [nq] and [nk] of `size` tokens, each listed once."""
    tiles = tiles_of_slices(ranges, size)
    lines, others = q_blocks, k_blocks
    if tiles.lines_are_keys:
        lines, others = k_blocks, q_blocks
    blocks = -(-ranges.start.shape[1] // size)
    place_of_line = _places_in(lines, blocks)
    place_of_other = _places_in(others, blocks)

    # [Bm, lines, blocks + 1]: a run adds 1 where it begins and takes it away where it ends.
    shape = (len(_slices(ranges)), len(lines), blocks + 1)
    changes = torch.zeros(shape, dtype=torch.int8, device=lines.device)
    runs = tiles.whole.select(place_of_line[tiles.whole.line] >= 0)
    row = (runs.sequence * len(lines) + place_of_line[runs.line]) * (blocks + 1)
    ones = torch.ones_like(row, dtype=torch.int8)
    changes.view(-1).scatter_add_(0, row + runs.first, ones)
    changes.view(-1).scatter_add_(0, row + runs.last, -ones)
    whole = changes.cumsum(-1, dtype=torch.int8)[..., others] > 0

    runs = tiles.cut.select(place_of_line[tiles.cut.line] >= 0)
    # [tiles in these runs]
    count = runs.last - runs.first
    run = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    other = place_of_other[runs.first[run] + within_runs(count)]
    cuts = runs.select(run[other >= 0])
    line = place_of_line[cuts.line]
    other = other[other >= 0]
    if tiles.lines_are_keys:
        return TilesBetween(whole.mT, cuts.sequence, cuts.slice, other, line, cuts.pairs)
    return TilesBetween(whole, cuts.sequence, cuts.slice, line, other, cuts.pairs)


def _tile(line: Tensor, other: Tensor, size: int) -> Tensor:
    """A whole tile as a slice, int64 [n, 6]."""
    q = line * size
    k = other * size
    low = k - q - size + 1
    high = k - q + size - 1
    return torch.stack([q, q + size, k, k + size, low, high], dim=-1)


def _places_in(listed: Tensor, blocks: int) -> Tensor:
    """int64 [blocks]: where each global block is in the list, -1 if it is not in it."""
    place = torch.full((blocks,), -1, device=listed.device)
    place[listed.long()] = torch.arange(len(listed), device=listed.device)
    return place
