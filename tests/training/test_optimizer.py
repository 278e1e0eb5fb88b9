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
    # The biases of all experts of a layer are one matrix.
    model[2].register_parameter("up_proj_bias", nn.Parameter(torch.zeros(2, 4)))
    matrices, vectors = parameter_groups(model, 0.3)
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight)]
    wanted = [model[0].bias, model[1].weight, model[1].bias, model[2].bias, model[2].up_proj_bias]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in wanted]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize(
    "name, implementation, device_type, offload, wanted",
    [
        ("AdamW", "auto", "cuda", False, "fused"),
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
        ("3", "cuda", True, 2, 11, 2),  # told by OMP_NUM_THREADS
        ("3", "cuda", False, 1, 11, 1),
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


LINEAR = {"warmup_steps": 0, "decay_type": "linear", "min_lr_factor": 0.0}


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"decay_ratio": 0.0}, [1.0, 1.0, 1.0, 1.0]),
        ({"decay_ratio": 0.5}, [1.0, 1.0, 1.0, 0.5]),
        ({"decay_ratio": 0.5, "decay_type": "sqrt"}, [1.0, 1.0, 1.0, 1 - 0.5**0.5]),
        ({"decay_ratio": -1.0}, [1.0, 0.75, 0.5, 0.25]),
        # Half a cosine of two steps, and no rise after it.
        (
            {"total_steps": 2, "decay_type": "cosine", "min_lr_factor": 0.5},
            [1.0, 0.75, 0.5, 0.5, 0.5],
        ),
    ],
)
def test_the_learning_rate_of_each_step(options, wanted):
    """As a share of the peak."""
    section = LRScheduler(**LINEAR | options)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    schedule = build_schedule([optimizer], section, len(wanted))
    for factor in wanted:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * factor)
        optimizer.step()
        schedule.step()


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
