"""Poisoned runs: NaN and infinity in one gradient element of one rank, weights that diverge, first
weights with a NaN. The run's numbers are those of a run that was led around the poison by hand."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.data.helpers import prepared
from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, weights_of, write_texts
from titan_sparse.data.shards import DataError
from titan_sparse.training.faults.launcher import Poisoned
from titan_sparse.training.trainer import Trainer

SETTINGS = {
    "training__steps": 7,
    "training__seq_len": 128,
    "attention__pattern": "dense",
    "training__dtype": "float32",
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "lr_scheduler__total_steps": 7,
    "parallelism__cp": 2,
    "metrics__recall_every": 0,
    "guard__max_skips_in_a_row": 2,
}


def _poison(trainer: Trainer, is_bad: Callable[[int], bool], value: float) -> None:
    """One element of the last rank's gradients becomes `value` in the bad ones of its updates,
    counted from 1."""
    clip = trainer._clip
    trainer.updates = 0

    def poisoned_clip() -> torch.Tensor:
        trainer.updates += 1
        if is_bad(trainer.updates) and dist.get_rank() == dist.get_world_size() - 1:
            gradient = next(p.grad for p in trainer.model.parameters() if p.grad.numel())
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[-1] = value
        return clip()

    trainer._clip = poisoned_clip


def _leave_out(trainer: Trainer, update: int) -> None:
    """By hand: the optimizer does not step in this update."""
    step = trainer.optimizer.step
    trainer.updates = 0

    def step_or_not() -> None:
        trainer.updates += 1
        if trainer.updates != update:
            step()

    trainer.optimizer.step = step_or_not


def _losses(config) -> list[float]:
    dist.barrier()
    return [line["loss"] for line in metrics_of(config)]


def _saved(config) -> list[str]:
    dist.barrier()
    folder = Path(config.training.output_dir, "checkpoint")
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def _one_bad_step(folder: Path) -> None:
    """It is left out."""
    by_hand = tiny_config(folder, "by_hand", **SETTINGS)
    reference = Trainer(by_hand)
    _leave_out(reference, 4)
    reference.train()
    config = tiny_config(folder, "poisoned", **SETTINGS)
    trainer = Trainer(config)
    _poison(trainer, lambda update: update == 4, math.nan)
    trainer.train()
    got, wanted = weights_of(trainer), weights_of(reference)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert _losses(config) == _losses(by_hand)
    assert all(math.isfinite(loss) for loss in _losses(config))
    lines = metrics_of(config)
    assert [line["skipped_updates"] for line in lines] == [0, 0, 0, 1, 1, 1, 1]
    assert [line["grad_norm"] is None for line in lines] == [False] * 3 + [True] + [False] * 3
    # The save of step 4 waited for a good step.
    assert _saved(config) == ["step-5", "step-6", "step-7"], _saved(config)


def _go_back_once(folder: Path) -> None:
    """The run goes back, and on with the batches that come next."""
    config = tiny_config(folder, "goes_back", **SETTINGS)
    trainer = Trainer(config)
    _poison(trainer, lambda update: update in (5, 6), math.nan)
    trainer.train()
    assert trainer.progress.times_gone_back == 1 and trainer.progress.skipped_updates == 2
    assert [line["step"] for line in metrics_of(config)] == [1, 2, 3, 4, 5, 6, 5, 6, 7]

    # By hand: the same start, then step 4's checkpoint, without the batches of steps 5 and 6.
    by_hand = tiny_config(folder, "goes_back_by_hand", **SETTINGS | {"training__steps": 4})
    Trainer(by_hand).train()
    by_hand.training.steps = 7
    reference = Trainer(by_hand)
    load = reference._load

    def load_and_skip() -> None:
        load()
        next(reference.loader)
        next(reference.loader)

    reference._load = load_and_skip
    reference.train()
    assert _losses(config)[-3:] == _losses(by_hand)[-3:]
    got, wanted = weights_of(trainer), weights_of(reference)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def _give_up(folder: Path) -> None:
    """Every update from the fifth on is bad: back to step 4, then to step 2, then no more."""
    settings = SETTINGS | {"guard__max_rollbacks": 2}
    trainer = Trainer(tiny_config(folder, "lost", **settings))
    _poison(trainer, lambda update: update >= 5, math.nan)
    with pytest.raises(Poisoned, match="has gone back 2 times .guard.max_rollbacks = 2.; look at"):
        trainer.train()
    assert trainer.progress.step == 4 and trainer.updates == 10
    dist.barrier()  # rank 0 writes the lines
    lines = metrics_of(trainer.config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 5, 6, 3, 4]
    assert _saved(trainer.config) == ["step-2"]

    settings = SETTINGS | {"checkpoint__enable": False}
    trainer = Trainer(tiny_config(folder, "unsaved", **settings))
    _poison(trainer, lambda update: update >= 2, math.inf)
    with pytest.raises(Poisoned, match="there is no good checkpoint before step 2; look at"):
        trainer.train()
    assert trainer.updates == 3


def _spoilt_weights(folder: Path) -> None:
    """Weights that went bad after the guard, as by a flipped bit, never enter a checkpoint."""
    config = tiny_config(folder, "spoilt", **SETTINGS | {"guard__max_skips_in_a_row": 50})
    trainer = Trainer(config)
    after_step = trainer._after_step

    def spoil_and_go_on(*args, **keywords) -> None:
        if trainer.progress.step == 4 and trainer.progress.times_gone_back == 0:
            with torch.no_grad():
                weight = trainer.model.norm.weight.to_local()
                if dist.get_rank() == 0:
                    weight[0] = math.nan
        after_step(*args, **keywords)

    trainer._after_step = spoil_and_go_on
    trainer.train()
    assert [line["step"] for line in metrics_of(config)] == [1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert trainer.progress.times_gone_back == 1
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())


def _poisoned_start(folder: Path) -> None:
    """A checkpoint of another run with a NaN in it, as versions without the guard have saved."""
    first = Trainer(
        tiny_config(folder, "first", **SETTINGS | {"training__steps": 2, "guard__enable": False})
    )
    _poison(first, lambda update: update == 1, math.nan)
    first.train()
    dist.barrier()
    path = folder / "first/checkpoint/step-2"
    config = tiny_config(folder, "second", **SETTINGS, checkpoint__initial_load_path=str(path))
    with pytest.raises(ValueError, match="the first weights: .* is not finite everywhere"):
        Trainer(config).train()


def _check(folder: Path) -> None:
    for check in (_one_bad_step, _go_back_once, _give_up, _spoilt_weights, _poisoned_start):
        check(folder)
        dist.barrier()


def test_poison(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _check, tmp_path)


@pytest.mark.parametrize("when", ["before a step", "before a save"])
def test_nothing_is_learned_or_saved_of_tokens_that_were_changed(tmp_path, monkeypatch, when):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokens = prepared(tmp_path, lengths=[299] * 12)
    overrides = {"checkpoint__enable": True, "checkpoint__interval": 1, "data__source": tokens}
    run = Trainer(tiny_config(tmp_path, "run", data__shuffle=False, **overrides))
    owner, name = (run.checkpointer, "save") if when == "before a step" else (run, "step")
    original = getattr(owner, name)

    def damage_after(*arguments):
        result = original(*arguments)
        # Whole pages of a file are cut off, which kills a process that has mapped them.
        os.truncate(Path(tokens, "shard_00000.bin"), 602)
        return result

    monkeypatch.setattr(owner, name, damage_after)
    with pytest.raises(DataError, match=r"shard_00000\.bin was changed during the run"):
        run.train()
    saved = sorted(path.name for path in (tmp_path / "run/checkpoint").glob("step-*"))
    assert saved == (["step-1"] if when == "before a step" else [])
