"""The chunks and blocks that each rank needs.

All ranks compute the same answer without communication, from the mask and, where
it helps, the index.
"""

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.masks.ranges import Causal, MaskRanges, once_per_mask, token_positions
from titan_sparse.attention.masks.visibility import block_reach, reached, seen_blocks, seen_chunks
from titan_sparse.attention.patterns.base import BlockIndex

_TILES_AT_ONCE = 1 << 26
"""How many tiles of all heads are looked at together, which bounds the memory."""
_LAYOUTS_BY_INDEX = ("contiguous", "zigzag")
"""Where the index is looked at. Under "balanced" any few slashes touch every rank; under "striped"
they do with few ranks."""


def needed_chunks(call: AttentionCall) -> Tensor:
    """bool [W, W] on the host: some query of rank r meets a block of rank s outside the verticals.

    The mask is looked at once a batch. Where the index is looked at too (goes_by_index), the host
    waits for the selection.
    """
    table = call.cp.table(call.mask)

    def seen_of_mask() -> Tensor:
        mask = call.mask
        if mask.plain and not call.cp.depends_on_mask:
            # It follows from the length alone, so that the host does not wait for the device.
            mask = Causal().rows(call.seq_len)
        return seen_chunks(mask, call.cp.table(mask), call.cp.block_size).cpu()

    seen = once_per_mask(call.mask, ("needed", call.cp.key), seen_of_mask)
    if call.cp.route_by == "mask":
        return seen
    if not goes_by_index(call.index, call.cp.layout):
        return seen
    return seen & met_blocks(call.mask, call.index, table)[:, table].any(-1).cpu()


def goes_by_index(index: BlockIndex, layout: str) -> bool:
    """True if a chunk that the mask lets a rank see is needed only where some
    head computes a tile."""
    return layout in _LAYOUTS_BY_INDEX and index.shortens_rings


def needed_blocks(call: AttentionCall) -> Tensor:
    """bool [W, blocks] on the host: some query of rank r meets a key of block b.

    Verticals do not count; any sequence and head does. For a static pattern the mask is looked at
    once a batch, and for a dynamic one the host waits for the index.
    """
    table = call.cp.table(call.mask)
    # int64 [W, n]: the query blocks of each rank
    queries = table[:, call.first : call.last]
    if call.pattern.dynamic:
        return met_blocks(call.mask, call.index, queries).cpu()
    key = ("needed blocks", call.cp.key, call.first, call.last)
    size = call.cp.block_size
    return once_per_mask(call.mask, key, lambda: seen_blocks(call.mask, queries, size).cpu())


def met_blocks(ranges: MaskRanges, index: BlockIndex, table: Tensor) -> Tensor:
    """bool [W, blocks]: some head computes a tile of block b for a query of rank r.

    table: int64 [W, n], the query blocks of each rank.
    """
    keys = index.all_blocks()
    size = index.block_size
    tiles_of_q_block = index.batch * index.heads * len(keys)
    q_blocks_at_once = max(1, _TILES_AT_ONCE // tiles_of_q_block)
    met = []
    for q_blocks in table.flatten().split(q_blocks_at_once):
        reach = block_reach(ranges, token_positions(q_blocks, size), size)
        # [B, nq, blocks]: how many heads select each block
        selecting, _ = index.heads_selecting(q_blocks, keys)
        tiles = reached(reach, keys, size) & (selecting > 0)
        met.append(tiles.any(0))
    # [W, n, blocks]
    by_rank = torch.cat(met).unflatten(0, table.shape)
    return by_rank.any(1)
