"""Small pictures of what was selected, for indexes of any length.

No mask of all pairs is ever made, neither of tokens nor of blocks.
"""

import torch
from torch import Tensor

from titan_sparse.attention.masks.counts import pairs_by_block
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex

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
    number_of_blocks = -(-index.seq_len // block_size)
    blocks = torch.arange(number_of_blocks, device=device)
    size = min(cells, number_of_blocks)
    # [blocks, P]: 1 where the block belongs to the cell
    cell = blocks * size // number_of_blocks
    cell_of_block = torch.nn.functional.one_hot(cell, size).float()

    first_slices = None if ranges.slices is None else ranges.slices[:1]
    first = MaskRanges(ranges.start[:1], ranges.stop[:1], None, slices=first_slices)
    # [blocks, blocks]; the same for all layers under one mask
    all_pairs = once_per_mask(
        ranges,
        ("pairs of all blocks", block_size),
        lambda: pairs_by_block(first, blocks, block_size)[0],
    )

    # Verticals are ascending, so differences of their ranks at the edges count them block by block.
    edges = torch.arange(number_of_blocks + 1, device=device, dtype=torch.int32)
    edges = edges * block_size
    # The last block may be cut off by the end of the sequence.
    edges = edges.clamp(max=index.seq_len)
    # [Hq, blocks + 1]; searchsorted() wants them contiguous.
    edges_of_head = edges.expand(index.heads, -1).contiguous()
    verticals_before = torch.searchsorted(index.verticals[0], edges_of_head)
    verticals_of_block = verticals_before.diff(dim=-1)
    # [Hq, 1, blocks]: share of the block's keys that are verticals
    vertical_share = verticals_of_block[:, None].float() / block_size

    computed = torch.zeros(index.heads, size, size, device=device)
    allowed = torch.zeros(size, size, device=device)
    for q_blocks, cell_of_q in zip(blocks.split(_Q_BLOCKS), cell_of_block.split(_Q_BLOCKS)):
        # [nq, blocks]
        pairs = all_pairs[q_blocks].float()
        # [Hq or 1, nq, blocks]
        selected = index.selects(q_blocks, blocks)[0]
        pairs_with_verticals = pairs * vertical_share
        computed_pairs = torch.where(selected, pairs, pairs_with_verticals)
        # Sums over the blocks of each cell, first of keys and then of queries.
        computed += cell_of_q.T @ (computed_pairs @ cell_of_block)
        allowed += cell_of_q.T @ (pairs @ cell_of_block)
    return computed / allowed.where(allowed > 0, torch.nan)
