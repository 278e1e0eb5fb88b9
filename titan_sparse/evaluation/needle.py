"""Needle In A Haystack: a fact hidden at some depth of a long text must be found again (Kamradt, 2023,
github.com/gkamradt/LLMTest_NeedleInAHaystack), with RULER's wording of needle and question (arXiv 2404.06654, table 8) so
that answers can be scored exactly. Samples are put together from tokens: depth and length are exact."""

import random
from collections import defaultdict
from typing import Any

import numpy as np

from titan_sparse.evaluation.answers import Sample
from titan_sparse.evaluation.haystack import Haystack, key, number

_INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the number afterwards.\n"
)
_NEEDLE = "\nOne of the special magic numbers for {key} is: {value}.\n"
_QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for "
    "{key} mentioned in the provided text is"
)


def depths(count: int) -> list[float]:
    """`count` depths, evenly from 0 (the beginning) to 1 (right before the question)."""
    return [round(step / max(count - 1, 1), 4) for step in range(count)]


def needle_samples(
    haystack: Haystack, lengths: list[int], depths: list[float], samples: int, seed: int
) -> list[Sample]:
    """`samples` prompts for each length (tokens, the answer included) and depth (share of the text before the needle).

    Each has its own key, number and piece of the haystack, fixed by `seed`. Raises ValueError for a length that does not
    hold the question and needle, or a depth outside [0, 1].
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"a depth of {depth} is no share of the text; write 0 to 1")
    return [
        _sample(haystack, length, depth, random.Random(f"needle {seed} {length} {depth} {count}"))
        for length in lengths
        for depth in depths
        for count in range(samples)
    ]


def _sample(haystack: Haystack, length: int, depth: float, draw: random.Random) -> Sample:
    names = {"key": key(draw), "value": number(draw)}
    first, needle, question, answer = (
        haystack.tokenizer.encode(text.format(**names)).astype(np.int64)
        for text in (_INTRODUCTION, _NEEDLE, _QUESTION, " {value}.")
    )
    room = length - sum(map(len, (first, needle, question, answer)))
    if room < 0:
        raise ValueError(
            f"a needle and its question do not fit in {length} tokens; write {length - room} or more"
        )
    text = haystack.tokens(draw.randrange(length), room)
    before = round(depth * room)
    prompt = np.concatenate([first, text[:before], needle, text[before:], question])
    return Sample(
        prompt, answer, (names["value"],), len(answer), length, {"length": length, "depth": depth}
    )


def by_cell(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the samples of each length and depth, of all that was measured, with their number as "samples"."""
    cells = defaultdict(list)
    for record in records:
        cells[record["length"], record["depth"]].append(record)
    return [
        {"length": length, "depth": depth, "samples": len(found), **means(found)}
        for (length, depth), found in sorted(cells.items())
    ]


def means(records: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of each of score, exact, correct and loss that the records have."""
    return {
        name: float(np.mean([record[name] for record in records]))
        for name in ("score", "exact", "correct", "loss")
        if name in records[0]
    }
