"""The same training run on 1, 2, 3 and 4 processes, and with all levers that save memory: loss,
gradient norm and weights agree."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, weights_of, write_texts
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.trainer import Trainer
from titan_sparse.training import offload

Case = dict[str, object]
"""Overrides of tiny_config(). "batch": sequences a step of the run on one process that equals it."""


def _run(folder: Path, output: str, overrides: Case) -> tuple[dict, Trainer]:
    config = tiny_config(folder, output, training__steps=2, **overrides)
    trainer = train(config)
    dist.barrier()
    lines = metrics_of(config)
    keys = ["loss", "grad_norm", "lr", "tokens_seen"]
    if config.training.gradient_accumulation_steps == 1:
        # Otherwise density is that of the last micro-batch.
        keys.append("density")
    result = {
        "weights": weights_of(trainer),
        "metrics": [[line[key] for key in keys] for line in lines],
        "recall": [line["recall"] for line in lines if "recall" in line],
    }
    return result, trainer


def _single(folder: Path) -> None:
    for pattern, batch in (("dense", 1), ("vertical_slash", 1), ("vertical_slash", 2)):
        case = {"attention__pattern": pattern, "training__local_batch_size": batch}
        result, _ = _run(folder, f"single_{pattern}_{batch}", case)
        torch.save(result, folder / f"{pattern}_{batch}.pt")


def _compare(folder: Path, cases: list[Case]) -> None:
    offload.MIN_BYTES = 4096  # smaller than a rank's input of a block, and than most of its weights
    for number, case in enumerate(cases):
        overrides = {key: value for key, value in case.items() if key != "batch"}
        wanted = torch.load(folder / f"{case['attention__pattern']}_{case['batch']}.pt")
        got, trainer = _run(folder, f"run_{dist.get_world_size()}_{len(cases)}_{number}", overrides)
        width = len(got["metrics"][0])
        wanted["metrics"] = [line[:width] for line in wanted["metrics"]]
        for what in ("metrics", "weights"):
            torch.testing.assert_close(
                got[what], wanted[what], rtol=1e-8, atol=1e-8, msg=lambda m, c=case: f"{c}: {m}"
            )
        torch.testing.assert_close(got["recall"], wanted["recall"], rtol=0.2, atol=0.1)
        if case == LEVERS:
            _check_levers(trainer)


def _spread(pattern: str, layout: str, schedule: str, world_size: int, **more) -> Case:
    return {
        "attention__pattern": pattern,
        "attention__layout": layout,
        "attention__schedule": schedule,
        "parallelism__cp": world_size,
        "parallelism__cp_intra": world_size,
        "batch": 1,
    } | more


RECOMPUTE = "activation_checkpoint__attention_recompute"
LEVERS: Case = {
    "attention__pattern": "vertical_slash",
    "parallelism__cp": 4,
    "training__gradient_accumulation_steps": 2,
    "training__mlp_chunk_tokens": 24,
    "compile__enable": True,
    "compile__backend": "aot_eager",
    "activation_checkpoint__offload": True,
    "optimizer__offload": True,
    "batch": 2,
}
SPARSE: Case = {"attention__pattern": "vertical_slash", "parallelism__cp": 2, "batch": 2}
THREE = [
    _spread("vertical_slash", "zigzag", "ring", 3),
    _spread("dense", "contiguous", "all_gather", 3),
]
FOUR = [
    _spread("vertical_slash", "striped", "double_ring", 4)
    | {"parallelism__cp_intra": 2, RECOMPUTE: 0.5},
    _spread("vertical_slash", "striped", "group_cast", 4)
    | {"parallelism__cp_intra": 2, "attention__overlap_stages_backward": 3, RECOMPUTE: 1.0},
    # Two context-parallel groups on data of their own, replicated, and by accumulation.
    SPARSE | {"parallelism__dp_replicate": 2},
    LEVERS,
    SPARSE | {"activation_checkpoint__mode": "selective", RECOMPUTE: -1.0},
]


def _check_levers(trainer: Trainer) -> None:
    pool = trainer.model.run_blocks.pool
    tokens = 320 // 4  # 300 padded to blocks of 16 for four ranks
    assert isinstance(trainer.model.layers["0"].mlp, ChunkedMLP)
    # Of the one block that is not the last: input, out and verticals. No gathered weights.
    assert pool.count == 3 and pool.free[tokens * 32 * 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, and the results of one process to compare with."""
    folder = tmp_path_factory.mktemp("parity")
    write_texts(folder / "texts")
    run_processes(1, _single, folder)
    return folder


def test_three_processes(folder):
    run_processes(3, _compare, folder, THREE)


def test_four_processes(folder):
    run_processes(4, _compare, folder, FOUR)
