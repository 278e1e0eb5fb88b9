"""Which checkpoint a run goes on from: damage, look-alikes, rollbacks, restarts. One process."""

import logging
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.training.checkpoint.helpers import (
    TEXTS,
    CountingLoader,
    Run,
    flip_bit,
    names_in,
    resumed,
    same,
)
from titan_sparse.config import Refusal

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def log(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "titan_sparse")
    return caplog


def test_a_checkpoint_is_what_was_saved(tmp_path):
    """Nothing but these files, and the user can check them by hand."""
    extra = CountingLoader()
    extra.places = [3]
    run = Run(tmp_path, states={"extra": extra}).train(1)
    checkpoint = run.folder / "step-1"
    assert names_in(run.folder) == {"step-1"}
    tensors = {name for name in names_in(checkpoint) if name.endswith(".distcp")}
    assert names_in(checkpoint) == tensors | {".metadata", "config.toml", "checksums.sha256"}
    assert (checkpoint / "config.toml").read_text() == TEXTS["config.toml"]
    listed = (checkpoint / "checksums.sha256").read_text()
    assert all(name in listed for name in tensors | {".metadata", "config.toml"})
    resumed(tmp_path, states={"extra": (again := CountingLoader())})
    assert again.places == [3]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    "name, damage",
    [
        ("__0_0.distcp", flip_bit),
        ("__0_0.distcp", truncate),
        ("__0_0.distcp", Path.unlink),
        (".metadata", flip_bit),
        (".metadata", Path.unlink),
        ("config.toml", Path.unlink),
        ("checksums.sha256", flip_bit),
        ("checksums.sha256", partial(os.truncate, length=0)),
        ("checksums.sha256", Path.unlink),
    ],
)
def test_damage_is_named_and_stepped_over(tmp_path, log, name, damage):
    run = Run(tmp_path).train(1)
    wanted = run.state()
    Run(tmp_path).train(2)
    damage(run.folder / "step-2" / name)
    again = resumed(tmp_path)
    assert again.progress.step == 1 and same(again.state(), wanted)
    assert names_in(run.folder) == {"step-1", "step-2.broken"}
    told = [record.getMessage() for record in log.records if "damaged" in record.getMessage()]
    assert len(told) == 1 and "step-2.broken" in told[0]
    # Wrong checksums name the file that they are of.
    assert f"step-2/{name}" in told[0] or name == "checksums.sha256"
    again.train(2)
    assert names_in(run.folder) == {"step-1", "step-2", "step-2.broken"}


def test_only_broken_ones_are_refused_and_left(tmp_path):
    run = Run(tmp_path).train(2)
    for step in (1, 2):
        flip_bit(run.folder / f"step-{step}/__0_0.distcp")
    with pytest.raises(Refusal, match=r"no checkpoint in .* is whole: .*step-2/__0_0") as caught:
        Run(tmp_path).checkpointer.load()
    assert "\n" not in str(caught.value)
    assert run.checkpointer.go_back(before=2) is None
    assert names_in(run.folder) == {"step-1", "step-2"}


def test_another_model_is_refused_and_nothing_moves(tmp_path):
    run = Run(tmp_path).train(1)
    with pytest.raises(Refusal, match=r"weight of shape \[5, 6\], this run of shape \[5, 7\]"):
        Run(tmp_path, width=7).checkpointer.load()
    assert names_in(run.folder) == {"step-1"}


def test_load_step_stays_rolled_back(tmp_path, log):
    run = Run(tmp_path).train(4)
    resumed(tmp_path, load_step=4)
    assert names_in(run.folder) == {*(f"step-{n}" for n in range(1, 5)), "rolled-back.json"}
    assert "newer than" not in log.text
    first = resumed(tmp_path, load_step=2)
    assert first.progress.step == 2
    assert names_in(run.folder) == {"step-1", "step-2", "rolled-back-1", "rolled-back.json"}
    assert names_in(run.folder / "rolled-back-1") == {"step-3", "step-4"}
    assert "newer than step 2 are in" in log.text and "rolled-back-1" in log.text
    first.train(3)
    # The newest is the branch's.
    assert resumed(tmp_path).progress.step == 3
    # The same command once more goes back once more; the branch's own progress is kept, too.
    assert resumed(tmp_path, load_step=2).progress.step == 2
    assert names_in(run.folder / "rolled-back-2") == {"step-3"}


@pytest.mark.parametrize(
    "variable, count, job, step",
    [
        ("TORCHELASTIC_RESTART_COUNT", "2", "a", 3),
        ("SLURM_RESTART_COUNT", "1", "a", 3),
        # Not to be mistaken for it: the same command, given once more.
        ("TORCHELASTIC_RESTART_COUNT", "0", "a", 2),
        # Another job's restart has not gone back yet.
        ("TORCHELASTIC_RESTART_COUNT", "2", "b", 2),
    ],
)
def test_a_restart_goes_on_from_the_branch(tmp_path, monkeypatch, variable, count, job, step):
    Run(tmp_path).train(4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    # The first attempt has died before it went back.
    run = resumed(tmp_path, load_step=2)
    assert run.progress.step == 2
    run.train(3)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    monkeypatch.setenv(variable, count)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    assert resumed(tmp_path, load_step=2).progress.step == step


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
    run.checkpointer.section.enable = False
    assert run.checkpointer.go_back(before=3) is None
    assert same(run.state() | {"sequence": 2}, wanted[2])


def test_a_save_over_an_existing_step_moves_that_aside(tmp_path):
    run = Run(tmp_path).train(2)
    before = run.state()
    run = resumed(tmp_path)
    run.step()
    run.checkpointer.save(2)
    assert names_in(run.folder) == {"step-1", "step-2", "step-2.replaced"}
    shutil.rmtree(run.folder / "step-2")
    (run.folder / "step-2.replaced").rename(run.folder / "step-2")
    assert same(resumed(tmp_path).state(), before)


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
