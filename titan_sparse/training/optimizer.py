"""The optimizer, with no weight decay on norms and biases, the clipping of gradients, and the
learning rate of each step.

Gradients are clipped and weights updated shard by shard, on plain tensors. For each DTensor torch
would ask its rules what to do, which takes the host tens of milliseconds a step.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from titan_sparse.config import Config, LRScheduler, Optimizer
from titan_sparse.config.start import cores_of_rank

_DECAYS = {
    "linear": lambda share: 1 - share,
    "sqrt": lambda share: 1 - math.sqrt(share),
    "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
}
"""lr_scheduler.decay_type -> what is left of the learning rate after a share of the decay"""


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
) -> torch.optim.Optimizer:
    """The [optimizer] section's optimizer over the (sharded) model's parameters, where they are."""
    implementation = optimizer.implementation
    if implementation == "auto":
        is_fused = device_type == "cuda" or optimizer.offload
        implementation = "fused" if is_fused else "foreach"
    if optimizer.offload and device_type == "cuda" and torch.get_num_threads() == 1:
        # torchrun starts processes with one thread each by default.
        torch.set_num_threads(cores_of_rank())
    options: dict[str, Any] = {
        "lr": optimizer.lr,
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
    }
    if optimizer.name != "SGD":
        options |= {"betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.eps}

    groups = parameter_groups(model, optimizer.weight_decay)
    return _of_shards(getattr(torch.optim, optimizer.name))(groups, **options)


def _of_shards(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """This kind of optimizer, but its kernels get this rank's shards. Its
    states remain DTensors."""

    def fill(self: torch.optim.Optimizer, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists with what step() computes on: parameters, gradients, and states."""
        has_complex = kind._init_group(self, group, *lists)
        for tensors in lists:
            tensors[:] = map(shard_of, tensors)
        return has_complex

    return type(kind.__name__, (kind,), {"_init_group": fill})


def shard_of(x: Tensor) -> Tensor:
    """This rank's shard, in the same memory; x itself if it is not a DTensor."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """The norm of all gradients over all ranks, a scalar. Gradients are scaled down in place to a
    norm of `max_norm`, if theirs is larger. Collective if parameters are DTensors; then all are,
    and all are sharded over the same axes of the mesh."""
    gradients = [x.grad for x in parameters if x.grad is not None]
    if not gradients:
        return torch.zeros(())
    shards = [shard_of(x) for x in gradients]
    # [gradients]
    norms = torch.stack(torch._foreach_norm(shards))
    if isinstance(gradients[0], DTensor):
        mesh = gradients[0].device_mesh
        [is_sharded] = {tuple(axis.is_shard() for axis in x.placements) for x in gradients}
        placements = [Partial() if sharded else Replicate() for sharded in is_sharded]
        # The squares of the shards' norms add up to those of the whole.
        squared = DTensor.from_local(norms**2, mesh, placements)
        norms = squared.full_tensor() ** 0.5
    norm = torch.linalg.vector_norm(norms)
    # Scaled always, so that the host need not know the norm.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(shards, scale.to(shards[0].device))
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, done: int) -> float:
    """Set the learning rate of the step that comes after `done` steps, and return it. It follows
    from the configuration alone: checkpoints do not hold it."""
    rate = learning_rate(config.optimizer.lr, config.lr_scheduler, config.training.steps, done)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def learning_rate(peak: float, section: LRScheduler, steps: int, done: int) -> float:
    """Learning rate of the step that comes after `done` steps of a run of `steps`.

    Linear warm-up, constant, then decay to min_lr_factor of the peak, and constant after that.
    """
    total = section.total_steps or steps
    step = min(done, total)
    warmup = section.warmup_steps
    if warmup < 0:
        warmup = min(10, total)
    decay = total - warmup
    if section.decay_ratio >= 0:
        decay = min(decay, round(total * section.decay_ratio))
    if step < warmup:
        return peak * ((step + 1) / warmup)
    decayed = step - (total - decay)
    if decayed <= 0:
        return peak
    left = _DECAYS[section.decay_type](decayed / decay)
    return peak * (section.min_lr_factor + (1 - section.min_lr_factor) * left)
