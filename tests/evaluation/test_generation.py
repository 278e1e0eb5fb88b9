"""generate(): the tokens of one process on any ranks, and those of transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.evaluation.helpers import scorer_of
from tests.models.transformers_models import save_model
from tests.runs import tiny_config, write_texts
from titan_sparse.config import Config
from titan_sparse.data.tokenizer import ByteTokenizer
from titan_sparse.evaluation.generation import Sampling, TokenChoice, generate
from titan_sparse.evaluation.load import build_scorer
from titan_sparse.evaluation.scorer import Scorer

NEW = 12


def _prompts(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, 250, length) for length in lengths]


def _scorer(folder: Path, cp: int, **settings) -> Scorer:
    config = tiny_config(folder, "run", training__dtype="float32", parallelism__cp=cp, **settings)
    scorer, _ = scorer_of(config)
    with torch.no_grad():
        for parameter in scorer.model.parameters():
            parameter.mul_(3)  # far from uniform: else the same token for ever
    return scorer


def _tokens(texts: list[np.ndarray]) -> list[list[int]]:
    return [text.tolist() for text in texts]


WAYS = [
    {"attention__pattern": "dense", "attention__layout": "zigzag"},
    {"attention__layout": "striped"},
    {"attention__layout": "balanced", "attention__schedule": "group_cast"},
    {
        "attention__pattern": "dense",
        "attention__sliding_window": 40,
        "attention__window_sinks": 3,
        "attention__schedule": "all_gather",
    },
    {"attention__pattern": "dense", "attention__sliding_window": 7},
]
"""Patterns, layouts, schedules and windows. Without a pattern: vertical_slash."""


def _ranks_write_what_one_writes(folder: Path) -> None:
    # Lengths from one token to several blocks of each rank; windows end inside the new tokens.
    prompts = _prompts(1, 171, 300, 50)
    for settings in WAYS:
        one = {key: value for key, value in settings.items() if "schedule" not in key}
        expected = generate(_scorer(folder, 1, **one), prompts, NEW)
        found = generate(_scorer(folder, dist.get_world_size(), **settings), prompts, NEW)
        assert _tokens(found) == _tokens(expected), settings
        assert len({tuple(text) for text in _tokens(found)}) == len(prompts)
        assert all(len(text) == NEW for text in found)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_write_what_one_writes(tmp_path, ranks):
    write_texts(tmp_path / "texts")
    run_processes(ranks, _ranks_write_what_one_writes, tmp_path)


def _prompts_do_not_meet(folder: Path) -> None:
    """Each prompt of a batch gets the tokens that it gets alone. Data-parallel ranks have prompts of their own."""
    scorer = _scorer(folder, 1, attention__pattern="dense")
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


def _drawn(folder: Path) -> None:
    """A seed draws the same tokens on any ranks, and different seeds differ. A small top_p is greedy."""
    prompts = _prompts(40, 70)
    texts = {}
    for cp in (1, 2):
        scorer = _scorer(folder, cp, attention__pattern="dense")
        for sampling in (
            Sampling(),
            Sampling(3.0, seed=1),
            Sampling(3.0, seed=2),
            Sampling(3.0, top_p=0.8, seed=1),
            Sampling(3.0, top_p=1e-9, seed=1),
        ):
            texts[cp, sampling] = _tokens(generate(scorer, prompts, NEW, sampling=sampling))
    assert all(texts[1, sampling] == texts[2, sampling] for _, sampling in texts)
    assert texts[1, Sampling(3.0, top_p=1e-9, seed=1)] == texts[1, Sampling()]
    written = {str(text) for text in texts.values()}
    assert len(written) == 4


def _on_two_ranks(folder: Path) -> None:
    _prompts_do_not_meet(folder)
    _drawn(folder)


def test_batches_stops_and_seeds(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _on_two_ranks, tmp_path)


def test_draws_follow_the_softmax():
    """Of 20,000 rows with the same logits; with top_p only the tokens that reach it."""
    shares = torch.tensor([0.5, 0.05, 0.3, 0.15])
    logits = shares.log().expand(20_000, 4)
    one = type("OneRank", (), {"all_gather": staticmethod(lambda tokens: tokens[None])})
    drawn = TokenChoice(Sampling(1.0), one)(logits)
    found = drawn.bincount(minlength=4) / len(drawn)
    torch.testing.assert_close(found, shares, atol=0.02, rtol=0)
    drawn = TokenChoice(Sampling(1.0, top_p=0.7), one)(logits)
    found = drawn.bincount(minlength=4) / len(drawn)
    expected = torch.tensor([0.5 / 0.8, 0, 0.3 / 0.8, 0])
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    # A temperature of 1/2 squares the shares.
    drawn = TokenChoice(Sampling(0.5), one)(logits)
    found = drawn.bincount(minlength=4) / len(drawn)
    torch.testing.assert_close(found, shares**2 / (shares**2).sum(), atol=0.02, rtol=0)


def test_what_cannot_be_drawn_is_refused():
    for wrong, reason in (
        ({"temperature": -1.0}, "temperature = -1.0 is negative; write 0 or more"),
        ({"top_p": 0.0}, r"top_p = 0.0 is not in \(0, 1\]"),
    ):
        with pytest.raises(ValueError, match=reason):
            Sampling(**wrong)
    for prompts in ([], [np.array([1]), np.array([], dtype=np.int64)]):
        with pytest.raises(ValueError, match="write a prompt of one token or more"):
            generate(None, prompts, 3)


FAMILIES = {"llama": {}, "mistral": {}, "gemma3": {}, "gpt_oss": {}, "granite": {}, "qwen3_moe": {}}
"""GQA; windows in all layers and in some; sinks; scaled logits; experts."""


def _config_of(folder: Path, cp: int) -> Config:
    config = Config()
    config.model.initial_hf = str(folder)
    config.training.dtype = "float32"
    config.training.device = "cpu"
    config.attention.pattern = "dense"
    config.attention.block_size = 16
    config.attention.layout = "zigzag"
    config.parallelism.cp = cp
    return config


def _as_transformers(folder: Path, prompts: list[np.ndarray], expected: dict) -> None:
    cp = dist.get_world_size()
    for name, texts in expected.items():
        scorer = build_scorer(_config_of(folder / name, cp), None, ByteTokenizer())
        assert _tokens(generate(scorer, prompts, NEW)) == texts, name


@torch.no_grad()
def _weigh_sinks(model: torch.nn.Module) -> None:
    """Give the sinks most of the softmax. Otherwise tokens would be the same without them."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.add_(6)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tokens_of_transformers(tmp_path, ranks):
    """Models of ours (llama) and those that run through transformers' code, on the same weights."""
    pytest.importorskip("transformers")
    prompts = _prompts(45, 70)
    expected = {}
    for name in FAMILIES:
        model = save_model(tmp_path / name, name)
        _weigh_sinks(model)
        model.save_pretrained(tmp_path / name)
        model.generation_config.eos_token_id = None
        expected[name] = []
        for prompt in prompts:
            ids = torch.from_numpy(prompt)[None]
            out = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            expected[name].append(out[0, len(prompt) :].tolist())
    run_processes(ranks, _as_transformers, tmp_path, prompts, expected)
