"""Stopping and going on: bit for bit on one world size, and onto another number of ranks."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, weights_of, write_texts
from titan_sparse.trainer import Trainer

SETTINGS = {
    "training__steps": 6,
    "training__dtype": "float32",
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
    "lr_scheduler__total_steps": 6,
    "parallelism__cp": 2,
}


def _lines(config) -> list[list]:
    dist.barrier()
    return [
        [line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens_seen")]
        for line in metrics_of(config)
    ]


def _six_equal_three_and_three(folder: Path) -> None:
    whole = tiny_config(folder, "whole", **SETTINGS)
    wanted = weights_of(train(whole))
    halves = tiny_config(folder, "halves", **SETTINGS | {"training__steps": 3})
    train(halves)
    if dist.get_rank() == 0:  # a save that was cut short, newer than the complete one
        shutil.copytree(folder / "halves/checkpoint/step-3", folder / "halves/checkpoint/step-5")
        os.remove(folder / "halves/checkpoint/step-5/.metadata")
    dist.barrier()
    halves.training.steps = 6
    torch.rand(7)  # the state of the generators must come from the checkpoint
    got = weights_of(train(halves))
    assert _lines(halves) == _lines(whole)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_six_steps_equal_three_and_three(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _six_equal_three_and_three, tmp_path)


def _save(folder: Path) -> None:
    train(
        tiny_config(
            folder, "run", **SETTINGS | {"training__steps": 3, "training__dtype": "float64"}
        )
    )
    train(tiny_config(folder, "whole", **SETTINGS | {"training__dtype": "float64"}))


def _go_on(folder: Path, overrides: dict) -> None:
    config = tiny_config(folder, "run", **SETTINGS | {"training__dtype": "float64"} | overrides)
    train(config)
    wanted = _lines(tiny_config(folder, "whole"))
    torch.testing.assert_close(_lines(config), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        pytest.param(1, {"parallelism__cp": 1}, marks=pytest.mark.slow),
        (
            4,
            {
                "parallelism__cp": 4,
                "attention__layout": "balanced",
                "attention__schedule": "group_cast",
            },
        ),
    ],
)
def test_another_world_size(tmp_path, world_size, overrides):
    write_texts(tmp_path / "texts")
    run_processes(2, _save, tmp_path)
    run_processes(world_size, _go_on, tmp_path, overrides)


def _other_data_parallel_degree(folder: Path) -> None:
    """Saved with one data-parallel rank, resumed with two: the stream continues and repeats no sequence."""
    settings = SETTINGS | {"parallelism__cp": 1, "training__dtype": "float64"}
    config = tiny_config(folder, "run", **settings)
    trainer = Trainer(config)
    trainer.checkpointer.load()
    assert trainer.progress.step == 3 and trainer.loader.state_dict()["sequence"] == 3
    trainer.train()
    assert trainer.loader.state_dict()["sequence"] == 3 + 3 * 2


@pytest.mark.slow
def test_another_data_parallel_degree(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _save, tmp_path)
    run_processes(2, _other_data_parallel_degree, tmp_path)


def _interrupted(folder: Path, number: int) -> None:
    """One rank alone receives the stop, in the middle of step 2. All ranks finish it, save, and return."""
    config = tiny_config(folder, "run", **SETTINGS | {"training__steps": 50})
    trainer = Trainer(config)
    forward = trainer.model.forward

    def forward_and_signal(*args):
        if trainer.progress.step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        return forward(*args)

    trainer.model.forward = forward_and_signal
    trainer.train()
    dist.barrier()
    # The signal falls into step 2; ranks agree at the start of step 3, which is left out.
    assert trainer.progress.step == 2
    assert (folder / "run/checkpoint/step-2/.metadata").is_file()
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves(tmp_path, number):
    write_texts(tmp_path / "texts")
    run_processes(2, _interrupted, tmp_path, int(number))


def _initial_weights(folder: Path) -> None:
    config = tiny_config(
        folder,
        "second",
        **SETTINGS
        | {
            "training__steps": 1,
            "optimizer__lr": 1e-30,
            "checkpoint__initial_load_path": str(folder / "run/checkpoint/step-3"),
        },
    )
    saved = SETTINGS | {"training__steps": 3, "training__dtype": "float64"}
    first = Trainer(tiny_config(folder, "run", **saved))
    assert first.checkpointer.load()
    second = train(config)
    assert second.progress.step == 1
    wanted, got = weights_of(first), weights_of(second)
    assert all((wanted[name] - got[name]).abs().max() < 1e-6 for name in wanted)


def test_initial_weights(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _save, tmp_path)
    run_processes(2, _initial_weights, tmp_path)
