"""Attention on one rank: no transfers, one step over all keys."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import DenseShape
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask
from titan_sparse.attention.schedules.rectangles import Rectangle
from titan_sparse.attention.schedules.steps import Group, Step, Transport


class Single(Transport):
    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        tiles = functools.partial(call.tiles_of_rank, len(k), 0)
        self.step = Step(0, k, v, tiles, packing_of(call, q, k))
        self.groups = [Group(call, slice(None), steps=1)]

    def steps(self) -> Iterator[Step]:
        yield self.step

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.step.d_kv


def packing_of(call: AttentionCall, q: Tensor, k: Tensor) -> Rectangle | None:
    """All keys of a dense call that is causal inside documents, with or without a window.

    Documents of all sequences come one sequence after the other, and a run of padding counts as one.
    None for any other call, or if no kernel serves it without tables of blocks. Tables would cost a
    kernel that knows documents 10 % and more, and every layer would have to make them. For a mask
    without offsets, such as one that follows from position_ids, the host waits once a batch.
    """
    if call.pattern.dynamic or call.mask.slices is not None:
        return None
    shape = DenseShape(causal=True, has_documents=call.mask.document_start is not None)
    # Asked twice: the first time spares the host the wait, the second time the window is known.
    if not call.backend.serves_dense(q, shape):
        return None
    if call.plain:
        return Rectangle(0, k.shape[2], shape)
    if call.is_partial:
        return None
    batch = len(q)
    find = find_packing
    if call.mask.offsets is not None and len(call.mask.start) == batch:
        find = known_packing
    packing = once_per_mask(call.mask, ("packing", batch), lambda: find(call.mask, batch))
    if packing is None or not call.backend.serves_dense(q, packing.shape):
        return None
    return packing


def known_packing(ranges: MaskRanges, batch: int) -> Rectangle:
    """The rectangle of a mask with offsets for `batch` sequences. Nothing in it depends on numbers that
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
    offsets = torch.nn.functional.pad(offsets, (0, 1), value=begins.numel()).int()
    lengths = offsets.diff()
    shape = DenseShape(
        causal=True,
        offsets=offsets,
        longest=int(lengths.max()),
        window=window if window_cuts else None,
        has_documents=ranges.document_start is not None,
    )
    return Rectangle(0, seq_len, shape, padding if has_padding else None)
