"""What training does otherwise on a GPU, in short runs: the demo, saves, traces, stacks."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scripts.summarize_trace import PARTS, summary
from tests.distributed import torchrun
from tests.runs import TINY, metrics_of, tiny_config, train, write_texts
from titan_sparse.models import flavours
from titan_sparse.training.faults.heartbeat import write_stacks

ROOT = Path(__file__).parents[2]
# NCCL's recorder reads it once, when a process has its first group, which another test may make.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
SETTINGS = {
    "training__device": "cuda",
    "training__dtype": "float32",
    "training__steps": 4,
    "attention__block_size": 64,
    "attention__backend": "triton",
    "attention__vertical_slash__dense_below": 128,
    "compile__enable": False,
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    "lr_scheduler__total_steps": 4,
}


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch) -> Iterator[None]:
    # The kernels take heads of 16 and more.
    monkeypatch.setitem(flavours.FLAVOURS, "small", replace(TINY, head_dim=16))
    write_texts(tmp_path / "texts")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _config(folder: Path, name: str, **overrides):
    return tiny_config(folder, name, **SETTINGS | {"model__flavour": "small"} | overrides)


def _losses(config) -> list[float]:
    return [line["loss"] for line in metrics_of(config)]


def test_demo(tmp_path):
    """The demo on all GPUs, compiled, in bf16."""
    gpus = torch.cuda.device_count()
    gpus = gpus if gpus & (gpus - 1) == 0 else 1
    words = ["train.py", "--config", "train_configs/demo_gpu.toml", "--checkpoint.enable"]
    words += ["--parallelism.cp", gpus]
    words += ["--training.steps", 20]
    words += ["--training.seq_len", 8192]
    words += ["--metrics.recall_every", 10]
    words += ["--training.output_dir", tmp_path]
    command = torchrun(gpus, *words)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] and 0 < lines[-1]["mfu"] < 1
    assert (tmp_path / "checkpoint/step-20/.metadata").is_file()


@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
def test_two_and_two_steps_are_four(tmp_path, mode):
    """Saved in the background from pinned memory too, and resumed with the GPU's random numbers."""
    keys = {
        "checkpoint__enable": True,
        "checkpoint__interval": 1,
        "checkpoint__async_mode": mode,
        "training__deterministic": True,
        "attention__backend": "eager",
    }
    whole = _config(tmp_path, "whole", **keys)
    wanted = train(whole)
    random_state = torch.cuda.get_rng_state()
    train(_config(tmp_path, "halves", **keys, training__steps=2))
    halves = _config(tmp_path, "halves", **keys)
    resumed = train(halves)
    assert _losses(halves) == _losses(whole)
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    for a, b in zip(resumed.model.parameters(), wanted.model.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.parametrize("rank", [0, 3])
def test_compiled_mlp_in_chunks(tmp_path, rank):
    """Compiled layers that compute a ragged MLP in chunks train as eager ones in one piece."""
    keys = {"lora__rank": rank, "training__seq_len": 1000}
    whole = _config(tmp_path, "whole", **keys)
    chunks = {"training__mlp_chunk_tokens": 300, "compile__enable": True}
    chunked = _config(tmp_path, "chunked", **keys, **chunks)
    train(whole)
    train(chunked)
    assert _losses(whole)[-1] < _losses(whole)[0]
    assert _losses(chunked) == pytest.approx(_losses(whole), abs=1e-3)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_kernels_of_a_trace_are_attributed(tmp_path, compiled):
    """Each was launched in a CPU op that says what it was for."""
    config = _config(
        tmp_path,
        "traced",
        compile__enable=compiled,
        # A replayed graph is one op of the CPU.
        compile__cuda_graphs="off",
        metrics__log_every=10,
        profiling__enable=True,
        profiling__first_step=3,
        profiling__steps=2,
    )
    train(config)
    events = json.loads((tmp_path / "traced/profile/rank0.json").read_text())["traceEvents"]
    found = summary(events)
    assert found["steps"] == 2
    assert sum(found["part_ms"].values()) == pytest.approx(found["span_ms"])
    assert found["launches_of_part"]["not attributed"] == 0
    for part in PARTS[:7]:
        assert found["ran_ms"][part] > 0, part


def test_stacks_come_with_records_of_nccl(tmp_path):
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    write_stacks(tmp_path, 0)
    assert (tmp_path / "nccl_trace_rank_0").stat().st_size > 0
    assert "test_stacks_come_with_records_of_nccl" in (tmp_path / "stacks_rank_0.txt").read_text()
