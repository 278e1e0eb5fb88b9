"""The guard against bad steps: an update that would spoil the weights does not happen.

A step is bad if its loss or its gradient norm is not finite, or if the norm is far above its
running statistics. The device decides, and the fused optimizers leave everything as it was. The
host reads each step's report one step later, when it is there anyway.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_sparse.config import Guard as GuardSection
from titan_sparse.config import Refusal
from titan_sparse.models.initialization import canonical_name
from titan_sparse.training.optimizer import shard_of

_STANDARD_DEVIATIONS = 6
"""A norm this far above the mean, in the logarithm, is bad even for a noisy run."""


class Report(NamedTuple):
    """The findings of the guard in one step. The same on every rank."""

    step: int
    skipped: float
    """1: the update did not happen"""
    bad_loss: float
    """1: the loss of some rank is not finite"""
    bad_norm: float
    """1: the gradient norm is not finite"""
    norm: float
    """gradient norm before clipping; 0 if it is not finite"""
    limit: float
    """the norm above which this step counts as a spike"""
    in_a_row: int
    """bad steps up to this one, without a good one between"""

    def reason(self) -> str:
        if self.bad_loss:
            return "the loss is not finite"
        if self.bad_norm:
            return "the gradient norm is not finite"
        return f"the gradient norm {self.norm:.3g} is above {self.limit:.3g}"


def decides_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """True if the optimizer can obey a verdict that only the device knows, as the fused kernels
    can. For others the host decides, which on a GPU has to wait for it."""
    is_fused = device.type == "cuda" and optimizer.defaults["fused"]
    parameters = optimizer.param_groups[0]["params"]
    return is_fused and all(parameter.device.type == "cuda" for parameter in parameters)


class Guard:
    """Judges each step and keeps the running statistics of the gradient norm.

    on_device: the optimizer reads the verdict on the device. Otherwise the host looks at it.
    """

    def __init__(self, section: GuardSection, device: torch.device, on_device: bool):
        self.section = section
        self.device = device
        self.on_device = on_device
        # Of the logarithm of accepted gradient norms: mean, variance, and how many there were.
        self.statistics = torch.zeros(3, dtype=torch.float64, device=device)
        self.in_a_row = torch.zeros((), dtype=torch.float64, device=device)
        # Reports on their way to the host: the step, the other fields of Report as float64 [6], and
        # the event of the copy.
        self.pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self.statistics.cpu(), "in_a_row": self.in_a_row.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.statistics.copy_(state["statistics"])
        self.in_a_row.copy_(state["in_a_row"])
        self.pending.clear()

    def update(
        self, step: int, loss: Tensor, grad_norm: Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        """optimizer.step(), unless this step is bad. Collective, on the device.

        loss: this rank's share. grad_norm: of all gradients before clipping. Both are scalars.
        """
        if not self.section.enable:
            optimizer.step()
            return
        skip = self._judge(step, loss, grad_norm)
        if self.on_device:
            # The way of torch.amp.GradScaler: the fused kernels return at once if it is 1.
            optimizer.found_inf = skip
            optimizer.grad_scale = None
            optimizer.step()
        elif not skip.item():
            optimizer.step()

    def reports(self, all_of_them: bool) -> list[Report]:
        """Those that the host has not read yet. all_of_them: also the last
        step's, for which it waits."""
        stay = 0 if all_of_them else 1
        read = []
        while len(self.pending) > stay:
            step, values, copied = self.pending.popleft()
            if copied is not None:
                copied.synchronize()
            *numbers, in_a_row = values.tolist()
            read.append(Report(step, *numbers, int(in_a_row)))
        return read

    def _judge(self, step: int, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """float32 scalar: 1 if the update must not happen, else 0. Queues the report."""
        norm = grad_norm.to(self.device, torch.float64)
        values = torch.stack(
            [(~loss.isfinite()).double(), (~norm.isfinite()).double(), norm.nan_to_num(0.0, 0.0)]
        )
        # Replicas of a sharded model (HSDP) may differ: what one rank finds holds for all.
        dist.all_reduce(values, dist.ReduceOp.MAX)
        bad_loss, bad_norm, norm = values
        limit = self._limit()
        skip = ((bad_loss + bad_norm > 0) | (norm > limit)).double()
        self._count(norm, skip)
        self.in_a_row = (self.in_a_row + 1) * skip
        report = torch.stack([skip, bad_loss, bad_norm, norm, limit, self.in_a_row])
        copied = None
        if self.device.type == "cuda":
            on_host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            report = on_host.copy_(report, non_blocking=True)
            copied = torch.cuda.current_stream(self.device).record_event()
        self.pending.append((step, report, copied))
        return skip.float()

    def _limit(self) -> Tensor:
        """The norm above which a step is a spike: infinite until there are enough statistics."""
        mean, variance, count = self.statistics
        if self.section.spike_factor == 0:
            return torch.full_like(mean, math.inf)
        tolerance = (_STANDARD_DEVIATIONS * variance.sqrt()).clamp_min(
            math.log(self.section.spike_factor)
        )
        limit = (mean + tolerance).exp()
        return torch.where(count < self.section.warmup_steps, math.inf, limit)

    def _count(self, norm: Tensor, skip: Tensor) -> None:
        """Move the statistics by an accepted norm. That of a step without a
        label is 0: left out."""
        mean, variance, count = self.statistics
        # The plain mean at first, then one that forgets.
        weight = (1 / (count + 1)).clamp_min(1 / self.section.average_steps)
        distance = norm.log() - mean
        new_mean = mean + weight * distance
        new_variance = (1 - weight) * (variance + weight * distance.square())
        moved = torch.stack([new_mean, new_variance, count + 1])
        self.statistics = torch.where((norm > 0) & (skip == 0), moved, self.statistics)


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """True if every element is finite on every rank. Collective; the host waits."""
    return not _not_finite(tensors, device).any()


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.ndim > 0]


def refuse_bad_weights(model: nn.Module, device: torch.device) -> None:
    """Raise Refusal, on every rank, for first weights that are not finite. Collective."""
    named = dict(model.named_parameters())
    bad = _not_finite(named.values(), device).tolist()
    for name in itertools.compress(named, bad):
        raise Refusal(
            f"the first weights: {canonical_name(name)} is not finite everywhere; read others by "
            "model.initial_hf, checkpoint.load_step, or checkpoint.initial_load_path"
        )


@torch.no_grad()
def _not_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """bool [n]: which of n tensors have an element that is not finite, on any rank."""
    shards = [shard_of(x) for x in tensors]
    # With more ranks than rows, some ranks have nothing to look at.
    filled = [number for number, shard in enumerate(shards) if shard.numel()]
    bad = torch.zeros(len(shards), device=device)
    if filled:
        # NaN and infinity come through the largest magnitude.
        largest = torch._foreach_norm([shards[number] for number in filled], math.inf)
        bad[filled] = (~torch.stack(largest).isfinite()).to(device, bad.dtype)
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    return bad > 0
