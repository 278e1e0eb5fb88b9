"""Optimizer and learning-rate schedule: torchtitan's containers, with no weight decay on norms and
biases."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import LRScheduler as TorchtitanLRScheduler

from titan_sparse.config import LRScheduler, Optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """First matrices, which decay, then vectors (norm weights and biases), which do not."""
    matrices = []
    vectors = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # The biases of all experts of a layer are one parameter, gate_up_proj_bias [E, 2 I].
        is_matrix = parameter.ndim > 1 and not name.endswith("_bias")
        (matrices if is_matrix else vectors).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module, optimizer: Optimizer, device_type: str
) -> OptimizersContainer:
    """The [optimizer] section's optimizer over the (sharded) model's parameters, where they are."""
    implementation = optimizer.implementation
    if implementation == "auto":
        implementation = "foreach"
        # DTensor has no fused SGD.
        if optimizer.name != "SGD" and (device_type == "cuda" or optimizer.offload):
            implementation = "fused"
    if optimizer.offload and device_type == "cuda" and torch.get_num_threads() == 1:
        # torchrun starts processes with one thread each by default.
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    options: dict[str, Any] = {
        "lr": optimizer.lr,
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
    }
    if optimizer.name != "SGD":
        options |= {"betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.eps}

    def create(_, **options) -> torch.optim.Optimizer:
        # In place of the plain list of parameters that torchtitan passes: which of them decay.
        groups = parameter_groups(model, optimizer.weight_decay)
        optimizer_class = getattr(torch.optim, optimizer.name)
        return optimizer_class(groups, **options)

    return OptimizersContainer([model], create, options)


def build_schedule(
    optimizers: Iterable[torch.optim.Optimizer], lr_scheduler: LRScheduler, steps: int
) -> LRSchedulersContainer:
    """Linear warm-up, constant, then decay to min_lr_factor of the peak over `steps`, and constant
    after that."""
    total_steps = lr_scheduler.total_steps or steps
    warmup_steps = lr_scheduler.warmup_steps
    if warmup_steps < 0:
        warmup_steps = min(10, total_steps)
    section = TorchtitanLRScheduler(
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        decay_ratio=None if lr_scheduler.decay_ratio < 0 else lr_scheduler.decay_ratio,
        decay_type=lr_scheduler.decay_type,
        min_lr_factor=lr_scheduler.min_lr_factor,
    )
    schedule = build_lr_schedulers(optimizers, section, steps)
    for scheduler in schedule.schedulers:
        factors = scheduler.lr_lambdas
        scheduler.lr_lambdas = [partial(_until, total_steps, factor) for factor in factors]
    return schedule


def _until(total_steps: int, factor: Callable[[int], float], step: int) -> float:
    """The schedule's factor at `step`. torchtitan's cosine rises again after its last step."""
    return factor(min(step, total_steps))


def resume_schedule(
    optimizers: OptimizersContainer, schedule: LRSchedulersContainer, step: int
) -> None:
    """Go on at `step`, as if the schedule had been stepped so often. In place."""
    for optimizer, scheduler in zip(optimizers, schedule.schedulers):
        scheduler.last_epoch = step
        scheduler._last_lr = [
            peak * factor(step)
            for peak, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, learning_rate in zip(optimizer.param_groups, scheduler._last_lr):
            group["lr"] = learning_rate
