"""Dense attention by kernels that need no tables of tiles, with which FlashAttention-4 would take
about 10 % longer (docs/benchmarks.md).

In the layouts contiguous and zigzag the queries of one rank and the keys of another make one
rectangle without holes, or a causal square. On one rank, all documents that are packed into the
sequences make one call of a kernel that knows documents.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from titan_sparse.attention.backends.base import DenseShape, Partial, Queries, Sum, merge
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask


class Rectangle(NamedTuple):
    """A rectangle of a chunk that queries see: local queries from `q_start` on see local keys
    before `k_stop`.

    If `shape` is causal, chunk and queries are of the same rank, and each query sees its own key
    and earlier ones. padding: bool [B, S], queries that see nothing; None if there are none.
    """

    q_start: int
    k_stop: int
    shape: DenseShape
    padding: Tensor | None = None


def rectangle_of(call: AttentionCall, length: int, source: int) -> Rectangle | None:
    """The rectangle of this rank's queries, `length` tokens, and the keys of rank `source`.

    None if they do not make a rectangle, or if no kernel serves it.

    Zigzag: rank r has runs r and 2 W - 1 - r. All of its queries see the first run of an earlier
    rank and nothing else of it. Those of its second run see all keys of a later rank.
    """
    layout = call.cp.layout
    rank = call.cp.rank
    shape = DenseShape(causal=source == rank)
    if not call.plain or layout not in ("contiguous", "zigzag"):
        return None
    if not call.backend.serves_dense(shape):
        return None
    if source == rank:
        return Rectangle(0, length, shape)
    if layout == "zigzag":
        if source < rank:
            return Rectangle(0, length // 2, shape)
        return Rectangle(length // 2, length, shape)
    return Rectangle(0, length, shape) if source < rank else None


def packing_of(call: AttentionCall, k: Tensor) -> Rectangle | None:
    """All keys [B, Hkv, S, D] of a dense call that is causal inside documents, with or without a window.

    Documents of all sequences come one sequence after the other, and a run of padding counts as
    one. None for any other call, or if no kernel serves it without tables of blocks. Tables would
    cost a kernel that knows documents 10 % and more, and every layer would have to make them. For a
    mask without offsets, such as one that follows from position_ids, the host waits once a batch.
    """
    if call.pattern.dynamic or call.mask.slices is not None:
        return None
    shape = DenseShape(causal=True, has_documents=call.mask.document_start is not None)
    # Asked twice: the first time spares the host the wait, the second time the window is known.
    if not call.backend.serves_dense(shape):
        return None
    if call.plain:
        return Rectangle(0, k.shape[2], shape)
    if call.is_partial:
        return None
    batch = len(k)

    def find() -> Rectangle | None:
        if call.mask.offsets is not None and len(call.mask.start) == batch:
            return known_packing(call.mask)
        return find_packing(call.mask, batch)

    packing = once_per_mask(call.mask, ("packing", batch), find)
    if packing is None or not call.backend.serves_dense(packing.shape):
        return None
    return packing


def known_packing(ranges: MaskRanges) -> Rectangle:
    """The rectangle of a mask with offsets for all sequences. Nothing in it depends on numbers that
    only the device knows, so that a CUDA graph can be replayed with other documents."""
    seq_len = ranges.start.shape[1]
    shape = DenseShape(
        causal=True,
        offsets=ranges.offsets,
        longest=seq_len,
        window=ranges.window or None,
        has_documents=ranges.document_start is not None,
    )
    return Rectangle(0, seq_len, shape, padding=ranges.start >= ranges.stop)


def find_packing(ranges: MaskRanges, batch: int) -> Rectangle | None:
    """The rectangle of a mask, with its documents. The host waits for the mask.

    None if it is anything but causal documents with one window for all.
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
    offsets = pad(offsets, (0, 1), value=begins.numel()).int()
    lengths = offsets.diff()
    shape = DenseShape(
        causal=True,
        offsets=offsets,
        longest=int(lengths.max()),
        window=window if window_cuts else None,
        has_documents=ranges.document_start is not None,
    )
    return Rectangle(0, seq_len, shape, padding if has_padding else None)


def forward(
    call: AttentionCall, rectangle: Rectangle, q: Tensor, k: Tensor, v: Tensor, total: Sum[Partial]
) -> Partial:
    """Like a backend's forward(), over one rectangle. total.before is changed in place."""
    # Only these queries see anything of the chunk, and only these keys are seen.
    queries = slice(rectangle.q_start, None)
    keys = slice(rectangle.k_stop)
    out, lse = call.backend.dense_forward(
        q[:, :, queries], k[:, :, keys], v[:, :, keys], rectangle.shape, call.scale
    )
    if rectangle.padding is not None:
        # [B, 1, S]
        padding = rectangle.padding[:, None]
        out = out.masked_fill(padding[..., None], 0)
        lse = lse.masked_fill(padding, -torch.inf)
    dtype, before = total
    if before is None:
        # The rank's own chunk comes first, and all queries see some of it.
        return Partial(out.to(dtype), lse)
    seeing_out = before.out[:, :, queries]
    seeing_lse = before.lse[:, :, queries]
    merged_out, merged_lse = merge((seeing_out, seeing_lse), out, lse, dtype)
    seeing_out.copy_(merged_out)
    seeing_lse.copy_(merged_lse)
    return Partial(before.out.to(dtype), before.lse)


def backward(
    call: AttentionCall,
    rectangle: Rectangle,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    total: Sum[Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """dq, and dk and dv, as a backend's backward() gives them."""
    dtype, dq = total
    q_start = rectangle.q_start
    keys = slice(rectangle.k_stop)
    rounded = queries._replace(out=queries.out.to(queries.q.dtype))
    if rectangle.padding is not None:
        # exp(score - inf) is 0: rows of padding have no share in anything.
        lse = queries.lse.masked_fill(rectangle.padding[:, None], torch.inf)
        rounded = rounded._replace(lse=lse)
    seeing = Queries._make(tensor[:, :, q_start:] for tensor in rounded)
    d_seeing, dk, dv = call.backend.dense_backward(
        seeing, k[:, :, keys], v[:, :, keys], rectangle.shape, call.scale
    )
    dk, dv = dk.to(dtype), dv.to(dtype)
    unseen = k.shape[2] - rectangle.k_stop
    if unseen > 0:
        # Keys that no query sees get gradients of 0.
        dk, dv = (pad(x, (0, 0, 0, unseen)) for x in (dk, dv))
    if dq is None:
        dq = d_seeing.to(dtype)
    else:
        dq[:, :, q_start:] += d_seeing
    return dq, (dk, dv)
