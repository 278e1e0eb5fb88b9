"""Runs with adapters do not depend on ranks, compilation, recomputation or chunks."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import run_processes
from tests.fake_step import fake_world
from tests.models.helpers import TINY, causal, dense_attend
from tests.training.lora_runs import assert_alike, assert_close, train
from tests.training.wired_run import write_model, write_shard
from titan_sparse.config import ActivationCheckpoint, Compile, Config, Lora
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.initialization import initialize
from titan_sparse.models.lora import add_adapters, initialize_adapters
from titan_sparse.models.lora_config import resolve_adapters
from titan_sparse.trainer import draw_dropout
from titan_sparse.training.build_model import parallelize

pytest.importorskip("peft")
pytest.importorskip("transformers")

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora-levers")
    write_shard(folder)
    write_model(folder, "Qwen3")
    return folder


MESHES = {
    "cp": {"parallelism.cp": 2},
    "shards": {"parallelism.dp_shard": 2},
    "replicas": {"parallelism.dp_replicate": 2},
}


def _on_two_ranks(folder: Path) -> None:
    for output, mesh in MESHES.items():
        train(folder, output, "Qwen3", mesh | {"training.steps": 3})
    dist.barrier()


def test_two_ranks_are_one(folder):
    """Two data-parallel ranks read what one reads in two micro-batches."""
    run_processes(2, _on_two_ranks, folder)
    for accumulated in (1, 2):
        settings = {"training.gradient_accumulation_steps": accumulated, "training.steps": 3}
        train(folder, f"one-{accumulated}", "Qwen3", settings)
    for mesh, wanted in (("cp", "one-1"), ("shards", "one-2"), ("replicas", "one-2")):
        assert_alike(folder, mesh, wanted)
        files = [
            load_file(folder / output / "huggingface/step-3/adapter_model.safetensors")
            for output in (mesh, wanted)
        ]
        assert_close(*files)


LEVERS = {
    "fused": {"optimizer.implementation": "fused"},
    "kept": {"activation_checkpoint.mode": "none"},
    "compiled": {"compile.enable": True, "compile.backend": "aot_eager"},
    "in chunks": {"training.mlp_chunk_tokens": 24},
    "compiled in chunks": {
        "training.mlp_chunk_tokens": 24,
        "compile.enable": True,
        "compile.backend": "aot_eager",
        "lora.targets": "q_proj,up_proj",
    },
    "offloaded": {
        "activation_checkpoint.offload": True,
        "compile.enable": True,
        "compile.backend": "aot_eager",
    },
}


SLOW = ("compiled in chunks", "offloaded")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LEVERS],
)
def test_levers_change_nothing(folder, name):
    settings = LEVERS[name] | {"training.steps": 3}
    targets = settings.get("lora.targets", "all-linear")
    plain = f"plain-{targets}"
    if not (folder / plain).is_dir():
        train(folder, plain, "Qwen3", {"training.steps": 3, "lora.targets": targets})
    train(folder, name, "Qwen3", settings)
    assert_alike(folder, name, plain)


def test_blocks_are_compiled_twice_however_many_there_are():
    shape = dataclasses.replace(TINY, layers=10)
    adapters = resolve_adapters(shape, 3, 6, 0.1, "all-linear", "default")
    counter = CompileCounterWithBackend("aot_eager")
    with fake_world(1):
        with torch.device("meta"):
            model = Decoder(shape, dense_attend)
            add_adapters(model, adapters)
        mesh = init_device_mesh("cpu", (1,))
        checkpointing = ActivationCheckpoint("full")
        parallelize(model, mesh, torch.float32, True, checkpointing, Compile(True, counter))
        model.to_empty(device="cpu")
        initialize(model, 0, shape)
        initialize_adapters(model, 0, adapters)
        tokens = torch.arange(13)[None]
        for _ in range(2):
            model(tokens, tokens, causal(13), tokens).backward()
    assert counter.frame_count == 2


def test_recomputation_drops_what_the_forward_dropped(folder):
    """In the backward of a checkpointed block, compiled or not."""
    drops = {"lora.dropout": 0.3, "training.steps": 3}
    compiled = {"compile.enable": True, "compile.backend": "aot_eager"}
    train(folder, "drops", "Qwen3", drops | {"activation_checkpoint.mode": "none"})
    for output, settings in (("drops-again", drops), ("drops-compiled", drops | compiled)):
        train(folder, output, "Qwen3", settings)
        assert_alike(folder, output, "drops")


def _numbers(out: Path) -> None:
    draw_dropout(Config(lora=Lora(rank=2, dropout=0.1)), 7)
    torch.save(torch.rand(4), out / f"{dist.get_rank()}")


def test_ranks_drop_different_inputs(tmp_path):
    run_processes(2, _numbers, tmp_path)
    first, second = (torch.load(tmp_path / name) for name in ("0", "1"))
    assert not torch.equal(first, second)
