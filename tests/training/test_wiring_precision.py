"""bfloat16 runs keep float32 weights, and sum gradients over ranks in float32: a whole run on two
ranks equals a loop that does this by hand.

The loop has the same decoder, so that both round alike and a step can be compared to seven digits.
Sums in bfloat16 would be off in the third.
"""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import run_processes
from tests.runs import weights_of
from tests.training import reference_loop as by_hand
from tests.training.reference_loop import Line, Piece
from tests.training.wired_run import SEQ_LEN, lines_of, run, write_model, write_shard
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import resolve

pytest.importorskip("transformers")

RANKS = 2
ACCUMULATED = 2
STEPS = 3
LR = 0.02
ADAMW = {"betas": (0.7, 0.8), "eps": 0.003, "weight_decay": 0.5}

SETTINGS = {
    "training.dtype": "bfloat16",
    "training.steps": STEPS,
    "training.gradient_accumulation_steps": ACCUMULATED,
    "training.max_norm": 0.0,
    "optimizer.lr": LR,
    "optimizer.beta1": 0.7,
    "optimizer.beta2": 0.8,
    "optimizer.eps": 0.003,
    "optimizer.weight_decay": 0.5,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.decay_ratio": 0.0,
    "checkpoint.last_save_in_hf": False,
}


def _gradients(
    model: Decoder, masters: dict[str, Tensor], pieces: list[Piece], labels: int
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one rank's sequence. Forward, backward and gradients are bfloat16."""
    weights = {name: w.detach().bfloat16().requires_grad_() for name, w in masters.items()}
    lengths = [len(piece.tokens) for piece in pieces]
    inputs = (
        torch.cat([piece.tokens for piece in pieces])[None],
        torch.cat([torch.arange(length) for length in lengths])[None],
        Documents([lengths]),
        torch.cat([piece.labels for piece in pieces])[None],
    )
    loss = torch.func.functional_call(model, weights, inputs) / labels
    return loss.detach(), list(torch.autograd.grad(loss, list(weights.values())))


def _reference(folder: Path) -> tuple[list[Line], dict[str, Tensor]]:
    """Float32 master weights, rounded for each forward; float32 sums of the ranks' gradients."""
    config = resolve(flavour="debug", initial_hf=str(folder / "Qwen2"))
    dense = functools.partial(attend, backend="eager", block_size=16)
    with torch.device("meta"):
        model = Decoder(config, dense)
    masters = {}
    for name, weight in load_file(folder / "Qwen2/model.safetensors").items():
        masters[name.removeprefix("model.")] = weight.float()
    assert masters.keys() == dict(model.named_parameters()).keys()
    matrices = [weight for weight in masters.values() if weight.ndim > 1]
    vectors = [weight for weight in masters.values() if weight.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, **ADAMW)

    documents = by_hand.ordered(by_hand.read_documents(folder / "shards"), 3)
    sequences = iter(by_hand.pack(documents, SEQ_LEN))
    lines = []
    for _ in range(STEPS):
        of_step = [next(sequences) for _ in range(ACCUMULATED * RANKS)]
        labels = sum(by_hand.count_labels(pieces) for pieces in of_step)
        loss = 0.0
        for weight in masters.values():
            weight.grad = torch.zeros_like(weight)
        for pieces in of_step:
            share, gradients = _gradients(model, masters, pieces, labels)
            loss += share.item()
            for weight, gradient in zip(masters.values(), gradients, strict=True):
                weight.grad += gradient.float()
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in masters.values()])
        optimizer.step()
        lines.append(Line(loss, norm.item(), LR))
    return lines, masters


def _runs(folder: Path) -> None:
    for output, replicas in (("sharded", 1), ("replicated", RANKS)):
        settings = {
            "model.initial_hf": folder / "Qwen2",
            "parallelism.dp_replicate": replicas,
            **SETTINGS,
        }
        trainer = run(folder, output, settings)
        weights = weights_of(trainer)
        if dist.get_rank() == 0:
            torch.save(weights, folder / f"{output}.pt")


def test_a_bfloat16_run_keeps_float32_weights_and_sums(tmp_path):
    write_shard(tmp_path)
    write_model(tmp_path, "Qwen2")
    run_processes(RANKS, _runs, tmp_path)
    lines, masters = _reference(tmp_path)
    for output in ("sharded", "replicated"):
        for wanted, got in zip(lines, lines_of(tmp_path / output), strict=True):
            assert got["loss"] == pytest.approx(wanted.loss, rel=1e-6)
            assert got["grad_norm"] == pytest.approx(wanted.grad_norm, rel=1e-6)
            assert got["lr"] == LR
        weights = torch.load(tmp_path / f"{output}.pt")
        assert weights.keys() == masters.keys()
        for name, weight in masters.items():
            assert weights[name].dtype == torch.float32
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6, msg=name)
