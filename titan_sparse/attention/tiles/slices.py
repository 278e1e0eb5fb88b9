"""Tables of blocks for a mask of slices."""

import torch
from torch import Tensor

from titan_sparse.attention.masks.bands import tiles_between
from titan_sparse.attention.masks.geometry import within_runs
from titan_sparse.attention.masks.ranges import MaskRanges, token_positions
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.tiles.blocks import for_all, query_ranges
from titan_sparse.kernels.block_sparse import BlockLists, Tiles


def block_tiles(
    ranges: MaskRanges,
    index: BlockIndex,
    q_blocks: Tensor,
    k_blocks: Tensor,
    batch: int,
    transpose: bool,
) -> Tiles:
    """Like blocks.block_tiles(), for a mask of slices and an index without verticals.

    Sequences and heads that are alike share their lists' memory.
    """
    size = index.block_size
    # bool [B or 1, Hq or 1, nq, nk]
    selected = index.selects(q_blocks, k_blocks)
    cuts = tiles_between(ranges, q_blocks, k_blocks, size)
    whole = cuts.whole[:, None] & selected
    sequence = cuts.sequence if len(ranges.slices) > 1 else None

    by_query = _lists(whole, selected, sequence, cuts.q, cuts.k, cuts.slice)
    by_key = None
    if transpose:
        by_key = _lists(whole.mT, selected.mT, sequence, cuts.k, cuts.q, cuts.slice)
    q_positions = token_positions(q_blocks, size)
    k_positions = token_positions(k_blocks, size)
    start, stop = query_ranges(ranges, q_positions, batch)
    return Tiles(
        by_query=for_all(by_query, batch, index.heads),
        by_key=for_all(by_key, batch, index.heads),
        start=start,
        stop=stop,
        k_positions=k_positions.int().view(1, 1, -1),
        covered=None,
        block_size=size,
        slices=ranges.slices.expand(batch, -1, -1),
        q_positions=q_positions.int(),
    )


def _lists(
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
    selected: the same for all tiles that the index selects. line, other, slice_number: int64 [cuts],
    the two blocks of each cut and the slice that cuts them. sequence: int64 [cuts], of each cut;
    None where all sequences have them.
    """
    batch, heads, lines = whole.shape[:3]
    shape = (batch, heads, lines)

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


def _table(
    line: Tensor, values: list[Tensor], shape: tuple[int, int, int]
) -> tuple[Tensor, list[Tensor]]:
    """Counts int32 [B, H, n] and a table int32 [B, H, n, K] for each of `values`.

    A line of a table holds the values with the same line.
    line: int64 [entries], ascending, of B H n. values: int64 [entries] each.
    """
    batch, heads, lines = shape
    total = batch * heads * lines
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
        tables.append(table.view(batch, heads, lines, width))
    return count.int().view(shape), tables
