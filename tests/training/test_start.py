"""attention_recompute = -1: as much of attention is computed again as memory requires."""

import pytest
import torch
import torch.distributed as dist

from tests.runs import tiny_config, write_texts
from titan_sparse.config import Config
from titan_sparse.estimate.memory import peak_gib
from titan_sparse.estimate.step import step_of
from titan_sparse.from_config import build_pattern
from titan_sparse.models.flavours import resolve
from titan_sparse.trainer import Trainer
from titan_sparse.training import setup

USED_SHARE = 0.9
"""Of the free memory; docs/training.md."""


@pytest.mark.parametrize(
    "free, chosen", [(10, 0), (50, 0), (6, 0.5), (5.99, 0.5625), (2.5, 0.9375), (2.4, 1), (-5, 1)]
)
def test_recomputes_no_more_than_the_fullest_rank_requires(monkeypatch, free, chosen):
    config = Config()
    config.activation_checkpoint.attention_recompute = -1.0

    def with_a_fuller_rank(share: torch.Tensor, op: dist.ReduceOp) -> None:
        assert op == dist.ReduceOp.MAX
        share.clamp_(min=0.75)

    monkeypatch.setattr(setup, "peak_gib", lambda share: 10 - 8 * share)
    monkeypatch.setattr(setup, "free_gib", lambda device: free / USED_SHARE)
    for all_reduce, least in ((lambda *_: None, 0), (with_a_fuller_rank, 0.75)):
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        share = setup.recomputed_share(config, lambda share: share, torch.device("cpu"))
        assert share == max(chosen, least)


def test_a_run_chooses_by_its_memory(tmp_path, monkeypatch):
    """Free memory for the estimated peak with half of attention recomputed."""
    write_texts(tmp_path / "texts")
    config = tiny_config(tmp_path, "run", training__seq_len=640, attention__pattern="dense")
    config.activation_checkpoint.attention_recompute = 0.5
    model = resolve(**vars(config.model))
    peak = peak_gib(step_of(config, model, build_pattern(config.attention), "eager", 1, 1))
    config.activation_checkpoint.attention_recompute = -1.0
    monkeypatch.setattr(setup, "free_gib", lambda device: 1.001 * peak / USED_SHARE)
    assert Trainer(config).recomputed == 0.5
