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
    no_verticals = q.new_empty(2, *q.shape[:2], 0, q.shape[3])
    packing = packing_of(call, q)
    if packing is not None:
        return *_dense_forward(call, packing, q, k, v), no_verticals
    geometry = gathered.geometry_of(call, len(q))
    if geometry is not None:
        return *gathered.forward(call, geometry, q, k, v), no_verticals
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
    packing = packing_of(call, q)
    if packing is not None:
        return _dense_backward(call, packing, queries, k, v)
    geometry = gathered.geometry_of(call, len(q))
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


class Packing(NamedTuple):
    """Documents of all sequences, one sequence after the other. A run of padding counts as one.

    padding: bool [B, S]; None if there is none.
    """

    shape: DenseShape
    padding: Tensor | None


def packing_of(call: AttentionCall, q: Tensor) -> Packing | None:
    """The packing of a dense call that is causal inside documents, with or without a window.

    None for any other call, or if no kernel serves it without tables of blocks. Tables would cost a
    kernel that knows documents 10 % and more, and every layer would have to make them. The host
    waits for a mask that is not plain, once a batch.
    """
    if call.pattern.dynamic or call.mask.slices is not None:
        return None
    if call.plain:
        shape = DenseShape(causal=True, is_whole=True, block_size=call.cp.block_size)
        if call.backend.serves_dense(q, shape):
            return Packing(shape, None)
        return None
    has_documents = call.mask.document_start is not None
    shape = DenseShape(causal=True, is_whole=True, is_packed=True, has_documents=has_documents)
    # Asked twice: the first time spares the host the wait, the second time the window is known.
    if call.is_partial or not call.backend.serves_dense(q, shape):
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
    document_start = torch.zeros_like(start)
    if ranges.document_start is not None:
        document_start = ranges.document_start.expand(batch, -1)
    # The widest view back is the window, if there is one.
    window = torch.where(padding, 0, position + 1 - start).amax()
    expected_start = torch.maximum(document_start, position + 1 - window)
    is_as_expected = (stop == position + 1) & (start == expected_start)
    fits = (padding | is_as_expected).all()
    window_cuts = (~padding & (start > document_start)).any()
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
    offsets = begins.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(offsets, (0, 1), value=begins.numel()).int()
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


def _dense_forward(
    call: AttentionCall, packing: Packing, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, D] and lse [B, Hq, S]; 0 and -inf for padding."""
    shape = packing.shape
    out, lse = call.backend.dense_forward(q, k, v, shape, call.scale)
    if packing.padding is None:
        return out, lse
    # [B, 1, S]
    padding = packing.padding[:, None]
    out = out.masked_fill(padding[..., None], 0)
    lse = lse.masked_fill(padding, -torch.inf)
    return out, lse


def _dense_backward(
    call: AttentionCall, packing: Packing, queries: Queries, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype; 0 for padding."""
    if packing.padding is not None:
        # exp(score - inf) is 0: rows of padding have no share in anything.
        padding = packing.padding[:, None]
        lse = queries.lse.masked_fill(padding, torch.inf)
        queries = queries._replace(lse=lse)
    shape = packing.shape
    return call.backend.dense_backward(queries, k, v, shape, call.scale)
