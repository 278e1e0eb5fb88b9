"""Attention over chunks that single queries chose (MoBA) on one rank, with queries gathered.

With lists of blocks, a block of queries computes the union of what its queries chose. Here the
queries of each chunk are gathered instead, and tiles of them meet whole chunks. The queries' own
chunks, which causality cuts, and short documents go by lists of blocks; these follow from the mask
alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask
from titan_sparse.attention.patterns.base import Dense
from titan_sparse.attention.patterns.moba import MoBA, document_origin
from titan_sparse.attention.tiles import block_tiles
from titan_sparse.kernels import gathered
from titan_sparse.kernels.block_sparse import BlockLists, Piece, Tiles
from titan_sparse.kernels.block_sparse.piece import mapped


class Geometry(NamedTuple):
    """What follows from the mask alone. It is the same in every layer.

    tiles: of every query and its own chunk. n chunks a sequence, of all its documents.
    earlier, offset: int32 [B, S]. begin: int32 [B, n]. As in kernels.gathered.Choices.
    """

    tiles: Tiles
    earlier: Tensor
    offset: Tensor
    begin: Tensor


def geometry_of(call: AttentionCall, batch: int) -> Geometry | None:
    """The geometry of a call whose queries are gathered; None for any other call.

    Where the mask is not plain, the host waits for it, once a batch.
    """
    if not isinstance(call.pattern, MoBA) or not call.backend.GATHERS_QUERIES:
        return None
    if call.cp.size > 1 or call.mask.slices is not None or call.is_partial:
        return None
    if _slots(call) == 0:
        return None
    mask = call.mask
    if not mask.plain and not once_per_mask(mask, "whole chunks", lambda: shows_the_past(mask)):
        # A window cuts through chunks.
        return None
    key = ("gathered", call.pattern.key, call.cp.key, batch)
    return once_per_mask(mask, key, lambda: _find_geometry(call, batch))


def shows_the_past(ranges: MaskRanges) -> bool:
    """Whether every query sees its whole document up to itself, or nothing. The host waits."""
    position = torch.arange(ranges.start.shape[1], device=ranges.start.device)
    from_origin = ranges.start == document_origin(ranges)
    up_to_itself = ranges.stop == position + 1
    sees_nothing = ranges.start >= ranges.stop
    return bool((sees_nothing | (from_origin & up_to_itself)).all())


def forward(
    call: AttentionCall, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, D] and lse [B, Hq, S]."""
    return gathered.forward(q, _plan(call, geometry, k, v))


def backward(
    call: AttentionCall, geometry: Geometry, queries: Queries, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype."""
    plan = _plan(call, geometry, k, v)
    return gathered.backward(queries.d_out, queries.q, queries.out, queries.lse, plan)


def _slots(call: AttentionCall) -> int:
    """The most chunks that a query can see in addition to its own."""
    most_earlier = (call.seq_len - 1) // call.pattern.chunk_size
    return min(call.pattern.top_k - 1, most_earlier)


def _plan(call: AttentionCall, geometry: Geometry, k: Tensor, v: Tensor) -> gathered.Plan:
    tiles, *tables = geometry
    choices = gathered.Choices(call.index.words, *tables, call.pattern.chunk_size, _slots(call))
    return gathered.Plan(own=Piece(k, v, tiles), choices=choices, scale=call.scale)


def _find_geometry(call: AttentionCall, batch: int) -> Geometry:
    mask = call.mask
    chunk = call.pattern.chunk_size
    chunks = call.pattern.chunks_of(mask, batch, call.cp)
    # [Bm, S]: keys before a query's own chunk are hidden.
    position = torch.arange(call.seq_len, dtype=torch.int32, device=mask.start.device)
    origin = document_origin(mask)
    own_start = origin + (position - origin) // chunk * chunk
    sees_any = mask.start < mask.stop
    start = torch.where(sees_any, own_start, mask.start)
    own_mask = MaskRanges(start, mask.stop, mask.document_start)

    own_index = Dense().index([], own_mask, batch, call.index.heads, call.cp.block_size)
    tiles = block_tiles(
        own_mask, own_index, call.query_blocks(), call.key_blocks(), batch, transpose=True
    )
    # The most KV blocks that a query block meets in the own chunks of its queries: the first
    # query's chunk begins `chunk` - 1 tokens before it at most.
    width = -(-(chunk - 1) // call.cp.block_size) + 1
    by_query, by_key = (_narrowed(lists, width) for lists in (tiles.by_query, tiles.by_key))
    # Rows that see nothing have no chunks either.
    earlier = torch.where(sees_any, chunks.own, 0)
    tables = (x.int().contiguous() for x in (earlier, chunks.offset, chunks.begin))
    return Geometry(tiles._replace(by_query=by_query, by_key=by_key), *tables)


def _narrowed(lists: BlockLists, width: int) -> BlockLists:
    """Tables of `width` entries a row; on a GPU they have room for all blocks."""

    def narrow(field: Tensor) -> Tensor:
        if field.dim() < 4:
            return field
        batch, heads = field.shape[:2]
        # All heads share their memory, and so may all sequences.
        sequences = 1 if field.stride(0) == 0 else batch
        field = field[:sequences, :1, :, :width].contiguous()
        return field.expand(batch, heads, -1, -1)

    return mapped(lists, narrow)
