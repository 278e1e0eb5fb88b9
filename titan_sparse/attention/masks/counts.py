"""How many pairs of tokens a mask lets see each other: in all, and in each tile."""

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks import classification
from titan_sparse.attention.masks.base import MaskRanges
from titan_sparse.attention.masks.classification import TileWeights
from titan_sparse.attention.masks.geometry import area
from titan_sparse.attention.masks.reach import block_reach, reached

_MAX_Q_BLOCKS = 16
"""Query blocks that pairs_by_block() looks at together. Bounds the memory."""


def visible_pairs(ranges: MaskRanges) -> Tensor:
    """Pairs that the mask allows, float64 [Bm]."""
    if ranges.slices is not None:
        # [Bm, N]
        pairs = area(ranges.slices)
        return pairs.sum(-1).double()
    # [Bm, S]
    pairs = ranges.stop - ranges.start
    return pairs.sum(-1, dtype=torch.float64)


def pairs_by_block(ranges: MaskRanges, q_blocks: Tensor, size: int) -> Tensor:
    """Pairs that the mask allows between each query block and every key block, int32 [Bm, nq,
    blocks].

    q_blocks: int64 [nq], global. size: tokens of a block.
    """
    seq_len = ranges.start.shape[1]
    # [blocks]: the first key of every block
    begin = torch.arange(0, seq_len, size, device=ranges.start.device, dtype=torch.int32)
    if ranges.slices is not None:
        k_blocks = begin.long() // size
        return classification.tile_weights(ranges, q_blocks, k_blocks, size).pairs
    tables = []
    for blocks in q_blocks.split(_MAX_Q_BLOCKS):
        # [Bm, nq * size, 1] against [blocks]
        position = token_positions(blocks, size)
        start = ranges.start[:, position, None]
        stop = ranges.stop[:, position, None]
        pairs = _keys_in_block(start, stop, begin, size)
        # [Bm, nq, size, blocks] -> [Bm, nq, blocks]
        by_q_block = pairs.unflatten(1, (len(blocks), size))
        tables.append(by_q_block.sum(2, dtype=torch.int32))
    return torch.cat(tables, dim=1)


def tile_weights(ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> TileWeights:
    """Of each tile whether it is seen whole or in part, and its visible pairs. int32 [Bm, nq, nk]
    each.

    q_blocks int64 [nq], k_blocks int64 [nk]: global blocks of `size` tokens.
    """
    if ranges.slices is not None:
        return classification.tile_weights(ranges, q_blocks, k_blocks, size)
    reach = block_reach(ranges, token_positions(q_blocks, size), size)
    begin = k_blocks * size
    end = begin + size
    # [Bm, nq, 1] against [nk]: every query sees the block from its first to its last key
    from_first = reach.all_first[..., None] <= begin
    to_last = reach.all_last[..., None] >= end
    whole = from_first & to_last
    partial = reached(reach, k_blocks, size) & ~whole
    pairs = whole.int() * size * size
    # Only the pairs of partial tiles are counted one by one: n tiles, [n, size] queries.
    sequence, q, k = partial.nonzero(as_tuple=True)
    positions = token_positions(q_blocks[q], size).view(-1, size)
    start = ranges.start[sequence[:, None], positions]
    stop = ranges.stop[sequence[:, None], positions]
    seen = _keys_in_block(start, stop, begin[k, None], size)
    pairs[sequence, q, k] = seen.sum(-1).int()
    return TileWeights(whole.int(), partial.int(), pairs)


def _keys_in_block(start: Tensor, stop: Tensor, begin: Tensor, size: int) -> Tensor:
    """How many of the keys start .. stop - 1 lie in the block of `size` keys from `begin` on."""
    end = begin + size
    first = torch.maximum(start, begin)
    last = torch.minimum(stop, end)
    count = last - first
    return count.clamp(min=0)
