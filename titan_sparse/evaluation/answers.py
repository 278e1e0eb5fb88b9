"""Prompts with a known answer: scored by one forward (teacher-forced) or by what the model generates."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.evaluation.generation import greedy
from titan_sparse.evaluation.scorer import Scorer, Sequence


@dataclass(frozen=True)
class Sample:
    """prompt, answer: tokens, int64 [n] and [m]. references: strings that a right answer holds. about: what the sample is,
    copied into its record. new_tokens: how many tokens may be generated. length: tokens of the longest sample beside
    which it is scored, answer included: all are padded to it."""

    prompt: NDArray[np.int64]
    answer: NDArray[np.int64]
    references: tuple[str, ...]
    new_tokens: int
    length: int
    about: dict[str, Any] = field(default_factory=dict)


def string_match_all(prediction: str, references: tuple[str, ...]) -> float:
    """Share of the references that the prediction holds, whatever the case: RULER's scorer of all tasks but QA."""
    return sum(reference.lower() in prediction.lower() for reference in references) / len(
        references
    )


def score_samples(scorer: Scorer, samples: list[Sample], generate: bool) -> list[dict[str, Any]]:
    """One record a sample, in order and the same on all ranks: its `about`, and "prediction" (text), "score"
    (string_match_all). Teacher-forced also "loss" (mean cross-entropy of the answer's tokens), "correct" (share of them
    that are the most likely token) and "exact" (whether all are): the prediction is made of the most likely tokens, each
    after the right ones before it. Collective: all ranks bring the same samples.

    Raises ValueError for generation over several context-parallel ranks.
    """
    answer = _generated if generate else _forced
    records = {}
    # Ranks must pad to the same length: a group of samples that goes through together is padded to its longest.
    lengths = [
        max(sample.length for sample in samples[start : start + scorer.dp_size])
        for start in range(0, len(samples), scorer.dp_size)
    ]
    new_tokens = max((sample.new_tokens for sample in samples), default=0)
    for number, sample in scorer.own(samples):
        found = answer(scorer, sample, lengths[number // scorer.dp_size], new_tokens)
        if sample is not None:
            score = string_match_all(found["prediction"], sample.references)
            records[number] = {**sample.about, "score": score, **found}
    scorer.release()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        gathered, records
    )  # ranks of a context-parallel group bring the same records
    merged = {number: record for part in gathered for number, record in part.items()}
    return [merged[number] for number in sorted(merged)]


def _forced(scorer: Scorer, sample: Sample | None, length: int, _) -> dict[str, Any]:
    sequence = None if sample is None else _sequence(sample)
    losses, predicted = scorer.answer(sequence, length)
    if sample is None:
        return {}
    predicted = predicted.cpu().numpy()
    right = predicted == sample.answer
    return {
        "prediction": scorer.tokenizer.decode(predicted),
        "loss": losses.mean().item(),
        "correct": float(right.mean()),
        "exact": float(right.all()),
    }


def _sequence(sample: Sample) -> Sequence:
    """Prompt and answer, with labels for the answer's tokens alone; its last token is not read."""
    tokens = np.concatenate([sample.prompt, sample.answer[:-1]])
    labels = np.full(len(tokens), IGNORED_LABEL)
    labels[len(sample.prompt) - 1 :] = sample.answer
    return Sequence(tokens, labels)


def _generated(scorer: Scorer, sample: Sample | None, _, new_tokens: int) -> dict[str, Any]:
    prompt = np.array([scorer.tokenizer.end_of_document]) if sample is None else sample.prompt
    found = greedy(scorer, prompt, new_tokens)
    return (
        {"prediction": text_of(scorer.tokenizer, found[: sample.new_tokens])}
        if sample is not None
        else {}
    )


def text_of(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> str:
    """The text of generated tokens up to the end of the document."""
    ends = np.flatnonzero(ids == tokenizer.end_of_document)
    return tokenizer.decode(ids[: ends[0]] if len(ends) else ids)
