"""Tables of blocks for a mask of slices."""

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks.classification import _of_blocks, cut_tiles, whole_tiles
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.slices import within_runs
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.tiles.blocks import BlockLists, Tiles, for_all, query_ranges


def block_tiles(
    rows: MaskRanges,
    index: BlockIndex,
    q_blocks: Tensor,
    k_blocks: Tensor,
    batch: int,
    transpose: bool,
) -> Tiles:
    """As tiles.block_tiles(), for a mask of slices and an index without columns. Sequences and heads that are alike
    share their lists' memory."""
    size, selected = index.block_size, index.selects(q_blocks, k_blocks)
    whole = whole_tiles(rows, q_blocks, k_blocks, size)[:, None] & selected
    cuts = cut_tiles(rows, size)
    which, q, k = _of_blocks(cuts, q_blocks, k_blocks, -(-rows.start.shape[1] // size))
    sequence, number = cuts.sequence[which] if len(rows.slices) > 1 else None, cuts.slice[which]
    by_query = _lists(whole, selected, sequence, q, k, number)
    by_key = _lists(whole.mT, selected.mT, sequence, k, q, number) if transpose else None
    q_positions = token_positions(q_blocks, size)
    return Tiles(
        *(for_all(x, batch, index.heads) for x in (by_query, by_key)),
        *query_ranges(rows, q_positions, batch),
        token_positions(k_blocks, size).int().view(1, 1, -1),
        None,
        size,
        slices=rows.slices.expand(batch, -1, -1),
        q_positions=q_positions.int(),
    )


def _lists(
    whole: Tensor,
    selected: Tensor,
    sequence: Tensor | None,
    row: Tensor,
    other: Tensor,
    number: Tensor,
) -> BlockLists:
    """BlockLists [B or 1, Hq or 1, n, K] from whole tiles bool [.., .., n, m], and from cuts of the blocks (row,
    other) by slice `number` where `selected` [.., .., n, m]. sequence: of each cut, None for all."""
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


def _table(
    line: Tensor, values: list[Tensor], shape: tuple[int, int, int]
) -> tuple[Tensor, list[Tensor]]:
    """Counts int32 [B, H, n] and, for each of `values`, a table [B, H, n, K] of those with the same `line`
    (ascending)."""
    lines = shape[0] * shape[1] * shape[2]
    count = torch.bincount(line, minlength=lines)
    place = within_runs(count)
    width = max(1, int(count.max())) if lines else 1
    tables = [torch.zeros(lines, width, dtype=torch.int32, device=line.device) for _ in values]
    for table, value in zip(tables, values):
        table[line, place] = value.int()
    return count.int().view(shape), [table.view(*shape, width) for table in tables]
