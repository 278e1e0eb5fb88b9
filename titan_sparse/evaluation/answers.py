"""Prompts with a known answer, scored by one forward (teacher-forced) or by generating text."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.evaluation.generation import generate
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer: tokens, int64 [n]. references: strings that a right answer contains.
    new_tokens: how many may be generated. length: tokens to pad to, answer included. about: copied
    into the sample's record."""

    prompt: NDArray[np.int64]
    answer: NDArray[np.int64]
    references: tuple[str, ...]
    new_tokens: int
    length: int
    about: dict[str, Any] = field(default_factory=dict)

    def sequence(self) -> Sequence:
        """Prompt and answer, with labels for the answer's tokens alone."""
        tokens = np.concatenate([self.prompt, self.answer])
        labels = np.full(len(tokens), IGNORE_INDEX)
        # The last token of the prompt says the first one of the answer.
        labels[len(self.prompt) - 1 : -1] = self.answer
        return Sequence(tokens, labels)


def string_match_all(prediction: str, references: tuple[str, ...]) -> float:
    """Share of the references that the prediction contains, in upper or
    lower case (as in RULER)."""
    text = prediction.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def score_samples(scorer: Scorer, samples: list[Sample], generate: bool) -> list[dict[str, Any]]:
    """One record a sample, in order and the same on all ranks, which bring the same samples.

    A record holds the sample's `about`, "prediction" (text) and "score" (string_match_all).
    Teacher-forced also "loss" (mean cross-entropy of the answer's tokens), "correct" (share of them
    that are the most likely token) and "exact" (whether all are). Only right tokens count for the
    score then. Otherwise a model that repeats what it reads would find the answer, one token late.
    """
    # All ranks must generate as many tokens.
    new_tokens = max((sample.new_tokens for sample in samples), default=0)

    def record(number: int, sample: Sample | None) -> dict[str, Any]:
        if generate:
            result = _generated(scorer, sample, new_tokens)
        else:
            # The samples that go through together are padded to the longest of them.
            first = number - number % scorer.dp_size
            together = samples[first : first + scorer.dp_size]
            result = _forced(scorer, sample, max(other.length for other in together))
        if sample is None:
            return {}
        text = result.pop("right_text", result["prediction"])
        return {**sample.about, "score": string_match_all(text, sample.references), **result}

    return scorer.results(samples, record)


def _forced(scorer: Scorer, sample: Sample | None, length: int) -> dict[str, Any]:
    """The results of one forward over prompt and answer. sample: None takes part in the collectives
    only."""
    # The answer's last token is read too, as the document has that length then: shorter ones may be
    # dense.
    sequence = None if sample is None else sample.sequence()
    ((losses, predicted),) = scorer.answers([sequence], length)
    if sample is None:
        return {}
    found = compared(scorer.tokenizer, sample.answer, predicted.cpu().numpy())
    return {**found, "loss": losses.mean().item()}


def compared(
    tokenizer: Tokenizer, answer: NDArray[np.int64], predicted: NDArray[np.int64]
) -> dict[str, Any]:
    """The record of predicted tokens, int64 [n], and "right_text": each run of right ones
    as a line."""
    right = predicted == answer
    # Where runs begin, and where they end.
    edges = np.flatnonzero(np.diff(right, prepend=False, append=False)).reshape(-1, 2)
    return {
        "prediction": tokenizer.decode(predicted),
        "right_text": "\n".join(tokenizer.decode(answer[begin:end]) for begin, end in edges),
        "correct": float(right.mean()),
        "exact": float(right.all()),
    }


def _generated(scorer: Scorer, sample: Sample | None, new_tokens: int) -> dict[str, Any]:
    """The text that the model generates. sample: None takes part in the collectives only."""
    prompt = np.array([scorer.tokenizer.end_of_document]) if sample is None else sample.prompt
    most = 1 if sample is None else sample.new_tokens

    def stop(tokens: NDArray[np.int64]) -> bool:
        return len(tokens) == most or int(tokens[-1]) in scorer.ends

    (ids,) = generate(scorer, [prompt], new_tokens, stop)
    if sample is None:
        return {}
    ends = np.flatnonzero(np.isin(ids, list(scorer.ends)))
    return {"prediction": scorer.tokenizer.decode(ids[: ends[0]] if len(ends) else ids)}
