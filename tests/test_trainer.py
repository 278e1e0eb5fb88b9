"""The same training run on 1, 2, 3 and 4 processes, and with all levers that save memory: loss,
gradient norm and weights agree."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.training import offload

PATTERNS = ("dense", "vertical_slash")
LAYOUTS = ("contiguous", "zigzag", "striped")
SCHEDULES = ("all_gather", "ring")


def _run(folder: Path, output: str, overrides: dict) -> dict:
    config = tiny_config(folder, output, training__steps=3, **overrides)
    trainer = train(config)
    weights = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in trainer.model.state_dict().items()
    }
    dist.barrier()
    lines = metrics_of(config)
    keys = ["loss", "grad_norm", "lr", "tokens_seen"]
    if (
        config.training.gradient_accumulation_steps == 1
    ):  # else density is that of the last micro-batch
        keys.append("density")
    return {
        "weights": weights,
        "metrics": [[line[key] for key in keys] for line in lines],
        "recall": [line["recall"] for line in lines if "recall" in line],
    }


def _single(folder: Path, batch: int) -> None:
    for pattern in PATTERNS:
        result = _run(
            folder,
            f"single_{pattern}_{batch}",
            {"attention__pattern": pattern, "training__local_batch_size": batch},
        )
        torch.save(result, folder / f"{pattern}_{batch}.pt")


def _compare(folder: Path, cases: list[dict]) -> None:
    for number, case in enumerate(cases):
        case = dict(case)
        batch = case.pop("batch")
        wanted = torch.load(folder / f"{case['attention__pattern']}_{batch}.pt")
        got = _run(folder, f"run_{dist.get_world_size()}_{number}", case)
        width = len(got["metrics"][0])
        wanted["metrics"] = [line[:width] for line in wanted["metrics"]]
        _assert_close(got["metrics"], wanted["metrics"], case)
        torch.testing.assert_close(got["recall"], wanted["recall"], rtol=0.2, atol=0.1)
        _assert_close(got["weights"], wanted["weights"], case)


def _assert_close(got, wanted, case: dict) -> None:
    torch.testing.assert_close(
        got, wanted, rtol=1e-8, atol=1e-8, msg=lambda message: f"{case}: {message}"
    )


def _cases(world_size: int) -> list[dict]:
    cases = []
    for pattern, layout, schedule in itertools.product(PATTERNS, LAYOUTS, SCHEDULES):
        cases.append(
            {
                "attention__pattern": pattern,
                "attention__layout": layout,
                "attention__schedule": schedule,
                "parallelism__cp": world_size,
                "parallelism__cp_intra": world_size,
                "batch": 1,
            }
        )
    return cases


def _half(cases: list[dict]) -> list[dict]:
    """Half of all combinations of patterns, layouts and schedules. Any two of the three still occur together."""

    def is_taken(case: dict) -> bool:
        places = [PATTERNS.index(case["attention__pattern"])]
        places.append(LAYOUTS.index(case["attention__layout"]))
        if case["attention__schedule"] in SCHEDULES:
            places.append(SCHEDULES.index(case["attention__schedule"]))
        return sum(places) % 2 == 0

    return [case for case in cases if is_taken(case)]


DOUBLE_RINGS = [
    {
        "attention__pattern": pattern,
        "attention__layout": layout,
        "attention__schedule": "double_ring",
        "parallelism__cp": 4,
        "parallelism__cp_intra": 2,
        "batch": 1,
        "activation_checkpoint__attention_recompute": 0.5 if layout == "striped" else 1.0,
    }
    for pattern, layout in itertools.product(PATTERNS, LAYOUTS)
]

FOUR = [
    {
        "attention__pattern": "vertical_slash",
        "attention__layout": "striped",
        "attention__schedule": "group_cast",
        "attention__overlap_stages_backward": 3,
        "parallelism__cp": 4,
        "parallelism__cp_intra": 2,
        "batch": 1,
        "activation_checkpoint__attention_recompute": 0.5,
    },
    {
        "attention__pattern": "dense",
        "attention__layout": "contiguous",
        "attention__schedule": "group_cast",
        "parallelism__cp": 4,
        "parallelism__cp_intra": 4,
        "batch": 1,
    },
    # Two context-parallel groups on data of their own, sharded, replicated, and by accumulation.
    {"attention__pattern": "vertical_slash", "parallelism__cp": 2, "batch": 2},
    {
        "attention__pattern": "vertical_slash",
        "parallelism__cp": 2,
        "parallelism__dp_replicate": 2,
        "batch": 2,
    },
    {
        "attention__pattern": "vertical_slash",
        "parallelism__cp": 4,
        "training__gradient_accumulation_steps": 2,
        "batch": 2,
    },
    {
        "attention__pattern": "dense",
        "parallelism__cp": 2,
        "activation_checkpoint__mode": "none",
        "batch": 2,
    },
    {
        "attention__pattern": "vertical_slash",
        "parallelism__cp": 2,
        "activation_checkpoint__mode": "selective",
        "batch": 2,
        "activation_checkpoint__attention_recompute": -1.0,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, and the results of one process to compare with."""
    folder = tmp_path_factory.mktemp("parity")
    write_texts(folder / "texts")
    for batch in (1, 2):
        run_processes(1, _single, folder, batch)
    return folder


def test_layouts_and_schedules(folder):
    run_processes(3, _compare, folder, _half(_cases(3)))


def test_four_processes(folder):
    run_processes(4, _compare, folder, _half(DOUBLE_RINGS) + FOUR)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, cases", [(2, _cases(2)), (3, _cases(3)), (4, DOUBLE_RINGS)], ids=["2", "3", "4"]
)
def test_all_layouts_and_schedules(folder, world_size, cases):
    run_processes(world_size, _compare, folder, cases)


LEVER_SETTINGS = {
    "training__steps": 2,
    "training__gradient_accumulation_steps": 2,
    "compile__enable": True,
    "compile__backend": "aot_eager",
    "parallelism__cp": 2,
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
}


def _losses(config) -> torch.Tensor:
    dist.barrier()
    return torch.tensor(
        [[line[key] for key in ("step", "loss", "grad_norm")] for line in metrics_of(config)]
    )


def _all_levers(folder: Path) -> None:
    plain = tiny_config(folder, "plain", **LEVER_SETTINGS)
    wanted = train(plain).model.state_dict()
    torch._dynamo.reset()
    offload.MIN_BYTES = 4096  # smaller than a rank's input of a block, and than most of its weights
    levers = tiny_config(
        folder,
        "levers",
        **LEVER_SETTINGS
        | {
            "training__mlp_chunk_tokens": 48,
            "activation_checkpoint__offload": True,
            "optimizer__offload": True,
        },
    )
    trainer = train(levers)
    blocks = trainer.model.run_blocks
    tokens = 320 // 2  # 300 padded to blocks of 16 for two ranks
    assert isinstance(trainer.model.layers["0"].mlp, ChunkedMLP)
    # Of the one block that is not the last: input, out, LSE, verticals. No gathered weights.
    assert (
        blocks.pool.count == 4
        and blocks.pool.free[tokens * 32 * 8]
        and blocks.pool.free[tokens * 4 * 8]
    )
    torch.testing.assert_close(_losses(levers), _losses(plain), rtol=1e-9, atol=0)
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(
            weight.full_tensor(), wanted[name].full_tensor(), rtol=1e-9, atol=1e-9
        )


def test_a_run_with_all_levers_equals_one_without(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _all_levers, tmp_path)
