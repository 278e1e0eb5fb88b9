"""Which ranks need which chunks and blocks.

All ranks work this out alike without asking: from the mask, and from the index where that helps.
"""

import functools

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.reach import block_reach, reached, seen_blocks, seen_chunks
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.heads import heads_selecting
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles.blocks import all_blocks

# With more entries in the table of block distances between ranks the index is not looked at.
_LARGEST_TABLE = 1 << 27
# Tiles of all heads that are looked at together: bounds the memory.
_TILES_AT_ONCE = 1 << 26


def needed_chunks(call: AttentionCall) -> Tensor | None:
    """bool [W, W] on the host: some query of rank r meets a block of rank s outside the verticals.

    None for one rank. It may say yes too often, never too seldom. The mask is looked at once a
    batch. The block diagonals of a vertical-slash index are looked at too, unless the layout is
    striped or balanced: there any few diagonals touch every rank, and looking makes the host wait
    for the selection.
    """
    if call.cp.size == 1:
        return None

    def by_mask() -> Tensor:
        return seen_chunks(call.mask, call.cp.table(call.mask), call.cp.block_size).cpu()

    seen = once_per_mask(call.mask, ("needed", call.cp.key), by_mask)
    return _without_unmet(seen, call.index, call.cp.layout)


def needed_chunks_of(index: BlockIndex, ranges: MaskRanges, layout: str, ranks: int) -> Tensor:
    """needed_chunks() of a call over so many ranks.

    ranges: for the layout "balanced" with their table.
    """
    if layout == "balanced":
        table = ranges.table
    else:
        table = block_ids(layout, ranks, index.seq_len, index.block_size)
    seen = seen_chunks(ranges, table.to(ranges.start.device), index.block_size).cpu()
    return _without_unmet(seen, index, layout)


def _without_unmet(by_mask: Tensor, index: BlockIndex, layout: str) -> Tensor:
    """Of the chunks that the mask lets ranks see, those that block diagonals meet.

    Unchanged where it is not worth looking.
    """
    if not isinstance(index, VerticalSlashIndex) or layout in ("striped", "balanced"):
        return by_mask
    ranks = len(by_mask)
    # [blocks, W * W]
    distances = block_distances(
        layout, ranks, index.seq_len, index.block_size, index.slashes.device
    )
    if distances is None:
        return by_mask
    diagonals_on = distances_on(index).to(distances.dtype)
    meets = (diagonals_on @ distances).view(ranks, ranks) > 0
    return by_mask & meets.cpu()


def needed_blocks(call: AttentionCall) -> Tensor:
    """bool [W, blocks] on the host: some query of rank r meets a key of block b.

    Verticals do not count; any sequence and head does. Exact. For a static pattern the mask alone
    says so, and is looked at once a batch; else the host waits for the index.
    """
    queries = call.cp.table(call.mask)[:, call.first : call.last]
    if call.pattern.dynamic:
        return met_blocks(call.mask, call.index, queries).cpu()
    key = ("needed blocks", call.cp.key, call.first, call.last)
    return once_per_mask(
        call.mask, key, lambda: seen_blocks(call.mask, queries, call.cp.block_size).cpu()
    )


def met_blocks(ranges: MaskRanges, index: BlockIndex, table: Tensor) -> Tensor:
    """bool [W, blocks]: some head computes a tile of block b for a query of rank r.

    table: int64 [W, n], the query blocks of each rank.
    """
    keys = all_blocks(index)
    size = index.block_size
    q_blocks_at_once = max(
        1, _TILES_AT_ONCE // (index.verticals.shape[0] * index.heads * len(keys))
    )
    is_met = torch.zeros(len(table), len(keys), dtype=torch.bool, device=table.device)
    for rank, blocks_of_rank in enumerate(table):
        for q_blocks in blocks_of_rank.split(q_blocks_at_once):
            reach = block_reach(ranges, token_positions(q_blocks, size), size)
            selected = heads_selecting(index, q_blocks, keys)[:, 0] > 0
            # [B, nq, blocks]
            tiles = reached(reach, keys, size) & selected
            is_met[rank] |= tiles.flatten(0, 1).any(0)
    return is_met


@functools.lru_cache(maxsize=8)
def block_distances(
    layout: str, ranks: int, seq_len: int, block_size: int, device: torch.device
) -> Tensor | None:
    """float32 [blocks, W * W]: 1 where rank r has a query block that lies so many blocks after a
    key block of rank s. None if that would be too large."""
    table = block_ids(layout, ranks, seq_len, block_size).to(device)
    blocks = table.numel()
    if blocks * ranks**2 > _LARGEST_TABLE:
        return None
    owner = torch.empty(blocks, dtype=torch.int64, device=device)
    owner[table] = torch.arange(ranks, device=device)[:, None]
    distances = torch.zeros(blocks, ranks * ranks, device=device)
    for delta in range(blocks):
        query_owner = owner[delta:]
        key_owner = owner[: blocks - delta]
        distances[delta, query_owner * ranks + key_owner] = 1
    return distances


def distances_on(index: VerticalSlashIndex) -> Tensor:
    """bool [blocks]: whether any head of any sequence computes a pair of blocks so far apart."""
    spans = index.spans
    device = index.slashes.device
    blocks = -(-index.seq_len // index.block_size)
    entry = torch.arange(index.slashes.shape[-1], device=device)
    # [B, E]: the span of each entry of the list of diagonals, and its distance in the span
    span = torch.searchsorted(
        spans.offset + spans.diagonals,
        entry.expand(len(spans.offset), -1).contiguous(),
        right=True,
    )
    count = spans.offset.shape[1]
    distance = entry - spans.offset.gather(1, span.clamp(max=count - 1))
    is_on = index.slashes.any(1) & (span < count)
    seen = torch.zeros(blocks + 1, dtype=torch.bool, device=device)
    seen[torch.where(is_on, distance, blocks).flatten()] = True
    # Short documents are computed whole: as far apart as the first and the last block of the
    # longest.
    block = torch.arange(blocks, device=device)
    longest_short = (block - spans.dense_from).amax()
    return seen[:blocks] | (block <= longest_short)
