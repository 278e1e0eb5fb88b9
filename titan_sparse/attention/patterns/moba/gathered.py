"""Attention over chunks that single queries chose (MoBA) on one rank, with queries gathered.

With lists of blocks, a block of queries computes the union of what its queries chose. Here the
queries of each chunk are gathered instead, and tiles of them meet whole chunks. The queries' own
chunks, which causality cuts, and short documents go by lists of blocks; these follow from the mask
alone.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask
from titan_sparse.attention.patterns.spans import document_origin
from titan_sparse.kernels import gathered
from titan_sparse.kernels.block_sparse import BlockLists, Piece, Tiles
from titan_sparse.kernels.block_sparse.piece import mapped


class Geometry(NamedTuple):
    """The tables that follow from the mask alone. They are the same in every layer.

    tiles: of every query and its own chunk. n chunks a sequence, of all its documents.
    earlier, offset: int32 [B, S]. begin: int32 [B, n]. As in kernels.gathered.Choices.
    """

    tiles: Tiles
    earlier: Tensor
    offset: Tensor
    begin: Tensor


@dataclass
class GatheredQueries:
    """Computes a call of MoBA: an AttentionCall (attention/call.py), and what follows from its mask."""

    call: Any
    geometry: Geometry

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [B, Hq, S, D] and lse [B, Hq, S]."""
        return gathered.forward(q, self._plan(k, v))

    def backward(self, queries: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, in their dtype. queries: Queries (attention/backends/base.py)."""
        plan = self._plan(k, v)
        return gathered.backward(queries.d_out, queries.q, queries.out, queries.lse, plan)

    def _plan(self, k: Tensor, v: Tensor) -> gathered.Plan:
        tiles, *tables = self.geometry
        pattern = self.call.pattern
        slots = _slots(pattern, self.call)
        choices = gathered.Choices(self.call.index.words, *tables, pattern.chunk_size, slots)
        return gathered.Plan(own=Piece(k, v, tiles), choices=choices, scale=self.call.scale)


def geometry_of(pattern: Any, call: Any, batch: int) -> Geometry | None:
    """The geometry of a call of the MoBA `pattern` whose queries are gathered; None for any other.

    Where the mask is not plain, the host waits for it, once a batch.
    """
    if not call.backend.GATHERS_QUERIES:
        return None
    if call.cp.size > 1 or call.mask.slices is not None or call.is_partial:
        return None
    if _slots(pattern, call) == 0:
        return None
    mask = call.mask
    if not mask.plain and not once_per_mask(mask, "whole chunks", lambda: shows_the_past(mask)):
        # A window cuts through chunks.
        return None
    key = ("gathered", pattern.key, call.cp.key, batch, call.index.heads)
    return once_per_mask(mask, key, lambda: _find_geometry(pattern, call, batch))


def shows_the_past(ranges: MaskRanges) -> bool:
    """True if every query sees its whole document up to itself, or nothing. The host waits."""
    position = torch.arange(ranges.start.shape[1], device=ranges.start.device)
    from_origin = ranges.start == document_origin(ranges)
    up_to_itself = ranges.stop == position + 1
    sees_nothing = ranges.start >= ranges.stop
    return bool((sees_nothing | (from_origin & up_to_itself)).all())


def _slots(pattern: Any, call: Any) -> int:
    """The most chunks that a query can see in addition to its own."""
    most_earlier = (call.seq_len - 1) // pattern.chunk_size
    return min(pattern.top_k - 1, most_earlier)


def _find_geometry(pattern: Any, call: Any, batch: int) -> Geometry:
    mask = call.mask
    chunk = pattern.chunk_size
    chunks = pattern.chunks_of(mask, batch, call.cp)
    # [Bm, S]: keys before a query's own chunk are hidden.
    position = torch.arange(call.seq_len, dtype=torch.int32, device=mask.start.device)
    origin = document_origin(mask)
    own_start = origin + (position - origin) // chunk * chunk
    sees_any = mask.start < mask.stop
    start = torch.where(sees_any, own_start, mask.start)
    own_mask = MaskRanges(start, mask.stop, mask.document_start)

    tiles = call.dense_tiles(own_mask, batch)
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
