"""What decays, the learning rate of each step, and updates shard by shard."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed.utils import clip_grad_norm_

from tests.distributed import on_ranks
from titan_sparse.config import LRScheduler, Optimizer
from titan_sparse.training.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate,
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
    "section, factors",
    [
        (LRScheduler(2, -1.0, "linear", 0.2), [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
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


def _model(mesh: DeviceMesh) -> nn.Module:
    """Replicated over one axis and sharded over the other. Some ranks have no
    row of some tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1), nn.LayerNorm(3))
    for module in model:
        for name, parameter in list(module.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)])
            setattr(module, name, nn.Parameter(sharded))
    model[1].bias.requires_grad_(False)
    return model


@on_ranks(4)
def test_updates_of_shards_are_torchs_of_dtensors_to_the_bit():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    names = ("AdamW", "Adam", "SGD")
    for name, implementation in itertools.product(names, ("fused", "foreach", "for-loop")):
        # DTensor has no fused SGD.
        theirs_fused = implementation == "fused" and name != "SGD"
        ours, theirs = _model(mesh), _model(mesh)
        section = Optimizer(name=name, implementation=implementation, weight_decay=0.1)
        optimizer = build_optimizer(ours, section, "cpu")
        betas = {} if name == "SGD" else {"betas": (section.beta1, section.beta2)}
        uses_foreach = implementation != "for-loop" and not theirs_fused
        kinds = {"fused": theirs_fused, "foreach": uses_foreach}
        reference = getattr(torch.optim, name)(parameter_groups(theirs, 0.1), **betas, **kinds)
        for step, max_norm in enumerate((math.inf, 0.3, 1e3)):
            for number, pair in enumerate(zip(ours.parameters(), theirs.parameters())):
                if pair[0].requires_grad:
                    torch.manual_seed(10 * step + number)
                    gradient = torch.randn(pair[0].shape)
                    for parameter in pair:
                        placements = parameter.placements
                        parameter.grad = distribute_tensor(gradient, mesh, placements)
            norm = clip_gradients(ours.parameters(), max_norm)
            assert torch.equal(norm, clip_grad_norm_(theirs.parameters(), max_norm))
            for group in (*optimizer.param_groups, *reference.param_groups):
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
            reference.step()
            for parameter, other in zip(ours.parameters(), theirs.parameters()):
                case = (name, implementation, step)
                got, wanted = parameter.to_local(), other.to_local()
                if name == "SGD" and implementation == "fused":
                    torch.testing.assert_close(got, wanted)
                else:
                    assert torch.equal(got, wanted), case
                for key, value in reference.state[other].items():
                    saved = optimizer.state[parameter][key]
                    # Checkpoints are of DTensors, whatever the kernels got.
                    assert type(saved) is type(value), case
                    both = [x.to_local() if isinstance(x, DTensor) else x for x in (saved, value)]
                    assert torch.equal(*both), case


def test_clipping_on_one_process():
    model = nn.Linear(3, 2)
    model.weight.grad = torch.full((2, 3), 3.0)
    assert clip_gradients(model.parameters(), 1.0) == pytest.approx(math.sqrt(54))
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 1 / math.sqrt(6)))
    assert clip_gradients([model.bias], 1.0) == 0
