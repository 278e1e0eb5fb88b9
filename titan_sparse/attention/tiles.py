"""mask ∩ pattern for one (query rank, KV chunk), as the tables of blocks that a backend computes
on: in plain torch, and by kernels (slash_*)."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, token_positions
from titan_sparse.attention.masks.slice_geometry import within_runs
from titan_sparse.attention.masks.visibility import (
    Reach,
    block_reach,
    reached,
    seen_whole,
    tiles_between,
)
from titan_sparse.attention.patterns.base import BlockIndex, compact
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.kernels import block_tables
from titan_sparse.kernels.block_sparse import BlockLists, Tiles
from titan_sparse.kernels.block_sparse.piece import mapped
from titan_sparse.kernels.compact import pack


def block_tiles(
    ranges: MaskRanges,
    index: BlockIndex,
    q_blocks: Tensor,
    k_blocks: Tensor,
    transpose: bool,
) -> Tiles:
    """Tiles between this rank's query blocks and a chunk's KV blocks.

    q_blocks, k_blocks: global block numbers, int [nq] and [nk].
    With `transpose` by_key is made too. Sequences and heads that are alike share their lists'
    memory.
    """
    size = index.block_size
    q_positions = token_positions(q_blocks, size)
    k_positions = token_positions(k_blocks, size)
    # [B or 1, Hq or 1, nq, nk]
    selected = index.selects(q_blocks, k_blocks)
    by_key = None
    of_slices = {}
    if ranges.slices is None:
        # [Bm, nq, nk]
        reach = block_reach(ranges, q_positions, size)
        whole = seen_whole(reach, k_blocks, size)
        # [B or 1, Hq or 1, nq, nk]
        listed = selected & reached(reach, k_blocks, size)[:, None]
        full = listed & whole[:, None] & index.selects_for_all(q_blocks, k_blocks)
        met = torch.stack([full, listed & ~full])
        by_query = block_lists(met)
        if transpose:
            by_key = block_lists(met.mT)
    else:
        cuts = tiles_between(ranges, q_blocks, k_blocks, size)
        whole = cuts.whole[:, None] & selected
        sequence = cuts.sequence if len(ranges.slices) > 1 else None
        by_query = _slice_lists(whole, selected, sequence, cuts.q, cuts.k, cuts.slice)
        if transpose:
            by_key = _slice_lists(whole.mT, selected.mT, sequence, cuts.k, cuts.q, cuts.slice)
        slices = ranges.slices.expand(index.batch, -1, -1)
        of_slices = {"slices": slices, "q_positions": q_positions.int()}
    start, stop = query_ranges(ranges, q_positions, index.batch)

    def for_all(field: Tensor) -> Tensor:
        return field.expand(index.batch, index.heads, *field.shape[2:])

    return Tiles(
        by_query=mapped(by_query, for_all),
        by_key=mapped(by_key, for_all),
        start=start,
        stop=stop,
        k_positions=k_positions.int().view(1, 1, -1),
        covered=None,
        block_size=size,
        chosen=index.chosen_chunks(q_positions),
        **of_slices,
    )


def vertical_tiles(
    ranges: MaskRanges, index: BlockIndex, q_blocks: Tensor, transpose: bool
) -> Tiles:
    """Tiles between this rank's query blocks and the gathered verticals.

    Verticals are cut into blocks in the order in which they come.
    A vertical inside a block that the query block meets anyway is marked as covered.
    """
    size = index.block_size
    verticals = index.verticals
    q_positions = token_positions(q_blocks, size)
    reach = block_reach(ranges, q_positions, size)
    reach = Reach._make(edge[:, None, :, None] for edge in reach)  # [Bm, 1, nq, 1]

    # [B, Hq, 1, n]: verticals ascend, so the first and the last one of a block bound it.
    vertical_blocks = verticals.unflatten(-1, (-1, size))[:, :, None]
    first, last = vertical_blocks[..., 0], vertical_blocks[..., -1]

    # [B, Hq, nq, C], and the rest [B, Hq, nq, n].
    covered = index.covers(q_blocks, verticals)
    any_covered = covered.unflatten(-1, (-1, size)).any(-1)
    any_seen = (reach.first <= last) & (reach.last > first)
    all_seen = (reach.all_first <= first) & (reach.all_last > last)
    whole = all_seen & ~any_covered
    met = torch.stack([any_seen & whole, any_seen & ~whole])
    start, stop = query_ranges(ranges, q_positions, index.batch)
    return Tiles(
        by_query=block_lists(met),
        by_key=block_lists(met.mT) if transpose else None,
        start=start,
        stop=stop,
        k_positions=verticals,
        covered=pack(covered),
        block_size=size,
    )


class SlashQueries(NamedTuple):
    """The facts about this rank's query blocks that tiles need, the same for every layer."""

    spans: Tensor  # int32 [B, nq, 5], as block_tables.slash_lists() takes it
    reach: Tensor  # int32 [B, nq, 4], as block_tables.slash_lists() takes it
    blocks: Tensor  # int32 [nq]
    start: Tensor  # int32 [B, Sq]
    stop: Tensor  # int32 [B, Sq]


class SlashKeys(NamedTuple):
    """The facts about KV blocks that tiles need, the same for every layer."""

    blocks: Tensor  # int32 [nk], global
    positions: Tensor  # int32 [1, 1, nk * block_size], of their tokens


def slash_keys(k_blocks: Tensor, block_size: int) -> SlashKeys:
    positions = token_positions(k_blocks, block_size)
    return SlashKeys(k_blocks.int(), positions.int().view(1, 1, -1))


def slash_queries(ranges: MaskRanges, index: VerticalSlashIndex, q_blocks: Tensor) -> SlashQueries:
    """The SlashQueries of global blocks int [nq], from mask, pattern and layout alone."""
    q_positions = token_positions(q_blocks, index.block_size)
    reach = torch.stack(block_reach(ranges, q_positions, index.block_size), dim=-1)  # [Bm, nq, 4]
    start, stop = query_ranges(ranges, q_positions, index.batch)
    return SlashQueries(
        spans=index.block_spans(q_blocks),
        reach=reach.expand(index.batch, -1, -1).int().contiguous(),
        blocks=q_blocks.int(),
        start=start,
        stop=stop,
    )


def slash_block_tiles(
    queries: SlashQueries, keys: SlashKeys, index: VerticalSlashIndex, transpose: bool
) -> Tiles:
    """block_tiles() by kernels, of a vertical-slash index on a GPU.

    No [blocks, blocks] mask is made and the host does not wait: the bound of the index gives
    the width of the lists.
    """
    nq, nk = len(queries.blocks), len(keys.blocks)
    of_queries = (index.slashes, queries.spans, queries.reach, queries.blocks)
    lists = block_tables.slash_lists(
        *of_queries,
        keys.blocks,
        index.block_size,
        capacity=list_width(index.most_blocks, nk),
        key_capacity=list_width(index.most_blocks, nq) if transpose else None,
    )
    return _slash_tiles(queries, index, lists, keys.positions)


def slash_vertical_tiles(
    queries: SlashQueries, index: VerticalSlashIndex, transpose: bool
) -> Tiles:
    """vertical_tiles() by kernels."""
    of_queries = (index.slashes, queries.spans, queries.reach, queries.blocks)
    covered, by_query, met = block_tables.vertical_lists(
        *of_queries, index.verticals, index.block_size, wants_met=transpose
    )
    by_key = [] if met is None else [block_lists(met)]
    return _slash_tiles(queries, index, [by_query, *by_key], index.verticals, covered)


def _slash_tiles(
    queries: SlashQueries,
    index: VerticalSlashIndex,
    lists: list[BlockLists],
    k_positions: Tensor,
    covered: Tensor | None = None,
) -> Tiles:
    """lists: by query, and by key if they were made."""
    by_query, *by_key = lists
    return Tiles(
        by_query=by_query,
        by_key=by_key[0] if by_key else None,
        start=queries.start,
        stop=queries.stop,
        k_positions=k_positions,
        covered=covered,
        block_size=index.block_size,
    )


def block_lists(met: Tensor) -> BlockLists:
    """Lists from a table, bool [2, B, H, n, m]: which tiles are full, and which are partial.

    Both lists are as wide as the longest one. On a GPU they are m wide, so that the host does not
    wait for the selection.
    """
    numbers, count = compact(met.flatten(0, 3), met.shape[-1], 0)
    if not met.is_cuda:
        width = max(int(count.max()), 1) if count.numel() else 1
        numbers = numbers[:, :width]
    # [2, B, H, n, width] and [2, B, H, n]
    numbers = numbers.unflatten(0, met.shape[:-1])
    count = count.view(met.shape[:-1])
    full, partial = numbers.unbind()
    full_count, partial_count = count.unbind()
    return BlockLists(full_count, full, partial_count, partial)


def list_width(most: int, blocks: int) -> int:
    """Width of lists of at most `most` out of `blocks`: a power of two, or all blocks.

    Widths that depend on the data would recompile kernels again and again.
    """
    # At least 32, so that short lists do not come in many widths either.
    power_of_two = 1 << (most - 1).bit_length()
    return min(blocks, max(32, power_of_two))


def query_ranges(ranges: MaskRanges, q_positions: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """start and stop of this rank's queries, int32 [B, Sq]."""
    # [Bm, Sq] -> [B, Sq]
    start = ranges.start[:, q_positions].expand(batch, -1)
    stop = ranges.stop[:, q_positions].expand(batch, -1)
    return start.contiguous(), stop.contiguous()


def _slice_lists(
    whole: Tensor,
    selected: Tensor,
    sequence: Tensor | None,
    line: Tensor,
    other: Tensor,
    slice_number: Tensor,
) -> BlockLists:
    """BlockLists [B or 1, Hq or 1, n, K] for the n blocks of one side.

    The other side has m blocks.
    whole: bool [B or 1, Hq or 1, n, m], tiles that the mask sees whole and the index selects.
    selected: the same for all tiles that the index selects. line, other, slice_number: int64
    [cuts], the two blocks of each cut and the slice that cuts them. sequence: int64 [cuts], of each
    cut; None where all sequences have them.
    """
    shape = whole.shape[:3]
    batch, heads, lines = shape
    # [full tiles]
    full_line, full_block = whole.flatten(0, 2).nonzero().unbind(-1)
    full_count, [full] = _table(full_line, [full_block], shape)

    # [cuts], by line, then by block of the other side. Blocks are numbered below 2**24.
    order = (line * (1 << 24) + other).argsort(stable=True)
    line = line[order]
    other = other[order]
    slice_number = slice_number[order]
    # [B or 1, Hq or 1, cuts]
    on = selected[..., line, other].expand(batch, heads, -1)
    if sequence is not None:
        numbers = torch.arange(batch, device=line.device)[:, None, None]
        on = on & (sequence[order] == numbers)

    # One entry for each cut that a head of a sequence computes, [entries].
    b, h, cut = on.nonzero().unbind(-1)
    # [entries], ascending.
    partial_line = (b * heads + h) * lines + line[cut]
    values = [other[cut], slice_number[cut]]
    partial_count, [partial, partial_slice] = _table(partial_line, values, shape)
    return BlockLists(full_count, full, partial_count, partial, partial_slice)


def _table(line: Tensor, values: list[Tensor], shape: torch.Size) -> tuple[Tensor, list[Tensor]]:
    """Counts int32 [B, H, n] and a table int32 [B, H, n, K] for each of `values`.

    A line of a table holds the values with the same line.
    line: int64 [entries], ascending, of B H n. values: int64 [entries] each.
    """
    total = shape.numel()
    # Entries of each line, [total], and the place of each entry in its line, [entries].
    count = torch.bincount(line, minlength=total)
    place = within_runs(count)

    # Tables are at least one entry wide, also where all lines are empty.
    width = max(1, int(count.max())) if total else 1
    tables = []
    for value in values:
        # [total, K], filled up with 0.
        table = torch.zeros(total, width, dtype=torch.int32, device=line.device)
        table[line, place] = value.int()
        tables.append(table.view(*shape, width))
    return count.int().view(shape), tables
