"""How optimizer and schedule are set up, by what is asked for and by the device."""

import os

import pytest
import torch
from torch import nn

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
    matrices, vectors = parameter_groups(model, 0.3)
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight)]
    wanted = [model[0].bias, model[1].weight, model[1].bias, model[2].bias]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in wanted]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize(
    "name, implementation, device_type, offload, wanted",
    [
        ("AdamW", "auto", "cuda", False, "fused"),
        ("AdamW", "auto", "cuda", True, "fused"),
        ("AdamW", "auto", "cpu", False, "foreach"),
        ("SGD", "auto", "cuda", False, "foreach"),
        ("AdamW", "foreach", "cuda", True, "foreach"),
        ("AdamW", "fused", "cpu", False, "fused"),
    ],
)
def test_fused_where_there_is_such_a_kernel(name, implementation, device_type, offload, wanted):
    """Or what is asked for."""
    section = Optimizer(name=name, implementation=implementation, offload=offload)
    defaults = build_optimizer(nn.Linear(3, 3), section, device_type).optimizers[0].defaults
    assert (defaults["fused"], defaults["foreach"]) == (wanted == "fused", wanted == "foreach")


@pytest.mark.parametrize(
    "processes, device_type, offload, before, cores, wanted",
    [
        ("3", "cuda", True, 1, 11, 3),
        ("3", "cuda", True, 1, 2, 1),
        ("3", "cuda", True, 2, 11, 2),  # told by OMP_NUM_THREADS
        ("3", "cuda", False, 1, 11, 1),
        ("3", "cpu", True, 1, 11, 1),
        (None, "cuda", True, 1, 11, 11),  # without a launcher
    ],
)
def test_an_update_on_the_cpu_takes_its_share_of_the_cores(
    monkeypatch, processes, device_type, offload, before, cores, wanted
):
    affinities = {0: set(range(cores))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: affinities[process])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    torch.set_num_threads(before)
    build_optimizer(nn.Linear(2, 2), Optimizer(offload=offload), device_type)
    assert torch.get_num_threads() == wanted


def _factors(section: LRScheduler, steps: int) -> list[float]:
    """Learning rate of each step of a run, as a share of the peak."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    schedule = build_schedule([optimizer], section, steps)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        schedule.step()
    return factors


@pytest.mark.parametrize(
    "ratio, decay_type, wanted",
    [
        (0.0, "linear", [1.0, 1.0, 1.0, 1.0]),
        (0.5, "linear", [1.0, 1.0, 1.0, 0.5]),
        (0.5, "sqrt", [1.0, 1.0, 1.0, 1 - 0.5**0.5]),
        (-1.0, "linear", [1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_the_share_of_steps_that_decay(ratio, decay_type, wanted):
    section = LRScheduler(
        warmup_steps=0, decay_ratio=ratio, decay_type=decay_type, min_lr_factor=0.0
    )
    assert _factors(section, 4) == pytest.approx(wanted)


def test_a_schedule_that_is_shorter_than_the_run():
    """Half a cosine of two steps, and no rise after it."""
    section = LRScheduler(warmup_steps=0, total_steps=2, decay_type="cosine", min_lr_factor=0.5)
    assert _factors(section, 5) == pytest.approx([1.0, 0.75, 0.5, 0.5, 0.5])


def test_a_resumed_group_has_the_settings_of_this_start():
    """And not what was saved with the optimizer's state."""
    model = nn.Linear(2, 2)
    optimizers = build_optimizer(model, Optimizer(lr=0.5), "cpu")
    schedule = build_schedule(optimizers, LRScheduler(warmup_steps=0), 10)
    section = Optimizer(lr=0.25, weight_decay=0.7)
    groups = optimizers.optimizers[0].param_groups
    for group in groups:
        group["betas"] = (0.1, 0.2)
    resume_schedule(optimizers, schedule, section, 3)
    betas = (section.beta1, section.beta2)
    assert [group["betas"] for group in groups] == [betas, betas]
    assert schedule.schedulers[0].last_epoch == 3
    assert schedule.schedulers[0].get_last_lr() == [group["lr"] for group in groups]
    assert [group["initial_lr"] for group in groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]
    assert all(0 < group["lr"] < 0.25 for group in groups)
