"""What may be seen: static attention masks, composable with `&`.

A mask says, for every query i, which contiguous range of keys it sees: start[i] <= j < stop[i]. Two vectors of length S
are the whole mask; no S x S tensor exists anywhere. Both are nondecreasing in i, which the counting of visible pairs
and the block classification rely on. What one range a query cannot say is for slices.py. Positions are global: a layout
permutes tokens, never what they see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class MaskRanges(NamedTuple):
    """A mask resolved for one sequence length. All int32, global positions; Bm is 1 or the batch size.

    start, stop: [Bm, S], both nondecreasing; query i sees keys start[i] <= j < stop[i] (none where they are equal).
    document_start: [Bm, S], where the query's document begins, -1 on padding; None for an unpacked sequence.
    causal: no query sees a later key, which patterns that select block diagonals need.
    plain: known to let every query see all keys up to its own, which some kernels compute faster. Packed documents are
    never said to be, since torch.compile would compile anew for a sequence that happens to hold a single one.
    slices: int32 [Bm, N, 6], what is seen, as in slices.py, where one range a query cannot say it; None elsewhere. start and
    stop are then but bounds: 0 and S for a query that sees anything, S and S for others.
    table: int64 [ranks, n], the blocks of every rank in the layout "balanced", as ContextParallel.balance() adds it. q, k and
    v are sharded by it, so that all masks of a batch have the table of one of them.
    """

    start: Tensor
    stop: Tensor
    document_start: Tensor | None
    causal: bool = True
    plain: bool = False
    slices: Tensor | None = None
    table: Tensor | None = None


class Mask:
    """Base of all masks. Subclasses give rows(); `a & b` sees what both see."""

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        """The mask for `seq_len` global tokens, as row ranges on `device`."""
        raise NotImplementedError

    def __and__(self, other: "Mask") -> "Mask":
        return Intersection(self, other)

    def dense(self, seq_len: int, device: torch.device | str = "cpu") -> Tensor:
        """bool [Bm, S, S] in global order, for tests and pictures of small sequences."""
        rows = self.rows(seq_len, device)
        if rows.slices is not None:
            return slices.dense(rows)
        keys = torch.arange(seq_len, device=device)
        return (keys >= rows.start[..., None]) & (keys < rows.stop[..., None])


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        start = torch.zeros(1, seq_len, dtype=torch.int32, device=device)
        return MaskRanges(start, torch.full_like(start, seq_len), None, causal=False)


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees keys 0..i. `valid` (one number per sequence): tokens from there on are padding, seen by nobody."""

    valid: tuple[int, ...] | None = None

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        position = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        if self.valid is None:
            return MaskRanges(torch.zeros_like(position), position + 1, None, plain=True)
        valid = torch.tensor(self.valid, dtype=torch.int32, device=device)[:, None]
        if max(self.valid) > seq_len or min(self.valid) < 0:
            raise ValueError(
                f"Causal(valid={self.valid}) does not fit a sequence of {seq_len} tokens"
            )
        real = position < valid
        return MaskRanges(
            torch.where(real, 0, seq_len).int(),
            torch.where(real, position + 1, seq_len).int(),
            None,
            plain=min(self.valid) == seq_len,
        )


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i sees keys i - window + 1 .. i (itself included)."""

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(
                f"SlidingWindow(window={self.window}): a window holds at least the query itself, 1 or more"
            )

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        position = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        return MaskRanges((position - self.window + 1).clamp(min=0), position + 1, None)


class Documents(Mask):
    """Packed documents: causal inside each, nothing across.

    lengths: tokens of each document in order, one list for all sequences of the batch or one list per sequence. What is
    left of the sequence after the last document is padding: it sees nothing and nobody sees it.
    Raises ValueError for a length below 1 and, in rows(), for documents longer than the sequence together.
    """

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]]):
        nested = len(lengths) > 0 and isinstance(lengths[0], Sequence)
        self.lengths = [
            [int(length) for length in row] for row in (lengths if nested else [lengths])
        ]
        if any(length < 1 for row in self.lengths for length in row):
            raise ValueError("Documents(lengths): every document has at least 1 token")

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        start = torch.stack([self._document_starts(row, seq_len) for row in self.lengths]).to(
            device
        )
        real = start >= 0
        stop = torch.arange(1, seq_len + 1, dtype=torch.int32, device=device).expand_as(start)
        return MaskRanges(start.where(real, seq_len), stop.where(real, seq_len), start)

    @staticmethod
    def _document_starts(lengths: list[int], seq_len: int) -> Tensor:
        total = sum(lengths)
        if total > seq_len:
            raise ValueError(f"Documents(lengths) hold {total} tokens, the sequence {seq_len}")
        sizes = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.repeat_interleave(sizes.cumsum(0, dtype=torch.int32) - sizes, sizes)
        return torch.nn.functional.pad(starts, (0, seq_len - total), value=-1)


@dataclass(frozen=True)
class Intersection(Mask):
    """What both masks see."""

    first: Mask
    second: Mask

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        a, b = self.first.rows(seq_len, device), self.second.rows(seq_len, device)
        if a.document_start is not None and b.document_start is not None:
            raise ValueError(
                "Documents & Documents: give the finer of the two document lists alone"
            )
        if len(a.start) != len(b.start) and 1 not in (len(a.start), len(b.start)):
            raise ValueError(
                f"masks for {len(a.start)} and for {len(b.start)} sequences do not go together"
            )
        if a.slices is not None or b.slices is not None:
            return slices.intersected_rows(a, b)
        start, stop = torch.maximum(a.start, b.start), torch.minimum(a.stop, b.stop)
        documents = a.document_start if b.document_start is None else b.document_start
        if documents is not None:  # what sees nothing is padding, also where the other mask says so
            documents = torch.where(start < stop, documents, -1)
        return MaskRanges(start, torch.maximum(start, stop), documents, a.causal or b.causal)


from titan_sparse.attention.masks import slices  # noqa: E402, they are masks themselves
