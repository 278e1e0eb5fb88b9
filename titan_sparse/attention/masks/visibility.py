"""The keys that each query, block of queries, or rank sees, and the number of pairs.

A tile is a pair of a query block and a KV block. Of a mask with slices, integers say which tiles it
sees whole, in part or not at all. Cut each slice to one block of rows, a *band*. A band touches one
run of blocks of the other side. Except for at most four blocks, where the slice's edges go through,
it holds equally many pairs of each. So tiles are counted run by run, and 1M tokens take well under
a second. A tile that several slices fill together is whole too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask, token_positions
from titan_sparse.attention.masks.slice_geometry import area, overlap, within_runs

_BLOCK_BITS = 24
"""Blocks are numbered below 2**24."""
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1
_TILES_AT_ONCE = 1 << 16
"""How many cut tiles are counted query by query together, which bounds the memory."""


class Reach(NamedTuple):
    """Key positions that the queries of each block see, int32 [Bm, nq] each. Where there are no
    such keys, the range is empty."""

    first: Tensor  # seen by any query of the block
    last: Tensor  # the end of what any query sees, not included
    all_first: Tensor  # seen by every query of the block
    all_last: Tensor  # the end of what every query sees, not included


def block_reach(ranges: MaskRanges, q_positions: Tensor, block_size: int) -> Reach:
    """Reach of blocks of queries, from the global positions of their tokens, int [Sq]."""
    # [Bm, Sq] -> [Bm, nq, block_size]
    start = ranges.start[:, q_positions].unflatten(1, (-1, block_size))
    stop = ranges.stop[:, q_positions].unflatten(1, (-1, block_size))
    sees_any = start < stop
    # A query that sees nothing must not widen what any query sees, ...
    start_if_any = torch.where(sees_any, start, torch.iinfo(torch.int32).max)
    # ... and must empty what every query sees.
    stop_if_any = torch.where(sees_any, stop, 0)
    return Reach(
        first=start_if_any.amin(-1),
        last=stop_if_any.amax(-1),
        all_first=start.amax(-1),
        all_last=stop_if_any.amin(-1),
    )


def reached(reach: Reach, k_blocks: Tensor, block_size: int) -> Tensor:
    """bool [Bm, nq, nk]: some query of the block sees a key of the KV block.

    k_blocks: int [nk], global. Between the first and the last key that a block of queries sees, a
    mask may leave a KV block unseen; it counts as reached.
    """
    begin = k_blocks * block_size
    end = begin + block_size
    # [Bm, nq, 1] against [nk]
    return (reach.first[..., None] < end) & (reach.last[..., None] > begin)


def seen_whole(reach: Reach, k_blocks: Tensor, block_size: int) -> Tensor:
    """bool [Bm, nq, nk]: every query of the block sees every key of the KV block.

    k_blocks: int [nk], global.
    """
    begin = k_blocks * block_size
    end = begin + block_size
    # [Bm, nq, 1] against [nk]
    return (reach.all_first[..., None] <= begin) & (reach.all_last[..., None] >= end)


def seen_blocks(ranges: MaskRanges, table: Tensor, block_size: int) -> Tensor:
    """bool [W, blocks]: the mask lets some query of rank r see a key of block b, in any sequence.

    table: int64 [W, n], the query blocks that each rank owns.
    """
    ranks = len(table)
    blocks = ranges.start.shape[1] // block_size
    if ranges.slices is not None:
        tiles = tiles_of_slices(ranges, block_size)
        lines, first, last = tiles.touched.line, tiles.touched.first, tiles.touched.last
        is_own = torch.zeros(ranks, blocks, dtype=torch.int64, device=table.device)
        is_own.scatter_(1, table, 1)
        changes = is_own.new_zeros(ranks, blocks + 1)
        if tiles.lines_are_keys:
            # [W, blocks + 1]: own blocks before each. A run of queries that holds some sees a line.
            before = torch.nn.functional.pad(is_own.cumsum(1), (1, 0))
            seen = changes.index_add_(1, lines, before[:, last] - before[:, first])
        else:
            changes.index_add_(1, first, is_own[:, lines])
            seen = changes.index_add_(1, last, -is_own[:, lines]).cumsum(1)
        return seen[:, :-1] > 0
    position = token_positions(table.flatten(), block_size)
    # [Bm, tokens]: the run of blocks that each query sees adds 1 where it begins, and takes it away
    # where it ends.
    start, stop = ranges.start[:, position], ranges.stop[:, position]
    sees_any = (start < stop).int()
    rank = torch.arange(ranks, device=table.device).repeat_interleave(table.shape[1] * block_size)
    changes = sees_any.new_zeros(ranks * (blocks + 1))
    of_rank = rank * (blocks + 1)
    first = of_rank + start // block_size
    last = of_rank + (stop + block_size - 1) // block_size
    changes.index_add_(0, first.flatten(), sees_any.flatten())
    changes.index_add_(0, last.flatten(), -sees_any.flatten())
    return changes.view(ranks, -1).cumsum(1)[:, :-1] > 0


def seen_chunks(ranges: MaskRanges, table: Tensor, block_size: int) -> Tensor:
    """bool [W, W]: the mask lets some query of rank r see a key of rank s.

    table: int64 [W, n], the layout's blocks of each rank.
    """
    # [W, blocks] -> [W, W, n]
    seen = seen_blocks(ranges, table, block_size)
    return seen[:, table].any(-1)


def queries_seeing(ranges: MaskRanges, keys: Tensor) -> tuple[Tensor, Tensor]:
    """First query that sees each key, and last + 1. int32, shaped like `keys`, int [B, ...].

    Both vectors of `ranges` are sorted, so these queries are contiguous. Not for masks with slices.
    """
    # [B, n]
    flat = keys.flatten(1).contiguous()
    # The first query whose range ends behind the key, and the first whose range begins behind it.
    found = []
    for ends in (ranges.stop, ranges.start):
        # searchsorted() does not broadcast: [Bm, S] -> [B, S].
        ends = ends.expand(len(keys), -1).contiguous()
        found.append(torch.searchsorted(ends, flat, right=True, out_int32=True).view(keys.shape))
    first, last = found
    return first, last


def seen_pairs(ranges: MaskRanges, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """bool [Bm, n, m]: the mask lets each query see each key. Global positions, int [n] and [m]."""
    # [n, 1] against [m]
    query, key = q_positions[:, None], k_positions
    if ranges.slices is None:
        start, stop = ranges.start[:, query], ranges.stop[:, query]
        return (key >= start) & (key < stop)
    seen = torch.zeros(1, 1, 1, dtype=torch.bool, device=key.device)
    for of_sequences in ranges.slices.unbind(1):
        # [Bm, 1, 1] each
        q_start, q_stop, k_start, k_stop, low, high = of_sequences[..., None, None].unbind(1)
        in_ranges = (query >= q_start) & (query < q_stop) & (key >= k_start) & (key < k_stop)
        seen = seen | (in_ranges & (key - query >= low) & (key - query <= high))
    return seen


def visible_pairs(ranges: MaskRanges) -> Tensor:
    """Pairs that the mask allows, float64 [Bm]."""
    if ranges.slices is not None:
        # [Bm, N]
        return area(ranges.slices).sum(-1).double()
    # [Bm, S]
    return (ranges.stop - ranges.start).sum(-1, dtype=torch.float64)


class TileWeights(NamedTuple):
    """The pairs that a mask sees in each tile. int32 [Bm, nq, nk] each."""

    whole: Tensor  # 1 if it is seen whole, else 0
    partial: Tensor  # how many slices, or the one mask without slices, see it in part
    pairs: Tensor  # visible pairs of tokens


def tile_weights(ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> TileWeights:
    """The pairs that the mask sees in each tile of these global blocks, int64 [nq] and [nk], of
    `size` tokens."""
    if ranges.slices is not None:
        tiles = tiles_between(ranges, q_blocks, k_blocks, size)
        cuts = (tiles.sequence, tiles.q, tiles.k)
        whole = tiles.whole.int()
        partial = torch.zeros_like(whole)
        partial.index_put_(cuts, partial.new_ones(()), accumulate=True)
        pairs = whole * size * size
        pairs.index_put_(cuts, tiles.pairs.int(), accumulate=True)
        return TileWeights(whole, partial, pairs)
    reach = block_reach(ranges, token_positions(q_blocks, size), size)
    whole = seen_whole(reach, k_blocks, size)
    partial = reached(reach, k_blocks, size) & ~whole
    # [nq, size]
    positions = token_positions(q_blocks, size).view(-1, size)
    begin = k_blocks.int() * size
    # What a block sees below the end of a key block, and not below its begin.
    below_end, below_begin = (
        _sum_of_smaller(ranges.stop[:, positions], edge)
        - _sum_of_smaller(ranges.start[:, positions], edge)
        for edge in (begin + size, begin)
    )
    return TileWeights(whole.int(), partial.int(), below_end - below_begin)


def _sum_of_smaller(ends: Tensor, limits: Tensor) -> Tensor:
    """Sums of min(end, limit) over the last dim of `ends`, int32 [Bm, nq, size] and nondecreasing
    there, for each limit int32 [nk]: int32 [Bm, nq, nk]."""
    ends = ends.contiguous()
    # [Bm, nq, size + 1]: sums of the first ends.
    sums = torch.nn.functional.pad(ends.cumsum(-1, dtype=torch.int32), (1, 0))
    limits = limits.expand(*ends.shape[:2], -1).contiguous()
    # [Bm, nq, nk]: how many ends are below the limit.
    count = torch.searchsorted(ends, limits)
    return sums.gather(-1, count) + limits * (ends.shape[-1] - count).int()


def pairs_by_block(ranges: MaskRanges, q_blocks: Tensor, size: int) -> Tensor:
    """Pairs that the mask allows between each query block int64 [nq] and every key block, int32
    [Bm, nq, blocks]."""
    blocks = -(-ranges.start.shape[1] // size)
    k_blocks = torch.arange(blocks, device=ranges.start.device)
    return tile_weights(ranges, q_blocks, k_blocks, size).pairs


class Runs(NamedTuple):
    """Runs of tiles, each in one line of blocks. int64 [n] each."""

    sequence: Tensor  # of the batch
    slice: Tensor  # of the sequence, in MaskRanges.slices
    line: Tensor  # the block of one side
    first: Tensor  # block of the other side
    last: Tensor  # block of the other side, not included
    pairs: Tensor  # of tokens that the slice holds in each tile

    def select(self, which: Tensor) -> "Runs":
        return Runs._make(field[which] for field in self)


class SliceTiles(NamedTuple):
    """Every tile that is not empty."""

    lines_are_keys: bool
    """True if a line is a KV block, and its runs are of query blocks; else the other way round."""
    touched: Runs
    """What a slice holds anything of, one run for each line of a slice, without `pairs`."""
    whole: Runs
    """What all slices together fill, each tile once, without `slice`."""
    cut: Runs
    """What the mask sees in part, once for each slice."""


class TilesBetween(NamedTuple):
    """Tiles between some query blocks and some KV blocks: those seen whole, bool [Bm, nq, nk], and
    the others, int64 [cuts], once for each slice that sees a part of them."""

    whole: Tensor
    sequence: Tensor
    slice: Tensor
    q: Tensor  # place in the list of query blocks
    k: Tensor  # place in the list of KV blocks
    pairs: Tensor  # that the slice holds in the tile


def tiles_of_slices(ranges: MaskRanges, size: int) -> SliceTiles:
    """The tiles of a mask with slices, remembered for the mask. size: tokens of a block."""
    assert ranges.slices is not None, "the mask is made of ranges"
    slices = ranges.slices
    return once_per_mask(ranges, ("tiles", size), lambda: _tiles(slices.long(), size))


def _tiles(slices: Tensor, size: int) -> SliceTiles:
    """slices: int64 [Bm, N, 6], tightened."""
    q_start, q_stop, k_start, k_stop, low, high = slices.unbind(-1)
    swapped = torch.stack([k_start, k_stop, q_start, q_stop, -high, -low], dim=-1)
    # The fewer lines there are, the less there is to do: with 1,000 keys that all of 1M queries
    # see, a slice for each, this takes 2 ms instead of 20 s.
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
    first = start // size
    last = (stop + size - 1) // size
    any_row = start < stop
    return first, (last - first) * any_row


def tiles_between(
    ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int
) -> TilesBetween:
    """The tiles of global blocks int64 [nq] and [nk] of `size` tokens, each listed once.

    The host waits for the mask.
    """
    if ranges.slices is None:
        return _tiles_between_ranges(ranges, q_blocks, k_blocks, size)
    tiles = tiles_of_slices(ranges, size)
    lines, others = q_blocks, k_blocks
    if tiles.lines_are_keys:
        lines, others = k_blocks, q_blocks
    blocks = -(-ranges.start.shape[1] // size)
    place_of_line = _places_in(lines, blocks)
    place_of_other = _places_in(others, blocks)

    # [Bm, lines, blocks + 1]: a run adds 1 where it begins and takes it away where it ends.
    shape = (len(ranges.start), len(lines), blocks + 1)
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


def _tiles_between_ranges(
    ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int
) -> TilesBetween:
    """tiles_between() for a mask without slices, which counts as one slice."""
    positions = token_positions(q_blocks, size)
    reach = block_reach(ranges, positions, size)
    k_blocks = k_blocks.int()
    whole = seen_whole(reach, k_blocks, size)
    cut = (reached(reach, k_blocks, size) & ~whole).nonzero()
    # [Bm, nq, size]
    start = ranges.start[:, positions].unflatten(1, (-1, size))
    stop = ranges.stop[:, positions].unflatten(1, (-1, size))
    pairs = []
    for sequence, q, k in (some.unbind(1) for some in cut.split(_TILES_AT_ONCE)):
        # [tiles, 1] and [tiles, size]
        begin = k_blocks[k, None] * size
        first = start[sequence, q].maximum(begin)
        last = stop[sequence, q].minimum(begin + size)
        pairs.append((last - first).clamp(min=0).sum(1))
    sequence, q, k = cut.unbind(1)
    return TilesBetween(whole, sequence, torch.zeros_like(q), q, k, torch.cat(pairs))


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
