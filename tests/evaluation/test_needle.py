"""Needle In A Haystack: samples are exact; answers, teacher-forced and generated, are those of a plain
forward on any mesh."""

import dataclasses
import itertools
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.distributed import on_one_rank, run_processes
from tests.evaluation.helpers import plain_decoder, plain_logits, scorer_of
from tests.runs import tiny_config, write_texts
from titan_sparse.data.documents import TokenizedTexts
from titan_sparse.data.tokenizer import ByteTokenizer
from titan_sparse.evaluation import answers
from titan_sparse.evaluation.answers import Sample, score_samples, string_match_all, text_of
from titan_sparse.evaluation.generation import generate
from titan_sparse.evaluation.haystack import Haystack
from titan_sparse.evaluation.needle import by_cell, depths, needle_samples
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.models.decoder import Decoder

TOKENIZER = ByteTokenizer()
HAYSTACK = Haystack(
    TokenizedTexts(["Call me Ishmael. " * 5, "", "It was the best of times. "], TOKENIZER),
    TOKENIZER,
)


def test_samples_have_exact_length_and_depth():
    lengths = [500, 900]
    samples = needle_samples(HAYSTACK, lengths, depths(3), 2, seed=1)
    about = [(sample.about["length"], sample.about["depth"]) for sample in samples]
    assert about == [cell for cell in itertools.product(lengths, (0.0, 0.5, 1.0)) for _ in range(2)]
    for sample in samples:
        assert len(sample.prompt) + len(sample.answer) == sample.length == sample.about["length"]
        text, (value,) = TOKENIZER.decode(sample.prompt), sample.references
        _, rest = text.split("afterwards.\n")
        before, after = rest.split(f" is: {value}.\n")
        before, _ = before.split("\nOne of the special magic numbers for ")
        after, question = after.split("\nWhat is the special magic number for ")
        assert TOKENIZER.decode(sample.answer) == f" {value}." and question.endswith("text is")
        whole = before + after
        assert len(before) == round(sample.about["depth"] * len(whole)) and len(whole) > 50
        assert whole in ("Call me Ishmael. " * 5 + "\nIt was the best of times. \n") * 20
    # Each has its own number.
    assert len({sample.references for sample in samples}) == len(samples)
    again = needle_samples(HAYSTACK, lengths, depths(3), 2, seed=1)
    other = needle_samples(HAYSTACK, lengths, depths(3), 2, seed=2)
    assert all((a.prompt == b.prompt).all() for a, b in zip(samples, again, strict=True))
    assert any((a.prompt != b.prompt).any() for a, b in zip(samples, other, strict=True))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="do not fit in 100 tokens; write 3.. or more"):
        needle_samples(HAYSTACK, [100], [0.5], 1, 0)
    with pytest.raises(ValueError, match="a depth of 50 is not a share"):
        needle_samples(HAYSTACK, [400], [50], 1, 0)
    with pytest.raises(ValueError, match="empty"):
        Haystack(TokenizedTexts(["", ""], TOKENIZER), TOKENIZER).tokens(0, 10)


def test_scores_are_shares_of_the_references():
    references = ("Alpha", "beta", "gamma", "delta")
    assert string_match_all("the ALPHA, and betas", references) == 0.5
    assert string_match_all("none", references) == 0
    assert text_of(TOKENIZER, np.array([104, 105, TOKENIZER.end_of_document, 106])) == "hi"


def test_an_answer_that_comes_a_token_late_scores_nothing(monkeypatch):
    """A model that repeats what it reads says the number, but with every token one place late."""
    alone = Mock()
    alone.get_world_size.return_value = 1
    alone.all_gather_object.side_effect = lambda gathered, own: gathered.__setitem__(0, own)
    monkeypatch.setattr(answers, "dist", alone)
    sample = _samples()[0]
    late = np.concatenate([sample.prompt[-1:], sample.answer[:-1]])
    almost = sample.answer.copy()
    almost[3] += 1
    for predicted, score in ((late, 0), (almost, 0), (sample.answer, 1)):
        answered = torch.ones(len(predicted)), torch.from_numpy(predicted)
        scorer = Mock(tokenizer=TOKENIZER, dp_size=1, own=enumerate)
        scorer.answer.return_value = answered
        (record,) = score_samples(scorer, [sample], generate=False)
        assert record["score"] == score
        if predicted is not almost:
            assert string_match_all(record["prediction"], sample.references) == 1


def test_cells_are_means():
    rest = {"exact": 0.0, "correct": 0.5, "loss": 2.0}
    records = [
        {"length": 8, "depth": depth, "score": score, **rest}
        for depth, score in ((1.0, 1.0), (0.0, 0.0), (1.0, 0.0))
    ]
    assert by_cell(records) == [
        {"length": 8, "depth": 0.0, "samples": 1, "score": 0.0, **rest},
        {"length": 8, "depth": 1.0, "samples": 2, "score": 0.5, **rest},
    ]


def _samples() -> list[Sample]:
    return needle_samples(HAYSTACK, [420, 471], [0.3], 2, seed=0)[:3]


def _scorer(folder, **settings) -> Scorer:
    config = tiny_config(folder, "run", attention__pattern="dense", **settings)
    scorer, _ = scorer_of(config)
    for parameter in scorer.model.parameters():
        parameter.data.mul_(3)  # far from uniform: else the same token for ever
    return scorer


def _forced(folder, cp: int) -> None:
    scorer = _scorer(folder, parallelism__cp=cp)
    records = score_samples(scorer, _samples(), generate=False)
    plain = plain_decoder(scorer.model)
    for sample, record in zip(_samples(), records, strict=True):
        logits = plain_logits(plain, np.concatenate([sample.prompt, sample.answer]))
        logits, answer = logits[len(sample.prompt) - 1 : -1], torch.from_numpy(sample.answer)
        predicted = logits.argmax(-1)
        assert record["loss"] == pytest.approx(F.cross_entropy(logits, answer).item(), rel=1e-9)
        assert record["prediction"] == TOKENIZER.decode(predicted.numpy())
        assert record["correct"] == (predicted == answer).double().mean().item()
        assert record["exact"] == 0
        assert (record["length"], record["depth"]) == (sample.length, 0.3)


def _generated(folder, cp: int) -> None:
    """With a cache as without one: each token by a forward over all before it."""
    scorer = _scorer(folder, parallelism__cp=cp)
    expected = on_one_rank(_continued, plain_decoder(scorer.model), _samples())
    samples = [
        dataclasses.replace(sample, references=(text, "no text"))
        for sample, text in zip(_samples(), expected)
    ]
    records = score_samples(scorer, samples, generate=True)
    assert [record["prediction"] for record in records] == expected
    assert [record["score"] for record in records] == [0.5] * len(samples)
    assert len(set(expected)) > 1


def _continued(plain: Decoder, samples: list[Sample]) -> list[str]:
    """What follows each prompt, each token by a forward over all before it."""
    texts = []
    for sample in samples:
        tokens = sample.prompt
        for _ in range(sample.new_tokens):
            tokens = np.append(tokens, plain_logits(plain, tokens)[-1].argmax().item())
        texts.append(text_of(TOKENIZER, tokens[len(sample.prompt) :]))
    return texts


def _windowed(folder) -> None:
    """With a sliding window and sinks, the generated answer is the most likely one by a forward with that mask."""
    scorer = _scorer(folder, attention__sliding_window=40, attention__window_sinks=3)
    prompt = _samples()[0].prompt
    (answer,) = generate(scorer, [prompt], 20)
    sample = Sample(prompt, answer, ("",), 20, len(prompt) + 20)
    (record,) = score_samples(scorer, [sample], generate=False)
    assert record["exact"] == 1 and len(set(answer.tolist())) > 1


def _on_two_ranks(folder) -> None:
    for cp in (1, 2):
        _forced(folder, cp)
        _generated(folder, cp)
    _windowed(folder)


def test_answers_are_those_of_a_plain_forward(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _on_two_ranks, tmp_path)
