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


class Layer(torch.nn.Module):
    """A matrix, which decays, and a bias, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2, dtype=torch.float64)


def _steps(model: Layer, optimizer, schedule, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        model.linear(torch.randn(5, 3, generator=generator, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("implementation", ["fused", "for-loop"])
def test_changed_settings_equal_a_loop_that_sets_them_by_hand(implementation):
    torch.manual_seed(0)
    model, twin = Layer(), Layer()
    twin.load_state_dict(model.state_dict())
    before = Optimizer(lr=0.1, weight_decay=0.1)
    now = Optimizer("AdamW", 0.03, 0.5, 0.6, 1e-3, 0.7, implementation)
    saved_optimizer = build_optimizer(model, before, "cpu")
    saved_schedule = build_schedule(saved_optimizer, LRScheduler(2, total_steps=10), 10)
    _steps(model, saved_optimizer, saved_schedule, 3)
    state = saved_optimizer.state_dict()

    optimizer = build_optimizer(model, now, "cpu")
    schedule = build_schedule(optimizer, LRScheduler(5, total_steps=10), 10)
    optimizer.load_state_dict(state)
    groups = optimizer.optimizers[0].param_groups
    assert groups[0]["betas"] == (0.9, 0.95), "the checkpoint brings its own settings"
    resume_schedule(optimizer, schedule, now, 3)
    assert all(group["fused"] == (implementation == "fused") for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]

    by_hand = torch.optim.AdamW(
        [
            {"params": [twin.linear.weight], "weight_decay": 0.1},
            {"params": [twin.linear.bias], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=implementation == "fused",
    )
    for step, factor in enumerate((1 / 2, 1, 1)):
        for group in by_hand.param_groups:
            group["lr"] = 0.1 * factor
        _steps(twin, by_hand, None, 1, first=step)
    for group, weight_decay in zip(by_hand.param_groups, (0.7, 0.0)):
        group |= {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": weight_decay}
    # Warm-up over five steps: the fourth update is at 4/5 of the peak.
    for step, factor in ((3, 4 / 5), (4, 1)):
        for group in by_hand.param_groups:
            group["lr"] = 0.03 * factor
        assert schedule.schedulers[0].get_last_lr() == pytest.approx([0.03 * factor] * 2)
        _steps(model, optimizer, schedule, 1, first=step)
        _steps(twin, by_hand, None, 1, first=step)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("section", [LRScheduler(), LRScheduler(3, 0.3), LRScheduler(0, 0.0)])
def test_resumed_schedule_is_the_stepped_one(section):
    model = Layer()
    optimizer = build_optimizer(model, Optimizer(), "cpu")
    stepped = build_schedule(optimizer, section, 20)
    # Beyond its last step too, where it stays as it is.
    for step in range(25):
        resumed = build_schedule(optimizer, section, 20)
        resume_schedule(optimizer, resumed, Optimizer(), step)
        assert resumed.schedulers[0].get_last_lr() == stepped.schedulers[0].get_last_lr()
        optimizer.step()
        stepped.step()
