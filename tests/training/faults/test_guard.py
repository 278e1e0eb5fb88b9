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

from tests.distributed import run_processes
from titan_sparse.config import Guard as GuardSection
from titan_sparse.training.faults.guard import Guard, Report, all_finite, refuse_bad_weights

CPU = torch.device("cpu")
SECTION = GuardSection(warmup_steps=3, average_steps=5, spike_factor=4.0)


class _Updates:
    """Counts the updates."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def _judge(guard: Guard, norms: list[float], updates: _Updates | None = None) -> list[bool]:
    """Which of the steps with these norms are skipped."""
    for step, norm in enumerate(norms, start=1):
        norm = torch.tensor(norm, dtype=torch.float64)
        guard.update(step, torch.zeros(()), norm, updates or _Updates())
    return [report.skipped for report in guard.reports(all_of_them=True)]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=True)


REASONS = {
    "nan gradient": "the gradient norm is not finite",
    "inf gradient": "the gradient norm is not finite",
    "nan loss": "the loss is not finite",
    "spike": "the gradient norm ",
}


@pytest.mark.parametrize("on_device", [True, False], ids=["fused verdict", "host"])
@pytest.mark.parametrize("poison", REASONS)
def test_a_bad_step_changes_nothing(alone, on_device, poison):
    """Weights and states are those of torch.optim.AdamW that never saw the bad steps."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain = copy.deepcopy(model)
    optimizer = _adamw(model)
    reference = _adamw(plain)
    guard = Guard(SECTION, CPU, on_device)

    for step in range(1, 11):
        is_bad = step in (6, 7)
        loss = torch.tensor(math.nan if is_bad and poison == "nan loss" else 1.0)
        factor = 100 if is_bad and poison == "spike" else 1
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = torch.randn(ours.shape)
            ours.grad = factor * gradient
            theirs.grad = gradient.clone()
        if is_bad and poison.endswith("gradient"):
            model.weight.grad[1, 2] = math.nan if poison.startswith("nan") else -math.inf
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        guard.update(step, loss.double(), norm, optimizer)
        if not is_bad:
            reference.step()

    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        our_state, their_state = optimizer.state[ours], reference.state[theirs]
        assert our_state["step"] == their_state["step"] == 8
        assert torch.equal(our_state["exp_avg_sq"], their_state["exp_avg_sq"])
    reports = guard.reports(all_of_them=True)
    assert [report.step for report in reports if report.skipped] == [6, 7]
    assert [report.in_a_row for report in reports] == [0] * 5 + [1, 2] + [0] * 3
    assert reports[5].reason().startswith(REASONS[poison])
    if poison == "inf gradient":
        assert reports[5] == Report(6, True, False, True, 0.0, reports[5].limit, 1)


def test_a_guard_that_is_off_lets_every_update_happen(alone):
    guard, updates = Guard(GuardSection(enable=False), CPU, False), _Updates()
    assert _judge(guard, [1.0, math.nan, math.inf], updates) == []
    assert updates.steps == 3


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


def test_spikes_by_the_written_rule(alone):
    random = torch.Generator().manual_seed(3)
    for noise in (0.05, 0.3, 1.0):
        norms = (noise * torch.randn(120, generator=random)).exp().tolist()
        for spike in range(30, 120, 15):
            norms[spike] *= 3 * spike / 30  # of many sizes around the limit
        norms[50] = math.nan
        norms[51] = 0.0
        wanted = _plainly(norms, SECTION)
        assert _judge(Guard(SECTION, CPU, False), norms) == wanted
        assert 1 < sum(wanted) < 20


@pytest.mark.parametrize(
    "options, norms, skipped",
    [
        # The first judged step is the one after the warm-up.
        ({}, [1.0, 1.0, 1.0, 1e9], [False] * 3 + [True]),
        ({"warmup_steps": 0, "spike_factor": 0}, [1.0, 1.0, 1e9, 1e-9, 1e9], [False] * 5),
        # A norm at the limit is taken.
        ({}, [1.0] * 3 + [math.nextafter(4.0, 0)], [False] * 4),
        ({}, [1.0] * 3 + [4.0 + 1e-9], [False] * 3 + [True]),
    ],
)
def test_what_is_a_spike(alone, options, norms, skipped):
    section = GuardSection(**{**vars(SECTION), **options})
    assert _judge(Guard(section, CPU, False), norms) == skipped


def test_a_resumed_guard_goes_on_to_the_last_digit(alone):
    first, second = Guard(SECTION, CPU, False), Guard(SECTION, CPU, False)
    _judge(first, [1.0, 1.1, 0.7, math.nan, math.nan])
    state = copy.deepcopy(first.state_dict())
    second.update(1, torch.zeros(()), torch.ones(()), _Updates())
    second.load_state_dict(state)
    assert second.statistics.dtype == first.statistics.dtype == torch.float64
    assert torch.equal(second.statistics, first.statistics)
    second.update(6, torch.tensor(math.inf), torch.ones(()), _Updates())
    # Unread reports of before have gone.
    [report] = second.reports(all_of_them=True)
    assert (report.in_a_row, report.bad_loss) == (3, True)


def _one_rank_is_poisoned() -> None:
    """Replicas hold the same parameters: if one finds a bad step, none may apply it."""
    model = nn.Linear(2, 2)
    optimizer = _adamw(model)
    before = model.weight.detach().clone()
    guard = Guard(SECTION, CPU, True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = torch.tensor(math.inf if dist.get_rank() == 1 else 1.0)
    guard.update(1, torch.zeros(()), norm, optimizer)
    assert torch.equal(model.weight, before)
    assert guard.reports(all_of_them=True)[0].bad_norm
    guard.update(2, torch.zeros(()), torch.ones(()), optimizer)
    assert not torch.equal(model.weight, before)

    # A bad element of one rank's shard is seen by all; ranks without rows take part.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for value, is_finite in ((1.0, True), (math.nan, False), (-math.inf, False), (3e38, True)):
        whole = torch.ones(2, 3)
        whole[0, 1] = value
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert all_finite([torch.ones(4), sharded], CPU) == is_finite
        model = nn.Linear(3, 2, bias=False)
        model.weight = nn.Parameter(sharded)
        if is_finite:
            refuse_bad_weights(model, CPU)
        else:
            with pytest.raises(
                ValueError, match="^the first weights: weight is not finite everywhere; read"
            ):
                refuse_bad_weights(model, CPU)


def test_what_one_rank_finds_holds_for_all():
    run_processes(3, _one_rank_is_poisoned)
