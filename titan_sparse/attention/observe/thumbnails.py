"""Small pictures of what was selected, for indexes of any length: never a mask of all pairs, of tokens or of blocks."""

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks import classification as slice_tiles
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex

_MASK_BLOCKS, _Q_BLOCKS = 16, 256
"""Query blocks of the mask, and of the index, that are looked at together: bounds the memory."""


def thumbnail(index: BlockIndex, rows: MaskRanges, cells: int) -> Tensor:
    """Share of the pairs the mask allows that the first sequence's index selects, fp32 [Hq, P, P], queries down, keys to
    the right; P = min(cells, blocks). nan where nothing is allowed.

    Exact for pairs in blocks (of MoBA those that any query of the block chose); a vertical counts for as many pairs in a block
    of keys as its keys have there on average.
    """
    blocks = torch.arange(-(-index.seq_len // index.block_size), device=index.verticals.device)
    size = min(cells, len(blocks))
    cell = torch.nn.functional.one_hot(blocks * size // len(blocks), size).float()
    first = MaskRanges(
        rows.start[:1], rows.stop[:1], None, slices=None if rows.slices is None else rows.slices[:1]
    )
    pairs_of = once_per_mask(
        rows,
        ("pairs of all blocks", index.block_size),
        lambda: pairs_by_block(first, blocks, index.block_size)[0],
    )
    edges = (
        torch.arange(len(blocks) + 1, device=blocks.device, dtype=torch.int32) * index.block_size
    )
    before = torch.searchsorted(
        index.verticals[0], edges.clamp(max=index.seq_len).expand(index.heads, -1).contiguous()
    )
    share = before.diff(dim=-1)[:, None].float() / index.block_size
    computed, allowed = (
        torch.zeros(*shape, size, size, device=blocks.device) for shape in ((index.heads,), ())
    )
    for some, of in zip(blocks.split(_Q_BLOCKS), cell.split(_Q_BLOCKS)):
        pairs = pairs_of[some].float()
        selected = index.selects(some, blocks)[0]
        computed += of.T @ (torch.where(selected, pairs, pairs * share) @ cell)
        allowed += of.T @ (pairs @ cell)
    return computed / allowed.where(allowed > 0, torch.nan)


def pairs_by_block(rows: MaskRanges, q_blocks: Tensor, size: int) -> Tensor:
    """Pairs the mask allows between each query block and every key block, int32 [Bm, nq, blocks]."""
    begin = torch.arange(0, rows.start.shape[1], size, device=rows.start.device, dtype=torch.int32)
    if rows.slices is not None:
        return slice_tiles.tile_weights(rows, q_blocks, begin.long() // size, size)[2]
    tables = []
    for some in q_blocks.split(_MASK_BLOCKS):
        position = token_positions(some, size)
        start, stop = (x[:, position, None] for x in (rows.start, rows.stop))
        pairs = (torch.minimum(stop, begin + size) - torch.maximum(start, begin)).clamp(min=0)
        tables.append(pairs.unflatten(1, (len(some), size)).sum(2, dtype=torch.int32))
    return torch.cat(tables, dim=1)
