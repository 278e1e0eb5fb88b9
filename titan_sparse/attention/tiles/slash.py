"""Tiles of a vertical-slash index made by kernels: the GPU's way to what tiles.py says in plain torch.

No [blocks, blocks] mask is made and the host waits for nothing: the lists are as wide as the index's bound says.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles.blocks import (
    BlockLists,
    Tiles,
    block_reach,
    list_width,
    query_ranges,
)
from titan_sparse.kernels import block_tables


class QuerySide(NamedTuple):
    """What tiles need to know of this rank's query blocks, for every layer the same.

    spans: int32 [B, nq, 5], reach: int32 [B, nq, 4], as block_tables.slash_lists() takes them. blocks: int32 [nq].
    start, stop: int32 [B, Sq].
    """

    spans: Tensor
    reach: Tensor
    blocks: Tensor
    start: Tensor
    stop: Tensor


class KeySide(NamedTuple):
    """Key blocks, int32 [nk], and their tokens' positions, int32 [1, 1, Sk]."""

    blocks: Tensor
    positions: Tensor


def key_side(k_blocks: Tensor, block_size: int) -> KeySide:
    """For global blocks int [nk]."""
    return KeySide(k_blocks.int(), token_positions(k_blocks, block_size).int().view(1, 1, -1))


def query_side(
    rows: MaskRanges, index: VerticalSlashIndex, q_blocks: Tensor, batch: int
) -> QuerySide:
    """For this rank's query blocks, global numbers int [nq]; depends on the mask, the pattern and the layout only."""
    q_positions = token_positions(q_blocks, index.block_size)
    reach = (
        torch.stack(block_reach(rows, q_positions, index.block_size), dim=-1)
        .expand(batch, -1, -1)
        .int()
        .contiguous()
    )
    return QuerySide(
        index.block_spans(q_blocks), reach, q_blocks.int(), *query_ranges(rows, q_positions, batch)
    )


def block_tiles(
    side: QuerySide, index: VerticalSlashIndex, keys: KeySide, transpose: bool
) -> Tiles:
    """As tiles.block_tiles()."""
    size = index.block_size
    common = (index.slashes, side.spans, side.reach, side.blocks, keys.blocks, size)
    by_query = BlockLists(
        *block_tables.slash_lists(*common, list_width(index.most_blocks, len(keys.blocks)), False)
    )
    by_key = None
    if transpose:
        by_key = BlockLists(
            *block_tables.slash_lists(
                *common, list_width(index.most_blocks, len(side.blocks)), True
            )
        )
    return Tiles(by_query, by_key, side.start, side.stop, keys.positions, None, size)


def vertical_tiles(side: QuerySide, index: VerticalSlashIndex, transpose: bool) -> Tiles:
    """As tiles.vertical_tiles()."""
    size, verticals = index.block_size, index.verticals
    covered, kind = block_tables.covered_verticals(
        index.slashes, side.spans, side.reach, side.blocks, verticals, size
    )
    # As wide as the table: verticals make few tiles, so one of its sides is short.
    by_query, by_key = (
        BlockLists(*block_tables.kind_lists(kind, by_key)) if by_key <= transpose else None
        for by_key in (False, True)
    )
    return Tiles(by_query, by_key, side.start, side.stop, verticals, covered, size)
