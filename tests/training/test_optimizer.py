"""Optimizer and schedule: how they are set up, and optimizer.offload on the CPU.

What crosses to a GPU: tests/gpu/test_offload.py.
"""

import os
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


SETTINGS = {
    "training__steps": 4,
    "training__gradient_accumulation_steps": 2,
    "training__max_norm": 0.1,
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "lr_scheduler__total_steps": 4,
    "parallelism__cp": 2,
}


def _lines(config) -> list[list]:
    dist.barrier()
    return [
        [line[key] for key in ("step", "loss", "grad_norm", "lr")] for line in metrics_of(config)
    ]


def _equal_and_resumed(folder: Path) -> None:
    plain = tiny_config(folder, "plain", **SETTINGS)
    wanted = weights_of(train(plain))
    halves = tiny_config(
        folder, "halves", **SETTINGS | {"optimizer__offload": True, "training__steps": 2}
    )
    train(halves)
    halves.training.steps = 4
    trainer = train(halves)  # goes on from the checkpoint of step 2
    groups = [
        s._fsdp_param_group
        for m in trainer.model.modules()
        if isinstance(m, FSDPModule) and (s := m._get_fsdp_state())
    ]
    assert len(groups) == 3 and all(p.offload_to_cpu for group in groups for p in group.fsdp_params)
    assert all(group["fused"] for group in trainer.optimizers.optimizers[0].param_groups)
    got = weights_of(trainer)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.tensor(_lines(halves)), torch.tensor(_lines(plain)), rtol=1e-12, atol=0
    )
    # and the other way: a run without offload goes on from a checkpoint with it
    halves.training.steps, halves.optimizer.offload, halves.lr_scheduler.total_steps = 5, False, 5
    assert train(halves).progress.step == 5


def test_a_run_equals_the_one_without_and_resumes(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _equal_and_resumed, tmp_path)


class Experts(torch.nn.Module):
    """As transformers has them: the biases of all experts are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 3, 4))
        self.gate_up_proj_bias = torch.nn.Parameter(torch.zeros(2, 4))
        self.router = torch.nn.Linear(3, 2)


def test_biases_of_experts_do_not_decay():
    experts = Experts()
    matrices, vectors = parameter_groups(experts, 0.1)
    assert [len(matrices["params"]), matrices["weight_decay"]] == [2, 0.1]
    assert [len(vectors["params"]), vectors["weight_decay"]] == [2, 0.0]
    assert any(parameter is experts.gate_up_proj_bias for parameter in vectors["params"])
