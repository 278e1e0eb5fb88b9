"""Masks of packed sequences that one range of keys a query cannot express. All return Slices.

Each function takes the lengths of the packed items in order, in tokens. The rest of the sequence
is padding. For a batch, make one mask for each sequence:
Slices.batch([prefix_lm(...), prefix_lm(...)]).
"""

from collections.abc import Sequence

from titan_sparse.attention.masks.slices import CAUSAL, FULL, Dilated, Slices


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
    slices = []
    for (start, stop), is_causal in zip(_spans(lengths), kinds):
        slices.append((start, stop, start, stop, CAUSAL if is_causal else FULL))
    return Slices.of(slices)


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
        slices.append((start, stop, start, stop, 1 - window, look_ahead))
        # Only as far back as the window does not reach: no pair may be in two slices.
        slices.append((start, stop, start, min(start + sinks, stop), start - stop, -window))
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
    for (sample_start, _), chunks in zip(_spans(sample_lengths), samples):
        for chunk_start, chunk_stop in _spans(chunks):
            # The chunk sees from the sample's beginning to its own end.
            start = sample_start + chunk_start
            stop = sample_start + chunk_stop
            slices.append((start, stop, sample_start, stop, FULL))
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
    """(start, stop) of each item, one after the other. ValueError for a length below 0."""
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths {list(lengths)}: 0 or more tokens each")
    spans = []
    start = 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return spans
