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
from titan_sparse.config import Config
from titan_sparse.trainer import Trainer

SETTINGS = {
    "training__steps": 6,
    "training__dtype": "float64",
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
    "lr_scheduler__total_steps": 6,
    "parallelism__cp": 2,
}


def _config(folder: Path, name: str, **overrides) -> Config:
    return tiny_config(folder, name, **SETTINGS | overrides)


def _save(folder: Path) -> None:
    train(_config(folder, "run", training__steps=3))
    train(_config(folder, "whole"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of two runs on two ranks: "whole" of six steps, and "run" of three."""
    folder = tmp_path_factory.mktemp("saved")
    write_texts(folder / "texts")
    run_processes(2, _save, folder)
    return folder


def _lines(config: Config) -> list[list]:
    dist.barrier()
    return [
        [line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens_seen")]
        for line in metrics_of(config)
    ]


def _go_on(folder: Path, name: str, overrides: dict) -> None:
    torch.rand(7)  # the state of the generators must come from the checkpoint
    config = _config(folder, name, **overrides)
    train(config)
    got, wanted = _lines(config), _lines(_config(folder, "whole"))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    if overrides:
        return
    assert got == wanted
    runs = folder / "whole", folder / name
    files = [sorted((run / "checkpoint/step-6").glob("*.distcp")) for run in runs]
    assert len(files[0]) == len(files[1]) >= 2
    for ours, theirs in zip(*files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        (2, {}),
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
def test_six_steps_equal_three_and_three(saved, world_size, overrides):
    """To the bit on as many ranks, past a newer save that was cut short."""
    name = f"on-{world_size}"
    shutil.copytree(saved / "run", saved / name)
    shutil.copytree(saved / "run/checkpoint/step-3", saved / name / "checkpoint/step-5")
    os.remove(saved / name / "checkpoint/step-5/.metadata")
    run_processes(world_size, _go_on, saved, name, overrides)


def _other_data_parallel_degree(folder: Path) -> None:
    """Saved with one data-parallel rank, resumed with two: the stream continues and repeats no sequence."""
    trainer = Trainer(_config(folder, "dp", parallelism__cp=1))
    trainer.checkpointer.load()
    assert trainer.progress.step == 3 and trainer.loader.state_dict()["sequence"] == 3
    trainer.train()
    assert trainer.loader.state_dict()["sequence"] == 3 + 3 * 2


@pytest.mark.slow
def test_another_data_parallel_degree(saved):
    shutil.copytree(saved / "run", saved / "dp")
    run_processes(2, _other_data_parallel_degree, saved)


def _interrupted(folder: Path) -> None:
    """One rank alone receives the stop, in the middle of step 2. All ranks finish it, save, and return."""
    for number in (signal.SIGINT, signal.SIGTERM):
        trainer = Trainer(_config(folder, f"stopped-{number:d}", training__steps=50))
        forward = trainer.model.forward

        def forward_and_signal(*args, trainer=trainer, forward=forward, number=number):
            if trainer.progress.step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), number)
            return forward(*args)

        trainer.model.forward = forward_and_signal
        trainer.train()
        dist.barrier()
        # The signal falls into step 2; ranks agree at the start of step 3, which is left out.
        assert trainer.progress.step == 2
        assert (folder / f"stopped-{number:d}/checkpoint/step-2/.metadata").is_file()
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_a_signal_ends_the_step_and_saves(saved):
    run_processes(2, _interrupted, saved)


def _initial_weights(folder: Path) -> None:
    first = Trainer(_config(folder, "run", training__steps=3))
    assert first.checkpointer.load()
    path = str(folder / "run/checkpoint/step-3")
    changes = {"training__dtype": "float32", "optimizer__lr": 1e-30, "training__steps": 1}
    second = train(_config(folder, "second", checkpoint__initial_load_path=path, **changes))
    assert second.progress.step == 1
    wanted, got = weights_of(first), weights_of(second)
    assert all((wanted[name] - got[name]).abs().max() < 1e-6 for name in wanted)


def test_initial_weights(saved):
    run_processes(2, _initial_weights, saved)
