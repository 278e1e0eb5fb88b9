"""Stopping and going on: bit for bit on one world size, and onto another number of ranks."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed import on_ranks, run_processes
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.config import Config
from titan_sparse.training.checkpoint.reader import read_metadata
from titan_sparse.training.trainer import Trainer

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
    """To the bit on as many ranks, past a newer save that was cut short. With optimizer.offload, too."""
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
    """Saved with one data-parallel rank, resumed with two: the stream continues and repeats no sequence."""
    if dist.get_rank() == 0:
        shutil.copytree(saved / "run", saved / "dp")
    dist.barrier()
    trainer = Trainer(_config(saved, "dp", parallelism__cp=1))
    trainer.checkpointer.load()
    assert trainer.progress.step == 3 and trainer.loader.state_dict()["sequence"] == 3
    trainer.train()
    assert trainer.loader.state_dict()["sequence"] == 3 + 3 * 2
