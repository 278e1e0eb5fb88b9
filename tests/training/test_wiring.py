"""A whole run, from a configuration to the exported weights, equals a loop that anybody would write.

Other tests compare the program with itself: a setting that is dropped everywhere passes them. Here
loss, gradient norm and learning rate of every step, and all weights after the last, are compared
with reference_loop.py. Learning rates are written out.
"""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.training import reference_loop as by_hand
from tests.training.reference_loop import Line
from tests.training.wired_run import (
    SEQ_LEN,
    lines_of,
    read_model,
    run,
    write_model,
    write_shard,
)

pytest.importorskip("transformers")

LR = 0.01


class Case(NamedTuple):
    family: str
    settings: dict[str, object]
    factors: list[float]
    """learning rate of each step, as a share of LR"""
    sequences_per_step: int = 1
    joined: bool = False
    shuffle_seed: int | None = None


ADAMW = Case(
    "Qwen3",
    {
        "optimizer.name": "AdamW",
        "optimizer.lr": LR,
        "optimizer.beta1": 0.7,
        "optimizer.beta2": 0.8,
        "optimizer.eps": 0.003,
        "optimizer.weight_decay": 0.5,
        "lr_scheduler.warmup_steps": 2,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.2,
        "training.max_norm": 2.5,
        "training.z_loss": 0.02,
        "training.gradient_accumulation_steps": 2,
        "activation_checkpoint.mode": "full",
    },
    # Up in two steps, then down from the third on. Step 7 would be the first at 0.2.
    [0.5, 1.0, 1.0, 0.8, 0.6, 0.4],
    sequences_per_step=2,
)

ADAM = Case(
    "Llama",
    {
        "optimizer.name": "Adam",
        "optimizer.lr": LR,
        "optimizer.beta1": 0.5,
        "optimizer.beta2": 0.9,
        "optimizer.eps": 0.01,
        "optimizer.weight_decay": 0.3,
        "lr_scheduler.warmup_steps": 1,
        "lr_scheduler.decay_type": "sqrt",
        "lr_scheduler.decay_ratio": 0.5,
        "lr_scheduler.total_steps": 8,
        "lr_scheduler.min_lr_factor": 0.0,
        "training.max_norm": 0.0,
        "training.local_batch_size": 3,
        "data.shuffle": True,
        "training.seed": 5,
        "activation_checkpoint.mode": "selective",
    },
    # Eight steps are planned, of which the last four decay: constant up to the fifth.
    [1.0, 1.0, 1.0, 1.0, 1.0, 1 - math.sqrt(1 / 4)],
    sequences_per_step=3,
    shuffle_seed=5,
)

SGD = Case(
    "Qwen2",
    {
        "optimizer.name": "SGD",
        "optimizer.lr": LR,
        "optimizer.weight_decay": 0.4,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.total_steps": 4,
        "lr_scheduler.min_lr_factor": 0.1,
        "training.max_norm": 0.75,
        "attention.mask": "causal_across_documents",
        "activation_checkpoint.mode": "none",
    },
    # Half a cosine of four steps from 1 to 0.1, and no rise after it.
    [
        1.0,
        0.1 + 0.9 * (0.5 + 0.25 * math.sqrt(2)),
        0.1 + 0.9 * 0.5,
        0.1 + 0.9 * (0.5 - 0.25 * math.sqrt(2)),
        0.1,
        0.1,
    ],
    joined=True,
)

CASES = {"AdamW": ADAMW, "Adam": ADAM, "SGD": SGD}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wiring")
    write_shard(folder)
    for case in CASES.values():
        write_model(folder, case.family)
    return folder


def _reference(folder: Path, case: Case) -> tuple[list[Line], dict[str, torch.Tensor]]:
    model = read_model(folder / case.family)
    settings = case.settings
    groups = by_hand.decay_groups(model, settings["optimizer.weight_decay"])
    kind = getattr(torch.optim, settings["optimizer.name"])
    options: dict = {"lr": LR, "foreach": False}
    if kind is not torch.optim.SGD:
        betas = settings["optimizer.beta1"], settings["optimizer.beta2"]
        options |= {"betas": betas, "eps": settings["optimizer.eps"]}
    optimizer = kind(groups, **options)
    documents = by_hand.ordered(by_hand.read_documents(folder / "shards"), 3, case.shuffle_seed)
    sequences = iter(by_hand.pack(documents, SEQ_LEN, case.joined))
    steps = []
    for _ in case.factors:
        of_step = [next(sequences) for _ in range(case.sequences_per_step)]
        steps.append([piece for pieces in of_step for piece in pieces])
    learning_rates = [LR * factor for factor in case.factors]
    max_norm, z_loss = settings["training.max_norm"], settings.get("training.z_loss", 0.0)
    lines = by_hand.train(model, optimizer, steps, learning_rates, max_norm, z_loss)
    return lines, model.state_dict()


def _compare(folder: Path, output: str, case: Case) -> None:
    lines, weights = _reference(folder, case)
    logged = lines_of(folder / output)
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6]
    # Each of them matters: some steps are clipped, all weights move.
    max_norm = case.settings["training.max_norm"]
    assert not max_norm or any(line.grad_norm > 1.05 * max_norm for line in lines)
    for wanted, got in zip(lines, logged, strict=True):
        assert got["loss"] == pytest.approx(wanted.loss, rel=2e-6)
        assert got["grad_norm"] == pytest.approx(wanted.grad_norm, rel=5e-6)
        assert got["lr"] == pytest.approx(wanted.lr, rel=1e-12)
        assert got["tokens_seen"] == got["step"] * case.sequences_per_step * SEQ_LEN
        assert got["skipped_updates"] == 0
    exported = read_model(folder / output / "huggingface/step-6").state_dict()
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(exported[name], weight, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_textbook_loop(folder, name):
    case = CASES[name]
    run(folder, name, {"model.initial_hf": folder / case.family, **case.settings})
    _compare(folder, name, case)


class TwoRanks(NamedTuple):
    """A mesh of two ranks: what asks for it, and its shape."""

    settings: dict[str, object]
    fsdp: tuple[int, ...]
    cp: tuple[int, int]


MESHES = {
    "replicated": TwoRanks(
        {"training.gradient_accumulation_steps": 1, "parallelism.dp_replicate": 2}, (2, 1), (1, 1)
    ),
    "outer_ring": TwoRanks({"parallelism.cp": 2, "parallelism.cp_intra": 1}, (2,), (2, 1)),
}


def _on_two_ranks(folder: Path) -> None:
    for output, mesh in MESHES.items():
        settings = {"model.initial_hf": folder / ADAMW.family, **ADAMW.settings, **mesh.settings}
        trainer = run(folder, output, settings)
        assert trainer.meshes.fsdp.shape == mesh.fsdp
        assert trainer.meshes.cp.shape == mesh.cp
    dist.barrier()


def test_two_ranks_are_the_textbook_loop(folder):
    """Two sequences a step: one on each rank, or both on both."""
    run_processes(2, _on_two_ranks, folder)
    for output in MESHES:
        _compare(folder, output, ADAMW)
