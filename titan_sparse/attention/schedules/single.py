"""Attention on one rank: no chunks, no transfers, one piece of blocks and one of verticals."""

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import DenseShape, Piece, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.schedules import varlen, verticals


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S, D], lse [B, Hq, S], and the keys and values of the verticals [2, B, Hq, C, D]."""
    square = DenseShape(causal=True, is_whole=True, block_size=call.cp.block_size)
    if call.plain and call.backend.serves_dense(q, square):
        out, lse = call.backend.dense_forward(q, k, v, square, call.scale)
        return out, lse, _no_verticals(q)
    if packing := varlen.packing_of(call, q):
        out, lse = varlen.forward(call, packing, q, k, v)
        return out, lse, _no_verticals(q)
    batch = len(q)
    pieces = [Piece(k, v, call.tiles_of_rank(batch, source=0, transpose=False))]
    vertical_kv = verticals.gather(call, k, v).wait()
    if vertical_kv.shape[3] > 0:
        pieces.append(call.vertical_piece(vertical_kv, batch, transpose=False))
    out, lse = call.backend.forward(q, pieces, None, call.scale, q.dtype)
    return out, lse, vertical_kv


def backward(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype."""
    q = queries.q
    square = DenseShape(causal=True, is_whole=True, block_size=call.cp.block_size)
    if call.plain and call.backend.serves_dense(q, square):
        return call.backend.dense_backward(queries, k, v, square, call.scale)
    if packing := varlen.packing_of(call, q):
        return varlen.backward(call, packing, queries, k, v)
    batch, by_key = len(q), call.backend.READS_BY_KEY
    pieces = [Piece(k, v, call.tiles_of_rank(batch, source=0, transpose=by_key))]
    has_verticals = vertical_kv.shape[3] > 0
    if has_verticals:
        pieces.append(call.vertical_piece(vertical_kv, batch, transpose=by_key))
    dq, gradients = call.backend.backward(queries, pieces, None, call.scale, q.dtype)
    dk, dv = gradients[0]
    if has_verticals:
        # [2, B, Hq, C, D]
        d_verticals = torch.stack(gradients[1])
        verticals.add_gradients(call, (dk, dv), d_verticals)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _no_verticals(q: Tensor) -> Tensor:
    batch, heads, _, head_dim = q.shape
    return q.new_empty(2, batch, heads, 0, head_dim)
