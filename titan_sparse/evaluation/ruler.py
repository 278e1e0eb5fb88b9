"""RULER (arXiv 2404.06654): prompts of an exact length's size, scored by string_match_all as there."""

import random
from collections import defaultdict
from typing import Any

import numpy as np

from titan_sparse.evaluation.answers import Sample
from titan_sparse.evaluation.haystack import Haystack
from titan_sparse.evaluation.needle import means
from titan_sparse.evaluation.ruler_tasks import TASKS, Prompt

__all__ = ["TASKS", "by_task", "ruler_samples"]


def ruler_samples(
    haystack: Haystack, tasks: list[str], lengths: list[int], samples: int, seed: int
) -> list[Sample]:
    """`samples` prompts for each task (of TASKS) and length: as many units as fit, the answer's tokens included.

    Raises ValueError for a length that does not hold the task, and where its words are not installed.
    """
    return [
        sample
        for task in tasks
        for length in lengths
        for sample in _samples(haystack, task, length, samples, seed)
    ]


def _samples(haystack: Haystack, task: str, length: int, samples: int, seed: int) -> list[Sample]:
    room = length - TASKS[task].new_tokens
    units = _fitting(haystack, task, room)
    return [
        _sample(haystack, task, length, units, f"ruler {seed} {task} {length} {number}")
        for number in range(samples)
    ]


def _build(haystack: Haystack, task: str, units: int, room: int, seed: str) -> tuple[Prompt, int]:
    """A prompt and its tokens, with those of the answer that new_tokens has no room for."""
    prompt = TASKS[task].build(units, room, random.Random(seed), haystack)
    spare = max(0, len(haystack.tokenizer.encode(prompt.answer)) - TASKS[task].new_tokens)
    return prompt, len(haystack.tokenizer.encode(prompt.text)) + spare


def _fitting(haystack: Haystack, task: str, room: int) -> int:
    """The most units whose prompt has at most `room` tokens: doubled until it does not fit, then by bisection."""
    low = TASKS[task].least
    if _build(haystack, task, low, room, "size")[1] > room:
        needed = _build(haystack, task, low, room, "size")[1] + TASKS[task].new_tokens
        raise ValueError(
            f"{task} does not fit in {room + TASKS[task].new_tokens} tokens; write {needed} or more"
        )
    high = 2 * low
    while _build(haystack, task, high, room, "size")[1] <= room:
        low, high = high, 2 * high
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        low, high = (
            (middle, high)
            if _build(haystack, task, middle, room, "size")[1] <= room
            else (low, middle)
        )
    return low


def _sample(haystack: Haystack, task: str, length: int, units: int, seed: str) -> Sample:
    """With fewer units where these draws happen to be longer than those that were measured."""
    room, least = length - TASKS[task].new_tokens, TASKS[task].least
    prompt, tokens = _build(haystack, task, units, room, seed)
    while tokens > room and units > least:
        units = max(least, units - max(1, units // 100))
        prompt, tokens = _build(haystack, task, units, room, seed)
    if tokens > room:
        raise ValueError(
            f"{task} does not fit in {length} tokens; write {length + tokens - room} or more"
        )
    encode = haystack.tokenizer.encode
    answer = encode(prompt.answer).astype(np.int64)
    return Sample(
        encode(prompt.text).astype(np.int64),
        answer,
        prompt.references,
        max(TASKS[task].new_tokens, len(answer)),
        length,
        {"task": task, "length": length},
    )


def by_task(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each task and length the means over its samples; "score" in percent, as RULER has it."""
    found = defaultdict(list)
    for record in records:
        found[record["task"], record["length"]].append(record)
    rows = [
        {"task": task, "length": length, "samples": len(part), **means(part)}
        for (task, length), part in found.items()
    ]
    return [{**row, "score": round(100 * row["score"], 2)} for row in rows]
