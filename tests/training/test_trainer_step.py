"""One step of the trainer on stand-ins: what is summed, logged and handed on. Three micro-batches
with two sequences each, in a world of two alike ranks."""

import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from titan_sparse import trainer
from titan_sparse.config import Config
from titan_sparse.trainer import Progress, Trainer

CPU = torch.device("cpu")
RANKS = 2


class _Step(SimpleNamespace):
    """A trainer after step 4. calls: what its step hands on."""

    def __init__(self, logged: bool, device: torch.device = CPU):
        calls = {}
        super().__init__(calls=calls, config=Config(), device=device, step_seconds=0.0)
        self.config.training.gradient_accumulation_steps = 3
        self.loader = _Loader([_batch([9], [9]), _batch([8], [8]), _batch([3, 4], [5])])
        self.progress = Progress(CPU)
        self.progress.step, self.progress.tokens_seen, self.progress.skipped_updates = 4, 1000, 3
        self.metrics = SimpleNamespace(
            should_log=lambda step: logged,
            count=lambda tokens: calls.update(counted=tokens),
            log=lambda *args: calls.update(log=args),
            caps=SimpleNamespace(counting=self._counting),
        )
        # The groups' learning rates are alike.
        scheduler = SimpleNamespace(get_last_lr=lambda: [0.5 / 2 ** calls.get("scheduled", 0)] * 2)
        self.schedule = SimpleNamespace(
            schedulers=[scheduler], step=lambda: calls.update(scheduled=1)
        )
        self.checkpointer = SimpleNamespace(before_update=lambda: None)
        self.guard = SimpleNamespace(update=lambda *args: calls.update(guard=args))
        self.recovery = SimpleNamespace(
            read_guard=lambda all_of_them: calls.update(all_of_them=all_of_them)
        )
        self.optimizers = SimpleNamespace(zero_grad=lambda: calls.update(cleared=True))
        self._totals = lambda batches: (16, 72, False)
        self._lacks_time = lambda *_: False
        self._clip = lambda: torch.tensor(2.0, device=device)

    @contextmanager
    def _counting(self):
        """Notes how many micro-batches ran inside."""
        before = len(self.calls.get("valid", []))
        yield
        inside = len(self.calls["valid"]) - before
        self.calls.setdefault("counted_caps", []).append(inside)

    def _recording(self, step: int, is_recorded: bool):
        self.calls.setdefault("recorded", []).append((step, is_recorded))
        return _Recorded(is_recorded)

    def _forward_backward(self, batch, valid: int) -> torch.Tensor:
        """A share that float32 could not add to 1."""
        self.calls.setdefault("valid", []).append(valid)
        return torch.tensor([1.0, 1e-12, 0.0][len(self.calls["valid"]) - 1], device=self.device)


def _batch(*lengths: list[int]) -> SimpleNamespace:
    return SimpleNamespace(lengths=list(lengths))


class _Loader:
    def __init__(self, batches: list):
        self.batches = batches

    def state_dict(self) -> dict:
        return {}

    def __next__(self):
        return self.batches.pop(0)


class _Recorded:
    """What `with recording()` gives, in a step that is logged."""

    def __init__(self, is_recorded: bool):
        self.recorded = "recorded" if is_recorded else None

    def __enter__(self):
        return self.recorded

    def __exit__(self, *_):
        return None


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.mul_(RANKS))


def test_a_step_that_is_logged(monkeypatch):
    seconds = iter([100.0, 107.5])
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=seconds.__next__))
    run = _Step(logged=True)
    assert Trainer.step(run) is False
    values = {
        "loss": RANKS * (1 + 1e-12),
        "grad_norm": 2.0,
        "lr": 0.5,  # of this step, and not of the next
        "skipped_updates": 3,
    }
    # (3 + 4 + 5) / 2 tokens a sequence in the micro-batch that was recorded.
    assert run.calls["log"] == (5, 1072, values, "recorded", 6.0)
    assert run.calls["recorded"] == [(5, False), (5, False), (5, True)]
    assert run.calls["valid"] == [16, 16, 16]
    assert run.calls["counted_caps"] == [1, 1, 1]
    assert run.calls["counted"] == 72
    assert run.calls["all_of_them"] is True
    assert run.calls["cleared"] and run.calls["scheduled"] == 1
    assert (run.progress.step, run.progress.tokens_seen) == (5, 1072)
    assert run.step_seconds == 7.5


def test_a_step_that_is_not_logged_waits_for_no_device():
    """Its loss stays there, in float64: the meta device has no number to give."""
    run = _Step(logged=False, device=torch.device("meta"))
    assert Trainer.step(run) is False
    step, loss, norm, optimizers = run.calls["guard"]
    assert (step, optimizers) == (5, run.optimizers)
    assert (loss.device.type, loss.dtype) == ("meta", torch.float64)
    assert norm.device.type == "meta"
    assert "log" not in run.calls and run.calls["all_of_them"] is False
    assert run.calls["recorded"] == [(5, False)] * 3
    assert run.calls["counted_caps"] == [1, 1, 1]


def test_a_rank_that_is_asked_to_stop_takes_no_batch():
    """The step is left out before anything is computed, with the states from before it."""
    run = _Step(logged=True)
    run._totals = lambda batches: (16, 72, True)
    run._leave_step_out = lambda loader, progress: (loader, progress["step"])
    assert Trainer.step(run) == ({}, 4)
    assert "valid" not in run.calls


@pytest.mark.parametrize("time_for", [1, 2, 3])
def test_time_is_looked_at_between_micro_batches(time_for):
    run = _Step(logged=True)
    asked = []

    def lacks_time(began: float, done: int, accumulated: int) -> bool:
        asked.append((done, accumulated))
        return done >= time_for

    run._lacks_time = lacks_time
    run._leave_step_out = lambda *_: "left out"
    assert Trainer.step(run) == (False if time_for == 3 else "left out")
    assert asked == [(1, 3), (2, 3)][:time_for]
    assert len(run.calls["valid"]) == time_for


@pytest.mark.parametrize("is_profiled", [False, True])
@pytest.mark.parametrize(
    "left_out, asked, wanted",
    [
        (None, False, ["step 4", "after 4 first", "step 5", "after 5", "step 6", "after 6"]),
        (None, True, ["step 4", "after 4 first", "step 5", "after 5", "step 6", "after 6"]),
        (5, True, ["step 4", "after 4 first", "step 5", "after 4 stopped"]),
        (4, True, ["step 4", "after 3 stopped"]),
    ],
)
def test_the_steps_that_are_left(monkeypatch, is_profiled, left_out, asked, wanted):
    """Of six, after three. The profiler counts each, and no garbage is collected by itself."""
    events, profiled = [], []
    profile = SimpleNamespace(step=lambda: profiled.append(True)) if is_profiled else None
    monkeypatch.setattr(trainer, "profiler", lambda *_: nullcontext(profile))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    run = SimpleNamespace(
        config=Config(),
        progress=SimpleNamespace(step=3),
        watch=SimpleNamespace(step=0),
        signals=SimpleNamespace(asked=asked),
        _any_rank=bool,
    )
    run.config.training.steps = 6

    def step() -> bool:
        assert not gc.isenabled()
        events.append(f"step {run.watch.step}")
        if run.watch.step == left_out:
            return True
        run.progress.step += 1
        return False

    def after_step(stopped: bool, is_first: bool) -> None:
        event = f"after {run.progress.step}"
        if is_first:
            event += " first"
        if stopped:
            event += " stopped"
        events.append(event)

    run.step, run._after_step = step, after_step
    assert Trainer._run_steps(run) is asked
    assert gc.isenabled()
    assert events == wanted
    assert len(profiled) == is_profiled * len(wanted) // 2
