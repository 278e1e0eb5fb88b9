"""Tiles of a vertical-slash index, made by kernels on a GPU. They equal those of blocks.py.

No [blocks, blocks] mask is made and the host does not wait: the bound of the index gives the width
of the lists.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, token_positions
from titan_sparse.attention.masks.reach import block_reach
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles.blocks import block_lists, list_width, query_ranges
from titan_sparse.kernels import block_tables
from titan_sparse.kernels.block_sparse import BlockLists, Tiles


class SlashQueries(NamedTuple):
    """What tiles need to know of this rank's query blocks, the same for every layer.

    spans: int32 [B, nq, 5], reach: int32 [B, nq, 4], as block_tables.slash_lists() takes them.
    blocks: int32 [nq].
    start, stop: int32 [B, Sq].
    """

    spans: Tensor
    reach: Tensor
    blocks: Tensor
    start: Tensor
    stop: Tensor


def slash_queries(
    ranges: MaskRanges, index: VerticalSlashIndex, q_blocks: Tensor, batch: int
) -> SlashQueries:
    """For this rank's query blocks, global numbers int [nq].

    It depends on the mask, the pattern and the layout only.
    """
    q_positions = token_positions(q_blocks, index.block_size)
    reach = torch.stack(block_reach(ranges, q_positions, index.block_size), dim=-1)  # [Bm, nq, 4]
    start, stop = query_ranges(ranges, q_positions, batch)
    return SlashQueries(
        spans=index.block_spans(q_blocks),
        reach=reach.expand(batch, -1, -1).int().contiguous(),
        blocks=q_blocks.int(),
        start=start,
        stop=stop,
    )


def block_tiles(
    queries: SlashQueries, index: VerticalSlashIndex, k_blocks: Tensor, transpose: bool
) -> Tiles:
    """Like blocks.block_tiles()."""
    nq = len(queries.blocks)
    nk = len(k_blocks)
    lists = block_tables.slash_lists(
        index.slashes,
        queries.spans,
        queries.reach,
        queries.blocks,
        k_blocks.int(),
        index.block_size,
        capacity=list_width(index.most_blocks, nk),
        key_capacity=list_width(index.most_blocks, nq) if transpose else None,
    )
    positions = token_positions(k_blocks, index.block_size)
    return _tiles(queries, index, lists, positions.int().view(1, 1, -1))


def vertical_tiles(queries: SlashQueries, index: VerticalSlashIndex, transpose: bool) -> Tiles:
    """Like blocks.vertical_tiles()."""
    covered, by_query, kind = block_tables.vertical_lists(
        index.slashes,
        queries.spans,
        queries.reach,
        queries.blocks,
        index.verticals,
        index.block_size,
        wants_kind=transpose,
    )
    by_key = []
    if kind is not None:
        by_key = [block_lists((kind == 2).mT, (kind == 1).mT)]
    return _tiles(queries, index, [by_query, *by_key], index.verticals, covered)


def _tiles(
    queries: SlashQueries,
    index: VerticalSlashIndex,
    lists: list[BlockLists],
    k_positions: Tensor,
    covered: Tensor | None = None,
) -> Tiles:
    """lists: by query, and by key if they were made."""
    by_query, *by_key = lists
    return Tiles(
        by_query=by_query,
        by_key=by_key[0] if by_key else None,
        start=queries.start,
        stop=queries.stop,
        k_positions=k_positions,
        covered=covered,
        block_size=index.block_size,
    )
