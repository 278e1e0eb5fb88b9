"""The optimizer and the schedule: how they are set up, changed on resuming, and optimizer.offload.

What crosses to a GPU: tests/gpu/test_offload.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, weights_of, write_texts
from titan_sparse.config import LRScheduler, Optimizer
from titan_sparse.training.optimizer import (
    build_optimizer,
    build_schedule,
    parameter_groups,
    resume_schedule,
)


def test_what_decays_and_what_is_frozen():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].weight.requires_grad_(False)
    # The biases of all experts of a layer are one matrix.
    model[2].register_parameter("up_proj_bias", nn.Parameter(torch.zeros(2, 4)))
    matrices, vectors = parameter_groups(model, 0.3)
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight)]
    wanted = [model[0].bias, model[1].weight, model[1].bias, model[2].bias, model[2].up_proj_bias]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in wanted]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)


SETTINGS = {
    "training__steps": 4,
    "attention__pattern": "dense",
    "training__gradient_accumulation_steps": 2,
    "training__max_norm": 0.1,
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "lr_scheduler__total_steps": 4,
    "parallelism__cp": 2,
}


def _equal_and_resumed(folder: Path) -> None:
    plain = tiny_config(folder, "plain", **SETTINGS)
    wanted = weights_of(train(plain))
    offload = {"optimizer__offload": True, "training__steps": 2}
    halves = tiny_config(folder, "halves", **SETTINGS | offload)
    train(halves)
    halves.training.steps = 4
    trainer = train(halves)  # goes on from the checkpoint of step 2
    blocks = [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]
    for block in blocks:
        group = block._get_fsdp_state()._fsdp_param_group
        assert all(parameter.offload_to_cpu for parameter in group.fsdp_params)
    assert all(group["fused"] for group in trainer.optimizers.optimizers[0].param_groups)
    torch.testing.assert_close(weights_of(trainer), wanted, rtol=0, atol=1e-12)
    dist.barrier()
    for line, other in zip(metrics_of(halves), metrics_of(plain), strict=True):
        for key in ("step", "loss", "grad_norm", "lr"):
            assert line[key] == pytest.approx(other[key], rel=1e-12)


def test_a_run_equals_the_one_without_and_resumes(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _equal_and_resumed, tmp_path)


@pytest.mark.parametrize(
    "section, factors",
    [
        (LRScheduler(2, -1.0, "linear", 0.2), [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (LRScheduler(1, 1 / 3, "linear", 0.0), [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        (LRScheduler(0, 0.0, "cosine", 0.0), [1.0] * 8),
        (LRScheduler(0, -1.0, "cosine", 0.5, 2), [1.0, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_a_schedule_by_hand_stepped_and_resumed(section, factors):
    """Of a run of six steps, which is made longer afterwards."""
    optimizer = build_optimizer(nn.Linear(2, 3), Optimizer(lr=0.5), "cpu")
    stepped = build_schedule(optimizer, section, 6)
    for step, factor in enumerate(factors):
        resumed = build_schedule(optimizer, section, 6)
        resume_schedule(optimizer, resumed, step)
        groups = optimizer.optimizers[0].param_groups
        assert [group["lr"] for group in groups] == resumed.schedulers[0].get_last_lr()
        assert resumed.schedulers[0].get_last_lr() == stepped.schedulers[0].get_last_lr()
        assert groups[0]["lr"] == pytest.approx(0.5 * factor, abs=1e-15)
        optimizer.step()
        stepped.step()
