"""attention_recompute = -1: as much of attention is computed again as memory requires."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.config import Config
from titan_sparse.estimate.memory import peak_gib
from titan_sparse.estimate.step import step_of
from titan_sparse.from_config import build_pattern
from titan_sparse.models.flavours import resolve
from titan_sparse.trainer import Trainer
from titan_sparse.training import setup
from titan_sparse.training.setup import choose_recompute, recomputed_share

SETTINGS = {
    "training__steps": 1,
    "training__seq_len": 640,
    "attention__pattern": "dense",
    "activation_checkpoint__attention_recompute": -1.0,
}
USED_SHARE = 0.9
"""Of the free memory; docs/training.md."""


def test_recomputes_no_more_than_the_memory_requires():
    shares = []

    def peak_gib(share: float) -> float:
        shares.append(share)
        return 10 - 8 * share

    for free, chosen in ((10, 0), (6, 0.5), (5.9, 0.5625), (1, 1)):
        assert choose_recompute(peak_gib, free) == chosen
    assert max(shares) == 15 / 16  # 1 is the last resort, whatever it needs


def test_a_run_chooses_by_its_memory(tmp_path, monkeypatch):
    """Free memory for the estimated peak with half of attention recomputed."""
    write_texts(tmp_path / "texts")
    config = tiny_config(tmp_path, "run", **SETTINGS)
    config.activation_checkpoint.attention_recompute = 0.5
    model = resolve(**vars(config.model))
    peak = peak_gib(step_of(config, model, build_pattern(config.attention), "eager", 1, 1))
    config.activation_checkpoint.attention_recompute = -1.0
    monkeypatch.setattr(setup, "free_gib", lambda device: 1.001 * peak / USED_SHARE)
    assert Trainer(config).recomputed == 0.5


def test_what_was_chosen_is_computed_again(tmp_path, monkeypatch):
    """In a step of the run, and without a change in its numbers."""
    calls = []

    def counted(function: Callable) -> Callable:
        def call(*args, **kwargs):
            calls.append(function)
            return function(*args, **kwargs)

        return call

    eager = BACKENDS["eager"]
    for name in ("forward", "dense_forward"):
        monkeypatch.setattr(eager, name, counted(getattr(eager, name)))
    write_texts(tmp_path / "texts")
    losses = {}
    forwards = {}
    for name, free in (("plenty", 1e9), ("scarce", 1e-9)):
        calls.clear()
        monkeypatch.setattr(setup, "free_gib", lambda device, free=free: free)
        config = tiny_config(tmp_path, name, **SETTINGS)
        layers = train(config).model_config.layers
        [line] = metrics_of(config)
        losses[name] = line["loss"], line["grad_norm"]
        forwards[name] = len(calls)
    assert forwards == {"plenty": layers, "scarce": 2 * layers}
    assert losses["scarce"] == pytest.approx(losses["plenty"], rel=1e-12)


def test_all_ranks_do_what_the_fullest_needs(monkeypatch):
    config = Config()
    config.activation_checkpoint.attention_recompute = -1.0

    def with_a_fuller_rank(share: torch.Tensor, op: dist.ReduceOp) -> None:
        assert op == dist.ReduceOp.MAX
        share.clamp_(min=0.75)

    monkeypatch.setattr(setup, "peak_gib", lambda share: 10 - 8 * share)
    monkeypatch.setattr(setup, "free_gib", lambda device: 6.0 / USED_SHARE)
    for all_reduce, expected in ((lambda *_: None, 0.5), (with_a_fuller_rank, 0.75)):
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        assert recomputed_share(config, lambda share: share, torch.device("cpu")) == expected
