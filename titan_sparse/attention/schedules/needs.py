"""Which ranks need which chunks and blocks.

All ranks compute the same answer without communication, from the mask and, where it helps, the index.
"""

import functools

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask, token_positions
from titan_sparse.attention.masks.reach import block_reach, reached, seen_blocks, seen_chunks
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles.blocks import all_blocks

_LARGEST_TABLE = 1 << 27
"""The index is ignored if the table of block distances between ranks would have more entries."""
_TILES_AT_ONCE = 1 << 26
"""How many tiles of all heads are looked at together, which bounds the memory."""
_LAYOUTS_BY_INDEX = ("contiguous", "zigzag")
"""Where the index is looked at. Under "balanced" any few slashes touch every rank; under "striped"
they do with few ranks."""


def needed_chunks(call: AttentionCall) -> Tensor:
    """bool [W, W] on the host: some query of rank r meets a block of rank s outside the verticals.

    The result may contain chunks that are not needed, but misses none. The mask is looked at once a
    batch. For what met_chunks() looks at, the host waits for the selection.
    """

    def by_mask() -> Tensor:
        table = call.cp.table(call.mask)
        return seen_chunks(call.mask, table, call.cp.block_size).cpu()

    seen = once_per_mask(call.mask, ("needed", call.cp.key), by_mask)
    if call.cp.route_by == "mask":
        return seen
    return met_chunks(seen, call.index, call.cp.layout)


def met_chunks(seen: Tensor, index: BlockIndex, layout: str) -> Tensor:
    """Of the chunks bool [W, W] that the mask lets ranks see, those that slashes of some head meet.

    `seen` is returned unchanged where there is nothing to look at. In a packed sequence this is a
    bound: a diagonal counts for all documents.
    """
    if layout not in _LAYOUTS_BY_INDEX or not isinstance(index, VerticalSlashIndex):
        return seen
    device = index.slashes.device
    distances = block_distances(layout, len(seen), index.seq_len, index.block_size, device)
    if distances is None:
        return seen
    # [W * W]: at how many distances a pair of ranks has blocks and a diagonal is on
    shared = distances_on(index).to(distances.dtype) @ distances
    return seen & (shared > 0).view(seen.shape).cpu()


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
    keys = all_blocks(index)
    size = index.block_size
    batch = index.verticals.shape[0]
    tiles_of_q_block = batch * index.heads * len(keys)
    q_blocks_at_once = max(1, _TILES_AT_ONCE // tiles_of_q_block)
    is_met = torch.zeros(len(table), len(keys), dtype=torch.bool, device=table.device)
    for rank, blocks_of_rank in enumerate(table):
        for q_blocks in blocks_of_rank.split(q_blocks_at_once):
            reach = block_reach(ranges, token_positions(q_blocks, size), size)
            # [B, nq, blocks]: how many heads select each block
            selecting, _ = index.heads_selecting(q_blocks, keys)
            tiles = reached(reach, keys, size) & (selecting > 0)
            is_met[rank] |= tiles.flatten(0, 1).any(0)
    return is_met


@functools.lru_cache(maxsize=8)
def block_distances(
    layout: str, ranks: int, seq_len: int, block_size: int, device: torch.device
) -> Tensor | None:
    """float32 [blocks, W * W]: how far query blocks of rank r lie behind key blocks of rank s.

    Entry [d, r * W + s] is 1 where some query block of r lies d blocks after a key block of s. None
    if the table would be too large.
    """
    table = block_ids(layout, ranks, seq_len, block_size).to(device)
    blocks = table.numel()
    pairs = ranks * ranks
    if blocks * pairs > _LARGEST_TABLE:
        return None
    # int64 [blocks]: the rank of each global block
    owner = torch.empty(blocks, dtype=torch.int64, device=device)
    owner[table] = torch.arange(ranks, device=device)[:, None]
    distances = torch.zeros(blocks, pairs, device=device)
    for distance in range(blocks):
        query_owner = owner[distance:]
        key_owner = owner[: blocks - distance]
        pair = query_owner * ranks + key_owner
        distances[distance, pair] = 1
    return distances


def distances_on(index: VerticalSlashIndex) -> Tensor:
    """bool [blocks]: whether any head of any sequence computes a pair of blocks at this distance."""
    spans = index.spans
    device = index.slashes.device
    blocks = -(-index.seq_len // index.block_size)
    batch, count = spans.offset.shape
    # [E] and [B, E]: the entries of the list of diagonals
    entry = torch.arange(index.slashes.shape[-1], device=device)
    entry_of_sequence = entry.expand(batch, -1).contiguous()
    # [B, E]: the span that each entry belongs to; `count` for entries behind the last span
    span_end = spans.offset + spans.diagonals
    span = torch.searchsorted(span_end, entry_of_sequence, right=True)
    # [B, E]: how far apart the blocks on the diagonal are
    last_span = count - 1
    offset = spans.offset.gather(1, span.clamp(max=last_span))
    distance = entry - offset
    is_on = index.slashes.any(1) & (span < count)
    # The extra place at the end takes the diagonals that are off.
    place = torch.where(is_on, distance, blocks)
    seen = torch.zeros(blocks + 1, dtype=torch.bool, device=device)
    seen[place.flatten()] = True
    # Short documents are computed whole. Their blocks are as far apart as the first and the last
    # block of the longest of them.
    block = torch.arange(blocks, device=device)
    longest_short = (block - spans.dense_from).amax()
    return seen[:blocks] | (block <= longest_short)
