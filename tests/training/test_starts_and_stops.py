"""How a run begins and ends: refusals, resuming, what follows a step, stop
signals, and timeouts."""

import fcntl
import gc
import itertools
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import on_ranks
from tests.runs import metrics_of, tiny_config, write_texts
from titan_sparse.config import Config, load
from titan_sparse.data import PackedLoader
from titan_sparse.training import export
from titan_sparse.training.recovery import Decision, decide
from titan_sparse.training.trainer import Trainer

GOOD = dict(
    save_is_due=False,
    validation_is_due=False,
    is_last=False,
    stopped=False,
    has_problem=False,
    bad_in_a_row=0,
)
SAVE = dict(save_is_due=True)
TABLE = {
    "nothing is due": ({}, Decision()),
    "a save": (SAVE, Decision(saves=True)),
    "a validation": (dict(validation_is_due=True), Decision(validates=True)),
    "both": (SAVE | dict(validation_is_due=True), Decision(saves=True, validates=True)),
    "a save amid bad updates waits": (SAVE | dict(bad_in_a_row=2), Decision(save_is_late=True)),
    "no save is due amid bad updates": (dict(bad_in_a_row=2), Decision()),
    "but the last step is saved": (SAVE | dict(bad_in_a_row=2, is_last=True), Decision(saves=True)),
    "a problem": (SAVE | dict(has_problem=True, validation_is_due=True), Decision(goes_back=True)),
    "a problem at the end": (SAVE | dict(has_problem=True, is_last=True), Decision(goes_back=True)),
    "a problem in a run that was stopped": (
        SAVE | dict(has_problem=True, is_last=True, stopped=True),
        Decision(),
    ),
    "a stop": (SAVE | dict(is_last=True, stopped=True), Decision(saves=True)),
}


@pytest.mark.parametrize("case", TABLE)
def test_decision(case):
    facts, wanted = TABLE[case]
    assert decide(**GOOD | facts) == wanted


def test_rules_that_always_hold():
    for values in itertools.product((False, True), repeat=len(GOOD)):
        facts = dict(zip(GOOD, values, strict=True))
        facts["is_last"] |= facts["stopped"]
        done = decide(**facts)
        # Bad weights are never saved, and nothing else happens to a run that goes back.
        assert not (facts["has_problem"] and (done.saves or done.save_is_late))
        assert not done.goes_back or done == Decision(goes_back=True)
        # A save that is due is made, put off, or impossible.
        is_possible = facts["save_is_due"] and not facts["has_problem"]
        assert done.saves + done.save_is_late == is_possible
        assert not (done.save_is_late and facts["is_last"])


SETTINGS = {
    "training__steps": 2,
    "training__seq_len": 64,
    "training__gradient_accumulation_steps": 2,
    "attention__pattern": "dense",
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "checkpoint__last_save_in_hf": True,
    "lr_scheduler__total_steps": 4,
    "metrics__log_every": 1,
    "metrics__recall_every": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("starts")
    write_texts(folder / "texts")
    write_texts(folder / "grown", documents=13)
    with pytest.MonkeyPatch.context() as patch:
        _run(patch, tiny_config(folder, "saved", **SETTINGS))
    return folder


def _run(monkeypatch, config: Config, **hooks) -> tuple[Trainer, list]:
    """Train. Returns what was saved and exported, and which step counted as the first.
    hooks: method of the trainer -> what is called after it with the trainer."""
    run, events = Trainer(config), []
    save, after_step = run.checkpointer.save, run._after_step

    def noted_save(step: int) -> float:
        events.append(f"save {step}")
        return save(step)

    def noted_after_step(stopped: bool, is_first: bool) -> None:
        if is_first:
            events.append(f"first {run.progress.step}")
        after_step(stopped, is_first)

    monkeypatch.setattr(run.checkpointer, "save", noted_save)
    monkeypatch.setattr(run, "_after_step", noted_after_step)
    # Transformers has nothing like the tiny model.
    monkeypatch.setattr(export, "export", lambda *_: events.append(f"export {run.progress.step}"))
    for name, hook in hooks.items():
        method = getattr(run, name)

        def followed(*args, method=method, hook=hook, **kwargs):
            result = method(*args, **kwargs)
            hook(run)
            return result

        monkeypatch.setattr(run, name, followed)
    run.train()
    return run, events


def _messages(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "titan_sparse"]


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"optimizer__name": "AdamW"}, '^optimizer.name was "SGD" and is "AdamW", .*step-2'),
        (
            {"checkpoint__async_mode": "async_with_pinned_mem"},
            "^checkpoint.async_mode .* needs a GPU",
        ),
        ({"float8__enable": True}, "^float8.enable = true needs a Hopper GPU"),
        # The place in the data that is saved would be another.
        ({"training__seq_len": 96}, "^training.seq_len was 64 and is 96, .*write training.seq_len"),
        ({"data__source": "{folder}/texts:1, {folder}/grown:1"}, "had 1 parts and has 2, .*write"),
        ({"data__source": "{folder}/grown"}, "documents .*was 12 and is 13.*write data.source = "),
    ],
)
def test_a_start_is_refused_before_it_begins(folder, settings, reason):
    """No folder of a start is made."""
    starts = os.listdir(folder / "saved/starts")
    config = tiny_config(folder, "saved", **SETTINGS | settings)
    config.data.source = config.data.source.replace("{folder}", str(folder))
    with pytest.raises(ValueError, match=reason) as refused:
        Trainer(config)
    assert os.listdir(folder / "saved/starts") == starts
    if config.data != tiny_config(folder, "saved", **SETTINGS).data:
        advice = f'checkpoint.initial_load_path = "{folder}/saved/checkpoint/step-2"'
        assert advice in str(refused.value)


def test_a_run_whose_folder_is_deleted_ends(folder, monkeypatch):
    def delete(run: Trainer) -> None:
        shutil.rmtree(folder / "deleted")

    config = tiny_config(folder, "deleted", **SETTINGS)
    with pytest.raises(FileNotFoundError, match="deleted or moved while the run goes on"):
        _run(monkeypatch, config, step=delete)
    assert not (folder / "deleted").exists()


def _finished(caplog) -> str:
    """The last line that says so. Commands that come next may follow it."""
    return [line for line in _messages(caplog) if line.startswith("finished")][-1]


def test_a_run_that_had_finished_says_what_to_do(folder, monkeypatch, caplog, tmp_path):
    """What it advises works: more steps, another folder, or no folder."""
    caplog.set_level(logging.INFO)
    settings = SETTINGS | {"checkpoint__last_save_in_hf": False}
    _run(monkeypatch, tiny_config(folder, tmp_path.name, **settings))
    assert _finished(caplog) == "finished 2 steps"
    _, events = _run(monkeypatch, tiny_config(folder, tmp_path.name, **settings))
    said = _messages(caplog)[-1]
    assert not events and said.startswith("the run had already finished (training.steps = 2), and")
    assert f"its results are in {folder / tmp_path.name}. To train on, write more" in said

    more = tiny_config(folder, tmp_path.name, **settings | {"training__steps": 3})
    _run(monkeypatch, more)
    assert _finished(caplog) == "finished 3 steps"
    _run(monkeypatch, tiny_config(folder, f"{tmp_path.name}_2", **settings))
    assert _finished(caplog) == "finished 2 steps"
    shutil.rmtree(folder / tmp_path.name)
    _run(monkeypatch, tiny_config(folder, tmp_path.name, **settings))
    assert _finished(caplog) == "finished 2 steps"


def test_a_run_that_goes_on(folder, monkeypatch, caplog):
    """The first step of this start is the third of the run. Changed settings are reported."""
    caplog.set_level(logging.INFO, "titan_sparse")
    settings = SETTINGS | {"training__steps": 4, "optimizer__lr": 0.1}
    shutil.copytree(folder / "saved", folder / "goes_on")
    back = {"checkpoint__load_step": 2}
    run, events = _run(monkeypatch, tiny_config(folder, "goes_on", **settings, **back))
    assert events == ["first 3", "save 4", "export 4"]
    messages = _messages(caplog)
    assert "resumed at step 2" in messages and "finished 4 steps" in messages
    changed = [message for message in messages if message.startswith("changed since")]
    assert any("optimizer.lr" in message for message in changed)
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.325)
    # No lock, the garbage collector as it was, the resolved config.
    with open(folder / "goes_on/.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert gc.isenabled()
    # With it the run goes on. Going back was of this start.
    of_run = folder / "goes_on/config.toml"
    *_, of_start = sorted((folder / "goes_on").glob("starts/*/config.toml"))
    for path, step in ((of_run, -1), (of_start, 2)):
        assert load(["--config", str(path)])[0].checkpoint.load_step == step

    # Stopped before its first step, it saves nothing.
    config = tiny_config(folder, "saved", **settings)
    run, events = _run(monkeypatch, config, _load=lambda run: run.signals.ask())
    assert events == [] and run.progress.step == 2


@pytest.mark.parametrize(
    "settings, method, left_after",
    [
        # Step 2 has no time left: it is dropped, and the first step is saved.
        ({"training__stop_grace_seconds": 0}, "_forward_backward", 1),
        # The first step has time left: it is finished and saved, and nothing follows.
        ({"training__stop_grace_seconds": 1000}, "_forward_backward", 0),
        # After the last step. Whoever sent the signal does not want to wait for an export.
        ({"training__steps": 1}, "_after_step", 1),
    ],
)
def test_a_stop(folder, monkeypatch, caplog, tmp_path, settings, method, left_after):
    caplog.set_level(logging.INFO, "titan_sparse")

    def ask(run: Trainer) -> None:
        if run.progress.step == left_after:
            run.signals.ask()

    config = tiny_config(folder, tmp_path.name, **SETTINGS | settings)
    run, events = _run(monkeypatch, config, **{method: ask})
    assert events == ["first 1", "save 1"]
    assert _messages(caplog)[-1] == "stopped by a signal after step 1"
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["_forward_backward", "_after_step"])
def test_a_failed_run_leaves_the_process_as_it_was(folder, monkeypatch, tmp_path, error, method):
    """While batches of the next step are read."""

    def fail(run: Trainer) -> None:
        if run.progress.step == 1:
            raise error("planted")

    read = PackedLoader._read

    def slow_read(self: PackedLoader):
        time.sleep(0.5 if threading.current_thread().name == "loader" else 0)
        return read(self)

    monkeypatch.setattr(PackedLoader, "_read", slow_read)
    threads, handler = set(threading.enumerate()), signal.getsignal(signal.SIGTERM)
    config = tiny_config(folder, tmp_path.name, **SETTINGS | {"training__steps": 4})
    with pytest.raises(error, match="planted"):
        _run(monkeypatch, config, **{method: fail})
    assert gc.isenabled()
    assert set(threading.enumerate()) <= threads
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_run_reads_ahead(folder, monkeypatch, tmp_path, accumulated):
    """The main thread reads only the batches of the first step, and no one reads after the last."""
    settings = {"training__steps": 4, "training__gradient_accumulation_steps": accumulated}
    settings = SETTINGS | settings | {"checkpoint__last_save_in_hf": False}
    readers = []
    read = PackedLoader._read

    def noted_read(self: PackedLoader):
        readers.append(threading.current_thread().name)
        return read(self)

    monkeypatch.setattr(PackedLoader, "_read", noted_read)
    Trainer(tiny_config(folder, tmp_path.name, **settings)).train()
    assert readers == ["MainThread"] * accumulated + ["loader"] * 3 * accumulated


def _config(folder: Path, output: str) -> Config:
    settings = {
        "parallelism__cp": 2,
        "training__steps": 3,
        "training__gradient_accumulation_steps": 6,
        "training__stop_grace_seconds": 1,
        "checkpoint__interval": 100,
        "checkpoint__last_save_in_hf": False,
    }
    return tiny_config(folder, output, **SETTINGS | settings)


def _train(config: Config, stop_in: int = 0) -> int:
    """The last step. In step `stop_in`, micro-batches are slow, and rank 1 gets a SIGTERM."""
    trainer = Trainer(config)
    forward_backward, counts = trainer._forward_backward, {}

    def slow(*args):
        step = trainer.progress.step + 1
        counts[step] = counts.get(step, 0) + 1
        if step == stop_in:
            time.sleep(0.3)
            if counts[step] == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return forward_backward(*args)

    trainer._forward_backward = slow
    trainer.train()
    dist.barrier()
    return trainer.progress.step


def _losses(config: Config) -> dict[int, tuple]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in metrics_of(config)}


@on_ranks(2)
def test_a_step_is_left_out_and_a_resume_loses_nothing(texts):
    whole, stopped = _config(texts, "whole"), _config(texts, "stopped")
    _train(whole)
    assert _train(stopped, stop_in=2) == 1
    assert [path.name for path in (texts / "stopped/checkpoint").glob("step-*")] == ["step-1"]
    assert max(_losses(stopped)) == 1
    assert _train(stopped) == 3
    assert _losses(stopped) == _losses(whole)


@on_ranks(2)
def test_a_signal_does_not_wait_for_the_end_of_a_validation(texts):
    """Launchers kill what needs longer, and all steps since the last save would be lost."""
    config = _config(texts, "validates")
    config.parallelism.cp = 1
    for name, value in {"enable": True, "every": 2, "windows": 5, "at_start": False}.items():
        setattr(config.validation, name, value)
    trainer = Trainer(config)
    token_losses, seen = trainer.scorer.token_losses, []

    def noted(*args):
        seen.append(trainer.progress.step)
        # Of three windows for each rank.
        if len(seen) == 2 and dist.get_rank() == 1:
            trainer.signals.ask()
        return token_losses(*args)

    trainer.scorer.token_losses = noted
    trainer.train()
    dist.barrier()
    assert seen == [2, 2]
    assert [path.name for path in (texts / "validates/checkpoint").glob("step-*")] == ["step-2"]
    assert not (texts / "validates/validation.jsonl").exists()


def _timeouts() -> dict[str, float]:
    """Seconds, by group."""
    timeouts = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        timeouts[f"{group.group_desc} {group.group_name}"] = timeout.total_seconds()
    return timeouts


@on_ranks(2)
def test_timeouts_are_long_for_the_first_step_and_saves_else_short(texts):
    """Rank 1 is late where that is allowed, in the first step and after a save."""
    config = tiny_config(
        texts,
        "run",
        parallelism__cp=2,
        parallelism__first_step_timeout_seconds=60,
        parallelism__timeout_seconds=1,
        checkpoint__enable=True,
        checkpoint__interval=2,
        checkpoint__async_mode="async",
        training__steps=3,
    )
    trainer = Trainer(config)
    forward, save, seen = trainer.model.forward, trainer.checkpointer.save, {}
    late = 1.2 * dist.get_rank()

    def late_forward(*args):
        seen[f"step {trainer.progress.step + 1}"] = _timeouts()
        time.sleep(late if trainer.progress.step == 0 else 0)
        return forward(*args)

    def late_save(step: int):
        seen[f"save {step}"] = _timeouts()
        seconds = save(step)
        time.sleep(late if step == 2 else 0)
        return seconds

    trainer.model.forward, trainer.checkpointer.save = late_forward, late_save
    trainer.train()
    # The banner is in the log of the first rank, once.
    log = (trainer.start_folder / f"rank{dist.get_rank()}.log").read_text()
    assert log.count("expect tensors of at most") == (dist.get_rank() == 0)
    assert set(seen) == {"step 1", "step 2", "step 3", "save 2", "save 3"}
    for when, timeouts in seen.items():
        groups = {name.rpartition(" ")[0] for name in timeouts}
        assert groups >= {"cp", "cp verticals", "cp inner", "cp inner_gradient"}
        for name, seconds in timeouts.items():
            is_background = name.split()[-1] == trainer.checkpointer.group.group_name
            is_short = when in ("step 2", "step 3") and not is_background
            assert seconds == (1 if is_short else 60), (when, name, seconds)
