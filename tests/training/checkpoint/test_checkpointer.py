"""Which checkpoint a run goes on from: damage, look-alikes, rollbacks, restarts. One process."""

import logging
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.training.checkpoint.helpers import TEXTS, Run, flip_bit, names_in, same
from titan_sparse.config import Refusal
from titan_sparse.training.checkpoint import newest_checkpoint, writer

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def log(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "titan_sparse")
    return caplog


def test_three_and_three_equal_six(tmp_path):
    whole = Run(tmp_path / "whole").train(6)
    Run(tmp_path / "halves").train(3)
    torch.rand(3)
    halves = Run(tmp_path / "halves").train(6)
    assert same(halves.state(), whole.state())


def test_a_checkpoint_is_what_was_saved(tmp_path):
    """Nothing but these files, and the user can check them by hand."""
    run = Run(tmp_path, states={"extra": Extra(3)}).train(1)
    checkpoint = run.folder / "step-1"
    assert names_in(run.folder) == {"step-1"}
    tensors = {name for name in names_in(checkpoint) if name.endswith(".distcp")}
    assert names_in(checkpoint) == tensors | {".metadata", "config.toml", "checksums.sha256"}
    assert (checkpoint / "config.toml").read_text() == TEXTS["config.toml"]
    listed = (checkpoint / "checksums.sha256").read_text()
    assert all(name in listed for name in tensors | {".metadata", "config.toml"})
    again = Run(tmp_path, states={"extra": (extra := Extra(0))})
    assert again.checkpointer.load() and extra.value == 3


class Extra:
    def __init__(self, value: int):
        self.value = value

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


def test_counters_that_a_checkpoint_lacks_stay(tmp_path):
    Run(tmp_path).train(1)
    run = Run(tmp_path, states={"extra": (extra := Extra(7))})
    assert run.checkpointer.load() and extra.value == 7


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_bit, truncate, empty, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "config.toml"])
def test_damage_is_named_and_stepped_over(tmp_path, log, name, damage):
    run = Run(tmp_path).train(1)
    wanted = run.state()
    Run(tmp_path).train(2)
    damage(run.folder / "step-2" / name)
    again = Run(tmp_path)
    assert again.checkpointer.load() and again.progress.step == 1
    assert same(again.state(), wanted)
    assert names_in(run.folder) == {"step-1", "step-2.broken"}
    told = [record.getMessage() for record in log.records if "damaged" in record.getMessage()]
    assert len(told) == 1 and f"step-2/{name}" in told[0] and "step-2.broken" in told[0]
    again.train(2)
    assert names_in(run.folder) == {"step-1", "step-2", "step-2.broken"}


@pytest.mark.parametrize("damage", [flip_bit, truncate, empty])
def test_damaged_checksums_are_damage(tmp_path, damage):
    run = Run(tmp_path).train(2)
    damage(run.folder / "step-2/checksums.sha256")
    again = Run(tmp_path)
    assert again.checkpointer.load() and again.progress.step == 1


def test_without_checksums_it_loads_with_a_warning(tmp_path, log):
    """As checkpoints from before there were any; missing bytes are found all the same."""
    run = Run(tmp_path).train(2)
    (run.folder / "step-2/checksums.sha256").unlink()
    again = Run(tmp_path)
    assert again.checkpointer.load() and again.progress.step == 2
    assert "step-2 has no checksums" in log.text
    truncate(run.folder / "step-2/__0_0.distcp")
    assert again.checkpointer.load() and again.progress.step == 1


def test_torchtitans_checkpoints_load(tmp_path, log):
    """Earlier versions saved additional values, fewer counters, and no checksums."""
    run = Run(tmp_path)
    for _ in range(2):
        run.step()
    wanted = run.state()
    optimizer = {
        name.removeprefix("optimizer."): value
        for name, value in run.checkpointer.tensors.all().items()
        if name.startswith("optimizer.")
    }
    progress = run.progress.state_dict()
    saved = {
        **run.checkpointer.tensors.of_model,
        "optimizer": optimizer | {"param_groups.weight.lr": 0.1},
        "lr_scheduler": {"last_epoch": 2},
        "dataloader": run.loader.state_dict(),
        "train_state": {key: progress[key] for key in ("step", "tokens_seen", "cpu_generator")},
    }
    dcp.save(saved, checkpoint_id=run.folder / "step-2")
    (run.folder / "step-3").mkdir()  # a save of before that was cut short
    again = Run(tmp_path)
    torch.rand(3)
    assert again.checkpointer.load() and same(again.state(), wanted)
    assert "step-2 has no checksums" in log.text


def test_only_broken_ones_are_refused_and_left(tmp_path):
    run = Run(tmp_path).train(2)
    for step in (1, 2):
        flip_bit(run.folder / f"step-{step}/__0_0.distcp")
    for _ in range(2):
        with pytest.raises(
            Refusal, match=r"no checkpoint in .* is whole: .*step-2/__0_0"
        ) as caught:
            Run(tmp_path).checkpointer.load()
        assert "\n" not in str(caught.value)
    assert names_in(run.folder) == {"step-1", "step-2"}


def test_another_model_is_refused_and_nothing_moves(tmp_path):
    run = Run(tmp_path).train(1)
    with pytest.raises(Refusal, match=r"bias|weight of shape \[5, 6\], this run of shape \[5, 7\]"):
        Run(tmp_path, width=7).checkpointer.load()
    assert names_in(run.folder) == {"step-1"}


def test_look_alikes_are_neither_read_nor_deleted(tmp_path):
    run = Run(tmp_path).train(1)
    names = ["step-10.bad", "best-step-20", "keep-step-1", "step-010", "step-9x", "xstep-9"]
    for name in names:
        shutil.copytree(run.folder / "step-1", run.folder / name)
    (run.folder / "step-11").write_text("a file")
    (run.folder / "step-12.incomplete.kept").mkdir()
    assert newest_checkpoint(str(tmp_path)) == str(run.folder / "step-1")
    again = Run(tmp_path, keep_latest_k=2).train(4)
    kept = {*names, "step-11", "step-12.incomplete.kept"}
    assert names_in(run.folder) == {"step-3", "step-4"} | kept
    assert again.progress.step == 4


def test_load_step_stays_rolled_back(tmp_path, log):
    run = Run(tmp_path).train(4)
    first = Run(tmp_path, load_step=2)
    assert first.checkpointer.load() and first.progress.step == 2
    assert names_in(run.folder) == {"step-1", "step-2", "rolled-back-1", "rolled-back.json"}
    assert names_in(run.folder / "rolled-back-1") == {"step-3", "step-4"}
    assert "rolled-back-1" in log.text
    first.train(3)
    # The newest is the branch's.
    plain = Run(tmp_path)
    assert plain.checkpointer.load() and plain.progress.step == 3
    # The same command once more goes back once more; the branch's own progress is kept, too.
    second = Run(tmp_path, load_step=2)
    assert second.checkpointer.load() and second.progress.step == 2
    assert names_in(run.folder / "rolled-back-2") == {"step-3"}


def test_an_automatic_restart_goes_on_from_the_branch(tmp_path, monkeypatch):
    Run(tmp_path).train(4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    # The first attempt has died before it went back.
    run = Run(tmp_path, load_step=2)
    assert run.checkpointer.load() and run.progress.step == 2
    run.train(3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    run = Run(tmp_path, load_step=2)
    assert run.checkpointer.load() and run.progress.step == 3
    assert not (run.folder / "rolled-back-2").exists()
    # Not to be mistaken for it: the same command, given once more.
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    run = Run(tmp_path, load_step=2)
    assert run.checkpointer.load() and run.progress.step == 2
    run.train(3)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = Run(tmp_path, load_step=2)
    assert run.checkpointer.load() and run.progress.step == 3
    # Another job's restart has not gone back yet.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    run = Run(tmp_path, load_step=2)
    assert run.checkpointer.load() and run.progress.step == 2


def test_a_load_step_that_is_not_there_moves_nothing(tmp_path):
    run = Run(tmp_path).train(3)
    flip_bit(run.folder / "step-2/__0_0.distcp")
    for step in (0, 2, 7):
        with pytest.raises(Refusal, match=f"load_step = {step}: no whole checkpoint"):
            Run(tmp_path, load_step=step).checkpointer.load()
    assert names_in(run.folder) == {"step-1", "step-2", "step-3"}


def test_going_back_keeps_the_loaders_place(tmp_path):
    run = Run(tmp_path)
    run.checkpointer.load()
    wanted = {}
    for step in range(1, 5):
        run.step()
        run.checkpointer.save(step)
        wanted[step] = run.state()
    flip_bit(run.folder / "step-3/__0_0.distcp")
    assert run.checkpointer.go_back(before=4) == 2
    assert same(run.state() | {"sequence": 2}, wanted[2]) and run.loader.sequence == 4
    assert names_in(run.folder) == {"step-1", "step-2", "step-3.broken", "rolled-back-1"}
    assert run.checkpointer.go_back(before=1) is None
    assert same(run.state() | {"sequence": 2}, wanted[2])


def test_going_back_waits_for_the_save_that_is_being_written(tmp_path, monkeypatch):
    write_share = writer.write_share

    def slow(*args):
        time.sleep(0.2)
        return write_share(*args)

    monkeypatch.setattr("titan_sparse.training.checkpoint.saver.write_share", slow)
    run = Run(tmp_path, async_mode="async")
    run.step()
    run.checkpointer.save(1)
    assert run.checkpointer.go_back(before=2) == 1
    assert run.checkpointer.go_back(before=1) is None
    run.checkpointer.close()


def test_a_save_over_an_existing_step_moves_that_aside(tmp_path):
    run = Run(tmp_path).train(2)
    before = run.state()
    run = Run(tmp_path)
    run.checkpointer.load()
    run.step()
    run.checkpointer.save(2)
    assert names_in(run.folder) == {"step-1", "step-2", "step-2.replaced"}
    shutil.rmtree(run.folder / "step-2")
    (run.folder / "step-2.replaced").rename(run.folder / "step-2")
    again = Run(tmp_path)
    assert again.checkpointer.load() and same(again.state(), before)


def test_rotation_keeps_the_newest(tmp_path):
    run = Run(tmp_path, keep_latest_k=2).train(5)
    assert names_in(run.folder) == {"step-4", "step-5"}


def test_what_a_killed_save_left_is_deleted_and_said(tmp_path, log):
    run = Run(tmp_path).train(1)
    (run.folder / "step-2.incomplete").mkdir()
    (run.folder / "step-2.incomplete/__0_0.distcp").write_text("half")
    Run(tmp_path).train(2)
    assert names_in(run.folder) == {"step-1", "step-2"}
    assert "cut short: step-2.incomplete" in log.text
    log.clear()
    Run(tmp_path).train(2)
    assert "cut short" not in log.text


def test_initial_weights_of_a_broken_folder_are_refused(tmp_path):
    source = Run(tmp_path / "a").train(1)
    path = str(source.folder / "step-1")
    run = Run(tmp_path / "b", initial_load_path=path)
    assert not run.checkpointer.load()
    assert torch.equal(run.model.weight, source.model.weight) and run.progress.step == 0
    flip_bit(Path(path, "__0_0.distcp"))
    with pytest.raises(Refusal, match=r"initial_load_path = .*__0_0\.distcp"):
        Run(tmp_path / "c", initial_load_path=path).checkpointer.load()
    assert names_in(source.folder) == {"step-1"}


def test_a_rollback_to_the_newest_moves_nothing(tmp_path, log):
    run = Run(tmp_path).train(2)
    Run(tmp_path, load_step=2).checkpointer.load()
    assert names_in(run.folder) == {"step-1", "step-2", "rolled-back.json"}
    assert "newer than" not in log.text


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(Refusal, match=r"folder of checkpoints: .*/checkpoint: Not a directory"):
        Run(tmp_path).checkpointer.load()


def test_a_checkpoint_is_written_for_transformers_once(tmp_path, monkeypatch):
    exports = []

    def export_weights(checkpoint: str, read, folder: str, *others, files) -> None:
        state = {"weight": torch.zeros(5, 6)}
        read(state)
        Path(folder).mkdir(parents=True)
        exports.append((checkpoint, folder, others, state["weight"]))

    monkeypatch.setattr("titan_sparse.models.huggingface.export_weights", export_weights)
    run = Run(tmp_path).train(2)
    others = ("config", torch.bfloat16, "source")
    for _ in range(2):
        run.checkpointer.save_in_hf(2, *others)
    [(checkpoint, folder, given, weight)] = exports
    assert Path(checkpoint) == run.folder / "step-2" and given == others
    assert Path(folder) == tmp_path / "huggingface/step-2"
    assert torch.equal(weight, run.model.weight)
    with pytest.raises(ValueError, match=r"last_save_in_hf: no complete checkpoint in .*step-3"):
        run.checkpointer.save_in_hf(3, *others)
