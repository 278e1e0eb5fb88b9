"""The tiles of an attention call: which key blocks its queries meet, and what they see in them."""

from collections.abc import Hashable
from dataclasses import replace

from torch import Tensor

from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.masks.ranges import once_per_mask
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles import blocks as block_tables
from titan_sparse.attention.tiles import slash as slash_tables
from titan_sparse.kernels.block_sparse import Piece, Tiles


def tiles_of_rank(
    call: AttentionCall,
    batch: int,
    source: int | None,
    transpose: bool,
    query_rank: int | None = None,
) -> Tiles:
    """Tiles of the queries of `query_rank` (default: this rank) and the keys of rank `source` (None:
    of all ranks, one after the other).

    transpose: make Tiles.by_key too, which some backends read in the backward.
    """
    if source is None:
        k_blocks = call.cp.table(call.mask)[:, : call.last].flatten()
    else:
        k_blocks = call.key_blocks(source)
    # Those of a static pattern are made once, for the forward and for the backward.
    transpose = transpose or (not call.pattern.dynamic and call.backend.READS_BY_KEY)
    return tiles_of_blocks(call, batch, transpose, k_blocks, source, query_rank=query_rank)


def tiles_of_blocks(
    call: AttentionCall,
    batch: int,
    transpose: bool,
    k_blocks: Tensor,
    name: Hashable,
    capacity: int = 0,
    query_rank: int | None = None,
) -> Tiles:
    """Tiles of the queries of `query_rank` (default: this rank) and any global blocks int64 [n].

    name: what distinguishes these blocks from others of the same mask, layout and pattern.
    capacity: KV blocks that there are in memory, if more; queries see none of the rest.
    """

    def make() -> Tiles:
        if _has_table_kernels(call):
            queries = _slash_queries(call, batch, query_rank)
            tiles = slash_tables.block_tiles(queries, call.index, k_blocks, transpose)
        else:
            q_blocks = call.query_blocks(query_rank)
            tiles = block_tables.block_tiles(
                call.mask, call.index, q_blocks, k_blocks, batch, transpose
            )
        return block_tables.with_room(tiles, capacity)

    if call.pattern.dynamic:
        return make()
    key = ("tiles", name, query_rank, batch, transpose, capacity, call.pattern.key, call.cp.key)
    return once_per_mask(call.mask, (*key, call.index.heads, call.first, call.last), make)


def tiles_of_verticals(call: AttentionCall, batch: int, transpose: bool) -> Tiles:
    """Tiles of this rank's queries and the gathered verticals."""
    if _has_table_kernels(call):
        queries = _slash_queries(call, batch)
        return slash_tables.vertical_tiles(queries, call.index, transpose)
    return block_tables.vertical_tiles(call.mask, call.index, call.query_blocks(), transpose)


def vertical_piece(
    call: AttentionCall,
    vertical_kv: Tensor,
    batch: int,
    transpose: bool,
    share: int = 0,
    shares: int = 1,
) -> Piece:
    """Every shares-th block of the gathered verticals [2, B, Hq, C, D], from block `share` on.

    Whole blocks are dealt out, not single verticals: runs of neighbors stay as long, and the
    mask cuts no more tiles.
    """
    k, v = vertical_kv
    if shares > 1:
        size = call.index.block_size
        # [B, Hq, C]
        positions = every_nth_block(call.index.verticals, size, share, shares).flatten(2, 3)
        # [B, Hq, C, D]
        k = every_nth_block(k, size, share, shares).flatten(2, 3)
        v = every_nth_block(v, size, share, shares).flatten(2, 3)
        call = replace(call, index=replace(call.index, verticals=positions))
    tiles = tiles_of_verticals(call, batch, transpose)
    return Piece(k, v, tiles)


def _has_table_kernels(call: AttentionCall) -> bool:
    """Whether kernels make the tables, with no wait of the host."""
    return isinstance(call.index, VerticalSlashIndex) and call.mask.start.is_cuda


def _slash_queries(
    call: AttentionCall, batch: int, rank: int | None = None
) -> slash_tables.SlashQueries:
    """What the kernels' tables need of the queries of a rank, remembered with the mask."""
    return once_per_mask(
        call.mask,
        ("slash queries", call.pattern.key, call.cp.key, batch, rank, call.first, call.last),
        lambda: slash_tables.slash_queries(call.mask, call.index, call.query_blocks(rank), batch),
    )


def every_nth_block(x: Tensor, block_size: int, first: int, n: int) -> Tensor:
    """A view of every n-th block along dim 2, from block `first` on.

    The dim becomes two: blocks, and the tokens of a block.
    """
    return x.unflatten(2, (-1, block_size))[:, :, first::n]
