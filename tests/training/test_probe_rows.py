"""The rows that probes look at: others in each step, the same in a resumed run and in a recomputation,
and those of no step in an evaluation."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scripts.compare_runs import differences
from tests.distributed import run_processes
from tests.runs import tiny_config, write_texts
from titan_sparse.attention.patterns.vertical_slash import pattern
from titan_sparse.attention.patterns.vertical_slash.probe import probe_seed, set_probe_seed
from titan_sparse.evaluation.scorer import Sequence, fixed_probe_rows
from titan_sparse.trainer import Trainer, draw_probe_rows
from titan_sparse.training import build_model

SETTINGS = {
    "training__steps": 4,
    "training__seed": 7,
    "training__gradient_accumulation_steps": 2,
    "data__sequences": "fixed",
    "attention__mask": "causal",
    "attention__pattern": "vertical_slash",
    "attention__vertical_slash__probe_rows": "spread",
    "metrics__recall_every": 0,
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
}


def _run(folder: Path, name: str, patch: pytest.MonkeyPatch, **settings) -> tuple[Trainer, dict]:
    """A trained run, and by step the rows that it looked at: a list of [n] each."""
    rows: dict[int, list[Tensor]] = {}
    spread_rows = pattern.spread_rows
    trainer = Trainer(tiny_config(folder, name, **SETTINGS | settings))

    def noted(*args):
        drawn = spread_rows(*args)
        rows.setdefault(trainer.progress.step + 1, []).append(drawn.position.flatten())
        return drawn

    patch.setattr(pattern, "spread_rows", noted)
    trainer.train()
    patch.setattr(pattern, "spread_rows", spread_rows)
    dist.barrier()
    return trainer, rows


def _same_rows(rows: dict, other: dict) -> bool:
    return rows.keys() == other.keys() and all(
        all(map(torch.equal, rows[step], other[step])) for step in rows
    )


def _check_runs(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _, whole = _run(folder, "whole", patch, parallelism__cp=2)
        _, first = _run(folder, "halves", patch, parallelism__cp=2, training__steps=2)
        # As a new process finds it.
        set_probe_seed(0)
        _, second = _run(folder, "halves", patch, parallelism__cp=2)
    assert list(whole) == [1, 2, 3, 4] and list(first) == [1, 2] and list(second) == [3, 4]
    assert _same_rows(whole, first | second)
    for step in (1, 2, 3):
        assert not whole[step][0].equal(whole[step + 1][0])
    for rows in whole.values():
        of_ranks = [torch.empty_like(rows[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, rows[0])
        assert of_ranks[0].equal(of_ranks[1])
    for field in ("loss", "grad_norm"):
        found = differences(folder / "whole", folder / "halves", field)
        assert all(step.absolute == 0 for step in found)


def test_rows_of_a_step_are_the_same_on_all_ranks_and_when_resumed(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _check_runs, tmp_path)


def _check_recomputation_and_evaluation(folder: Path) -> None:
    """Both look at the same rows again: of the step, and of no step."""
    settings = {"training__steps": 2, "checkpoint__enable": False}
    select = pattern.VerticalSlash.select_tensors
    selections = []
    with pytest.MonkeyPatch.context() as patch:
        trainer, _ = _run(folder, "kept", patch, activation_checkpoint__mode="none", **settings)
        # Nothing is kept of attention: the backward selects anew.
        patch.setattr(build_model, "SAVED_OPS", ())
        counted = lambda *args: selections.append(0) or select(*args)  # noqa: E731
        patch.setattr(pattern.VerticalSlash, "select_tensors", counted)
        _run(folder, "recomputed", patch, activation_checkpoint__mode="full", **settings)
    assert len(selections) > 2 * 2 * 2
    for field in ("loss", "grad_norm"):
        found = differences(folder / "kept", folder / "recomputed", field)
        assert all(step.relative < 1e-9 for step in found)

    tokens = np.arange(300) % 250
    losses = []
    for step in (1, 2):
        draw_probe_rows(7, step)
        seed = probe_seed()
        losses.append(trainer.scorer.token_losses(Sequence(tokens, tokens), 300)[0])
        assert probe_seed() == seed
    assert losses[0].equal(losses[1])


def test_a_recomputation_and_an_evaluation_look_at_the_same_rows(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(1, _check_recomputation_and_evaluation, tmp_path)


def test_seeds():
    seeds = set()
    for training_seed in (0, 1, 2**63 - 1):
        for step in (1, 2, 10**6):
            draw_probe_rows(training_seed, step)
            seeds.add(probe_seed())
    assert len(seeds) == 9 and max(seeds) < 2**32
    with pytest.raises(KeyError), fixed_probe_rows():
        assert probe_seed() == 0
        raise KeyError
    assert probe_seed() in seeds
    set_probe_seed(0)
