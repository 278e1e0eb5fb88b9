"""Masks made of slices, for what one range of keys a query cannot express.

A slice is a range of queries, a range of keys, and a range of the diagonal k - q that is seen
inside them (slice_geometry.py). No pair of tokens may be in two slices.

The functions make masks of packed sequences. Each takes the lengths of the packed items in order,
in tokens. The rest of the sequence is padding. For a batch, make one mask for each sequence:
Slices.batch([prefix_lm(...), prefix_lm(...)]).
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import (
    UNTRACED,
    Mask,
    MaskRanges,
    as_lists,
    at_least_one,
    never_sees_later,
    ranges_of_slices,
)
from titan_sparse.attention.masks.slice_geometry import check_disjoint, padded_table, tightened

FULL = "full"
"""Every pair."""
CAUSAL = "causal"
"""Aligned at the bottom right: the last query sees all keys."""
INV_CAUSAL = "inv_causal"
"""Aligned at the top left: the first query sees all keys."""
BI_CAUSAL = "bi_causal"
"""Both causal and inv_causal."""
KINDS = (FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL)


class Slices(Mask):
    """The pairs that the slices see. A pair of tokens that is in no slice is not seen.

    q_ranges, k_ranges: half-open (start, stop) in global tokens.
    types: one of KINDS for each slice. With sq queries and sk keys in the slice, its query i sees
    its key j if: full, always; causal, j <= i + (sk - sq); inv_causal, j >= i; bi_causal, both.
    This holds for sq > sk too (as in MagiAttention's AttnSlice).
    Slices may share queries and keys, but not pairs.
    Raises ValueError for other types, for ranges that are not ranges, and for a pair that two
    slices cover, naming the two.
    """

    is_constant = True

    def __init__(
        self,
        q_ranges: Sequence[tuple[int, int]],
        k_ranges: Sequence[tuple[int, int]],
        types: Sequence[str],
    ):
        if not len(q_ranges) == len(k_ranges) == len(types):
            raise ValueError(
                f"Slices: {len(q_ranges)} q_ranges, {len(k_ranges)} k_ranges "
                f"and {len(types)} types; write as many of each"
            )
        slices = []
        for number, (queries, keys, kind) in enumerate(zip(q_ranges, k_ranges, types)):
            for start, stop in (queries, keys):
                if not 0 <= start <= stop or start % 1 or stop % 1:
                    raise ValueError(
                        f"Slices: range {(start, stop)} of slice {number} is none; "
                        "write whole numbers with 0 <= start <= stop"
                    )
            slices.append((*queries, *keys, *_diagonals(*queries, *keys, kind)))
        self._set([torch.tensor(slices, dtype=torch.int64, device="cpu").reshape(-1, 6)])

    @classmethod
    def of(cls, slices: Iterable[tuple[int, int, int, int, str]]) -> "Slices":
        """From one (q_start, q_stop, k_start, k_stop, type) for each slice."""
        written = list(slices)
        return cls([x[:2] for x in written], [x[2:4] for x in written], [x[4] for x in written])

    @classmethod
    def of_diagonals(cls, numbers: Sequence[Sequence[int]] | Tensor) -> "Slices":
        """From q_start, q_stop, k_start, k_stop, low and high of each slice, [N, 6].

        Raises ValueError for numbers that are not six integers each.
        """
        slices = torch.as_tensor(numbers, device="cpu")
        if slices.numel() % 6 or (slices.is_floating_point() and len(slices)):
            raise ValueError(
                f"Slices.of_diagonals: {slices.numel()} numbers are {slices.dtype}; write six integers "
                "for each slice"
            )
        return cls._of([slices.long().reshape(-1, 6)])

    @classmethod
    def batch(cls, masks: Sequence["Slices"]) -> "Slices":
        """One mask of its own for each sequence of the batch."""
        for mask in masks:
            if not isinstance(mask, Slices):
                name = type(mask).__name__
                raise ValueError(f"Slices.batch: {name} is not Slices; write documents([...])")
        # A mask may be a batch itself.
        sequences = [slices for mask in masks for slices in mask.sequences]
        return cls._of(sequences)

    @classmethod
    def _of(cls, sequences: list[Tensor]) -> "Slices":
        mask = cls.__new__(cls)
        mask._set(sequences)
        return mask

    @torch.compiler.disable(reason=UNTRACED)
    def _set(self, sequences: list[Tensor]) -> None:
        """sequences: int64 [N, 6] for each sequence."""
        for slices in sequences:
            check_disjoint(slices)
        self.sequences = [tightened(slices) for slices in sequences]
        if any((slices[:, [0, 2]] < 0).any() for slices in self.sequences):
            raise ValueError("Slices hold a token before the first; write starts of 0 or more")
        stops = [int(slices[:, [1, 3]].max()) for slices in self.sequences if len(slices)]
        self.extent = max(stops, default=0)
        # Worked out once, so that torch.compile sees constants in rows().
        self._causal = never_sees_later(self.sequences)
        self._table = padded_table(self.sequences)

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        """Raises ValueError if a slice reaches beyond the sequence."""
        if self.extent > seq_len:
            raise ValueError(f"Slices reach to token {self.extent}, the sequence holds {seq_len}")
        return ranges_of_slices(self._table, seq_len, device, self._causal)


@dataclass(frozen=True)
class Dilated(Mask):
    """Query i sees keys i, i - rate, i - 2 rate, ... later than i - window (LongNet, as a window).

    For packed documents write Documents(lengths) & Dilated(window, rate).

    Exact, but a slice for each of the diagonals. A block is computed once for each diagonal that
    goes through it, so this is slower than SlidingWindow(window), the more so the smaller rate is.
    Raises ValueError unless both are whole numbers of 1 or more.
    """

    window: int
    rate: int
    is_constant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refusal = (
            f"Dilated(window={self.window!r}, rate={self.rate!r}): "
            "both are whole numbers, 1 or more"
        )
        object.__setattr__(self, "window", at_least_one(self.window, refusal))
        object.__setattr__(self, "rate", at_least_one(self.rate, refusal))

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        # Tight already: the first `distance` queries have no key that far back.
        diagonals = [
            (distance, seq_len, 0, seq_len - distance, -distance, -distance)
            for distance in range(0, min(self.window, seq_len), self.rate)
        ]
        # [N, 6], also where N is 0
        slices = torch.tensor(diagonals, dtype=torch.int64, device="cpu").reshape(-1, 6)
        return ranges_of_slices(padded_table([slices]), seq_len, device, causal=True)


def _diagonals(q_start: int, q_stop: int, k_start: int, k_stop: int, kind: str) -> tuple[int, int]:
    """The least and the greatest k - q of a slice."""
    if kind not in KINDS:
        raise ValueError(f'Slices: type "{kind}" is unknown; write one of {", ".join(KINDS)}')
    # Without a bound: from the last query and the first key to the first query and the last key.
    low = k_start - q_stop + 1
    high = k_stop - 1 - q_start
    if kind in (INV_CAUSAL, BI_CAUSAL):
        low = k_start - q_start
    if kind in (CAUSAL, BI_CAUSAL):
        high = k_stop - q_stop
    return low, high


def documents(lengths: Sequence[int], causal: bool | Sequence[bool] = True) -> Slices:
    """Each document sees itself.

    causal: True, each token sees the tokens up to itself; False, every token sees every other. One
    value for all documents, or one for each.
    """
    kinds = [causal] * len(lengths) if isinstance(causal, bool) else causal
    if len(kinds) != len(lengths):
        raise ValueError(
            f"documents(): {len(kinds)} values of causal for {len(lengths)} documents; "
            "write one, or one for each"
        )
    return Slices.of(
        (start, stop, start, stop, CAUSAL if is_causal else FULL)
        for (start, stop), is_causal in zip(_spans(lengths), kinds)
    )


def sliding_window(
    lengths: Sequence[int], window: int, sinks: int = 0, look_ahead: int = 0
) -> Slices:
    """Inside each document, query i sees keys i - window + 1 .. i + look_ahead and the sinks.

    sinks: the first tokens of the document, which are seen by every query that is not earlier
    (StreamingLLM, section 3.2).
    """
    if window < 1 or sinks < 0 or look_ahead < 0:
        raise ValueError(
            f"sliding_window(window={window}, sinks={sinks}, look_ahead={look_ahead}): "
            "window is 1 or more, the others 0 or more"
        )
    slices = []
    for start, stop in _spans(lengths):
        # Neither bound is above a document's length, however large its argument is.
        low, high = max(1 - window, start - stop), min(look_ahead, stop - start)
        slices.append((start, stop, start, stop, low, high))
        # Only as far back as the window does not reach: no pair may be in two slices.
        slices.append((start, stop, start, min(start + sinks, stop), start - stop, low - 1))
    return Slices.of_diagonals(slices)


def dilated(lengths: Sequence[int], window: int, rate: int) -> Slices:
    """Documents(lengths) & Dilated(window, rate) for one sequence, as Slices.

    Raises ValueError as Dilated does.
    """
    Dilated(window, rate)
    slices = []
    for start, stop in _spans(lengths):
        # No query of the document has a key further back than its length.
        for distance in range(0, min(window, stop - start), rate):
            slices.append((start, stop, start, stop, -distance, -distance))
    return Slices.of_diagonals(slices)


def prefix_lm(lengths: Sequence[int], prefixes: Sequence[int]) -> Slices:
    """Documents whose first tokens see each other in both directions, the rest causally.

    prefixes: how many tokens that is in each document (T5, section 3.2.1).
    """
    if len(prefixes) != len(lengths) or any(not 0 <= p <= n for p, n in zip(prefixes, lengths)):
        raise ValueError(
            "prefix_lm(lengths, prefixes): a prefix for each document, from 0 to its length"
        )
    slices = []
    for (start, stop), prefix in zip(_spans(lengths), prefixes):
        # In both directions up to the middle, causally from there on.
        middle = start + prefix
        slices.append((start, middle, start, middle, FULL))
        slices.append((middle, stop, start, stop, CAUSAL))
    return Slices.of(slices)


def block_causal(samples: Sequence[Sequence[int]]) -> Slices:
    """Packed samples, each made of chunks (the frames of a video).

    A token sees all of its own chunk and of the chunks before it in its sample.
    samples: for each sample the lengths of its chunks.
    """
    sample_lengths = [sum(chunks) for chunks in samples]
    slices = []
    for (first, _), chunks in zip(_spans(sample_lengths), samples):
        for chunk_start, chunk_stop in _spans(chunks):
            # The chunk sees from the sample's beginning to its own end.
            stop = first + chunk_stop
            slices.append((first + chunk_start, stop, first, stop, FULL))
    return Slices.of(slices)


def shared_question(groups: Sequence[tuple[int, Sequence[int]]]) -> Slices:
    """Questions with several answers each, packed as question, answer, answer, ...

    An answer sees its question and itself, causally, and no other answer.
    groups: for each question its length and the lengths of its answers.
    """
    slices = []
    start = 0
    for question, answers in groups:
        stop = start + question
        slices.append((start, stop, start, stop, CAUSAL))
        for answer_start, answer_stop in _spans(answers):
            first = stop + answer_start
            last = stop + answer_stop
            slices.append((first, last, start, stop, FULL))
            slices.append((first, last, first, last, CAUSAL))
        start = stop + sum(answers)
    return Slices.of(slices)


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of each item, one after the other. ValueError for a length that is not a whole
    number of 0 or more."""
    try:
        is_right = all(operator.index(as_lists(length)) >= 0 for length in lengths)
    except TypeError:
        is_right = False
    if not is_right:
        raise ValueError(
            f"lengths {list(lengths)}: write whole numbers of 0 or more tokens, for one sequence. For "
            "several, write Slices.batch() of one mask for each"
        )
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
