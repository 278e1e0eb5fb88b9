"""Dense attention of packed documents on one rank, by a kernel that knows documents.

Tables of blocks would cost such a kernel 10 % and more, and every layer would have to make them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges


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


def forward(
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


def backward(
    call: AttentionCall, packing: Packing, queries: Queries, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype; 0 for padding."""
    if packing.padding is not None:
        # exp(score - inf) is 0: rows of padding have no share in anything.
        padding = packing.padding[:, None]
        lse = queries.lse.masked_fill(padding, torch.inf)
        queries = queries._replace(lse=lse)
    return call.backend.dense_backward(queries, k, v, packing.shape, call.scale)
