"""Which checkpoint a run goes on from, and that it goes on bit for bit, or
on another world size."""

import logging
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed import on_ranks, run_processes
from tests.refusals import refused
from tests.runs import metrics_of, tiny_config, train, write_texts
from tests.training.checkpoint.helpers import (
    TEXTS,
    CountingLoader,
    Run,
    flip_bit,
    names_in,
    resumed,
    same,
)
from titan_sparse.config import Config, Refusal
from titan_sparse.training.checkpoint.reader import read_metadata
from titan_sparse.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("alone")


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
def test_damage_is_named_and_stepped_over(tmp_path, caplog, name, damage):
    run = Run(tmp_path).train(1)
    wanted = run.state()
    Run(tmp_path).train(2)
    damage(run.folder / "step-2" / name)
    again = resumed(tmp_path)
    assert again.progress.step == 1 and same(again.state(), wanted)
    assert names_in(run.folder) == {"step-1", "step-2.broken"}
    told = [line for line in caplog.messages if "damaged" in line]
    assert len(told) == 1 and "step-2.broken" in told[0]
    # Wrong checksums name the file that they are of.
    assert f"step-2/{name}" in told[0] or name == "checksums.sha256"
    again.train(2)
    assert names_in(run.folder) == {"step-1", "step-2", "step-2.broken"}


def test_only_broken_ones_are_refused_and_left(tmp_path):
    run = Run(tmp_path).train(2)
    for step in (1, 2):
        flip_bit(run.folder / f"step-{step}/__0_0.distcp")
    with refused(r"no checkpoint in .* is whole: .*step-2/__0_0", Refusal):
        Run(tmp_path).checkpointer.load()
    assert run.checkpointer.go_back(before=2) is None
    assert names_in(run.folder) == {"step-1", "step-2"}


def test_another_model_is_refused_and_nothing_moves(tmp_path):
    run = Run(tmp_path).train(1)
    with refused(r"weight of shape \[5, 6\], this run of shape \[5, 7\]", Refusal):
        Run(tmp_path, width=7).checkpointer.load()
    assert names_in(run.folder) == {"step-1"}


def test_load_step_stays_rolled_back(tmp_path, caplog):
    caplog.set_level(logging.INFO, "titan_sparse")
    run = Run(tmp_path).train(4)
    resumed(tmp_path, load_step=4)
    assert names_in(run.folder) == {*(f"step-{n}" for n in range(1, 5)), "rolled-back.json"}
    assert "newer than" not in caplog.text
    first = resumed(tmp_path, load_step=2)
    assert first.progress.step == 2
    assert names_in(run.folder) == {"step-1", "step-2", "rolled-back-1", "rolled-back.json"}
    assert names_in(run.folder / "rolled-back-1") == {"step-3", "step-4"}
    assert "newer than step 2 are in" in caplog.text and "rolled-back-1" in caplog.text
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


@pytest.mark.parametrize("names", ["TORCHELASTIC_RUN_ID", "TITAN_SPARSE_ENDED"])
@pytest.mark.parametrize("record", ["as it was", "of an older version", "damaged"])
def test_a_restart_by_past_torchrun_goes_on_from_the_branch(tmp_path, monkeypatch, names, record):
    """It has the name of the rendezvous, or with --standalone, which makes another one for each
    start, that of the script."""
    Run(tmp_path).train(4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    monkeypatch.setenv("TITAN_SPARSE_ENDED", "/tmp/first/ended")
    monkeypatch.setenv("TITAN_SPARSE_RESTART_COUNT", "0")
    run = resumed(tmp_path, load_step=2)
    run.train(3)
    path = run.folder / "rolled-back.json"
    if record != "as it was":
        path.write_text('{"load_step": 2, "job": "first"}' if record != "damaged" else "{")
    monkeypatch.setenv(names, "second")
    monkeypatch.setenv("TITAN_SPARSE_RESTART_COUNT", "1")
    again = resumed(tmp_path, load_step=2)
    assert again.progress.step == (3 if record == "as it was" else 2)


def test_a_load_step_that_is_not_there_moves_nothing(tmp_path):
    run = Run(tmp_path).train(3)
    flip_bit(run.folder / "step-2/__0_0.distcp")
    for step in (0, 2, 7):
        with refused(f"load_step = {step}: no whole checkpoint", Refusal):
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
    with refused(r"initial_load_path = .*__0_0\.distcp", Refusal):
        Run(tmp_path / "c", initial_load_path=path).checkpointer.load()
    assert names_in(source.folder) == {"step-1"}


SETTINGS = {
    "training__steps": 6,
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
    "lr_scheduler__total_steps": 6,
    "parallelism__cp": 2,
}


def _config(folder: Path, name: str, **overrides) -> Config:
    return tiny_config(folder, name, **SETTINGS | overrides)


def _save(folder: Path) -> None:
    train(_config(folder, "run", training__steps=3))
    train(_config(folder, "whole"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of two runs on two ranks: "whole" of six steps, and "run" of three."""
    folder = tmp_path_factory.mktemp("saved")
    write_texts(folder / "texts")
    run_processes(2, _save, folder)
    return folder


def _lines(config: Config) -> list[list]:
    dist.barrier()
    return [
        [line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens_seen")]
        for line in metrics_of(config)
    ]


def _go_on(folder: Path, name: str, overrides: dict) -> None:
    torch.rand(7)  # the state of the generators must come from the checkpoint
    # Saves in the background are the same.
    config = _config(folder, name, checkpoint__async_mode="async", **overrides)
    trainer = train(config)
    got, wanted = _lines(config), _lines(_config(folder, "whole"))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    if config.optimizer.offload:
        for block in trainer.model.layers.values():
            parameters = block._get_fsdp_state()._fsdp_param_group.fsdp_params
            assert all(parameter.offload_to_cpu for parameter in parameters)
        assert all(group["fused"] for group in trainer.optimizer.param_groups)
    if overrides:
        return
    assert got == wanted
    runs = folder / "whole", folder / name
    files = [sorted((run / "checkpoint/step-6").glob("*.distcp")) for run in runs]
    assert len(files[0]) == len(files[1]) >= 2
    for ours, theirs in zip(*files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        (2, {}),
        pytest.param(1, {"parallelism__cp": 1}, marks=pytest.mark.slow),
        (
            4,
            {
                "parallelism__cp": 4,
                "attention__layout": "balanced",
                "attention__schedule": "group_cast",
                "optimizer__offload": True,
            },
        ),
    ],
)
def test_six_steps_equal_three_and_three(saved, world_size, overrides):
    """To the bit on as many ranks, past a newer save that was cut short. With
    optimizer.offload, too."""
    name = f"on-{world_size}"
    shutil.copytree(saved / "run", saved / name)
    shutil.copytree(saved / "run/checkpoint/step-3", saved / name / "checkpoint/step-5")
    os.remove(saved / name / "checkpoint/step-5/.metadata")
    run_processes(world_size, _go_on, saved, name, overrides)


ATTENTION = {
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.q_proj.bias": (32,),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.k_proj.bias": (16,),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.v_proj.bias": (16,),
    "self_attn.o_proj.weight": (32, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
}
REST_OF_A_LAYER = {
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
}
VALUES = {
    "dataloader": "sequence dp_size batch_size cursors fingerprint",
    "train_state": "step tokens_seen skipped_updates times_gone_back",
}


def test_names_and_shapes_in_a_checkpoint(saved):
    """They are a promise: a run that an earlier version has begun goes on with them."""
    weights = {"embed_tokens.weight": (258, 32), "norm.weight": (32,)}
    for layer in range(2):
        for name, shape in (ATTENTION | REST_OF_A_LAYER).items():
            weights[f"layers.{layer}.{name}"] = shape
    wanted = {name: (shape, torch.float64) for name, shape in weights.items()}
    for name, shape in weights.items():
        wanted[f"optimizer.state.{name}.step"] = ((), torch.float32)
        for moment in ("exp_avg", "exp_avg_sq"):
            wanted[f"optimizer.state.{name}.{moment}"] = (shape, torch.float64)
    wanted["guard.statistics"] = ((3,), torch.float64)
    wanted["guard.in_a_row"] = ((), torch.float64)
    wanted["train_state.cpu_generator"] = ((5056,), torch.uint8)
    for part, names in VALUES.items():
        wanted |= {f"{part}.{name}": None for name in names.split()}

    found = {}
    for name, stored in read_metadata(saved / "run/checkpoint/step-3").state_dict_metadata.items():
        is_tensor = isinstance(stored, TensorStorageMetadata)
        found[name] = (tuple(stored.size), stored.properties.dtype) if is_tensor else None
    assert found == wanted


@pytest.mark.slow
@on_ranks(2)
def test_another_data_parallel_degree(saved):
    """Saved with one data-parallel rank, resumed with two: no sequence is repeated."""
    if dist.get_rank() == 0:
        shutil.copytree(saved / "run", saved / "dp")
    dist.barrier()
    trainer = Trainer(_config(saved, "dp", parallelism__cp=1))
    trainer.checkpointer.load()
    assert trainer.progress.step == 3 and trainer.loader.state_dict()["sequence"] == 3
    trainer.train()
    assert trainer.loader.state_dict()["sequence"] == 3 + 3 * 2
