"""What decays, and the learning rate of each step."""

import itertools

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer

from titan_sparse.config import LRScheduler
from titan_sparse.training.optimizer import learning_rate, parameter_groups


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
def test_a_schedule_by_hand(section, factors):
    """Of a run of six steps, which is made longer afterwards."""
    rates = [learning_rate(0.5, section, 6, done) for done in range(8)]
    assert rates == pytest.approx([0.5 * factor for factor in factors], abs=1e-15)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_the_schedule_is_torchtitans_to_the_bit(decay_type):
    """Up to the last step. After it, torchtitan's cosine would rise again."""
    sections = itertools.product(
        [0, 1, 4, 11], [-1.0, 0.0, 0.3, 0.95, 1.0], [0.0, 0.1, 1.0], [0, 11]
    )
    for warmup_steps, decay_ratio, min_lr_factor, total_steps in sections:
        section = LRScheduler(warmup_steps, decay_ratio, decay_type, min_lr_factor, total_steps)
        theirs = LRSchedulersContainer.Config(
            warmup_steps=warmup_steps,
            total_steps=total_steps or None,
            decay_ratio=None if decay_ratio < 0 else decay_ratio,
            decay_type=decay_type,
            min_lr_factor=min_lr_factor,
        )
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
        [schedule] = theirs.build(optimizers=[optimizer], training_steps=17)
        for done in range((total_steps or 17) + 1):
            theirs_now = 0.3 * schedule.lr_lambdas[0](done)
            assert learning_rate(0.3, section, 17, done) == theirs_now, (section, done)
