"""Attention on one rank: no chunks, no transfers, one piece of blocks and one of verticals."""

from torch import Tensor

from titan_sparse.attention import call_tiles
from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.schedules import gathered, varlen, verticals
from titan_sparse.kernels.block_sparse import Piece


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S, D], lse [B, Hq, S], and keys and values of the verticals [2, B, Hq, C, D]."""
    # Plain causal attention without tables, where the backend has kernels for it.
    square = DenseShape(causal=True, is_whole=True, block_size=call.cp.block_size)
    if call.plain and call.backend.serves_dense(q, square):
        out, lse = call.backend.dense_forward(q, k, v, square, call.scale)
        return out, lse, _no_verticals(q)
    # Packed documents, by kernels that know documents.
    packing = varlen.packing_of(call, q)
    if packing is not None:
        out, lse = varlen.forward(call, packing, q, k, v)
        return out, lse, _no_verticals(q)
    # Chunks that single queries chose.
    batch = len(q)
    geometry = gathered.geometry_of(call, batch)
    if geometry is not None:
        out, lse = gathered.forward(call, geometry, q, k, v)
        return out, lse, _no_verticals(q)
    # Everything else goes by tiles.
    tiles = call_tiles.tiles_of_rank(call, batch, source=0, transpose=False)
    pieces = [Piece(k, v, tiles)]
    pending = verticals.gather(call, k, v)
    vertical_kv = pending.wait()
    if vertical_kv.shape[3] > 0:
        vertical_piece = call_tiles.vertical_piece(call, vertical_kv, batch, transpose=False)
        pieces.append(vertical_piece)
    out, lse = call.backend.forward(
        q,
        pieces,
        total=None,
        scale=call.scale,
        dtype=q.dtype,
    )
    return out, lse, vertical_kv


def backward(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype."""
    q = queries.q
    square = DenseShape(causal=True, is_whole=True, block_size=call.cp.block_size)
    if call.plain and call.backend.serves_dense(q, square):
        return call.backend.dense_backward(queries, k, v, square, call.scale)
    packing = varlen.packing_of(call, q)
    if packing is not None:
        return varlen.backward(call, packing, queries, k, v)
    batch = len(q)
    geometry = gathered.geometry_of(call, batch)
    if geometry is not None:
        return gathered.backward(call, geometry, queries, k, v)
    by_key = call.backend.READS_BY_KEY
    tiles = call_tiles.tiles_of_rank(call, batch, source=0, transpose=by_key)
    pieces = [Piece(k, v, tiles)]
    has_verticals = vertical_kv.shape[3] > 0
    if has_verticals:
        vertical_piece = call_tiles.vertical_piece(call, vertical_kv, batch, transpose=by_key)
        pieces.append(vertical_piece)
    dq, gradients = call.backend.backward(
        queries,
        pieces,
        dq=None,
        scale=call.scale,
        dtype=q.dtype,
    )
    dk, dv = gradients[0]
    if has_verticals:
        verticals.add_gradients(call, (dk, dv), gradients[1])
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _no_verticals(q: Tensor) -> Tensor:
    """Keys and values of no verticals: [2, B, Hq, 0, D]."""
    batch, heads, _, head_dim = q.shape
    return q.new_empty(2, batch, heads, 0, head_dim)
