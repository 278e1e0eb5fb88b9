"""Optimizer without weight decay on norms and biases, learning-rate schedule, clipping."""

import math
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_sparse.config import LRScheduler
from titan_sparse.config import Optimizer as OptimizerSection


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


def build_optimizer(model: nn.Module, section: OptimizerSection, device_type: str) -> Optimizer:
    """The [optimizer] section's optimizer over the (sharded) model's parameters.

    The parameters stay on the device that they are on. With optimizer.offload that is the CPU, and a
    process takes its share of the node's cores.
    """
    implementation = section.implementation
    if implementation == "auto":
        implementation = "foreach"
        # DTensor has no fused SGD.
        if section.name != "SGD" and (device_type == "cuda" or section.offload):
            implementation = "fused"
    if section.offload and device_type == "cuda" and torch.get_num_threads() == 1:
        # torchrun starts processes with one thread each by default.
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    options: dict[str, Any] = {
        "lr": section.lr,
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
    }
    if section.name != "SGD":
        options |= {"betas": (section.beta1, section.beta2), "eps": section.eps}
    groups = parameter_groups(model, section.weight_decay)
    return getattr(torch.optim, section.name)(groups, **options)


def learning_rate_factor(section: LRScheduler, steps: int, step: int) -> float:
    """The learning rate of the update after `step` updates, as a share of the peak.

    Linear warm-up, constant, then decay to min_lr_factor over a run of `steps`, and constant after
    that.
    """
    total = section.total_steps or steps
    step = min(step, total)
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    decay_steps = total - section.warmup_steps
    if section.decay_ratio >= 0:
        decay_steps = min(decay_steps, round(total * section.decay_ratio))
    # The update after the last one would be the first at min_lr_factor.
    before_decay = total + 1 - decay_steps
    if step < before_decay:
        return 1.0
    progress = (step + 1 - before_decay) / decay_steps
    left = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[section.decay_type]
    return section.min_lr_factor + (1 - section.min_lr_factor) * left


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to `max_norm`; 0: leave them. Returns their norm before that."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
