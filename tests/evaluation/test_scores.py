"""Loss by position, needles, and generated text are those of a plain forward on any mesh."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed import on_one_rank, run_processes
from tests.models.transformers_models import save_model
from tests.runs import TINY, tiny_config
from titan_sparse.config import Data
from titan_sparse.data.documents import Documents, TokenizedTexts, open_documents
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.tokenizer import ByteTokenizer, Encoded
from titan_sparse.evaluation.answers import Sample, score_samples, string_match_all
from titan_sparse.evaluation.generation import generate
from titan_sparse.evaluation.needle import by_cell, depths, haystack, needle_samples
from titan_sparse.evaluation.position import first_windows, position_loss, windows
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.models.decoder import Decoder
from titan_sparse.training.load import build_scorer, find_config
from titan_sparse.training.trainer import Trainer

LENGTH, BUCKETS, WINDOWS, NEW = 150, 4, 9, 12
TOKENIZER = ByteTokenizer()
HAYSTACK = TokenizedTexts(["Call me Ishmael. " * 5, "", "It was the best of times. "], TOKENIZER)


@pytest.mark.parametrize("stride", [7, 3, 1])
def test_windows_score_each_token_once_with_context(stride):
    texts = [np.arange(n) + 100 * n for n in (1, 2, 7, 8, 23)]
    seen = []
    for tokens, labels in windows(map(Encoded, texts), 7, stride):
        assert len(tokens) == len(labels) <= 7
        for place in np.flatnonzero(labels != -100):
            # The next token of the same document. A later window adds only
            # tokens with long context.
            assert labels[place] == tokens[place] + 1
            assert place >= 7 - stride or tokens[0] % 100 == 0
            seen.append(labels[place])
    assert sorted(seen) == sorted(token for text in texts for token in text[1:])


def test_windows_score_only_what_is_learned_of_a_chat():
    """Of tokens 0 to 19, only 8 to 11 and 19 are scored. The window in between
    has nothing to score."""
    learned = np.isin(np.arange(20), [8, 9, 10, 11, 19])
    found = list(windows([Encoded(np.arange(20), learned)], 5, 5))
    assert [window.tokens.tolist() for window in found] == [
        [5, 6, 7, 8, 9],
        [10, 11, 12, 13, 14],
        [15, 16, 17, 18, 19],
    ]
    assert [window.labels.tolist() for window in found] == [
        [-100, -100, 8, 9, 10],
        [11, -100, -100, -100, -100],
        [-100, -100, -100, 19, -100],
    ]


def test_what_cannot_be_measured_is_refused():
    for stride in (0, 8):
        with pytest.raises(ValueError, match="write 1 to 7"):
            next(windows([Encoded(np.arange(9))], 7, stride))
    with pytest.raises(ValueError, match="150 positions cannot be cut into 151 buckets"):
        position_loss(None, [], 150, 151)
    for seed in range(20):
        with pytest.raises(
            ValueError, match="do not fit in 100 tokens; write (384|448) or more"
        ) as error:
            needle_samples(HAYSTACK, [100], [0.5], 1, seed)
        # As advised, whatever the keys and numbers are.
        [advised] = re.findall(r"write (\d+)", str(error.value))
        needle_samples(HAYSTACK, [int(advised)], [0.5], 50, seed)
    with pytest.raises(ValueError, match="empty"):
        haystack(TokenizedTexts(["", ""], TOKENIZER), 10)
    for prompts in ([], [np.array([1]), np.array([], dtype=np.int64)]):
        with pytest.raises(ValueError, match="write a prompt of one token or more"):
            generate(None, prompts, 3)


def test_tokens_of_another_vocabulary_are_refused(texts):
    prepare(Recipe(str(texts / "texts"), shard_rows=5), str(texts / "out"))
    tokens = np.memmap(texts / "out/shard_00000.bin", "<u2", "r+")
    tokens[3] = 258
    documents = open_documents(Data(source=str(texts / "out")), TOKENIZER)
    for read in (
        lambda: first_windows(documents, 50, LENGTH, 100, 30),
        lambda: haystack(documents, 9),
    ):
        with pytest.raises(ValueError, match="holds the token 258, of a vocabulary of 258; copy"):
            read()


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


def test_scores_are_shares_of_the_references():
    references = ("Alpha", "beta", "gamma", "delta")
    assert string_match_all("the ALPHA, and betas", references) == 0.5
    assert string_match_all("none", references) == 0


class Told:
    """A scorer whose model answers by a rule: (tokens, labels) -> predicted tokens [S]."""

    dp_size = 1
    tokenizer = TOKENIZER

    def __init__(self, rule) -> None:
        self.rule = rule
        self.seen = []

    def results(self, samples, record):
        return [record(number, sample) for number, sample in enumerate(samples)]

    def answers(self, sequences, length):
        for tokens, labels in sequences:
            self.seen.append((tokens, labels))
            predicted = self.rule(tokens, labels)[labels != -100]
            yield torch.zeros(len(predicted)), torch.from_numpy(predicted)


def test_a_needle_is_scored_by_the_tokens_of_its_answer():
    """By the token after each place. A number that is repeated one token late, or has one wrong
    digit, scores nothing."""
    samples = _samples()
    rules = {
        "knows": (lambda tokens, labels: labels, 1),
        "almost": (lambda tokens, labels: np.append(labels[:-4], labels[-4:] + [1, 0, 0, 0]), 0),
        "repeats": (lambda tokens, labels: tokens, 0),
        "reads on": (lambda tokens, labels: np.append(tokens[1:], 0), None),
        "nothing": (lambda tokens, labels: np.zeros_like(tokens), 0),
    }
    for name, (rule, score) in rules.items():
        scorer = Told(rule)
        records = score_samples(scorer, samples, generate=False)
        for sample, record, (tokens, labels) in zip(samples, records, scorer.seen, strict=True):
            whole = [*sample.prompt.tolist(), *sample.answer.tolist()]
            asked = len(sample.prompt) - 1
            # The document is as long as it was asked for.
            assert tokens.tolist() == whole and len(tokens) == sample.length
            assert labels.tolist() == [-100] * asked + whole[asked + 1 :] + [-100]
            predicted = rule(tokens, labels)[asked:-1].tolist()
            answer = sample.answer.tolist()
            right = [a == b for a, b in zip(predicted, answer, strict=True)]
            assert record["correct"] == pytest.approx(sum(right) / len(right)), name
            assert record["exact"] == all(right), name
            assert record["prediction"] == TOKENIZER.decode(predicted), name
            assert score is None or record["score"] == score, name


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


def _scorer(folder: Path, **settings) -> tuple[Scorer, Documents]:
    """Of a run's model, far from uniform (else it writes one token for ever), and its documents."""
    settings = {"attention__pattern": "dense", "training__dtype": "float64", **settings}
    trainer = Trainer(tiny_config(folder, "run", **settings))
    for parameter in trainer.scorer.model.parameters():
        parameter.data.mul_(3)
    return trainer.scorer, trainer.loader.streams[0].documents


def plain_decoder(model: Decoder) -> Decoder:
    """The tiny model's weights in a decoder of causal attention by torch, not
    sharded. Collective."""

    def attend(q, k, v, _):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    plain = Decoder(TINY, attend).double()
    plain.load_state_dict({name: x.full_tensor() for name, x in model.state_dict().items()})
    return plain


@torch.no_grad()
def plain_logits(plain: Decoder, tokens: np.ndarray) -> torch.Tensor:
    """[S, V] of a plain_decoder(), float64."""
    positions = torch.arange(len(tokens))
    [logits] = plain(torch.from_numpy(tokens)[None], positions[None], None)
    return logits


def _position_loss(scorer: Scorer, documents: Documents) -> None:
    """Of an odd number of windows over two ranks, or with two ranks that share each window."""
    plain = plain_decoder(scorer.model)
    for stride in (LENGTH, 40):
        found = first_windows(documents, 0, LENGTH, stride, WINDOWS)
        sums, counts = np.zeros(BUCKETS), np.zeros(BUCKETS, dtype=int)
        for tokens, labels in found:
            logits = plain_logits(plain, tokens)
            losses = F.cross_entropy(logits, torch.from_numpy(labels), reduction="none")
            for place in np.flatnonzero(labels != -100):
                sums[int(place / LENGTH * BUCKETS)] += losses[place]
                counts[int(place / LENGTH * BUCKETS)] += 1
        got = position_loss(scorer, found, LENGTH, BUCKETS)
        buckets = got["buckets"]
        assert [part["tokens"] for part in buckets] == counts.tolist()
        losses = [part["loss"] for part in buckets]
        np.testing.assert_allclose(losses, sums / counts, rtol=1e-9)
        assert got["tokens"] == counts.sum()
        assert got["loss"] == pytest.approx(sums.sum() / counts.sum(), rel=1e-9)
        assert got["perplexity"] == pytest.approx(np.exp(got["loss"]))
        assert [part["start"] for part in buckets] == [0, 38, 75, 113]
        assert [part["stop"] for part in buckets] == [38, 75, 113, 150]


def _uneven(scorer: Scorer, documents: Documents) -> None:
    """Fewer windows than ranks, and a position range without tokens."""
    text = documents[0].tokens[:30].astype(np.int64)
    found = list(windows([Encoded(text)], LENGTH, LENGTH))
    got = position_loss(scorer, found, LENGTH, BUCKETS)
    first, second, *_ = got["buckets"]
    assert got["tokens"] == 29 and first["loss"] == pytest.approx(got["loss"])
    assert second == {"start": 38, "stop": 75, "tokens": 0, "loss": None, "perplexity": None}
    # A number that is none has no perplexity, and a huge one an infinite one.
    for loss in (math.nan, 1e6):
        scored = torch.tensor([loss]), torch.tensor([0])
        with mock.patch.object(scorer, "token_losses", return_value=scored):
            got = position_loss(scorer, found, LENGTH, BUCKETS)
        assert repr(got["perplexity"]) == ("nan" if math.isnan(loss) else "inf")


def _forced(scorer: Scorer) -> None:
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


def _generated(scorer: Scorer) -> None:
    """With a cache as without one: each token by a forward over all before it."""
    expected = on_one_rank(_continued, plain_decoder(scorer.model), _samples())
    samples = [
        replace(sample, references=(text, "no text")) for sample, text in zip(_samples(), expected)
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
        written = tokens[len(sample.prompt) :].tolist()
        end = TOKENIZER.end_of_document
        texts.append(TOKENIZER.decode(written[: written.index(end)] if end in written else written))
    return texts


def _windowed(folder: Path) -> None:
    """With a window and sinks, the generated answer is the most likely one by a forward."""
    settings = {"attention__sliding_window": 40, "attention__window_sinks": 3}
    scorer, _ = _scorer(folder, **settings)
    prompt = _samples()[0].prompt
    (answer,) = generate(scorer, [prompt], 20)
    sample = Sample(prompt, answer, ("",), 20, len(prompt) + 20)
    (record,) = score_samples(scorer, [sample], generate=False)
    assert record["exact"] == 1 and len(set(answer.tolist())) > 1


def _prompts(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, 250, length) for length in lengths]


def _tokens(texts: list[np.ndarray]) -> list[list[int]]:
    return [text.tolist() for text in texts]


WAYS = [
    {
        "attention__pattern": "vertical_slash",
        "attention__layout": "balanced",
        "attention__schedule": "group_cast",
    },
    {
        "attention__layout": "zigzag",
        "attention__sliding_window": 40,
        "attention__window_sinks": 3,
        "attention__schedule": "all_gather",
    },
]
"""Patterns, layouts, schedules and windows."""


def _ranks_write_what_one_writes(folder: Path) -> None:
    # Lengths from one token to several blocks of each rank; windows end inside the new tokens.
    prompts = _prompts(1, 171, 300, 50)
    for settings in WAYS:
        one = {key: value for key, value in settings.items() if "schedule" not in key}
        expected = generate(_scorer(folder, **one)[0], prompts, NEW)
        found = generate(_scorer(folder, parallelism__cp=2, **settings)[0], prompts, NEW)
        assert _tokens(found) == _tokens(expected), settings
        assert len({tuple(text) for text in _tokens(found)}) == len(prompts)
        assert all(len(text) == NEW for text in found)


def _prompts_do_not_meet(folder: Path) -> None:
    """Each prompt of a batch gets the tokens that it gets alone. Data-parallel ranks have
    prompts of their own."""
    scorer, _ = _scorer(folder)
    prompts = _prompts(90, 1, 33)
    together = generate(scorer, prompts, NEW)
    for prompt, text in zip(prompts, together, strict=True):
        assert generate(scorer, [prompt], NEW)[0].tolist() == text.tolist()

    # The second rank stops much later than the first one.
    mine = together[dist.get_rank()].tolist()
    last = [1, 7][dist.get_rank()]
    (text,) = generate(
        scorer, [prompts[dist.get_rank()]], NEW, stop=lambda tokens: len(tokens) == last
    )
    assert text.tolist() == mine[:last]


FAMILY = "gpt_oss"
"""Windows in some layers, sinks, and experts."""


def _on_two_ranks(folder: Path, prompts: list[np.ndarray], expected: list) -> None:
    balanced = {"attention__layout": "balanced", "attention__schedule": "group_cast"}
    for settings in ({}, {"parallelism__cp": 2, **balanced}):
        scorer, documents = _scorer(folder, **settings)
        _position_loss(scorer, documents)
        _uneven(scorer, documents)
        _forced(scorer)
        _generated(scorer)
    _windowed(folder)
    _ranks_write_what_one_writes(folder)
    _prompts_do_not_meet(folder)
    settings = {
        "model__flavour": "debug",
        "model__initial_hf": str(folder / FAMILY),
        "training__dtype": "float32",
        "attention__pattern": "dense",
        "attention__layout": "zigzag",
        "parallelism__cp": 2,
    }
    scorer = build_scorer(tiny_config(folder, "", **settings), None, TOKENIZER)
    assert _tokens(generate(scorer, prompts, NEW)) == expected


def test_two_ranks_measure_and_write_what_a_plain_forward_and_transformers_do(texts):
    prompts = _prompts(45, 70)
    model = save_model(texts / FAMILY, FAMILY)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            # Most of the softmax. Otherwise tokens would be the same without them.
            parameter.data.add_(6)
    model.save_pretrained(texts / FAMILY)
    model.generation_config.eos_token_id = None
    expected = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt)[None]
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    run_processes(2, _on_two_ranks, texts, prompts, expected)


def test_a_checkpoint_has_a_configuration_of_its_own(tmp_path):
    """Also where a resumed run has another one. Nothing else is looked at."""
    run = tmp_path / "outputs/run"
    step = run / "checkpoint/step-2"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    (tmp_path / "config.toml").touch()
    with pytest.raises(ValueError, match="outputs/run has no config.toml; copy that of the run"):
        find_config(str(run))
    (run / "config.toml").touch()
    with pytest.raises(ValueError, match="step-2 has no config.toml; copy that of the run"):
        find_config(str(step))
    (step / "config.toml").touch()
    for folder in (run, step):
        assert find_config(str(folder)) == str(folder / "config.toml")
