"""The guard's numbers and messages, each by itself, and what it asks of a GPU that is not here.

Its rule as a whole, against plain loops, is in test_guard.py.
"""

import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_sparse.config import Guard as GuardSection
from titan_sparse.training.guard import (
    Guard,
    Report,
    optimizer_states,
    refuse_bad_weights,
)

CPU = torch.device("cpu")
SECTION = GuardSection(warmup_steps=3, average_steps=4, spike_factor=4.0)


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Optimizers:
    """Counts the updates. optimizers: one, which takes what the guard tells fused kernels."""

    def __init__(self) -> None:
        self.optimizers = [SimpleNamespace()]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def _judge(guard: Guard, norms: list[float], optimizers: _Optimizers | None = None) -> list[bool]:
    """Which of the steps with these norms are skipped."""
    for step, norm in enumerate(norms, start=1):
        norm = torch.tensor(norm, dtype=torch.float64)
        guard.update(step, torch.zeros(()), norm, optimizers or _Optimizers())
    return [report.skipped for report in guard.reports(all_of_them=True)]


def test_statistics_are_plain_at_first_and_then_forget():
    guard = Guard(GuardSection(warmup_steps=100, average_steps=4), CPU, False)
    logarithms = [1.0, 2.0, 4.0, 1.0]
    _judge(guard, [math.exp(x) for x in logarithms])
    # Mean 2, and the mean square of the distances.
    assert guard.statistics.tolist() == pytest.approx([2.0, 1.5, 4.0])
    _judge(guard, [math.exp(6.0)])
    # A quarter of the way to 6, as there are four steps to average.
    assert guard.statistics.tolist() == pytest.approx([3.0, 0.75 * (1.5 + 0.25 * 16), 5.0])


def test_the_first_judged_step_is_the_one_after_the_warm_up():
    assert _judge(Guard(SECTION, CPU, False), [1.0, 1.0, 1.0, 1e9]) == [False] * 3 + [True]


def test_a_norm_at_the_limit_is_taken():
    guard = Guard(SECTION, CPU, False)
    _judge(guard, [1.0] * 3)
    limit = guard._limit().item()
    assert limit == pytest.approx(4.0)
    above = Guard(SECTION, CPU, False)
    above.load_state_dict(copy.deepcopy(guard.state_dict()))
    assert _judge(guard, [limit]) == [False]
    assert _judge(above, [math.nextafter(limit, math.inf)]) == [True]


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_reported_as_0(norm):
    guard = Guard(SECTION, CPU, False)
    guard.update(7, torch.zeros(()), torch.tensor(norm), _Optimizers())
    [report] = guard.reports(all_of_them=True)
    assert report == Report(7, True, False, True, 0.0, math.inf, 1)
    assert report.reason() == "the gradient norm is not finite"


def test_fused_kernels_are_told_and_the_host_asks_nothing():
    """The update is also called in bad steps, where the kernels leave everything unchanged."""
    guard, optimizers = Guard(SECTION, CPU, on_device=True), _Optimizers()
    [optimizer] = optimizers.optimizers
    for count, (norm, found) in enumerate([(1.0, 0.0), (math.nan, 1.0), (1.0, 0.0)], start=1):
        _judge(guard, [norm], optimizers)
        assert optimizers.steps == count
        assert optimizer.found_inf.dtype == torch.float32 and optimizer.found_inf == found
        assert optimizer.grad_scale is None


def test_the_host_leaves_a_bad_update_out():
    guard, optimizers = Guard(SECTION, CPU, on_device=False), _Optimizers()
    assert _judge(guard, [1.0, math.nan, 1.0], optimizers) == [False, True, False]
    assert optimizers.steps == 2


def test_a_resumed_guard_goes_on_to_the_last_digit():
    first, second = Guard(SECTION, CPU, False), Guard(SECTION, CPU, False)
    _judge(first, [1.0, 1.1, 0.7, math.nan, math.nan])
    state = copy.deepcopy(first.state_dict())
    assert {name: value.dtype for name, value in state.items()} == {
        name: value.dtype for name, value in second.state_dict().items()
    }
    second.load_state_dict(state)
    assert torch.equal(second.statistics, first.statistics)
    second.update(6, torch.tensor(math.inf), torch.ones(()), _Optimizers())
    [report] = second.reports(all_of_them=True)
    assert report.in_a_row == 3


def test_states_as_large_as_parameters():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["nothing"] = None
    states = optimizer_states(SimpleNamespace(optimizers=[optimizer]))
    assert [tuple(state.shape) for state in states] == [(2, 2), (2, 2), (2,), (2,)]


@pytest.mark.parametrize(
    "bad, message",
    [
        (["0.bias"], "0.bias is not finite everywhere"),
        (["0.weight", "1.bias"], r"0.weight is not finite everywhere \(and 1 more\)"),
        (["0.weight", "0.bias", "1.bias"], r"0.weight is not finite everywhere \(and 2 more\)"),
    ],
)
def test_bad_first_weights_are_named_and_counted(bad, message):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name in bad:
        model.get_parameter(name).data.view(-1)[-1] = math.nan
    with pytest.raises(ValueError, match=f"^somewhere: {message}$"):
        refuse_bad_weights(model, "somewhere", CPU)
