"""The optimizer and the schedule: how they are set up and changed on resuming."""

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
    # The biases of all experts of a layer are one matrix.
    model[2].register_parameter("up_proj_bias", nn.Parameter(torch.zeros(2, 4)))
    matrices, vectors = parameter_groups(model, 0.3)
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight)]
    wanted = [model[0].bias, model[1].weight, model[1].bias, model[2].bias, model[2].up_proj_bias]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in wanted]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize(
    "section, factors",
    [
        (LRScheduler(2, -1.0, "linear", 0.2), [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (LRScheduler(1, 1 / 3, "linear", 0.0), [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        (LRScheduler(0, 0.0, "cosine", 0.0), [1.0] * 8),
        (LRScheduler(0, -1.0, "cosine", 0.5, 2), [1.0, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        # A warm-up that is not set: 10 steps, or all that there are.
        (LRScheduler(), [1 / 6, 2 / 6, 0.5, 4 / 6, 5 / 6, 1.0, 1.0, 1.0]),
        (LRScheduler(total_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LRScheduler(total_steps=10**9), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
        (LRScheduler(total_steps=11, decay_ratio=1.0), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
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
