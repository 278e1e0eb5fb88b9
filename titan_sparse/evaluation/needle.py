"""Needle In A Haystack: the model must find a fact that is hidden at some depth of a long text.

The test is by Kamradt (2023, github.com/gkamradt/LLMTest_NeedleInAHaystack), in RULER's words
(arXiv 2404.06654, table 8). Samples are built from tokens, so depth and length are exact.
"""

import itertools
import random
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.documents import Documents
from titan_sparse.data.tokenizer import begun, check_ids
from titan_sparse.evaluation.answers import Sample

_ADJECTIVES = tuple(
    (
        "amber brave calm dusty early fancy gentle hollow icy jolly kind lazy "
        "misty noble olive proud quiet rusty silent tidy urban vivid windy young"
    ).split()
)
_NOUNS = tuple(
    (
        "anchor barrel candle desert engine forest garden harbor island jacket kettle ladder "
        "market needle orchard pillow quarry river saddle temple umbrella valley window yard"
    ).split()
)
_INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the number afterwards.\n"
)
_NEEDLE = "\nOne of the special magic numbers for {key} is: {value}.\n"
_QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for "
    "{key} mentioned in the provided text is"
)


def haystack(documents: Documents, count: int) -> NDArray[np.int64]:
    """`count` tokens or more: the documents one after the other, a line break between them, again
    from the first after the last.

    Raises ValueError if no document holds text, or a token is beyond the vocabulary.
    """
    line_break = documents.tokenizer.encode("\n").astype(np.int64)
    parts = [line_break[:0]]
    length = 0
    for index in itertools.count():
        if length >= count:
            return np.concatenate(parts)
        if index == len(documents) and length == 0:
            raise ValueError("the text to hide needles in is empty; write another data.source")
        # Without the end-of-document token, and without what stands before each document.
        ids = documents[index % len(documents)].tokens[:-1]
        begin = documents.tokenizer.begin
        if len(begin) and np.array_equal(ids[: len(begin)], begin):
            ids = ids[len(begin) :]
        check_ids(ids, documents.tokenizer)
        if len(ids):
            parts += [ids.astype(np.int64), line_break]
            length += len(ids) + len(line_break)


def depths(count: int) -> list[float]:
    """`count` depths, evenly from 0 (the beginning) to 1 (right before the question)."""
    last = max(count - 1, 1)
    return [round(step / last, 4) for step in range(count)]


def needle_samples(
    documents: Documents, lengths: list[int], depths: list[float], samples: int, seed: int
) -> list[Sample]:
    """`samples` prompts for each length and depth.

    lengths: tokens, the answer included. depths: share of the text before the needle, 0 to 1. Each
    prompt has its own key, number and part of the haystack, fixed by `seed`, and begins as
    documents do.
    Raises ValueError for a length that does not hold the question and needle.
    """
    prompts = []
    text = haystack(documents, 2 * max(lengths, default=0))
    for length, depth, repeat in itertools.product(lengths, depths, range(samples)):
        draw = random.Random(f"needle {seed} {length} {depth} {repeat}")
        prompts.append(_sample(text, documents, length, depth, draw))
    return prompts


def _sample(
    text: NDArray[np.int64], documents: Documents, length: int, depth: float, draw: random.Random
) -> Sample:
    # Such as "misty-harbor", and a number of seven digits.
    hidden_key = f"{draw.choice(_ADJECTIVES)}-{draw.choice(_NOUNS)}"
    value = str(draw.randint(1_000_000, 9_999_999))

    def encode(text: str) -> NDArray[np.int64]:
        filled = text.format(key=hidden_key, value=value)
        return documents.tokenizer.encode(filled).astype(np.int64)

    introduction = begun(encode(_INTRODUCTION), documents.begin)
    needle = encode(_NEEDLE)
    question = encode(_QUESTION)
    answer = encode(" {value}.")
    room = length - len(introduction) - len(needle) - len(question) - len(answer)
    if room < 0:
        # Other keys and numbers may have a few tokens more.
        enough = -(-(length - room + 32) // 64) * 64
        raise ValueError(
            f"a needle and its question do not fit in {length} tokens; write {enough} or more"
        )
    text = text[draw.randrange(length) :][:room]
    before = round(depth * room)
    prompt = np.concatenate([introduction, text[:before], needle, text[before:], question])
    return Sample(
        prompt=prompt,
        answer=answer,
        references=(value,),
        new_tokens=len(answer),
        length=length,
        about={"length": length, "depth": depth},
    )


def by_cell(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the samples of each length and depth. "samples" is their number."""
    cells = defaultdict(list)
    for record in records:
        cells[record["length"], record["depth"]].append(record)
    return [
        {"length": length, "depth": depth, "samples": len(members), **means(members)}
        for (length, depth), members in sorted(cells.items())
    ]


def means(records: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of each of score, exact, correct and loss that the records have."""
    names = [name for name in ("score", "exact", "correct", "loss") if name in records[0]]
    return {name: float(np.mean([record[name] for record in records])) for name in names}
