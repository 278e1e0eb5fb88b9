"""Spans: the documents that a selection is made for.

They are arrays of fixed size, so that nothing waits for the device. An unpacked sequence is one
span, always selected. In a packed one, every document of at least `dense_below` tokens is a span
with a selection of its own; shorter documents are computed whole. At most two spans touch a block,
because dense_below >= block_size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask


class Spans(NamedTuple):
    """n slots per sequence, int64; unused slots have start = stop = sequence length."""

    start: Tensor  # [B, n], global tokens
    stop: Tensor  # [B, n], global tokens
    first_block: Tensor  # [B, n]
    last_block: Tensor  # [B, n]
    offset: Tensor  # [B, n], where the span's slashes begin in the list of all (see `entries`)
    dense_from: Tensor
    """[B, blocks], the first block that a query block sees whole because of short documents;
    `blocks` if none."""
    tokens: Tensor  # [B, 1], tokens of the sequence up to its padding

    @property
    def diagonals(self) -> Tensor:
        """int64 [B, n]: number of slashes of each span, 0 for an unused slot."""
        count = self.last_block - self.first_block + 1
        return torch.where(self.start < self.stop, count, 0)


def slots(seq_len: int, dense_below: int, packed: bool) -> int:
    """The most spans that a sequence can have."""
    if not packed:
        return 1
    return max(1, seq_len // dense_below)


def entries(seq_len: int, block_size: int, n: int) -> int:
    """Length of the list of all spans' slashes.

    Neighboring spans share at most one block.
    """
    blocks = -(-seq_len // block_size)
    return blocks + n - 1


def find_spans(ranges: MaskRanges, batch: int, dense_below: int, block_size: int) -> Spans:
    """The spans of a resolved mask, [batch, n].

    They are remembered for the mask: all layers, and all patterns with the same limit, share them.
    """

    def find() -> Spans:
        # [Bm, n]
        if ranges.document_start is None:
            # Up to the last token that sees anything. Earlier ones may see nothing.
            end = torch.arange(1, ranges.start.shape[1] + 1, device=ranges.start.device)
            stop = F.pad(end * (ranges.start < ranges.stop), (1, 0)).amax(-1, keepdim=True)
            start, tokens = torch.zeros_like(stop), stop
        else:
            tokens = (ranges.document_start >= 0).sum(-1, keepdim=True)
            start, stop = _long_documents(ranges.document_start, dense_below)
        first_block = start // block_size
        last_block = (stop - 1).clamp(min=0) // block_size
        diagonals = torch.where(start < stop, last_block - first_block + 1, 0)
        spans = Spans(
            start=start,
            stop=stop,
            first_block=first_block,
            last_block=last_block,
            offset=diagonals.cumsum(-1) - diagonals,
            dense_from=_dense_from(ranges, start, stop, block_size),
            tokens=tokens,
        )
        # searchsorted() wants contiguous memory.
        return Spans._make(field.expand(batch, -1).contiguous() for field in spans)

    return once_per_mask(ranges, ("spans", batch, dense_below, block_size), find)


def share_of_cap(most: int, least: int, spans: Spans) -> Tensor:
    """int64 [B, n]: each span's part of a budget's cap.

    It is all of the cap for an unpacked sequence, else in proportion to length.
    Padding does not count as length: the number of ranks, which padding depends on, does not change
    the selection.
    """
    length = spans.stop - spans.start
    # [B, 1], not 0 where all is padding.
    tokens = spans.tokens.clamp(min=1)
    # [B, n], rounded up.
    share = (most * length + spans.tokens - 1) // tokens
    return share.clamp(min=least)


def _long_documents(document_start: Tensor, dense_below: int) -> tuple[Tensor, Tensor]:
    """Start and stop of the documents of at least `dense_below` tokens, int64 [Bm, n] each."""
    batch, seq_len = document_start.shape
    n = slots(seq_len, dense_below, packed=True)
    # [Bm, S]
    position = torch.arange(seq_len, device=document_start.device).expand(document_start.shape)
    next_start = F.pad(document_start[:, 1:], (0, 1), value=-2)

    # [Bm, S]: a document's last token knows the length.
    ends_document = (document_start != next_start) & (document_start >= 0)
    is_long = position - document_start + 1 >= dense_below
    ends_long_document = ends_document & is_long

    # [Bm, S]: the number of each long document, at its last token; n elsewhere.
    number = ends_long_document.long().cumsum(-1) - 1
    slot = torch.where(ends_long_document, number, n)

    # [Bm, n + 1], the last slot collects all other tokens and is cut off.
    empty = torch.full((batch, n + 1), seq_len, device=document_start.device)
    start = empty.scatter(1, slot, document_start.long())[:, :n]
    stop = empty.scatter(1, slot, position + 1)[:, :n]
    return start.contiguous(), stop.contiguous()


def _dense_from(ranges: MaskRanges, start: Tensor, stop: Tensor, block_size: int) -> Tensor:
    """int64 [Bm, blocks], as Spans.dense_from; start, stop: [Bm, n], the spans."""
    seq_len = ranges.start.shape[1]
    blocks = -(-seq_len // block_size)
    if ranges.document_start is None:
        return torch.full((1, blocks), blocks, device=ranges.start.device)
    # [Bm, S]
    in_span = span_of_tokens(start, stop, seq_len) < start.shape[1]
    in_short_document = (ranges.document_start >= 0) & ~in_span
    document_block = ranges.document_start.long() // block_size
    first_block = torch.where(in_short_document, document_block, blocks)
    # The last block may be cut short: [Bm, blocks, block_size].
    missing = blocks * block_size - seq_len
    first_block = F.pad(first_block, (0, missing), value=blocks)
    return first_block.unflatten(1, (blocks, block_size)).amin(-1)


def lookup(values: Tensor, slot: Tensor) -> Tensor:
    """values [B, n] at the slots int64 [B, ...] of the same sequence: shaped like `slot`."""
    flat = slot.flatten(1)
    return values.gather(1, flat).view_as(slot)


def span_of_tokens(start: Tensor, stop: Tensor, seq_len: int) -> Tensor:
    """int64 [B, S]: the slot of the span that holds each token, n for none. start, stop: [B, n]."""
    n = start.shape[1]
    # [B, S]; spans are in order, so the first one that ends behind a token is the only candidate.
    position = torch.arange(seq_len, device=start.device)
    position = position.expand(len(start), -1).contiguous()
    slot = torch.searchsorted(stop, position, right=True)
    # The token may still lie before that span.
    slot_start = start.gather(1, slot.clamp(max=n - 1))
    inside = (slot < n) & (slot_start <= position)
    return torch.where(inside, slot, n)


def spans_of_blocks(spans: Spans, blocks: Tensor, block_size: int) -> Tensor:
    """int64 [B, m, T]: the slots of the spans that touch each of m global blocks, -1 for none.

    blocks: int [m]. T = min(n, 2).
    """
    batch, n = spans.start.shape
    # [B, m]
    block_start = blocks.long() * block_size
    block_start = block_start.expand(batch, -1).contiguous()
    first = torch.searchsorted(spans.stop, block_start, right=True)

    # [B, m, T]: the first span that ends behind the block's start, and the one after it.
    candidates = torch.stack([first + i for i in range(min(n, 2))], dim=-1)
    known = candidates.clamp(max=n - 1)
    start = lookup(spans.start, known)
    stop = lookup(spans.stop, known)

    # Unused slots are empty spans.
    block_stop = block_start[..., None] + block_size
    touches = (start < stop) & (start < block_stop)
    return torch.where(touches & (candidates < n), candidates, -1)


def document_origin(ranges: MaskRanges) -> Tensor:
    """int32 [Bm, S], where each token's document begins; 0 for padding."""
    if ranges.document_start is None:
        return torch.zeros_like(ranges.start)
    return ranges.document_start.clamp(min=0).int()
