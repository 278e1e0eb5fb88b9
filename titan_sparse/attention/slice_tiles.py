"""Tiles of a mask of slices: which (query block, KV block) pairs are seen whole, in part or not at all, from integers.

A slice cut to one query block (a *band*) meets one run of KV blocks and covers one run of them whole, so that 1M tokens are
classified without looking at tiles. What is left over are the tiles through which a slice's edge goes (*cuts*). A tile
that several slices fill together is whole too; otherwise it is listed once for each of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.layout import token_positions
from titan_sparse.attention.masks import Rows
from titan_sparse.attention.memo import once_per_mask
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.slices import area, overlap, within_runs
from titan_sparse.attention.tiles import BlockLists, Tiles, query_ranges


class Bands(NamedTuple):
    """Slice by slice and query block by query block the KV blocks that are met; int64 [n] each.

    sequence, slice: which one in Rows.slices. block: the query block. first, last: meets KV blocks first .. last - 1.
    whole_first, whole_last: of these it covers whole_first .. whole_last - 1 whole.
    """

    sequence: Tensor
    slice: Tensor
    block: Tensor
    first: Tensor
    last: Tensor
    whole_first: Tensor
    whole_last: Tensor


class Cuts(NamedTuple):
    """Tiles that a slice covers in part, once for each slice, or whole tiles (slice -1); int64 [n] each, sorted by sequence,
    query block, KV block. pairs: pairs of tokens that the slice holds there."""

    sequence: Tensor
    slice: Tensor
    q_block: Tensor
    k_block: Tensor
    pairs: Tensor


class Classification(NamedTuple):
    """Every tile that is not empty: whole ones are in a band's whole run or in `filled`, the others in `cuts`."""

    bands: Bands
    cuts: Cuts
    filled: Cuts


# Classification -----------------------------------------------------------------------------------------------------


def classify(slices: Tensor, size: int) -> Classification:
    """slices: int [Bm, N, 6], tightened, as in Rows.slices. size: tokens of a block."""
    bands = _bands(slices.long(), size)
    return Classification(bands, *_filled(_cuts(slices.long(), bands, size), size))


def classified(rows: Rows, size: int) -> Classification:
    """classify(), remembered for the mask."""
    return once_per_mask(rows, ("classification", size), lambda: classify(rows.slices, size))


def _bands(slices: Tensor, size: int) -> Bands:
    flat = slices.flatten(0, 1)
    begin, end = flat[:, 0] // size, (flat[:, 1] + size - 1) // size
    count = (end - begin) * (flat[:, 0] < flat[:, 1])
    number = torch.repeat_interleave(torch.arange(len(flat), device=flat.device), count)
    block = begin[number] + within_runs(count)
    q_start, q_stop, k_start, k_stop, low, high = flat[number].unbind(-1)
    first_row, last_row = torch.maximum(q_start, block * size), torch.minimum(q_stop, block * size + size) - 1
    first = torch.maximum(k_start, first_row + low) // size
    last = (torch.minimum(k_stop, last_row + high + 1) - 1) // size + 1
    whole_first = (torch.maximum(k_start, last_row + low) + size - 1) // size
    whole_last = torch.minimum(k_stop, first_row + high + 1) // size
    whole = (last_row - first_row + 1 == size) & (whole_first < whole_last)
    return Bands(number // slices.shape[1], number % slices.shape[1], block, first, last,
                 whole_first.where(whole, first), whole_last.where(whole, first))


def _cuts(slices: Tensor, bands: Bands, size: int) -> Cuts:
    begin = torch.cat([bands.first, bands.whole_last])
    count = torch.cat([bands.whole_first, bands.last]) - begin
    band = torch.repeat_interleave(torch.arange(len(begin), device=begin.device) % max(1, len(bands.first)), count)
    k_block = torch.repeat_interleave(begin, count) + within_runs(count)
    sequence, number, q_block = bands.sequence[band], bands.slice[band], bands.block[band]
    pairs = area(overlap(slices[sequence, number], _tile(q_block, k_block, size))[0])
    order = _place(sequence, q_block, k_block).argsort(stable=True)
    return Cuts(*(x[order] for x in (sequence, number, q_block, k_block, pairs)))


def _tile(q_block: Tensor, k_block: Tensor, size: int) -> Tensor:
    """A whole tile as a slice, int64 [n, 6]."""
    q, k = q_block * size, k_block * size
    return torch.stack([q, q + size, k, k + size, k - q - size + 1, k - q + size - 1], dim=-1)


def _place(sequence: Tensor, q_block: Tensor, k_block: Tensor) -> Tensor:
    """One number for a tile, ascending in sequence, query block, KV block. Blocks are numbered below 2**24."""
    return (sequence << 48) + (q_block << 24) + k_block


def _filled(cuts: Cuts, size: int) -> tuple[Cuts, Cuts]:
    """Cuts of tiles that are not whole, and the tiles that several slices fill: slices share no pair, so counting is
    enough."""
    _, tile, count = torch.unique_consecutive(_place(cuts.sequence, cuts.q_block, cuts.k_block), return_inverse=True,
                                              return_counts=True)
    whole = torch.zeros_like(count).index_add_(0, tile, cuts.pairs) == size * size
    leading = (count.cumsum(0) - count)[whole]
    filled = Cuts(*(x[leading] for x in cuts))
    filled = filled._replace(slice=torch.full_like(filled.slice, -1), pairs=torch.full_like(filled.pairs, size * size))
    return Cuts(*(x[~whole[tile]] for x in cuts)), filled


# Tables -------------------------------------------------------------------------------------------------------------


def whole_tiles(rows: Rows, q_blocks: Tensor, k_blocks: Tensor, size: int) -> Tensor:
    """bool [Bm, nq, nk]: the mask lets every query of the block see every key of the block."""
    bands, _, filled = classified(rows, size)
    blocks = -(-rows.start.shape[1] // size)
    row = _local(q_blocks, blocks)
    own = row[bands.block] >= 0
    line = (bands.sequence * len(q_blocks) + row[bands.block])[own] * (blocks + 1)
    # A run adds 1 where it begins and takes it away where it ends.
    ends = torch.zeros(len(rows.slices), len(q_blocks), blocks + 1, dtype=torch.int8, device=line.device)
    for column, step in ((bands.whole_first, 1), (bands.whole_last, -1)):
        ends.view(-1).scatter_add_(0, line + column[own], torch.full_like(line, step, dtype=torch.int8))
    whole = ends.cumsum(-1, dtype=torch.int8)[..., k_blocks] > 0
    which, q, k = _of_blocks(filled, q_blocks, k_blocks, blocks)
    whole[filled.sequence[which], q, k] = True
    return whole


def tile_weights(rows: Rows, q_blocks: Tensor, k_blocks: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each tile whether it is seen whole, how many slices cut it otherwise, and its visible pairs; int32 [Bm, nq, nk]."""
    whole = whole_tiles(rows, q_blocks, k_blocks, size).int()
    cuts = classified(rows, size).cuts
    which, q, k = _of_blocks(cuts, q_blocks, k_blocks, -(-rows.start.shape[1] // size))
    at = (cuts.sequence[which], q, k)
    partial = torch.zeros_like(whole).index_put_(at, torch.ones_like(q, dtype=torch.int32), accumulate=True)
    return whole, partial, (whole * size * size).index_put_(at, cuts.pairs[which].int(), accumulate=True)


def seen_chunks(rows: Rows, table: Tensor, size: int) -> Tensor:
    """bool [W, W]: the mask lets some query of rank r see a key of rank s. table: int64 [W, n], the layout's blocks."""
    bands, blocks = classified(rows, size).bands, table.numel()
    owned = torch.zeros(blocks + 1, len(table), dtype=torch.int32, device=table.device)
    owner = torch.empty(blocks, dtype=torch.int64, device=table.device)
    for rank, own in enumerate(table):
        owned[own + 1, rank], owner[own] = 1, rank
    before = owned.cumsum(0, dtype=torch.int32)
    met = before[bands.last] > before[bands.first]
    seen = torch.zeros(len(table), len(table), dtype=torch.int32, device=table.device)
    return seen.index_add_(0, owner[bands.block], met.int()) > 0


def _local(blocks: Tensor, total: int) -> Tensor:
    """int64 [total]: where each global block is in the list `blocks`, -1 for nowhere."""
    return torch.full((total,), -1, device=blocks.device).scatter_(0, blocks.long(), torch.arange(len(blocks), device=blocks.device))


def _of_blocks(cuts: Cuts, q_blocks: Tensor, k_blocks: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """The cuts between these blocks: their numbers, and the places of their two blocks in the lists."""
    q, k = _local(q_blocks, total)[cuts.q_block], _local(k_blocks, total)[cuts.k_block]
    which = ((q >= 0) & (k >= 0)).nonzero().flatten()
    return which, q[which], k[which]


# Tiles --------------------------------------------------------------------------------------------------------------


def block_tiles(rows: Rows, index: BlockIndex, q_blocks: Tensor, k_blocks: Tensor, batch: int, transpose: bool) -> Tiles:
    """As tiles.block_tiles(), for a mask of slices and an index without columns. Sequences and heads that are alike share
    their lists' memory."""
    size, selected = index.block_size, index.selects(q_blocks, k_blocks)
    whole = whole_tiles(rows, q_blocks, k_blocks, size)[:, None] & selected
    cuts = classified(rows, size).cuts
    which, q, k = _of_blocks(cuts, q_blocks, k_blocks, -(-rows.start.shape[1] // size))
    sequence, number = cuts.sequence[which] if len(rows.slices) > 1 else None, cuts.slice[which]
    expand = lambda x: x and BlockLists(*(y.expand(batch, index.heads, *y.shape[2:]) for y in x))
    by_query = _lists(whole, selected, sequence, q, k, number)
    by_key = _lists(whole.mT, selected.mT, sequence, k, q, number) if transpose else None
    q_positions = token_positions(q_blocks, size)
    return Tiles(expand(by_query), expand(by_key), *query_ranges(rows, q_positions, batch),
                 token_positions(k_blocks, size).int().view(1, 1, -1), None, size,
                 rows.slices.expand(batch, -1, -1), q_positions.int())


def _lists(whole: Tensor, selected: Tensor, sequence: Tensor | None, row: Tensor, other: Tensor,
           number: Tensor) -> BlockLists:
    """BlockLists [B or 1, Hq or 1, n, K] from whole tiles bool [.., .., n, m], and from cuts of the blocks (row, other) by
    slice `number` where `selected` [.., .., n, m]. sequence: of each cut, None for all."""
    shape = whole.shape[:3]
    lines, blocks = whole.flatten(0, 2).nonzero().unbind(-1)
    full_count, (full,) = _table(lines, [blocks], shape)
    order = (row * (1 << 24) + other).argsort(stable=True)
    row, other, number = (x[order] for x in (row, other, number))
    on = selected[..., row, other].expand(*shape[:2], -1)
    if sequence is not None:
        on = on & (sequence[order] == torch.arange(shape[0], device=row.device)[:, None, None])
    b, h, entry = on.nonzero().unbind(-1)
    line = (b * shape[1] + h) * shape[2] + row[entry]
    partial_count, (partial, partial_slice) = _table(line, [other[entry], number[entry]], shape)
    return BlockLists(full_count, full, partial_count, partial, partial_slice)


def _table(line: Tensor, values: list[Tensor], shape: tuple[int, int, int]) -> tuple[Tensor, list[Tensor]]:
    """Counts int32 [B, H, n] and, for each of `values`, a table [B, H, n, K] of those with the same `line` (ascending)."""
    lines = shape[0] * shape[1] * shape[2]
    count = torch.bincount(line, minlength=lines)
    place = within_runs(count)
    width = max(1, int(count.max())) if lines else 1
    tables = [torch.zeros(lines, width, dtype=torch.int32, device=line.device) for _ in values]
    for table, value in zip(tables, values):
        table[line, place] = value.int()
    return count.int().view(shape), [table.view(*shape, width) for table in tables]
