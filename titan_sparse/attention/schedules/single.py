"""Attention on one rank: no chunks, no transfers, one piece of blocks and one of verticals."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import call_tiles
from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.masks.base import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.schedules import gathered, verticals
from titan_sparse.kernels.block_sparse import Piece


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S, D], lse [B, Hq, S], and keys and values of the verticals [2, B, Hq, C, D]."""
    # Plain causal attention without tables, where the backend has kernels for it.
    square = DenseShape(causal=True, is_whole=True, block_size=call.cp.block_size)
    if call.plain and call.backend.serves_dense(q, square):
        out, lse = call.backend.dense_forward(q, k, v, square, call.scale)
        return out, lse, _no_verticals(q)
    # Packed documents, by a kernel that knows documents: tables of blocks would cost it 10 % and
    # more, and every layer would have to make them.
    packing = packing_of(call, q)
    if packing is not None:
        out, lse = _packed_forward(call, packing, q, k, v)
        return out, lse, _no_verticals(q)
    # Chunks that single queries chose.
    batch = len(q)
    geometry = gathered.geometry_of(call, batch)
    if geometry is not None:
        out, lse = gathered.forward(call, geometry, q, k, v)
        return out, lse, _no_verticals(q)
    # Everything else goes by tiles.
    vertical_kv = verticals.gather(call, k, v).wait()
    pieces = _pieces(call, k, v, vertical_kv, transpose=False)
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
    packing = packing_of(call, q)
    if packing is not None:
        return _packed_backward(call, packing, queries, k, v)
    batch = len(q)
    geometry = gathered.geometry_of(call, batch)
    if geometry is not None:
        return gathered.backward(call, geometry, queries, k, v)
    pieces = _pieces(call, k, v, vertical_kv, call.backend.READS_BY_KEY)
    dq, gradients = call.backend.backward(queries, pieces, None, call.scale, q.dtype)
    dk, dv = gradients[0]
    if len(pieces) > 1:
        verticals.add_gradients(call, (dk, dv), gradients[1])
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _pieces(
    call: AttentionCall, k: Tensor, v: Tensor, vertical_kv: Tensor, transpose: bool
) -> list[Piece]:
    """All keys by tiles, and the verticals if there are any."""
    tiles = call_tiles.tiles_of_rank(call, len(k), source=0, transpose=transpose)
    pieces = [Piece(k, v, tiles)]
    if vertical_kv.shape[3] > 0:
        pieces.append(call_tiles.vertical_piece(call, vertical_kv, len(k), transpose))
    return pieces


def _no_verticals(q: Tensor) -> Tensor:
    """Keys and values of no verticals: [2, B, Hq, 0, D]."""
    batch, heads, _, head_dim = q.shape
    return q.new_empty(2, batch, heads, 0, head_dim)


class Packing(NamedTuple):
    """Documents of all sequences, one sequence after the other. A run of padding counts as one.

    padding: bool [B, S]; None if there is none.
    """

    shape: DenseShape
    padding: Tensor | None


def packing_of(call: AttentionCall, q: Tensor) -> Packing | None:
    """The packing of a dense call that is causal inside documents, with or without a window.

    None for any other call, or if no kernel serves it. The host waits for the mask, once a batch.
    """
    if call.pattern.dynamic or call.mask.slices is not None:
        return None
    if call.plain or call.is_partial:
        return None
    has_documents = call.mask.document_start is not None
    shape = DenseShape(causal=True, is_whole=True, is_packed=True, has_documents=has_documents)
    # Asked twice: the first time spares the host the wait, the second time the window is known.
    if not call.backend.serves_dense(q, shape):
        return None
    batch = len(q)
    key = ("packing", batch)
    packing = once_per_mask(call.mask, key, lambda: find_packing(call.mask, batch))
    if packing is None or not call.backend.serves_dense(q, packing.shape):
        return None
    return packing


def find_packing(ranges: MaskRanges, batch: int) -> Packing | None:
    """The packing of a mask; None if it is anything but causal documents with one window for all.

    The host waits for the mask.
    """
    seq_len = ranges.start.shape[1]
    position = torch.arange(seq_len, device=ranges.start.device)
    # [B, S] each
    start = ranges.start.expand(batch, -1)
    stop = ranges.stop.expand(batch, -1)
    padding = start >= stop
    if ranges.document_start is None:
        document_start = torch.zeros_like(start)
    else:
        document_start = ranges.document_start.expand(batch, -1)
    # The widest view back is the window, if there is one.
    window = torch.where(padding, 0, position + 1 - start).amax()
    expected_start = torch.maximum(document_start, position + 1 - window)
    is_causal = stop == position + 1
    is_as_expected = is_causal & (start == expected_start)
    fits = (padding | is_as_expected).all()
    is_cut = ~padding & (start > document_start)
    window_cuts = is_cut.any()
    # A document, or a run of padding, begins where this number changes.
    number = torch.where(padding, -1, document_start)
    begins = torch.ones_like(padding)
    begins[:, 1:] = number[:, 1:] != number[:, :-1]
    # One wait of the host for all four.
    numbers = torch.stack([fits, window_cuts, padding.any(), window])
    fits, window_cuts, has_padding, window = numbers.tolist()
    if not fits:
        return None
    # Where each document begins, and behind them the number of tokens.
    tokens = begins.numel()
    offsets = begins.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(offsets, (0, 1), value=tokens)
    offsets = offsets.int()
    lengths = offsets.diff()
    shape = DenseShape(
        causal=True,
        is_whole=True,
        is_packed=True,
        offsets=offsets,
        longest=int(lengths.max()),
        window=window if window_cuts else None,
        has_documents=ranges.document_start is not None,
    )
    return Packing(shape, padding if has_padding else None)


def _packed_forward(
    call: AttentionCall, packing: Packing, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, D] and lse [B, Hq, S]; 0 and -inf for padding."""
    out, lse = call.backend.dense_forward(q, k, v, packing.shape, call.scale)
    if packing.padding is None:
        return out, lse
    # [B, 1, S]
    padding = packing.padding[:, None]
    out = out.masked_fill(padding[..., None], 0)
    lse = lse.masked_fill(padding, -torch.inf)
    return out, lse


def _packed_backward(
    call: AttentionCall, packing: Packing, queries: Queries, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype; 0 for padding."""
    if packing.padding is not None:
        # exp(score - inf) is 0: rows of padding have no share in anything.
        padding = packing.padding[:, None]
        lse = queries.lse.masked_fill(padding, torch.inf)
        queries = queries._replace(lse=lse)
    return call.backend.dense_backward(queries, k, v, packing.shape, call.scale)
