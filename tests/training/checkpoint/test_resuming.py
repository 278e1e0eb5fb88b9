"""Stopping and going on: bit for bit on one world size, and onto another number of ranks."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.config import Config
from titan_sparse.trainer import Trainer

SETTINGS = {
    "training__steps": 6,
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
    # Saves in the background are the same.
    config = _config(folder, name, checkpoint__async_mode="async", **overrides)
    trainer = train(config)
    got, wanted = _lines(config), _lines(_config(folder, "whole"))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    if config.optimizer.offload:
        for block in trainer.model.layers.values():
            parameters = block._get_fsdp_state()._fsdp_param_group.fsdp_params
            assert all(parameter.offload_to_cpu for parameter in parameters)
        assert all(group["fused"] for group in trainer.optimizers.optimizers[0].param_groups)
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
                "optimizer__offload": True,
            },
        ),
    ],
)
def test_six_steps_equal_three_and_three(saved, world_size, overrides):
    """To the bit on as many ranks, past a newer save that was cut short. With optimizer.offload, too."""
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
