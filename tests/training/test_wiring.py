"""A whole run, from a configuration to the exported weights, equals the loop of reference_loop.py.

What has no number there is counted from outside: lines, checkpoints, chunks, recomputed products.
"""

import functools
import gc
import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_processes
from tests.models.transformers_models import read_model
from tests.runs import weights_of
from tests.training import reference_loop as by_hand
from tests.training.reference_loop import Line, Piece
from tests.training.wired_run import SEQ_LEN, lines_of, run, write_model, write_shard
from titan_sparse import loss as loss_module
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import resolve
from titan_sparse.training import trainer as training_loop
from titan_sparse.training.trainer import Trainer

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
    """A shard, another for validation, and the models."""
    folder = tmp_path_factory.mktemp("wiring")
    write_shard(folder)
    write_shard(folder / "other", seed=1)
    for case in CASES.values():
        write_model(folder, case.family)
    return folder


def _reference(folder: Path, case: Case, model: nn.Module, loss=by_hand.loss_sum) -> list[Line]:
    """Train the model by hand."""
    settings = case.settings
    groups = by_hand.decay_groups(model, settings["optimizer.weight_decay"])
    kind = getattr(torch.optim, settings["optimizer.name"])
    options: dict = {"lr": LR, "foreach": False}
    if kind is not torch.optim.SGD:
        betas = settings["optimizer.beta1"], settings["optimizer.beta2"]
        options |= {"betas": betas, "eps": settings["optimizer.eps"]}
    optimizer = kind(groups, **options)
    steps = by_hand.steps_of(
        folder / "shards",
        len(case.factors),
        SEQ_LEN,
        case.sequences_per_step,
        case.shuffle_seed,
        case.joined,
        epochs=3,
    )
    learning_rates = [LR * factor for factor in case.factors]
    max_norm, z_loss = settings["training.max_norm"], settings.get("training.z_loss", 0.0)
    return by_hand.train(model, optimizer, steps, learning_rates, max_norm, z_loss, loss)


def _compare(folder: Path, output: str, case: Case) -> None:
    model = read_model(folder / case.family)
    lines = _reference(folder, case, model)
    # Each of them matters: some steps are clipped, all weights move.
    max_norm = case.settings["training.max_norm"]
    assert not max_norm or any(line.grad_norm > 1.05 * max_norm for line in lines)
    _compare_lines(folder, output, case, lines)
    exported = read_model(folder / output / "huggingface/step-6").state_dict()
    torch.testing.assert_close(exported, model.state_dict(), rtol=0, atol=2e-6)


def _compare_lines(folder: Path, output: str, case: Case, lines: list[Line]) -> None:
    logged = lines_of(folder / output)
    assert [line["step"] for line in logged] == list(range(1, len(case.factors) + 1))
    for wanted, got in zip(lines, logged, strict=True):
        assert got["loss"] == pytest.approx(wanted.loss, rel=1e-6)
        assert got["grad_norm"] == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert got["lr"] == pytest.approx(wanted.lr, rel=1e-12)
        assert got["tokens_seen"] == got["step"] * case.sequences_per_step * SEQ_LEN
        assert got["skipped_updates"] == 0


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_textbook_loop(folder, name):
    case = CASES[name]
    run(folder, name, {"model.initial_hf": folder / case.family, **case.settings})
    _compare(folder, name, case)


MESHES = {
    # what asks for it, and the shapes for FSDP and context parallelism
    "replicated": (
        {"training.gradient_accumulation_steps": 1, "parallelism.dp_replicate": 2},
        (2, 1),
        (1, 1),
    ),
    "outer_ring": ({"parallelism.cp": 2, "parallelism.cp_intra": 1}, (2,), (2, 1)),
}


def _on_two_ranks(folder: Path) -> None:
    for output, (mesh, *shapes) in MESHES.items():
        settings = {"model.initial_hf": folder / ADAMW.family, **ADAMW.settings, **mesh}
        meshes = run(folder, output, settings).meshes
        assert [meshes.fsdp.shape, meshes.cp.shape] == shapes
    dist.barrier()


def test_two_ranks_are_the_textbook_loop(folder):
    """Two sequences a step: one on each rank, or both on both."""
    run_processes(2, _on_two_ranks, folder)
    for output in MESHES:
        _compare(folder, output, ADAMW)


LAYERS = 2


def _run(folder: Path, output: str, **settings) -> Trainer:
    """A short run. settings: keys, with __ for the dot."""
    short = {
        "model.initial_hf": folder / "Qwen2",
        "training.steps": 2,
        "lr_scheduler.warmup_steps": 0,
        "checkpoint.enable": False,
        "checkpoint.last_save_in_hf": False,
    }
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    return run(folder, output, short | overrides)


def test_every_key_does_what_it_says(folder, monkeypatch):
    """Seven steps with what can be counted from outside."""
    recorded, collected, rows, lengths = [], [], [], []

    def counted(module, name: str, note) -> None:
        function = getattr(module, name)

        def call(*args, **kwargs):
            note(*args, **kwargs)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(training_loop, "recording", lambda rows, cells: recorded.append((rows, cells)))
    counted(gc, "collect", lambda generation=2: collected.append(generation))
    counted(loss_module, "cross_entropy_naive", lambda logits, *_: rows.append(len(logits)))
    counted(nn.functional, "silu", lambda x, *_, **__: lengths.append(x.shape[-2]))
    trainer = _run(
        folder,
        "all",
        training__steps=7,
        training__gc_interval=2,
        training__deterministic=True,
        training__loss_chunk_tokens=40,
        training__mlp_chunk_tokens=24,
        parallelism__reshard_after_forward=False,
        activation_checkpoint__attention_recompute=0.25,
        checkpoint__enable=True,
        checkpoint__interval=2,
        checkpoint__keep_latest_k=2,
        metrics__log_every=3,
        metrics__recall_every=2,
        metrics__recall_rows=9,
        metrics__peak_tflops=2.0,
        profiling__enable=True,
        profiling__first_step=3,
        profiling__steps=3,
        profiling__with_stack=True,
    )
    # The first line, every third, the last. Recall in those of the first and each second step.
    lines = lines_of(folder / "all")
    assert [line["step"] for line in lines] == [1, 3, 6, 7]
    assert [line["tokens_seen"] for line in lines] == [SEQ_LEN * step for step in (1, 3, 6, 7)]
    assert recorded == [(9, 0), (0, 0), (9, 0), (0, 0)]
    assert [line["step"] for line in lines if "recall" in line] == [1, 6]
    # Dense attention computes all that the mask allows: both speeds are of the same FLOPs.
    speeds = [line["dense_equivalent_tflops"] / 2 for line in lines]
    assert [line["mfu"] for line in lines] == pytest.approx(speeds)
    assert not (folder / "all/tensorboard").exists()
    # Every second step and the last one are saved, and the last two of these are kept.
    assert {path.name for path in (folder / "all/checkpoint").glob("step*")} == {"step-6", "step-7"}
    assert collected.count(1) == 3  # after steps 2, 4 and 6
    assert torch.are_deterministic_algorithms_enabled()

    # Of 64 tokens.
    assert rows == [40, 24] * 7
    assert set(lengths) == {24, 16} and lengths[:3] == [24, 24, 16]
    for block in trainer.model.layers.values():
        assert block.self_attn.attend.keywords["recomputed"] == 0.25
        group = block._get_fsdp_state()._fsdp_param_group
        assert group._reshard_after_forward is False

    # The third step to the fifth. The profiler counts from 0.
    events = json.loads((folder / "all/profile/rank0.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert names == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}
    assert any("trainer.py" in event["name"] for event in events)  # with_stack


def test_validation_is_the_loss_of_transformers(folder):
    """Before the first step, after every third, and after the last: of the documents' first
    windows, one by one."""
    _run(
        folder,
        "validated",
        training__steps=4,
        training__z_loss=0.1,
        checkpoint__enable=True,
        checkpoint__interval=2,
        checkpoint__keep_latest_k=0,
        checkpoint__last_save_in_hf=True,
        optimizer__lr=0.01,
        validation__enable=True,
        validation__source=folder / "other/shards",
        validation__every=3,
        validation__windows=5,
        validation__position_buckets=4,
    )
    text = (folder / "validated/validation.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [0, 3, 4]
    saved = {path.name for path in (folder / "validated/checkpoint").glob("step*")}
    assert saved == {"step-2", "step-4"}

    model = read_model(folder / "validated/huggingface/step-4")
    windows = []
    for document in by_hand.read_documents(folder / "other/shards"):
        # A window scores the token after its last, so the next begins with that.
        for start in range(0, len(document) - 1, SEQ_LEN):
            part = torch.from_numpy(document[start : start + SEQ_LEN + 1])
            windows.append((part[:SEQ_LEN], part[1:]))
    totals, counts = torch.zeros(4), torch.zeros(4)
    with torch.no_grad():
        for tokens, labels in windows[:5]:
            logits = model(input_ids=tokens[None]).logits[0, : len(labels)]
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            bucket = torch.arange(len(labels)) // (SEQ_LEN // 4)
            totals.index_add_(0, bucket, losses)
            counts.index_add_(0, bucket, torch.ones(len(labels)))
    assert lines[-1]["tokens"] == counts.sum()
    assert lines[-1]["loss"] == pytest.approx((totals.sum() / counts.sum()).item(), rel=1e-5)
    buckets = lines[-1]["buckets"]
    assert [bucket["tokens"] for bucket in buckets] == counts.tolist()
    losses = [bucket["loss"] for bucket in buckets]
    assert losses == pytest.approx((totals / counts).tolist(), rel=1e-5)
    assert lines[0]["loss"] != lines[1]["loss"]


class _Products(TorchDispatchMode):
    """Counts matrix products, with and without a bias."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_what_is_computed_again(folder):
    """Of a block's seven products the backward recomputes all but the last,
    half of these, or none."""
    products = {}
    for mode in ("none", "selective", "full"):
        with _Products() as counted:
            _run(folder, mode, training__steps=1, activation_checkpoint__mode=mode)
        products[mode] = counted.count
    # The last product, of down_proj, is nothing that a gradient needs.
    assert products["none"] == LAYERS * 7 * 3
    assert products["full"] - products["none"] == LAYERS * 6
    assert products["selective"] - products["none"] == LAYERS * 3


BFLOAT16 = Case(
    "Qwen2",
    ADAMW.settings
    | {
        "training.dtype": "bfloat16",
        "training.steps": 3,
        "training.max_norm": 0.0,
        "training.z_loss": 0.0,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0.0,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 0.1,
        "checkpoint.last_save_in_hf": False,
    },
    [1.0, 1.0, 1.0],
    sequences_per_step=4,
    joined=True,
)


def _rounded_loss(model: Decoder, piece: Piece, z_loss: float) -> Tensor:
    """The loss of a packed sequence. Forward and backward are bfloat16."""
    ends = (piece.labels == by_hand.IGNORED).nonzero().flatten() + 1
    lengths = [len(part) for part in piece.labels.tensor_split(ends) if len(part)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    weights = {name: _unsharded(name, weight) for name, weight in model.named_parameters()}
    inputs = piece.tokens[None], positions[None], Documents([lengths]), piece.labels[None]
    return torch.func.functional_call(model, weights, inputs)


def _unsharded(name: str, master: nn.Parameter) -> Tensor:
    """The weight that FSDP computes with, in bfloat16. Its gradient is added to the master's."""
    weight = master.detach().bfloat16().requires_grad_()
    if torch.__version__ >= "2.15" and "norm" in name:
        # FSDP keeps the gradients of norms as their backward computes them.
        weight.grad_dtype = torch.float32

    def add(weight: Tensor) -> None:
        gradient = weight.grad.float()
        master.grad = gradient if master.grad is None else master.grad + gradient

    weight.register_post_accumulate_grad_hook(add)
    return weight


def _bfloat16_runs(folder: Path) -> None:
    for replicas in (1, 2):
        model = {"model.initial_hf": folder / BFLOAT16.family, "parallelism.dp_replicate": replicas}
        weights = weights_of(run(folder, f"bfloat16-{replicas}", BFLOAT16.settings | model))
        if dist.get_rank() == 0:
            torch.save(weights, folder / f"bfloat16-{replicas}.pt")


def test_a_bfloat16_run_keeps_float32_weights_and_sums(folder):
    """And gradients are summed over ranks in float32. The loop has the same decoder, so that both
    round alike: sums in bfloat16 would be off in the third digit."""
    run_processes(2, _bfloat16_runs, folder)
    dense = functools.partial(attend, backend="eager", block_size=16)
    model = Decoder(resolve(flavour="debug", initial_hf=str(folder / "Qwen2")), dense)
    stored = load_file(folder / "Qwen2/model.safetensors").items()
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in stored})
    lines = _reference(folder, BFLOAT16, model, _rounded_loss)
    masters = dict(model.named_parameters())
    for replicas in (1, 2):
        _compare_lines(folder, f"bfloat16-{replicas}", BFLOAT16, lines)
        weights = torch.load(folder / f"bfloat16-{replicas}.pt")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        for name, weight in weights.items():
            torch.testing.assert_close(weight, masters[name].detach(), rtol=0, atol=1e-6)
