"""Masks whose queries each see one contiguous range of keys: start[i] <= j < stop[i].

Two vectors of length S are the whole mask. No S x S tensor exists anywhere. Both vectors are
nondecreasing in i, which the counting of visible pairs and the block classification rely on. Masks
that one range a query cannot express are in slices.py. Positions are global: a layout permutes
tokens, never what they see.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_sparse.attention.masks.base import Intersection, Mask, MaskRanges, at_least_one

__all__ = [
    "Causal",
    "Documents",
    "Full",
    "Intersection",
    "Mask",
    "MaskRanges",
    "SlidingWindow",
]


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        # [1, S]
        start = torch.zeros(1, seq_len, dtype=torch.int32, device=device)
        stop = torch.full_like(start, seq_len)
        return MaskRanges(start, stop, document_start=None, causal=False)


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees keys 0..i.

    valid: one number per sequence. Tokens from there on are padding, which no query sees and which
    sees nothing. rows() raises ValueError for a number that does not fit the sequence.
    """

    valid: tuple[int, ...] | None = None

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        # [1, S]
        position = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        if self.valid is None:
            start = torch.zeros_like(position)
            return MaskRanges(start, position + 1, None, plain=True)
        if max(self.valid) > seq_len or min(self.valid) < 0:
            raise ValueError(
                f"Causal(valid={self.valid}) does not fit a sequence of {seq_len} tokens"
            )
        # [Bm, 1] against [1, S]
        valid = torch.tensor(self.valid, dtype=torch.int32, device=device)[:, None]
        real = position < valid
        start = torch.where(real, 0, seq_len).int()
        stop = torch.where(real, position + 1, seq_len).int()
        has_no_padding = min(self.valid) == seq_len
        return MaskRanges(start, stop, None, plain=has_no_padding)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i sees keys i - window + 1 .. i, itself included.

    Raises ValueError unless window is a whole number of 1 or more.
    """

    window: int

    def __post_init__(self) -> None:
        at_least_one(
            self.window,
            f"SlidingWindow(window={self.window!r}): "
            "a window is a whole number of tokens, 1 or more",
        )

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        # [1, S]
        position = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        # The first queries have fewer keys before them than the window holds.
        start = position - self.window + 1
        start = start.clamp(min=0)
        stop = position + 1
        return MaskRanges(start, stop, None)


class Documents(Mask):
    """Packed documents: causal inside each, nothing across.

    lengths: tokens of each document in order, one list for all sequences of the batch or one list
    per sequence. What is left of the sequence after the last document is padding: it sees nothing
    and no query sees it.
    Raises ValueError for a length that is not a whole number of 1 or more and, in rows(), for
    documents that together are longer than the sequence.
    """

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]]):
        if len(lengths) > 0 and isinstance(lengths[0], Sequence):
            sequences = lengths
        else:
            sequences = [lengths]
        self.lengths: list[list[int]] = []
        for row in sequences:
            self.lengths.append([_document_length(length) for length in row])

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        starts = [_document_starts(lengths, seq_len) for lengths in self.lengths]
        # [Bm, S]
        document_start = torch.stack(starts).to(device)
        real = document_start >= 0
        # [S]: each token sees the tokens up to itself
        stop = torch.arange(1, seq_len + 1, dtype=torch.int32, device=device)
        return MaskRanges(
            start=document_start.where(real, seq_len),
            stop=stop.expand_as(document_start).where(real, seq_len),
            document_start=document_start,
        )


def _document_length(length: object) -> int:
    return at_least_one(
        length,
        f"Documents(lengths): a length is a whole number of tokens, 1 or more, not {length!r}",
    )


def _document_starts(lengths: list[int], seq_len: int) -> Tensor:
    """int32 [S]: where each token's document begins, -1 on padding."""
    total = sum(lengths)
    if total > seq_len:
        raise ValueError(f"Documents(lengths) hold {total} tokens, the sequence {seq_len}")
    # [documents]
    sizes = torch.tensor(lengths, dtype=torch.int32)
    begins = sizes.cumsum(0, dtype=torch.int32) - sizes
    # [total] -> [S]
    starts = torch.repeat_interleave(begins, sizes)
    padding = seq_len - total
    return torch.nn.functional.pad(starts, (0, padding), value=-1)
