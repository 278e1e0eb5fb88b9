"""Runs of small models of transformers, from command-line words, for tests that compare them."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.models.transformers_models import save_model
from tests.training.wired_run import lines_of, run, write_shard

STEPS = 3
SETTINGS: dict[str, object] = {
    "model.implementation": "transformers",
    "training.steps": STEPS,
    "optimizer.name": "SGD",
    "optimizer.lr": 0.1,
    "optimizer.weight_decay": 0.0,
    "lr_scheduler.warmup_steps": 0,
    "checkpoint.enable": False,
    "checkpoint.last_save_in_hf": False,
}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
ALIKE = 1e-5
"""Relative error of a loss or a gradient norm: fp32, summed in another order."""


def prepare(folder: Path, names: Iterable[str]) -> None:
    write_shard(folder)
    for name in names:
        save_model(folder / name, name, **(ROUTED if name in ("mixtral", "gpt_oss") else {}))


def train(folder: Path, name: str, run_name: str, settings: dict[str, object]) -> None:
    alone = not dist.is_initialized()
    run(
        folder,
        f"{name}-{run_name}",
        {**SETTINGS, "model.initial_hf": folder / name, **settings},
    )
    if alone:
        dist.destroy_process_group()


def assert_alike(folder: Path, name: str, run_name: str, other: str = "one") -> None:
    found = lines_of(folder / f"{name}-{run_name}")
    expected = lines_of(folder / f"{name}-{other}")
    assert len(found) == len(expected) == STEPS
    for line, wanted in zip(found, expected, strict=True):
        for field in ("loss", "grad_norm", "density"):
            assert line[field] == pytest.approx(wanted[field], rel=ALIKE), (
                name,
                field,
                line["step"],
            )
