"""Models that run through transformers' own code: spread over processes, a run is that of one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.training.transformers_runs import assert_alike, prepare, train

pytest.importorskip("transformers")

torch.set_num_threads(1)

CP = {"parallelism.cp": 2, "parallelism.dp_shard": 1}
SPREAD: dict[str, dict[str, object]] = {
    "llama": {**CP, "attention.layout": "contiguous"},
    "mistral": {**CP, "attention.layout": "balanced", "attention.schedule": "group_cast"},
    "smollm3": CP,
    "olmo3": {**CP, "attention.layout": "balanced", "attention.schedule": "ring"},
    "gemma3": {**CP, "attention.layout": "zigzag"},
    "phi3": CP,
    "mixtral": CP,
    "qwen3_moe": CP,
    "gpt_oss": {**CP, "attention.layout": "balanced"},
}
"""What two processes do."""

OVER_THREE = ("llama", "olmo3", "gemma3", "phi3", "mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A shard, the models, and runs of one process over one and over two sequences a step."""
    folder = tmp_path_factory.mktemp("spread")
    prepare(folder, SPREAD)
    for name in SPREAD:
        train(folder, name, "one", {})
    for name in ("gemma3", "mixtral"):
        train(folder, name, "one-batch-of-2", {"training.local_batch_size": 2})
    return folder


def _train_spread(folder: Path) -> None:
    ranks = dist.get_world_size()
    for name in _names(ranks):
        settings = SPREAD[name] if ranks == 2 else {**CP, "parallelism.cp": ranks}
        train(folder, name, f"cp-{ranks}", settings)


def _names(ranks: int) -> tuple[str, ...]:
    return tuple(SPREAD) if ranks == 2 else OVER_THREE


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_context_parallel_runs_are_those_of_one_process(folder: Path, ranks: int) -> None:
    """Parameters are sharded over the same ranks."""
    run_processes(ranks, _train_spread, folder)
    for name in _names(ranks):
        assert_alike(folder, name, f"cp-{ranks}")


def _train_data_parallel(folder: Path) -> None:
    cp = dist.get_world_size() // 2
    for name in ("gemma3", "mixtral"):
        train(folder, name, f"dp-2-cp-{cp}", {"parallelism.cp": cp})


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_data_parallel_runs_are_those_of_one_process(folder: Path, ranks: int) -> None:
    """Mixtral's router loss is counted over both sequences, as in one process that has both."""
    run_processes(ranks, _train_data_parallel, folder)
    for name in ("gemma3", "mixtral"):
        assert_alike(folder, name, f"dp-2-cp-{ranks // 2}", "one-batch-of-2")
