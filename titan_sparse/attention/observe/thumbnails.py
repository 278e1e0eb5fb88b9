"""Small pictures of what was selected, for indexes of any length.

No mask of all pairs is ever made, neither of tokens nor of blocks.
"""

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks import classification
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex

_MASK_BLOCKS = 16
"""Query blocks of the mask that are looked at together: bounds the memory."""
_Q_BLOCKS = 256
"""Query blocks of the index that are looked at together: bounds the memory."""


def thumbnail(index: BlockIndex, ranges: MaskRanges, cells: int) -> Tensor:
    """Share of the pairs the mask allows that the first sequence's index selects.

    Returns fp32 [Hq, P, P], queries down and keys to the right, with P = min(cells, blocks). A
    cell is nan where the mask allows nothing.

    Pairs in blocks are exact (for MoBA those of blocks that any query of the block chose). A
    vertical counts for as many pairs in a block of keys as a key of that block has on average.
    """
    device = index.verticals.device
    block_size = index.block_size
    blocks = torch.arange(-(-index.seq_len // block_size), device=device)
    size = min(cells, len(blocks))
    # [blocks, P]: 1 where the block belongs to the cell
    cell_of_block = torch.nn.functional.one_hot(blocks * size // len(blocks), size).float()

    first_slices = None if ranges.slices is None else ranges.slices[:1]
    first = MaskRanges(ranges.start[:1], ranges.stop[:1], None, slices=first_slices)
    # [blocks, blocks]; the same for all layers under one mask
    all_pairs = once_per_mask(
        ranges,
        ("pairs of all blocks", block_size),
        lambda: pairs_by_block(first, blocks, block_size)[0],
    )

    # Verticals are ascending, so differences of their ranks at the edges count them block by block.
    edges = torch.arange(len(blocks) + 1, device=device, dtype=torch.int32) * block_size
    edges_of_head = edges.clamp(max=index.seq_len).expand(index.heads, -1).contiguous()
    verticals_before = torch.searchsorted(index.verticals[0], edges_of_head)
    # [Hq, 1, blocks]: share of the block's keys that are verticals
    vertical_share = verticals_before.diff(dim=-1)[:, None].float() / block_size

    computed = torch.zeros(index.heads, size, size, device=device)
    allowed = torch.zeros(size, size, device=device)
    for q_blocks, cell_of_q in zip(blocks.split(_Q_BLOCKS), cell_of_block.split(_Q_BLOCKS)):
        # [nq, blocks]
        pairs = all_pairs[q_blocks].float()
        # [Hq or 1, nq, blocks]
        selected = index.selects(q_blocks, blocks)[0]
        computed_pairs = torch.where(selected, pairs, pairs * vertical_share)
        computed += cell_of_q.T @ (computed_pairs @ cell_of_block)
        allowed += cell_of_q.T @ (pairs @ cell_of_block)
    return computed / allowed.where(allowed > 0, torch.nan)


def pairs_by_block(ranges: MaskRanges, q_blocks: Tensor, block_size: int) -> Tensor:
    """Pairs the mask allows between each query block and every key block, int32 [Bm, nq, blocks].

    q_blocks: int64 [nq], global.
    """
    seq_len = ranges.start.shape[1]
    device = ranges.start.device
    k_begin = torch.arange(0, seq_len, block_size, device=device, dtype=torch.int32)
    if ranges.slices is not None:
        k_blocks = k_begin.long() // block_size
        return classification.tile_weights(ranges, q_blocks, k_blocks, block_size)[2]
    tables = []
    for some_blocks in q_blocks.split(_MASK_BLOCKS):
        positions = token_positions(some_blocks, block_size)
        # [Bm, n * block_size, 1], and with k_begin [Bm, n * block_size, blocks]
        start = ranges.start[:, positions, None]
        stop = ranges.stop[:, positions, None]
        last_seen = torch.minimum(stop, k_begin + block_size)
        first_seen = torch.maximum(start, k_begin)
        pairs = (last_seen - first_seen).clamp(min=0)
        tables.append(pairs.unflatten(1, (len(some_blocks), block_size)).sum(2, dtype=torch.int32))
    return torch.cat(tables, dim=1)
