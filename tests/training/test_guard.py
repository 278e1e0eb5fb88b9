"""The guard: what it skips leaves nothing behind, against torch.optim loops that leave those steps
out, and against the statistics written down plainly."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.components.optimizer import OptimizersContainer

from tests.distributed import run_processes
from titan_sparse.config import Guard as GuardSection
from titan_sparse.training.guard import Guard, all_finite, refuse_bad_weights

CPU = torch.device("cpu")
ALWAYS = GuardSection(warmup_steps=3, average_steps=5, spike_factor=4.0)


@pytest.fixture(autouse=True)
def _one_process(request):
    """A group of this process alone, which the guard's collectives need."""
    if "alone" not in request.fixturenames:
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def alone():
    """Asks for _one_process."""


def _container(model: nn.Module, fused: bool) -> OptimizersContainer:
    options = {"lr": 0.05, "weight_decay": 0.1, "fused": fused, "foreach": not fused}
    return OptimizersContainer(
        [model], lambda parameters, **options: torch.optim.AdamW(parameters, **options), options
    )


def _gradients(model: nn.Module, steps: int) -> list[list[torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        [torch.randn(p.shape, generator=random) for p in model.parameters()] for _ in range(steps)
    ]


@pytest.mark.parametrize("on_device", [True, False], ids=["fused verdict", "host"])
@pytest.mark.parametrize("poison", ["nan gradient", "inf gradient", "nan loss", "spike"])
def test_a_bad_step_changes_nothing(alone, on_device, poison):
    """Weights and states are those of torch.optim.AdamW that never saw the bad steps."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain = copy.deepcopy(model)
    optimizers = _container(model, fused=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1, fused=True)
    guard = Guard(ALWAYS, CPU, on_device)
    bad_steps = (6, 7)

    for step, gradients in enumerate(_gradients(model, 10), start=1):
        loss = torch.tensor(1.0, dtype=torch.float64)
        if step in bad_steps and poison == "nan loss":
            loss = torch.tensor(math.nan, dtype=torch.float64)
        if step in bad_steps and poison == "spike":
            gradients = [100 * gradient for gradient in gradients]
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient.clone()
        if step in bad_steps and poison.endswith("gradient"):
            model.weight.grad[1, 2] = math.nan if poison.startswith("nan") else -math.inf
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        guard.update(step, loss, norm, optimizers)
        if step not in bad_steps:
            for parameter, gradient in zip(plain.parameters(), gradients):
                parameter.grad = gradient.clone()
            reference.step()

    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(ours, theirs)
        our_state, their_state = optimizers.optimizers[0].state[ours], reference.state[theirs]
        assert our_state["step"] == their_state["step"] == 8
        assert torch.equal(our_state["exp_avg_sq"], their_state["exp_avg_sq"])
    reports = guard.reports(all_of_them=True)
    assert [report.step for report in reports if report.skipped] == list(bad_steps)
    assert [report.in_a_row for report in reports] == [0] * 5 + [1, 2] + [0] * 3
    word = "loss" if poison == "nan loss" else "gradient norm"
    assert word in reports[5].reason()


def _run(guard: Guard, norms: list[float]) -> list[bool]:
    """Which of the steps with these norms are skipped."""
    optimizers = _container(nn.Linear(1, 1), fused=True)
    for step, norm in enumerate(norms, start=1):
        guard.update(step, torch.zeros(()), torch.tensor(norm), optimizers)
    return [report.skipped for report in guard.reports(all_of_them=True)]


def _plainly(norms: list[float], section: GuardSection) -> list[bool]:
    """The rule of docs/training.md in floats."""
    mean = variance = count = 0
    skipped = []
    for norm in norms:
        limit = math.inf
        if count >= section.warmup_steps:
            tolerance = max(math.log(section.spike_factor), 6 * math.sqrt(variance))
            limit = math.exp(mean + tolerance)
        skipped.append(not math.isfinite(norm) or norm > limit)
        if norm > 0 and not skipped[-1]:
            weight = max(1 / (count + 1), 1 / section.average_steps)
            distance = math.log(norm) - mean
            mean += weight * distance
            variance = (1 - weight) * (variance + weight * distance**2)
            count += 1
    return skipped


@pytest.mark.parametrize("enable, updates", [(False, 3), (True, 1)])
def test_a_guard_that_is_off_lets_every_update_happen(alone, enable, updates):
    """One good step, one with a NaN loss, one with an infinite norm."""
    model = nn.Linear(2, 2)
    optimizers = _container(model, fused=False)
    guard = Guard(GuardSection(enable=enable), CPU, on_device=False)
    for loss, norm in ((1.0, 1.0), (math.nan, 1.0), (1.0, math.inf)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        guard.update(1, torch.tensor(loss), torch.tensor(norm), optimizers)
    state = optimizers.optimizers[0].state[model.weight]
    assert state["step"] == updates
    skipped = [report.skipped for report in guard.reports(all_of_them=True)]
    assert skipped == ([False, True, True] if enable else [])


def test_spikes_by_the_written_rule(alone):
    random = torch.Generator().manual_seed(3)
    for noise in (0.05, 0.3, 1.0):
        norms = (noise * torch.randn(120, generator=random)).exp().tolist()
        for spike in range(30, 120, 15):
            norms[spike] *= 3 * spike / 30  # of many sizes around the limit
        norms[50] = math.nan
        norms[51] = 0.0
        wanted = _plainly(norms, ALWAYS)
        assert _run(Guard(ALWAYS, CPU, False), norms) == wanted
        assert 1 < sum(wanted) < 20


def test_skipped_norms_do_not_move_the_limit(alone):
    skipped = _run(Guard(ALWAYS, CPU, False), [1.0] * 20 + [50.0] * 40 + [1.0])
    assert skipped == [False] * 20 + [True] * 40 + [False]


def test_no_spikes_before_the_warm_up_or_without_a_factor(alone):
    norms = [1.0, 1.0, 1e9, 1e-9, 1e9]
    assert not any(_run(Guard(GuardSection(warmup_steps=5), CPU, False), norms))
    assert not any(_run(Guard(GuardSection(warmup_steps=0, spike_factor=0), CPU, False), norms))


def test_the_host_reads_a_step_later(alone):
    guard = Guard(ALWAYS, CPU, False)
    optimizers = _container(nn.Linear(1, 1), fused=True)
    guard.update(1, torch.zeros(()), torch.ones(()), optimizers)
    assert guard.reports(all_of_them=False) == []
    guard.update(2, torch.zeros(()), torch.ones(()), optimizers)
    assert [report.step for report in guard.reports(all_of_them=False)] == [1]
    assert [report.step for report in guard.reports(all_of_them=True)] == [2]


def test_statistics_come_back(alone):
    norms = [1.0, 1.2, 0.8, 1.0, 1.1]
    first, second = Guard(ALWAYS, CPU, False), Guard(ALWAYS, CPU, False)
    _run(first, norms)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert _run(second, [30.0]) == _run(first, [30.0]) == [True]


def _one_rank_is_poisoned() -> None:
    """Replicas hold the same parameters: if one finds a bad step, none may apply it."""
    model = nn.Linear(2, 2)
    optimizers = _container(model, fused=True)
    before = model.weight.detach().clone()
    guard = Guard(ALWAYS, CPU, True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = torch.tensor(math.inf if dist.get_rank() == 1 else 1.0)
    guard.update(1, torch.zeros(()), norm, optimizers)
    assert torch.equal(model.weight, before)
    assert guard.reports(all_of_them=True)[0].bad_norm
    guard.update(2, torch.zeros(()), torch.ones(()), optimizers)
    assert not torch.equal(model.weight, before)
    _finite_everywhere()


def _finite_everywhere() -> None:
    """A bad element of one rank's shard is seen by all; ranks without rows take part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for value, is_finite in ((1.0, True), (math.nan, False), (-math.inf, False), (3e38, True)):
        whole = torch.ones(2, 3)
        whole[0, 1] = value
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert all_finite([torch.ones(4), sharded], CPU) == is_finite
        model = nn.Linear(3, 2, bias=False)
        model.weight = nn.Parameter(sharded)
        if is_finite:
            refuse_bad_weights(model, "somewhere", CPU)
        else:
            with pytest.raises(ValueError, match="^somewhere: weight is not finite everywhere$"):
                refuse_bad_weights(model, "somewhere", CPU)


def test_what_one_rank_finds_holds_for_all():
    run_processes(3, _one_rank_is_poisoned)
