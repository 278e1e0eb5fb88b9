"""Tiles of a vertical-slash index made by kernels: the GPU's way to what tiles.py says in plain torch.

No [blocks, blocks] mask is made and the host waits for nothing: the lists are as wide as the index's bound says.
"""

import torch
from torch import Tensor

from titan_sparse.attention.layout import token_positions
from titan_sparse.attention.masks import Rows
from titan_sparse.attention.patterns.vertical_slash import VerticalSlashIndex
from titan_sparse.attention.tiles import BlockLists, Tiles, block_reach, query_ranges
from titan_sparse.kernels import block_tables


def block_tiles(rows: Rows, index: VerticalSlashIndex, q_blocks: Tensor, k_blocks: Tensor, batch: int,
                transpose: bool) -> Tiles:
    """As tiles.block_tiles()."""
    size = index.block_size
    q_positions, k_positions = token_positions(q_blocks, size), token_positions(k_blocks, size)
    q_blocks, k_blocks, reach = q_blocks.int(), k_blocks.int(), _reach(rows, q_positions, size, batch)
    common = (index.slashes, index.block_spans(q_blocks), reach, q_blocks, k_blocks, size)
    lists = [
        BlockLists(*block_tables.slash_lists(*common, min(index.most_blocks, n), by_key))
        for by_key, n in ((False, len(k_blocks)), (True, len(q_blocks)))[: 2 if transpose else 1]
    ]
    by_key = lists[1] if transpose else None
    return Tiles(lists[0], by_key, *query_ranges(rows, q_positions, batch), k_positions.int().view(1, 1, -1), None, size)


def column_tiles(rows: Rows, index: VerticalSlashIndex, q_blocks: Tensor, transpose: bool) -> Tiles:
    """As tiles.column_tiles()."""
    size, columns = index.block_size, index.columns
    q_positions = token_positions(q_blocks, size)
    reach = _reach(rows, q_positions, size, len(columns))
    covered, kind = block_tables.covered_columns(
        index.slashes, index.block_spans(q_blocks), reach, q_blocks.int(), columns, size
    )
    by_key = _lists(kind.mT) if transpose else None
    return Tiles(_lists(kind), by_key, *query_ranges(rows, q_positions, len(columns)), columns, covered, size)


def _reach(rows: Rows, q_positions: Tensor, size: int, batch: int) -> Tensor:
    """int32 [B, nq, 4]"""
    return torch.stack(block_reach(rows, q_positions, size), dim=-1).expand(batch, -1, -1).int().contiguous()


def _lists(kind: Tensor) -> BlockLists:
    """Lists as wide as the table from int8 [B, H, n, m]: 2 full, 1 partial. Columns make few tiles, so m or n is small."""
    return BlockLists(*_ascending(kind == 2), *_ascending(kind == 1))


def _ascending(listed: Tensor) -> tuple[Tensor, Tensor]:
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    count = listed.sum(-1, dtype=torch.int32)
    inside = torch.arange(listed.shape[-1], device=listed.device) < count[..., None]
    return count, torch.where(inside, order, 0).int().contiguous()
