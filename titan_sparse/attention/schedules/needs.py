"""Which ranks need which chunks and blocks, known to all ranks alike without asking: by the mask, and by the index where
that helps."""

import functools

import torch
from torch import Tensor

from titan_sparse.attention.call import Run
from titan_sparse.attention.context_parallel.layouts import block_ids, token_positions
from titan_sparse.attention.masks import classification as slice_tiles
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.reach import block_reach, reached
from titan_sparse.attention.observe.visits import heads_selecting
from titan_sparse.attention.patterns.base import BlockIndex, pattern_by_key
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles.blocks import all_blocks

_LARGEST_TABLE = 1 << 27
"""Entries of the table of block distances between ranks: with more the index is not looked at."""
_ELEMENTS = 1 << 26
"""Tiles of all heads that are looked at together: bounds the memory."""


def needed_chunks(run: Run) -> Tensor | None:
    """bool [W, W] on the host: any query of rank r meets a block of rank s outside the verticals; None for one rank.

    May say yes too often, never too seldom. The mask is looked at once a batch. Of a vertical-slash index the block
    diagonals are looked at too, unless the layout is striped or balanced: there any few diagonals touch every rank, and
    looking makes the host wait for the selection.
    """
    if run.cp.size == 1:
        return None
    key = ("needed", run.cp.key)
    by_mask = once_per_mask(
        run.rows,
        key,
        lambda: seen_chunks(run.rows, run.cp.table(run.rows), run.cp.block_size).cpu(),
    )
    return _without_unmet(by_mask, run.index, run.cp.layout)


def needed_chunks_of(index: BlockIndex, rows: MaskRanges, layout: str, ranks: int) -> Tensor:
    """needed_chunks() of a run over so many ranks. rows: for the layout "balanced" with their table."""
    table = (
        rows.table
        if layout == "balanced"
        else block_ids(layout, ranks, index.seq_len, index.block_size)
    )
    table = table.to(rows.start.device)
    return _without_unmet(seen_chunks(rows, table, index.block_size).cpu(), index, layout)


def _without_unmet(by_mask: Tensor, index: BlockIndex, layout: str) -> Tensor:
    """Of the chunks that the mask lets ranks see, those that block diagonals meet, where it is worth looking."""
    if not isinstance(index, VerticalSlashIndex) or layout in ("striped", "balanced"):
        return by_mask
    distances = block_distances(
        layout, len(by_mask), index.seq_len, index.block_size, index.slashes.device
    )
    if distances is None:
        return by_mask
    met = (distances_on(index).to(distances.dtype) @ distances).view(len(by_mask), -1) > 0
    return by_mask & met.cpu()


def seen_chunks(rows: MaskRanges, table: Tensor, block_size: int) -> Tensor:
    """bool [W, W]: the mask lets some query of rank r see a key of rank s. table: int64 [W, n], the layout's blocks."""
    return seen_blocks(rows, table, block_size)[:, table].any(-1)


def seen_blocks(rows: MaskRanges, table: Tensor, block_size: int) -> Tensor:
    """bool [W, blocks]: the mask lets some query of rank r see a key of block b. table: int64 [W, n], the query blocks
    that each rank owns."""
    if rows.slices is not None:
        return slice_tiles.seen_blocks(rows, table, block_size)
    blocks = rows.start.shape[1] // block_size
    queries = token_positions(table.flatten(), block_size)
    start, stop = (
        x[:, queries].unflatten(1, (len(table), -1)).transpose(0, 1).flatten(1).long()
        for x in (rows.start, rows.stop)
    )
    ends = torch.zeros(len(table), blocks + 1, dtype=torch.int32, device=table.device)
    # A query adds 1 at the first block that it sees and takes it away behind the last one.
    for at, step in ((start // block_size, 1), ((stop + block_size - 1) // block_size, -1)):
        ends.scatter_add_(
            1, torch.where(start < stop, at, blocks), torch.full_like(at, step, dtype=torch.int32)
        )
    return ends[:, :blocks].cumsum(1) > 0


def needed_blocks(run: Run) -> Tensor:
    """bool [W, blocks] on the host: some query of rank r meets a key of block b outside the verticals, in any sequence and
    head.

    Exact. By a static pattern the mask alone says so, which is looked at once a batch; else the host waits for the index.
    """
    queries = run.cp.table(run.rows)[:, run.first : run.last]
    if pattern_by_key(run.pattern).dynamic:
        return met_blocks(run.rows, run.index, queries).cpu()
    key = ("needed blocks", run.cp.key, run.first, run.last)
    return once_per_mask(
        run.rows, key, lambda: seen_blocks(run.rows, queries, run.cp.block_size).cpu()
    )


def met_blocks(rows: MaskRanges, index: BlockIndex, table: Tensor) -> Tensor:
    """bool [W, blocks]: some head computes a tile of block b for a query of rank r. table: int64 [W, n], as above."""
    keys, size = all_blocks(index), index.block_size
    step = max(1, _ELEMENTS // (index.verticals.shape[0] * index.heads * len(keys)))
    met = torch.zeros(len(table), len(keys), dtype=torch.bool, device=table.device)
    for found, own in zip(met, table):
        for q_blocks in own.split(step):
            reach = block_reach(rows, token_positions(q_blocks, size), size)
            tiles = reached(reach, keys, size) & (heads_selecting(index, q_blocks, keys)[:, 0] > 0)
            found |= tiles.flatten(0, 1).any(0)
    return met


@functools.lru_cache(maxsize=8)
def block_distances(
    layout: str, ranks: int, seq_len: int, block_size: int, device: torch.device
) -> Tensor | None:
    """float32 [blocks, W * W]: 1 where rank r has a query block that lies so many blocks after a key block of rank s."""
    table = block_ids(layout, ranks, seq_len, block_size).to(device)
    blocks = table.numel()
    if blocks * ranks**2 > _LARGEST_TABLE:
        return None
    owner = torch.empty(blocks, dtype=torch.int64, device=device)
    owner[table] = torch.arange(ranks, device=device)[:, None]
    distances = torch.zeros(blocks, ranks * ranks, device=device)
    for delta in range(blocks):
        distances[delta, owner[delta:] * ranks + owner[: blocks - delta]] = 1
    return distances


def distances_on(index: VerticalSlashIndex) -> Tensor:
    """bool [blocks]: whether any head of any sequence computes a pair of blocks so far apart."""
    spans, blocks = index.spans, -(-index.seq_len // index.block_size)
    entry = torch.arange(index.slashes.shape[-1], device=index.slashes.device)
    slot = torch.searchsorted(
        spans.offset + spans.diagonals, entry.expand(len(spans.offset), -1).contiguous(), right=True
    )
    delta = entry - spans.offset.gather(1, slot.clamp(max=spans.offset.shape[1] - 1))
    on = index.slashes.any(1) & (slot < spans.offset.shape[1])
    found = torch.zeros(blocks + 1, dtype=torch.bool, device=entry.device)
    found[torch.where(on, delta, blocks).flatten()] = True
    # Short documents are computed whole: as far apart as the first and the last block of the longest.
    short = (torch.arange(blocks, device=entry.device) - spans.dense_from).amax()
    return found[:blocks] | (torch.arange(blocks, device=entry.device) <= short)
