"""mask ∩ pattern for one (query rank, KV chunk): the block tables that a backend computes on."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.layout import token_positions
from titan_sparse.attention.masks import Rows
from titan_sparse.attention.patterns.base import BlockIndex


class Tiles(NamedTuple):
    """Which KV blocks each query block meets, and which pairs inside them are seen.

    kv_count: int32 [B, Hq, nq]. kv_blocks: int32 [B, Hq, nq, K], local block numbers, ascending, filled up with 0.
    start, stop: int32 [B or 1, Sq]: the query sees keys at positions start <= p < stop.
    k_positions: int32 [Sk], or [B, Hq, Sk] where every head has keys of its own.
    covered: bool [B, Hq, nq, Sk] or None: keys that query block already met elsewhere, not to be counted again.
    block_size: tokens in a block of queries and of keys.
    """

    kv_count: Tensor
    kv_blocks: Tensor
    start: Tensor
    stop: Tensor
    k_positions: Tensor
    covered: Tensor | None
    block_size: int


def block_reach(rows: Rows, q_positions: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """First and last + 1 key position that each local query block sees, int32 [Bm, nq]; an empty range if none."""
    start, stop = rows.start[:, q_positions], rows.stop[:, q_positions]
    seen = start < stop
    first = torch.where(seen, start, torch.iinfo(torch.int32).max).unflatten(1, (-1, block_size)).amin(-1)
    last = torch.where(seen, stop, 0).unflatten(1, (-1, block_size)).amax(-1)
    return first, last


def _table(listed: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, H, nq, nk] -> counts int32 [B, H, nq] and ascending block numbers int32 [B, H, nq, K], K the largest count."""
    count = listed.sum(-1, dtype=torch.int32)
    widest = max(int(count.max()), 1) if count.numel() else 1
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :widest]
    inside = torch.arange(widest, device=listed.device) < count[..., None]
    return count, torch.where(inside, order, 0).int()


def block_tiles(rows: Rows, index: BlockIndex, q_blocks: Tensor, k_blocks: Tensor, batch: int) -> Tiles:
    """Tiles between this rank's query blocks and a chunk's KV blocks, both as global block numbers int [nq], [nk]."""
    size = index.block_size
    q_positions, k_positions = token_positions(q_blocks, size), token_positions(k_blocks, size)
    first, last = block_reach(rows, q_positions, size)
    begin = k_blocks * size
    reached = (first[..., None] < begin + size) & (last[..., None] > begin)
    listed = index.selects(q_blocks, k_blocks) & reached[:, None]
    count, table = _table(listed.expand(batch, index.heads, -1, -1))
    return Tiles(count, table, rows.start[:, q_positions], rows.stop[:, q_positions], k_positions.int(), None, size)


def column_tiles(rows: Rows, index: BlockIndex, q_blocks: Tensor) -> Tiles:
    """Tiles between this rank's query blocks and the gathered columns, which are cut into blocks as they come.

    A column inside a block that the query block meets anyway is marked as covered.
    """
    size, columns = index.block_size, index.columns
    q_positions = token_positions(q_blocks, size)
    first, last = block_reach(rows, q_positions, size)
    runs = columns.unflatten(-1, (-1, size))
    reached = (first[:, None, :, None] <= runs[:, :, None, :, -1]) & (last[:, None, :, None] > runs[:, :, None, :, 0])
    count, table = _table(reached)
    covered = covered_columns(index, q_blocks)
    return Tiles(count, table, rows.start[:, q_positions], rows.stop[:, q_positions], columns, covered, size)


def covered_columns(index: BlockIndex, q_blocks: Tensor) -> Tensor:
    """bool [B, Hq, nq, C]: the column lies in a block that this query block computes whole."""
    batch, heads, capacity = index.columns.shape
    blocks = torch.arange(-(-index.seq_len // index.block_size), device=index.columns.device)
    selected = index.selects(q_blocks, blocks).expand(batch, heads, -1, -1)
    block = (index.columns.long() // index.block_size).clamp(max=len(blocks) - 1)
    return selected.gather(3, block[:, :, None].expand(-1, -1, len(q_blocks), -1))
