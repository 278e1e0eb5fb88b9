"""Settings changed on resuming: they take effect, exactly, and a jump of the learning rate is said."""

import logging
from operator import attrgetter

import pytest
import torch

from titan_sparse.config import Config, LRScheduler, Optimizer
from titan_sparse.config.changes import Saved
from titan_sparse.config.reading import KINDS
from titan_sparse.training.optimizer import build_optimizer, build_schedule, resume_schedule
from titan_sparse.training.setup import report_changes


class Layer(torch.nn.Module):
    """A matrix, which decays, and a bias, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2, dtype=torch.float64)


def _steps(model: Layer, optimizer, schedule, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        model.linear(torch.randn(5, 3, generator=generator, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("implementation", ["fused", "for-loop"])
def test_changed_settings_equal_a_loop_that_sets_them_by_hand(implementation):
    torch.manual_seed(0)
    model, twin = Layer(), Layer()
    twin.load_state_dict(model.state_dict())
    before = Optimizer(lr=0.1, weight_decay=0.1)
    now = Optimizer("AdamW", 0.03, 0.5, 0.6, 1e-3, 0.7, implementation)
    saved_optimizer = build_optimizer(model, before, "cpu")
    saved_schedule = build_schedule(saved_optimizer, LRScheduler(2, total_steps=10), 10)
    _steps(model, saved_optimizer, saved_schedule, 3)
    state = saved_optimizer.state_dict()

    optimizer = build_optimizer(model, now, "cpu")
    schedule = build_schedule(optimizer, LRScheduler(5, total_steps=10), 10)
    optimizer.load_state_dict(state)
    groups = optimizer.optimizers[0].param_groups
    assert groups[0]["betas"] == (0.9, 0.95), "the checkpoint brings its own settings"
    resume_schedule(optimizer, schedule, now, 3)
    assert all(group["fused"] == (implementation == "fused") for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]

    by_hand = torch.optim.AdamW(
        [
            {"params": [twin.linear.weight], "weight_decay": 0.1},
            {"params": [twin.linear.bias], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=implementation == "fused",
    )
    for step, factor in enumerate((1 / 2, 1, 1)):
        for group in by_hand.param_groups:
            group["lr"] = 0.1 * factor
        _steps(twin, by_hand, None, 1, first=step)
    for group, weight_decay in zip(by_hand.param_groups, (0.7, 0.0)):
        group |= {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": weight_decay}
    # Warm-up over five steps: the fourth update is at 4/5 of the peak.
    for step, factor in ((3, 4 / 5), (4, 1)):
        for group in by_hand.param_groups:
            group["lr"] = 0.03 * factor
        assert schedule.schedulers[0].get_last_lr() == pytest.approx([0.03 * factor] * 2)
        _steps(model, optimizer, schedule, 1, first=step)
        _steps(twin, by_hand, None, 1, first=step)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("section", [LRScheduler(), LRScheduler(3, 0.3), LRScheduler(0, 0.0)])
def test_resumed_schedule_is_the_stepped_one(section):
    model = Layer()
    optimizer = build_optimizer(model, Optimizer(), "cpu")
    stepped = build_schedule(optimizer, section, 20)
    # Beyond its last step too, where it stays as it is.
    for step in range(25):
        resumed = build_schedule(optimizer, section, 20)
        resume_schedule(optimizer, resumed, Optimizer(), step)
        assert resumed.schedulers[0].get_last_lr() == stepped.schedulers[0].get_last_lr()
        optimizer.step()
        stepped.step()


def _config(steps: int, lr: float = 1.0, total_steps: int = 0) -> Config:
    config = Config()
    config.training.steps, config.optimizer.lr = steps, lr
    config.lr_scheduler = LRScheduler(0, -1.0, "linear", 0.1, total_steps)
    return config


def test_more_steps_raise_the_learning_rate_with_a_warning(caplog):
    caplog.set_level(logging.INFO, "titan_sparse")
    saved = Saved("step-100", {key: attrgetter(key)(_config(100)) for key in KINDS}, {})
    report_changes(saved, _config(200, lr=0.5), 100)
    said = [record.getMessage() for record in caplog.records]
    assert "changed since the checkpoint: training.steps 100 -> 200" in said
    assert "changed since the checkpoint: optimizer.lr 1.0 -> 0.5" in said
    # Linear from the peak at the first step to a tenth of it: after 100 of 200 steps half of the way.
    assert caplog.records[-1].levelno == logging.WARNING
    assert "of step 101 is 0.275 and was 0.1 under" in said[-1] and "total_steps = 100" in said[-1]
    caplog.clear()
    report_changes(saved, _config(200, total_steps=100), 100)
    assert not any(record.levelno == logging.WARNING for record in caplog.records)
