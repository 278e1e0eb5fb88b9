"""Runs with adapters, from command-line words, for tests that compare them."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.training.wired_run import lines_of, run
from titan_sparse.trainer import Trainer

LR = 0.02
STEPS = 4
ALIKE = 1e-5
"""Relative error of a loss or a gradient norm: fp32, summed in another order."""

ADAPTERS: dict[str, object] = {"lora.rank": 3, "lora.alpha": 12}
SETTINGS: dict[str, object] = {
    **ADAPTERS,
    "training.steps": STEPS,
    "training.max_norm": 0.0,
    "optimizer.lr": LR,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta2": 0.95,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.min_lr_factor": 1.0,
}

CODE = {"phi3": "transformers", "qwen3_moe": "transformers"}
"""Models that our own decoder does not have."""


def train(folder: Path, output: str, model: str, settings: dict[str, object]) -> Trainer:
    alone = not dist.is_initialized()
    settings = {
        **SETTINGS,
        "model.initial_hf": folder / model,
        "model.implementation": CODE.get(model, "native"),
        **settings,
    }
    trainer = run(folder, output, settings)
    if alone:
        dist.destroy_process_group()
    return trainer


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All tensors, beside the largest number of any."""
    assert found.keys() == expected.keys()
    largest = max(x.abs().max().item() for x in expected.values())
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max().item() <= ALIKE * largest, name


def assert_alike(folder: Path, output: str, wanted_output: str) -> None:
    wanted_lines = lines_of(folder / wanted_output)
    for line, wanted in zip(lines_of(folder / output), wanted_lines, strict=True):
        for field in ("loss", "grad_norm"):
            assert line[field] == pytest.approx(wanted[field], rel=ALIKE), (field, line["step"])
