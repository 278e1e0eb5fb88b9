"""RULER (arXiv 2404.06654): prompts that fill given lengths, scored by string_match_all as there."""

import itertools
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
    """`samples` prompts for each task (of TASKS) and length in tokens: as many units as fit.

    Lengths include the answer. Raises ValueError for a length that does not hold the task, and where
    its words are not installed.
    """
    prompts = []
    for task, length in itertools.product(tasks, lengths):
        units = _fitting(haystack, task, length - TASKS[task].new_tokens)
        for number in range(samples):
            name = f"ruler {seed} {task} {length} {number}"
            prompts.append(_sample(haystack, task, length, units, name))
    return prompts


def _build(haystack: Haystack, task: str, units: int, room: int, seed: str) -> tuple[Prompt, int]:
    """A prompt, and how many tokens it takes.

    Tokens of the answer count as far as new_tokens has no room for them.
    """
    prompt = TASKS[task].build(units, room, random.Random(seed), haystack)
    encode = haystack.tokenizer.encode
    beyond = max(0, len(encode(prompt.answer)) - TASKS[task].new_tokens)
    return prompt, len(encode(prompt.text)) + beyond


def _fitting(haystack: Haystack, task: str, room: int) -> int:
    """The most units whose prompt has at most `room` tokens."""

    def tokens(units: int) -> int:
        return _build(haystack, task, units, room, "size")[1]

    low = TASKS[task].least
    least_tokens = tokens(low)
    if least_tokens > room:
        new_tokens = TASKS[task].new_tokens
        raise ValueError(
            f"{task} does not fit in {room + new_tokens} tokens; write {least_tokens + new_tokens} or more"
        )
    # Doubled until it does not fit, then by bisection, to half a percent.
    high = 2 * low
    while tokens(high) <= room:
        low = high
        high = 2 * high
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        if tokens(middle) <= room:
            low = middle
        else:
            high = middle
    return low


def _sample(haystack: Haystack, task: str, length: int, units: int, seed: str) -> Sample:
    """A prompt of so many units; of fewer where its draws are longer than those that were measured."""
    room = length - TASKS[task].new_tokens
    least = TASKS[task].least
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
        prompt=encode(prompt.text).astype(np.int64),
        answer=answer,
        references=prompt.references,
        new_tokens=max(TASKS[task].new_tokens, len(answer)),
        length=length,
        about={"task": task, "length": length},
    )


def by_task(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each task and length the means over its samples; "score" in percent, as RULER has it."""
    groups = defaultdict(list)
    for record in records:
        groups[record["task"], record["length"]].append(record)
    rows = []
    for (task, length), members in groups.items():
        row = {"task": task, "length": length, "samples": len(members), **means(members)}
        row["score"] = round(100 * row["score"], 2)
        rows.append(row)
    return rows
