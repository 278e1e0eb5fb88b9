"""How a run begins and ends: what is refused before anything is made, what is resumed and told, and a
stop signal in one process."""

import fcntl
import gc
import logging
import os
import shutil
from pathlib import Path

import pytest

from tests.runs import tiny_config, write_texts
from titan_sparse.config import Config, Refusal
from titan_sparse.trainer import Trainer

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

    hooks: method of the trainer -> what is called after it with the trainer.
    """
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
    monkeypatch.setattr(
        run.checkpointer, "save_in_hf", lambda step, *_: events.append(f"export {step}")
    )
    for name, hook in hooks.items():
        monkeypatch.setattr(run, name, _followed(run, getattr(run, name), hook))
    run.train()
    return run, events


def _followed(run: Trainer, method, hook):
    def followed(*args, **kwargs):
        result = method(*args, **kwargs)
        hook(run)
        return result

    return followed


def _messages(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "titan_sparse"]


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"optimizer__name": "AdamW"}, '^optimizer.name was "SGD" and is "AdamW", .*step-2'),
        (
            {"checkpoint__async_mode": "async_with_pinned_mem"},
            "^checkpoint.async_mode = .* needs a GPU",
        ),
        ({"float8__enable": True}, "^float8.enable = true needs a Hopper GPU"),
        # The place in the data that is saved would be another.
        ({"training__seq_len": 96}, "^training.seq_len was 64 and is 96, .*write training.seq_len"),
        ({"training__seed": 5}, "^training.seed was 0 and is 5, .*write training.seed = 0"),
        ({"data__shuffle": False}, "^data.shuffle was 1 and is 0, .*write data.shuffle = true"),
        (
            {"data__sequences": "fixed"},
            '^data.sequences was packed and is fixed, .*write data.sequences = "packed"',
        ),
        (
            {"data__min_document_length": 9},
            "^data.min_document_length was 0 and is 9, .*write data.min_document_length = 0",
        ),
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
        assert f'checkpoint.initial_load_path = "{folder}/saved/checkpoint/step-2"' in str(refused)


def test_a_folder_that_has_grown(folder):
    """Nothing that could be written instead has changed."""
    shutil.copytree(folder / "saved", folder / "copy")
    texts = folder / "texts"
    texts.rename(folder / "fewer")
    (folder / "grown").rename(texts)
    try:
        with pytest.raises(Refusal, match="was 12 and is 13, .*; put the files back as they were"):
            Trainer(tiny_config(folder, "copy", **SETTINGS))
    finally:
        texts.rename(folder / "grown")
        (folder / "fewer").rename(texts)


def test_a_run_whose_folder_is_deleted_ends(folder, monkeypatch):
    def delete(run: Trainer) -> None:
        shutil.rmtree(folder / "deleted")

    config = tiny_config(folder, "deleted", **SETTINGS)
    with pytest.raises(FileNotFoundError, match="deleted or moved while the run goes on"):
        _run(monkeypatch, config, step=delete)
    assert not (folder / "deleted").exists()


def test_a_run_that_goes_on(folder, monkeypatch, caplog):
    """The first step of this start is the third of the run. Changed settings are reported."""
    caplog.set_level(logging.INFO, "titan_sparse")
    settings = SETTINGS | {"training__steps": 4, "optimizer__lr": 0.1}
    shutil.copytree(folder / "saved", folder / "goes_on")
    run, events = _run(monkeypatch, tiny_config(folder, "goes_on", **settings))
    assert events == ["first 3", "save 4", "export 4"]
    messages = _messages(caplog)
    assert "resumed at step 2" in messages and "finished 4 steps" in messages
    changed = [message for message in messages if message.startswith("changed since")]
    assert any("optimizer.lr" in message for message in changed)
    assert run.optimizers.optimizers[0].param_groups[0]["initial_lr"] == 0.1
    # No lock, the garbage collector as it was, the resolved config.
    with open(folder / "goes_on/.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert gc.isenabled()
    assert (folder / "goes_on/config.toml").exists()


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


def test_a_resumed_run_that_is_stopped_at_once_saves_nothing(folder, monkeypatch):
    settings = SETTINGS | {"training__steps": 4}
    run, events = _run(
        monkeypatch,
        tiny_config(folder, "saved", **settings),
        _load=lambda run: run.signals.ask(),
    )
    assert events == [] and run.progress.step == 2
    assert [path.name for path in (folder / "saved/checkpoint").glob("step-*")] == ["step-2"]
