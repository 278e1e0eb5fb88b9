"""Compute from integers which tiles a mask of slices sees whole, in part or not at all.

A tile is a pair of a query block and a KV block. Cut each slice to one block of rows, a *band*. A
band touches one run of blocks of the other side. Except for at most four blocks, where the slice's
edges go through, it covers them whole for its rows. If these are all rows of the block, the tiles
are whole, and they are kept as a run. All other tiles are looked at one by one: several slices may
fill one together. So 1M tokens take well under a second.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.base import MaskRanges, once_per_mask
from titan_sparse.attention.masks.geometry import area, overlap, within_runs


class Tiles(NamedTuple):
    """Every tile that is not empty. int64 [bands] or [singles] each, unless said otherwise.

    lines_are_keys: a line is a KV block, and its runs are of query blocks. Otherwise the other way
        round.
    sequence, line: of each band. first, last: the blocks that it touches, `last` not included.
    whole_first, whole_last: those that it covers whole, in all rows of the line.
    single_sequence, single_slice: of each tile that is not in such a run, once for each slice in
        it. Slices are numbered as in MaskRanges.slices.
    single_line, single_block: where it lies.
    single_pairs: pairs of tokens that the slice holds in the tile.
    is_filled: bool [singles], all slices together fill the tile.
    """

    lines_are_keys: bool
    sequence: Tensor
    line: Tensor
    first: Tensor
    last: Tensor
    whole_first: Tensor
    whole_last: Tensor
    single_sequence: Tensor
    single_slice: Tensor
    single_line: Tensor
    single_block: Tensor
    single_pairs: Tensor
    is_filled: Tensor


class TileTable(NamedTuple):
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


def tiles_of_slices(ranges: MaskRanges, size: int) -> Tiles:
    """The tiles of a mask with slices, remembered for the mask. size: tokens of a block."""
    return once_per_mask(ranges, ("tiles", size), lambda: _tiles(ranges.slices.long(), size))


def _tiles(slices: Tensor, size: int) -> Tiles:
    """slices: int64 [Bm, N, 6], tightened."""
    q_start, q_stop, k_start, k_stop, low, high = slices.unbind(-1)
    swapped = torch.stack([k_start, k_stop, q_start, q_stop, -high, -low], dim=-1)
    # The fewer lines there are, the less there is to do.
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
    # A band without all rows of its line has no whole tiles.
    rows = bottom - top + 1
    whole_last = inner_last.where(rows == size, inner_first)

    # [singles]: what lies before the inner runs, behind them, and in those that are not whole.
    run_first = torch.cat([first, inner_last, whole_last])
    run_last = torch.cat([inner_first, last, inner_last])
    count = run_last - run_first
    run = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    block = run_first[run] + within_runs(count)
    band = run % len(line) if len(line) else run
    # In an inner run the slice holds all rows of the band. Elsewhere its edges decide.
    edges = int((run < 2 * len(line)).sum())
    held, _ = overlap(flat[number[band[:edges]]], _tile(line[band[:edges]], block[:edges], size))
    pairs = torch.cat([area(held), rows[band[edges:]] * size])
    sequence = number // slices_of_sequence
    # [singles]: one number for each tile. Slices share no pair, so it is enough to count pairs.
    # Blocks are numbered below 2**24.
    tile = (sequence[band] << 48) + (line[band] << 24) + block
    _, tile = tile.unique(return_inverse=True)
    total = torch.zeros_like(pairs).index_add_(0, tile, pairs)
    return Tiles(
        lines_are_keys=lines_are_keys,
        sequence=sequence,
        line=line,
        first=first,
        last=last,
        whole_first=inner_first,
        whole_last=whole_last,
        single_sequence=sequence[band],
        single_slice=(number % slices_of_sequence)[band],
        single_line=line[band],
        single_block=block,
        single_pairs=pairs,
        is_filled=total[tile] == size * size,
    )


def _lines(slices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First block of rows of each slice, and how many it touches. int64 [Bm * N] each."""
    start = slices[..., 0].flatten()
    stop = slices[..., 1].flatten()
    first = start // size
    last = (stop + size - 1) // size
    any_row = start < stop
    return first, (last - first) * any_row


def tiles_between(ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> TileTable:
    """The tiles of global blocks int64 [nq] and [nk] of `size` tokens, each listed once."""
    tiles = tiles_of_slices(ranges, size)
    lines, others = q_blocks, k_blocks
    if tiles.lines_are_keys:
        lines, others = k_blocks, q_blocks
    blocks = -(-ranges.start.shape[1] // size)
    place_of_line = _places_in(lines, blocks)
    place_of_other = _places_in(others, blocks)

    # [Bm, lines, blocks + 1]: a run adds 1 where it begins and takes it away where it ends.
    shape = (len(ranges.slices), len(lines), blocks + 1)
    changes = torch.zeros(shape, dtype=torch.int8, device=lines.device)
    band = (place_of_line[tiles.line] >= 0).nonzero().flatten()
    row = tiles.sequence[band] * len(lines) + place_of_line[tiles.line[band]]
    ones = torch.ones_like(row, dtype=torch.int8)
    changes.view(-1).scatter_add_(0, row * (blocks + 1) + tiles.whole_first[band], ones)
    changes.view(-1).scatter_add_(0, row * (blocks + 1) + tiles.whole_last[band], -ones)
    whole = changes.cumsum(-1, dtype=torch.int8)[..., others] > 0

    line = place_of_line[tiles.single_line]
    other = place_of_other[tiles.single_block]
    listed = (line >= 0) & (other >= 0)
    filled = listed & tiles.is_filled
    whole[tiles.single_sequence[filled], line[filled], other[filled]] = True
    cut = (listed & ~tiles.is_filled).nonzero().flatten()
    sequence = tiles.single_sequence[cut]
    slice_number = tiles.single_slice[cut]
    pairs = tiles.single_pairs[cut]
    if tiles.lines_are_keys:
        return TileTable(whole.mT, sequence, slice_number, other[cut], line[cut], pairs)
    return TileTable(whole, sequence, slice_number, line[cut], other[cut], pairs)


def _tile(line: Tensor, other: Tensor, size: int) -> Tensor:
    """A whole tile as a slice, int64 [n, 6]."""
    q = line * size
    k = other * size
    numbers = [
        q,
        q + size,
        k,
        k + size,
        k - q - size + 1,
        k - q + size - 1,
    ]
    return torch.stack(numbers, dim=-1)


def _places_in(listed: Tensor, blocks: int) -> Tensor:
    """int64 [blocks]: where each global block is in the list, -1 if it is not in it."""
    place = torch.full((blocks,), -1, device=listed.device)
    place[listed.long()] = torch.arange(len(listed), device=listed.device)
    return place
