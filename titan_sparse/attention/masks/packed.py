"""Masks of packed sequences that one range of keys a query cannot say: functions that return Slices.

Each takes what the sequence is packed of, one after the other, in tokens; what is left of the sequence is padding. For
a batch write one for each sequence: Slices.batch([prefix_lm(...), prefix_lm(...)]).
"""

import itertools
from collections.abc import Iterator, Sequence

from titan_sparse.attention.masks.slices import CAUSAL, FULL, Slices


def documents(lengths: Sequence[int], causal: bool | Sequence[bool] = True) -> Slices:
    """Each document sees itself: causal, or (causal=False, for all or for each) every token every other."""
    kinds = [causal] * len(lengths) if isinstance(causal, bool) else causal
    if len(kinds) != len(lengths):
        raise ValueError(
            f"documents(): {len(kinds)} values of causal for {len(lengths)} documents; "
            "write one, or one for each"
        )
    return Slices.of(
        (a, b, a, b, CAUSAL if kind else FULL) for (a, b), kind in zip(_ranges(lengths), kinds)
    )


def sliding_window(
    lengths: Sequence[int], window: int, sinks: int = 0, look_ahead: int = 0
) -> Slices:
    """Inside each document query i sees keys i - window + 1 .. i + look_ahead, and besides the first `sinks` tokens of
    the document as far as they are not later (StreamingLLM, section 3.2)."""
    if window < 1 or sinks < 0 or look_ahead < 0:
        raise ValueError(
            f"sliding_window(window={window}, sinks={sinks}, look_ahead={look_ahead}): "
            "window is 1 or more, the others 0 or more"
        )
    slices = []
    for a, b in _ranges(lengths):
        slices.append((a, b, a, b, 1 - window, look_ahead))
        slices.append((a, b, a, min(a + sinks, b), a - b, -window))
    return Slices.of_diagonals(slices)


def dilated(lengths: Sequence[int], window: int, rate: int) -> Slices:
    """Inside each document query i sees keys i, i - rate, i - 2 rate, ... later than i - window (LongNet, as a
    window).

    Exact, but a slice for each of the diagonals: a block is computed once for each that goes through it, so that this
    is slower than the whole window, the more the smaller rate is.
    """
    if window < 1 or rate < 1:
        raise ValueError(f"dilated(window={window}, rate={rate}): both are 1 or more")
    return Slices.of_diagonals(
        [
            (a, b, a, b, -distance, -distance)
            for a, b in _ranges(lengths)
            for distance in range(0, min(window, b - a), rate)
        ]
    )


def prefix_lm(lengths: Sequence[int], prefixes: Sequence[int]) -> Slices:
    """Documents whose first tokens (`prefixes`) see each other in both directions, the rest causally (T5, section
    3.2.1)."""
    if len(prefixes) != len(lengths) or any(not 0 <= p <= n for p, n in zip(prefixes, lengths)):
        raise ValueError(
            "prefix_lm(lengths, prefixes): a prefix for each document, from 0 to its length"
        )
    slices = []
    for (a, b), prefix in zip(_ranges(lengths), prefixes):
        slices += [(a, a + prefix, a, a + prefix, FULL), (a + prefix, b, a, b, CAUSAL)]
    return Slices.of(slices)


def block_causal(samples: Sequence[Sequence[int]]) -> Slices:
    """Packed samples, each of chunks (the frames of a video): a token sees all of its own chunk and of the chunks
    before it in its sample. samples: for each the lengths of its chunks."""
    slices = []
    for (a, _), chunks in zip(_ranges([sum(chunks) for chunks in samples]), samples):
        slices += [(a + start, a + stop, a, a + stop, FULL) for start, stop in _ranges(chunks)]
    return Slices.of(slices)


def shared_question(groups: Sequence[tuple[int, Sequence[int]]]) -> Slices:
    """Questions with several answers each, packed as question, answer, answer, ...: an answer sees its question and
    itself, causally, and no other answer. groups: for each the length of the question and those of the answers."""
    slices, start = [], 0
    for question, answers in groups:
        stop = start + question
        slices.append((start, stop, start, stop, CAUSAL))
        for a, b in _ranges(answers):
            slices += [
                (stop + a, stop + b, start, stop, FULL),
                (stop + a, stop + b, stop + a, stop + b, CAUSAL),
            ]
        start = stop + sum(answers)
    return Slices.of(slices)


def _ranges(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each of these, one after the other; ValueError for a length below 0."""
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths {list(lengths)}: 0 or more tokens each")
    return itertools.pairwise(itertools.accumulate(lengths, initial=0))
