"""The guard on one GPU: the fused optimizer obeys the device, and the host waits for nothing."""

import copy
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from tests.gpu.errors import no_waits
from titan_sparse.config import Guard as GuardSection
from titan_sparse.training.faults.guard import Guard, decides_on_device

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _alone():
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _build(fused: bool) -> tuple[nn.Module, AdamW, nn.Module, AdamW]:
    """A sharded model and a plain copy, each with its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8)).to(DEVICE)
    plain = copy.deepcopy(model)
    fully_shard(model)
    options = {"lr": 0.05, "weight_decay": 0.1, "fused": fused, "foreach": not fused}
    return model, AdamW(model.parameters(), **options), plain, AdamW(plain.parameters(), **options)


def _gradients_of(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Backward through both; returns the norm of the first's gradients."""
    for network in (model, plain):
        network.zero_grad()
        network(x).square().mean().backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_step_changes_nothing(fused, value):
    model, ours, plain, theirs = _build(fused)
    guard = Guard(GuardSection(), DEVICE, decides_on_device(ours, DEVICE))
    assert guard.on_device == fused
    for step in range(1, 7):
        x = torch.randn(32, 64, device=DEVICE)
        norm = _gradients_of(model, plain, x)
        is_bad = step in (3, 4)
        if is_bad:
            next(model.parameters()).grad.to_local()[5, 7] = value
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        loss = torch.ones((), device=DEVICE, dtype=torch.float64)
        guard.update(step, loss, norm, ours)
        if not is_bad:
            theirs.step()
    for sharded, whole in zip(model.parameters(), plain.parameters()):
        assert torch.equal(sharded.full_tensor(), whole)
    reports = guard.reports(all_of_them=True)
    assert [report.skipped for report in reports] == [False, False, True, True, False, False]
    assert math.isclose(reports[-1].norm, norm.item())


def test_the_host_does_not_wait():
    model, ours, plain, _ = _build(fused=True)
    guard = Guard(GuardSection(), DEVICE, on_device=True)
    norm = _gradients_of(model, plain, torch.randn(32, 64, device=DEVICE))
    loss = torch.ones((), device=DEVICE, dtype=torch.float64)
    guard.update(1, loss, norm, ours)  # makes the states
    torch.cuda.synchronize()
    torch.cuda._sleep(6_000_000_000)  # about three seconds of work before the next update
    asleep = torch.cuda.Event()
    asleep.record()
    with no_waits():
        guard.update(2, loss, norm, ours)
        assert [report.step for report in guard.reports(all_of_them=False)] == [1]
    assert not asleep.query()
