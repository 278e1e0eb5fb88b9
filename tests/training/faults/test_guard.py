"""The guard, against torch.optim loops without the skipped steps and against plain statistics.
Poisoned runs have the numbers of a run that was led around the poison by hand."""

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.data.helpers import prepared
from tests.distributed import on_ranks
from tests.runs import metrics_of, tiny_config, weights_of
from titan_sparse.config import Guard as GuardSection
from titan_sparse.data.shards import DataError
from titan_sparse.training.faults.guard import Guard, Report, all_finite
from titan_sparse.training.faults.launcher import Poisoned
from titan_sparse.training.trainer import Trainer

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


@on_ranks(3)
def test_what_one_rank_finds_holds_for_all():
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


SETTINGS = {
    "training__steps": 7,
    "training__seq_len": 128,
    "attention__pattern": "dense",
    "training__dtype": "float32",
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "lr_scheduler__total_steps": 7,
    "parallelism__cp": 2,
    "metrics__recall_every": 0,
    "guard__max_skips_in_a_row": 2,
}


def _poison(trainer: Trainer, is_bad: Callable[[int], bool], value: float) -> None:
    """In bad updates, counted from 1, one element of the last rank's gradients becomes `value`."""
    clip = trainer._clip
    trainer.updates = 0

    def poisoned_clip() -> torch.Tensor:
        trainer.updates += 1
        if is_bad(trainer.updates) and dist.get_rank() == dist.get_world_size() - 1:
            gradient = next(p.grad for p in trainer.model.parameters() if p.grad.numel())
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[-1] = value
        return clip()

    trainer._clip = poisoned_clip


def _leave_out(trainer: Trainer, update: int) -> None:
    """By hand: the optimizer does not step in this update."""
    step = trainer.optimizer.step
    trainer.updates = 0

    def step_or_not() -> None:
        trainer.updates += 1
        if trainer.updates != update:
            step()

    trainer.optimizer.step = step_or_not


def _losses(config) -> list[float]:
    dist.barrier()
    return [line["loss"] for line in metrics_of(config)]


def _saved(config) -> list[str]:
    dist.barrier()
    folder = Path(config.training.output_dir, "checkpoint")
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def _one_bad_step(folder: Path) -> None:
    """It is left out."""
    by_hand = tiny_config(folder, "by_hand", **SETTINGS)
    reference = Trainer(by_hand)
    _leave_out(reference, 4)
    reference.train()
    config = tiny_config(folder, "poisoned", **SETTINGS)
    trainer = Trainer(config)
    _poison(trainer, lambda update: update == 4, math.nan)
    trainer.train()
    got, wanted = weights_of(trainer), weights_of(reference)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert _losses(config) == _losses(by_hand)
    assert all(math.isfinite(loss) for loss in _losses(config))
    lines = metrics_of(config)
    assert [line["skipped_updates"] for line in lines] == [0, 0, 0, 1, 1, 1, 1]
    assert [line["grad_norm"] is None for line in lines] == [False] * 3 + [True] + [False] * 3
    # The save of step 4 waited for a good step.
    assert _saved(config) == ["step-5", "step-6", "step-7"], _saved(config)


def _go_back_once(folder: Path) -> None:
    """The run goes back, and on with the batches that come next."""
    config = tiny_config(folder, "goes_back", **SETTINGS | {"metrics__tensorboard": True})
    trainer = Trainer(config)
    _poison(trainer, lambda update: update in (5, 6), math.nan)
    trainer.train()
    assert trainer.progress.times_gone_back == 1 and trainer.progress.skipped_updates == 2
    assert [line["step"] for line in metrics_of(config)] == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    losses = EventAccumulator(str(folder / "goes_back/tensorboard")).Reload().Scalars("Train/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4, 5, 6, 7]

    # By hand: the same start, then step 4's checkpoint, without the batches of steps 5 and 6.
    by_hand = tiny_config(folder, "goes_back_by_hand", **SETTINGS | {"training__steps": 4})
    Trainer(by_hand).train()
    by_hand.training.steps = 7
    reference = Trainer(by_hand)
    load = reference._load

    def load_and_skip() -> None:
        load()
        next(reference.loader)
        next(reference.loader)

    reference._load = load_and_skip
    reference.train()
    assert _losses(config)[-3:] == _losses(by_hand)[-3:]
    got, wanted = weights_of(trainer), weights_of(reference)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def _give_up(folder: Path) -> None:
    """Every update from the fifth on is bad: back to step 4, then to step 2, then no more."""
    settings = SETTINGS | {"guard__max_rollbacks": 2}
    trainer = Trainer(tiny_config(folder, "lost", **settings))
    _poison(trainer, lambda update: update >= 5, math.nan)
    with pytest.raises(Poisoned, match="has gone back 2 times .guard.max_rollbacks = 2.; look at"):
        trainer.train()
    assert trainer.progress.step == 4 and trainer.updates == 10
    dist.barrier()  # rank 0 writes the lines
    lines = metrics_of(trainer.config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 5, 6, 3, 4]
    assert _saved(trainer.config) == ["step-2"]

    settings = SETTINGS | {"checkpoint__enable": False}
    trainer = Trainer(tiny_config(folder, "unsaved", **settings))
    _poison(trainer, lambda update: update >= 2, math.inf)
    with pytest.raises(Poisoned, match="there is no good checkpoint before step 2; look at"):
        trainer.train()
    assert trainer.updates == 3


def _spoilt_weights(folder: Path) -> None:
    """Weights that went bad after the guard, as by a flipped bit, never enter a checkpoint."""
    config = tiny_config(folder, "spoilt", **SETTINGS | {"guard__max_skips_in_a_row": 50})
    trainer = Trainer(config)
    after_step = trainer._after_step

    def spoil_and_go_on(*args, **keywords) -> None:
        if trainer.progress.step == 4 and trainer.progress.times_gone_back == 0:
            with torch.no_grad():
                weight = trainer.model.norm.weight.to_local()
                if dist.get_rank() == 0:
                    weight[0] = math.nan
        after_step(*args, **keywords)

    trainer._after_step = spoil_and_go_on
    trainer.train()
    assert [line["step"] for line in metrics_of(config)] == [1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert trainer.progress.times_gone_back == 1
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())


def _poisoned_start(folder: Path) -> None:
    """A checkpoint of another run with a NaN in it, as versions without the guard have saved."""
    first = Trainer(
        tiny_config(folder, "first", **SETTINGS | {"training__steps": 2, "guard__enable": False})
    )
    _poison(first, lambda update: update == 1, math.nan)
    first.train()
    dist.barrier()
    path = folder / "first/checkpoint/step-2"
    config = tiny_config(folder, "second", **SETTINGS, checkpoint__initial_load_path=str(path))
    with pytest.raises(ValueError, match="^the first weights: .* is not finite everywhere; read"):
        Trainer(config).train()


@on_ranks(2)
def test_poison(texts):
    for check in (_one_bad_step, _go_back_once, _give_up, _spoilt_weights, _poisoned_start):
        check(texts)
        dist.barrier()


@pytest.mark.parametrize("when", ["before a step", "before a save"])
def test_nothing_is_learned_or_saved_of_tokens_that_were_changed(tmp_path, monkeypatch, when):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokens = prepared(tmp_path, lengths=[299] * 12)
    overrides = {"checkpoint__enable": True, "checkpoint__interval": 1, "data__source": tokens}
    run = Trainer(tiny_config(tmp_path, "run", data__shuffle=False, **overrides))
    owner, name = (run.checkpointer, "save") if when == "before a step" else (run, "step")
    original = getattr(owner, name)

    def damage_after(*arguments):
        result = original(*arguments)
        # Whole pages of a file are cut off, which kills a process that has mapped them.
        os.truncate(Path(tokens, "shard_00000.bin"), 602)
        return result

    monkeypatch.setattr(owner, name, damage_after)
    with pytest.raises(DataError, match=r"shard_00000\.bin was changed during the run"):
        run.train()
    saved = sorted(path.name for path in (tmp_path / "run/checkpoint").glob("step-*"))
    assert saved == (["step-1"] if when == "before a step" else [])
