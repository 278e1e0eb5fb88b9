"""Which documents a selection is made for, in arrays of fixed size so that nothing waits for the device.

An unpacked sequence is one span, always selected. In a packed one every document of at least `dense_below` tokens is a
span with a selection of its own; shorter ones are computed whole. Spans touch a block at most two at a time, because
dense_below >= block_size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges


class Spans(NamedTuple):
    """n slots per sequence, int64; unused ones have start = stop = sequence length.

    start, stop: [B, n] global tokens. first_block, last_block: [B, n].
    offset: [B, n], where the span's block diagonals begin in the list of all diagonals (see `entries`).
    dense_from: [B, blocks], the first block that a query block sees whole because of short documents; `blocks` if none.
    tokens: [B, 1], tokens of the sequence that are not padding.
    """

    start: Tensor
    stop: Tensor
    first_block: Tensor
    last_block: Tensor
    offset: Tensor
    dense_from: Tensor
    tokens: Tensor

    @property
    def diagonals(self) -> Tensor:
        """int64 [B, n]: block diagonals of each span, 0 for an unused slot."""
        return torch.where(self.start < self.stop, self.last_block - self.first_block + 1, 0)


def slots(seq_len: int, dense_below: int, packed: bool) -> int:
    """How many spans a sequence can have at the most."""
    return max(1, seq_len // dense_below) if packed else 1


def entries(seq_len: int, block_size: int, n: int) -> int:
    """Length of the list of all spans' block diagonals: neighbours share at most one block."""
    return -(-seq_len // block_size) + n - 1


def find_spans(rows: MaskRanges, batch: int, dense_below: int, block_size: int) -> Spans:
    """The spans of a resolved mask, [batch, n]."""
    start, stop = (
        _unpacked(rows)
        if rows.document_start is None
        else _long_documents(rows.document_start, dense_below)
    )
    first_block, last_block = start // block_size, (stop - 1).clamp(min=0) // block_size
    count = torch.where(start < stop, last_block - first_block + 1, 0)
    offset = count.cumsum(-1) - count
    dense_from = _dense_from(rows, start, stop, block_size)
    fields = (start, stop, first_block, last_block, offset, dense_from, _tokens(rows))
    return Spans(*(x.expand(batch, -1).contiguous() for x in fields))


def _tokens(rows: MaskRanges) -> Tensor:
    return (rows.start < rows.stop).sum(-1, keepdim=True)


def _unpacked(rows: MaskRanges) -> tuple[Tensor, Tensor]:
    stop = _tokens(rows)
    return torch.zeros_like(stop), stop


def _long_documents(document_start: Tensor, dense_below: int) -> tuple[Tensor, Tensor]:
    seq_len = document_start.shape[1]
    n = slots(seq_len, dense_below, packed=True)
    position = torch.arange(seq_len, device=document_start.device).expand(document_start.shape)
    following = torch.nn.functional.pad(document_start[:, 1:], (0, 1), value=-2)
    long = (
        (document_start != following)
        & (document_start >= 0)
        & (position - document_start + 1 >= dense_below)
    )
    slot = torch.where(long, long.long().cumsum(-1) - 1, n)
    empty = torch.full((len(document_start), n + 1), seq_len, device=document_start.device)
    start = empty.scatter(1, slot, document_start.long())[:, :n]
    stop = empty.scatter(1, slot, position + 1)[:, :n]
    return start.contiguous(), stop.contiguous()


def _dense_from(rows: MaskRanges, start: Tensor, stop: Tensor, block_size: int) -> Tensor:
    seq_len = rows.start.shape[1]
    blocks = -(-seq_len // block_size)
    if rows.document_start is None:
        return torch.full((1, blocks), blocks, device=rows.start.device)
    in_span = span_of_tokens(start, stop, seq_len) < start.shape[1]
    short = (rows.document_start >= 0) & ~in_span
    first = torch.where(short, rows.document_start.long() // block_size, blocks)
    first = torch.nn.functional.pad(first, (0, blocks * block_size - seq_len), value=blocks)
    return first.view(len(first), blocks, block_size).amin(-1)


def span_of_tokens(start: Tensor, stop: Tensor, seq_len: int) -> Tensor:
    """int64 [B, S]: the slot of the span that holds each token, n for none."""
    n = start.shape[1]
    position = torch.arange(seq_len, device=start.device).expand(len(start), -1).contiguous()
    slot = torch.searchsorted(stop, position, right=True)
    inside = (slot < n) & (start.gather(1, slot.clamp(max=n - 1)) <= position)
    return torch.where(inside, slot, n)


def spans_of_blocks(spans: Spans, blocks: Tensor, block_size: int) -> Tensor:
    """int64 [B, m, min(n, 2)]: the slots of the spans that touch each of m global blocks (int [m]), -1 for none."""
    batch, n = spans.start.shape
    begin = (blocks.long() * block_size).expand(batch, -1).contiguous()
    first = torch.searchsorted(spans.stop, begin, right=True)
    candidates = torch.stack([first + i for i in range(min(n, 2))], dim=-1)
    flat = candidates.clamp(max=n - 1).flatten(1)
    touches = (spans.start.gather(1, flat) < spans.stop.gather(1, flat)).view_as(candidates)
    touches &= spans.start.gather(1, flat).view_as(candidates) < begin[..., None] + block_size
    return torch.where(touches & (candidates < n), candidates, -1)
