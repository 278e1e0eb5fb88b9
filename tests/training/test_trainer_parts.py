"""The trainer's methods one by one, on stand-ins for what they call.

Here are the branches that whole runs reach only under a signal, a poisoned step or a slow rank.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.runs import TINY
from titan_sparse import trainer
from titan_sparse.config import Config
from titan_sparse.data import Batch
from titan_sparse.trainer import Trainer

LONG, SHORT = 900, 30
"""Seconds of the two timeouts."""


@pytest.fixture
def world(monkeypatch) -> SimpleNamespace:
    """A world of `ranks` that all have what this process has. rank: this one's."""
    world = SimpleNamespace(rank=0, ranks=1)
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.mul_(world.ranks))
    monkeypatch.setattr(dist, "get_rank", lambda: world.rank)
    return world


def _batch(labels: list[list[int]], lengths: list[list[int]]) -> Batch:
    tokens = torch.zeros(len(labels), len(labels[0]), dtype=torch.long)
    return Batch(tokens, torch.tensor(labels), tokens, lengths)


@pytest.mark.parametrize("cp_rank, tokens", [(0, 7), (1, 0), (2, 0)])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_totals(world, ranks, cp_rank, tokens, asked):
    """Labels of all ranks; tokens of the first rank of each context-parallel group."""
    world.ranks = ranks
    batches = [_batch([[1, 2, -100, 4]], [[3]]), _batch([[1, 2, 3, -100]], [[2, 2]])]
    run = SimpleNamespace(cp=SimpleNamespace(rank=cp_rank), signals=SimpleNamespace(asked=asked))
    assert Trainer._totals(run, batches) == (6 * ranks, tokens * ranks, asked)


def test_without_a_label_the_loss_is_divided_by_one(world):
    run = SimpleNamespace(cp=SimpleNamespace(rank=0), signals=SimpleNamespace(asked=False))
    assert Trainer._totals(run, [_batch([[-100]], [[1]])]) == (1, 1, False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_rank(world, ranks):
    world.ranks = ranks
    assert Trainer._any_rank(None, True) is True
    assert Trainer._any_rank(None, False) is False


def test_another_rank_counts(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.add_(1))
    assert Trainer._any_rank(None, False) is True


@pytest.mark.parametrize(
    "now, done, last_step, needed",
    [
        (112.0, 2, 8.0, 6 * 6.0),  # 6 s each so far
        (104.0, 4, 24.0, 4 * 3.0),  # as slow as in the step before, 24 s of 8
        (124.0, 4, 0.0, 4 * 6.0),
    ],
)
def test_what_the_rest_of_a_step_needs(monkeypatch, now, done, last_step, needed):
    """Of a step of 8 micro-batches that began at second 100. A save takes 5 s."""
    asked, told = [], []
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now)

    def has_time_for(seconds: float, grace: float) -> bool:
        asked.append((seconds, grace))
        return seconds < 30

    def any_rank(condition: bool) -> bool:
        told.append(condition)
        return condition

    run = SimpleNamespace(
        step_seconds=last_step,
        config=Config(),
        signals=SimpleNamespace(has_time_for=has_time_for),
        _save_seconds=lambda grace: 5.0,
        _any_rank=any_rank,
    )
    run.config.training.stop_grace_seconds = 40
    lacks = Trainer._lacks_time(run, 100.0, done, 8)
    assert asked == [(pytest.approx(needed + 5.0), 40)]
    assert told == [lacks] == [needed + 5.0 >= 30]


@pytest.mark.parametrize("last, wanted", [(None, 10), (7.5, 7.5)])
def test_a_save_is_reckoned_until_it_is_on_disk(last, wanted):
    """One in the background holds training for milliseconds, but the end of the run waits for it."""
    checkpointer = SimpleNamespace(last_save_seconds=last, last_held_seconds=0.001)
    run = SimpleNamespace(config=Config(), checkpointer=checkpointer)
    assert Trainer._save_seconds(run, 20) == 0
    run.config.checkpoint.enable = True
    assert Trainer._save_seconds(run, 20) == wanted


def test_a_step_that_is_left_out_leaves_nothing():
    """Neither gradients, nor a place in the data, nor drawn random numbers."""
    before = trainer.Progress(torch.device("cpu"))
    before.step, before.tokens_seen = 3, 40
    states = {"place": 7}, before.state_dict()
    drawn = torch.rand(2)
    loaded, cleared = [], []
    run = SimpleNamespace(
        optimizers=SimpleNamespace(zero_grad=lambda: cleared.append(True)),
        loader=SimpleNamespace(load_state_dict=loaded.append),
        progress=trainer.Progress(torch.device("cpu")),
    )
    assert Trainer._leave_step_out(run, *states) is True
    assert loaded == [{"place": 7}] and cleared == [True]
    assert (run.progress.step, run.progress.tokens_seen) == (3, 40)
    assert torch.equal(torch.rand(2), drawn)


def test_attention_is_recorded_where_it_is_logged(monkeypatch):
    metrics = SimpleNamespace(
        recall_rows=lambda step: 10 * step, thumbnail_cells=lambda step: 100 * step
    )
    monkeypatch.setattr(trainer, "recording", lambda *sizes: sizes)
    run = SimpleNamespace(metrics=metrics)
    assert Trainer._recording(run, 3, True) == (30, 300)
    with Trainer._recording(run, 3, False) as nothing:
        assert nothing is None


@pytest.mark.parametrize("has_table", [False, True])
def test_a_layout_by_the_batch_reaches_the_model(has_table):
    """The table of blocks goes along with the mask, and the loss is a share of the mean."""
    table = torch.tensor([[0, 1], [3, 2]])
    weight = nn.Parameter(torch.tensor(3.0))
    seen = []

    def model(tokens, positions, ranges, labels, chunk, z_loss):
        seen.append((tokens, positions, labels, ranges.table, chunk, z_loss))
        return 8 * weight

    batch = _batch([[1, 2, 3, -100]], [[8]])
    batch.table = table if has_table else None
    run = SimpleNamespace(
        config=Config(),
        model_config=TINY,
        device=torch.device("cpu"),
        cp=SimpleNamespace(size=2),
        model=model,
    )
    run.config.training.loss_chunk_tokens, run.config.training.z_loss = 5, 0.25
    loss = Trainer._forward_backward(run, batch, 4)
    assert loss == 6 and not loss.requires_grad and weight.grad == 2
    [(*inputs, got, chunk, z_loss)] = seen
    for given, wanted in zip(inputs, (batch.tokens, batch.positions, batch.labels), strict=True):
        assert torch.equal(given, wanted)
    assert (chunk, z_loss) == (5, 0.25)
    assert torch.equal(got, table) if has_table else got is None


@pytest.mark.parametrize("max_norm, factor", [(0.5, 0.1), (2.5, 0.5), (5.5, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_down_to_the_limit(max_norm, factor):
    """A norm of 5, over a parameter that has a gradient and one that has none."""
    model = nn.ParameterList([torch.ones(2), torch.ones(3)])
    model[0].grad = torch.tensor([3.0, -4.0])
    run = SimpleNamespace(model=model, config=Config())
    run.config.training.max_norm = max_norm
    assert Trainer._clip(run) == 5.0
    torch.testing.assert_close(model[0].grad, factor * torch.tensor([3.0, -4.0]))
    assert model[1].grad is None


class _Run(SimpleNamespace):
    """Notes in `events` what _after_step() sets in motion.

    problem: of the guard. due, validates: whether a save and a validation are. asked: a signal.
    """

    def __init__(self, step: int, problem: str = "", due=False, validates=False, asked=False):
        events: list = []
        note = events.append
        config = Config()
        config.training.steps = 10
        config.training.gc_interval = 4
        config.parallelism.timeout_seconds = SHORT
        config.parallelism.first_step_timeout_seconds = LONG
        super().__init__(events=events, config=config, saved_step=0)
        self.progress = SimpleNamespace(step=step)
        self.checkpointer = SimpleNamespace(
            is_due=lambda step, is_last: due or is_last,
            raise_failure=lambda: note("raise_failure"),
            prepare=lambda: note("prepare"),
            save=lambda step: note(f"save {step}"),
            last_held_seconds=1.5,
        )
        self.recovery = SimpleNamespace(
            problem=self._problem,
            may_save=lambda is_due, is_last: is_due,
            has_saved=lambda: note("has_saved"),
        )
        self.problem = problem
        self.signals = SimpleNamespace(asked=asked)
        self.validation = SimpleNamespace(
            is_due=lambda step: validates,
            run=lambda scorer, step, board, writes: note(f"validate {step} {scorer} {writes}"),
        )
        self.scorer = "scorer"
        self.model = torch.nn.Identity()
        self.metrics = SimpleNamespace(
            leave_out=lambda seconds: note(f"leave out {seconds}"),
            start_interval=lambda: note("start_interval"),
            board=None,
        )
        self._any_rank = bool
        self._go_back = lambda problem: note(f"go back: {problem}")
        self._set_timeout = lambda seconds: note(f"timeout {seconds}")

    def _problem(self, saves: bool, is_last: bool) -> str:
        self.asked_for = saves, is_last
        return self.problem


@pytest.fixture
def after(monkeypatch, world):
    """after(run, stopped, is_first): the events of what follows a step."""

    def after(run: _Run, stopped: bool = False, is_first: bool = False) -> list:
        monkeypatch.setattr(trainer, "meet", lambda: run.events.append("meet"))
        monkeypatch.setattr(
            trainer.gc, "collect", lambda generation: run.events.append(f"collect {generation}")
        )
        Trainer._after_step(run, stopped, is_first)
        return run.events

    return after


BEGIN = [f"timeout {LONG}", "raise_failure"]
END = ["meet", f"timeout {SHORT}"]
SAVE = ["leave out 1.5", "has_saved"]


def test_most_steps_only_look_for_a_failed_save(after):
    run = _Run(3)
    assert after(run) == ["raise_failure"]
    assert run.asked_for == (False, False) and run.saved_step == 0


def test_after_the_first_step_timeouts_are_short(after):
    assert after(_Run(3), is_first=True) == ["raise_failure", "prepare", *END]


def test_a_save_has_the_long_timeout(after):
    run = _Run(3, due=True)
    assert after(run) == [*BEGIN, "save 3", *SAVE, *END]
    assert run.asked_for == (True, False) and run.saved_step == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_validation_has_the_long_timeout(after, world, rank):
    """Rank 0 writes it, and its time is no part of a step's."""
    world.rank = rank
    validated = [f"validate 3 scorer {rank == 0}", "start_interval"]
    assert after(_Run(3, validates=True)) == [*BEGIN, *validated, *END]


def test_who_is_asked_to_stop_does_not_validate(after):
    assert after(_Run(3, validates=True, asked=True)) == ["raise_failure"]


@pytest.mark.parametrize("step, collected", [(3, []), (4, ["collect 1"]), (8, ["collect 1"])])
def test_garbage_is_collected_at_the_same_steps(after, step, collected):
    assert after(_Run(step)) == ["raise_failure", *collected]


@pytest.mark.parametrize("step, stopped", [(10, False), (3, True)])
def test_the_last_step_is_saved_once(after, step, stopped):
    run = _Run(step)
    assert after(run, stopped) == [*BEGIN, f"save {step}", *SAVE, *END]
    assert run.asked_for == (True, True)
    again = _Run(step)
    again.saved_step = step
    assert after(again, stopped) == ["raise_failure"]
    assert again.asked_for == (False, True)


def test_a_problem_sends_the_run_back(after):
    run = _Run(3, problem="weights are bad", due=True)
    assert after(run) == ["go back: weights are bad"]
    assert run.saved_step == 0


@pytest.mark.parametrize("due", [False, True])
def test_a_run_that_is_stopped_saves_nothing_bad(after, caplog, due):
    run = _Run(3, problem="weights are bad")
    run.saved_step = 0 if due else 3
    assert after(run, stopped=True) == ["raise_failure"]
    wanted = ["step 3 is not saved: weights are bad"] if due else []
    assert [record.message for record in caplog.records] == wanted


def test_going_back(monkeypatch):
    events = []
    monkeypatch.setattr(trainer, "meet", lambda: events.append("meet"))
    run = SimpleNamespace(config=Config(), progress=SimpleNamespace(step=9), saved_step=0)

    def go_back(problem: str) -> None:
        events.append(problem)
        run.progress.step = 6

    run.config.parallelism.timeout_seconds = SHORT
    run.config.parallelism.first_step_timeout_seconds = LONG
    run.recovery = SimpleNamespace(go_back=go_back)
    run.metrics = SimpleNamespace(start_interval=lambda: events.append("start_interval"))
    run._set_timeout = lambda seconds: events.append(f"timeout {seconds}")
    Trainer._go_back(run, "why")
    assert events == [f"timeout {LONG}", "why", "start_interval", *END]
    assert run.saved_step == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_exports_and_the_others_wait(monkeypatch, world, rank):
    world.rank = rank
    events = []
    monkeypatch.setattr(trainer, "meet", lambda: events.append("meet"))
    run = SimpleNamespace(
        config=Config(),
        progress=SimpleNamespace(step=9),
        model_config="shape",
        adapters="adapters",
        dtype=torch.bfloat16,
        checkpointer=SimpleNamespace(save_in_hf=lambda *args: events.append(args)),
        _set_timeout=lambda seconds: events.append(f"timeout {seconds}"),
    )
    run.config.parallelism.first_step_timeout_seconds = LONG
    run.config.model.initial_hf = "source"
    Trainer._save_in_hf(run)
    exported = [(9, "shape", torch.bfloat16, "source", "adapters")] if rank == 0 else []
    assert events == [f"timeout {LONG}", *exported, "meet"]


@pytest.mark.parametrize("seconds, without", [(SHORT, ["saves"]), (LONG, [])])
def test_saves_in_the_background_keep_the_long_timeout(monkeypatch, seconds, without):
    calls = []
    monkeypatch.setattr(trainer, "set_timeout", lambda s, without=(): calls.append((s, without)))
    run = SimpleNamespace(
        config=Config(),
        checkpointer=SimpleNamespace(background_groups=lambda: ["saves"]),
        watch=SimpleNamespace(timeout_seconds=0),
    )
    run.config.parallelism.timeout_seconds = SHORT
    Trainer._set_timeout(run, seconds)
    assert calls == [(seconds, without)]
    assert run.watch.timeout_seconds == seconds
