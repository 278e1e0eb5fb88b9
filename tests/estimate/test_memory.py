"""The memory estimate, against a step on fake tensors, measured runs, and by hand."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.fake_step import fake_world, peaks_of_a_step
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.schedules import SCHEDULES
from titan_sparse.attention.masks.ranges import Causal, Full
from titan_sparse.attention.patterns import Dense
from titan_sparse.config import Checkpoint, Config, load_and_check
from titan_sparse.estimate import memory
from titan_sparse.estimate.memory import (
    GIB,
    attention_workspace,
    cp_buffers,
    estimate,
    frozen_bytes,
    master_bytes,
    peak_gib,
)
from titan_sparse.estimate.step import StepShape
from titan_sparse.models.config import Adapters, adapter_elements, resolve_adapters
from titan_sparse.models.decoder import Attends
from titan_sparse.models.flavours import FLAVOURS, resolve
from titan_sparse.training.dry_run import host_gib
from titan_sparse.training.model import build_model
from titan_sparse.training.step_shape import step_of

ROOT = Path(__file__).parents[2]

# Published shapes with few layers: tied with biases; a head of its own; queries wider than the
# model, with their norms.
QWEN2 = dataclasses.replace(FLAVOURS["qwen2.5-0.5b"], layers=3), 32768
LLAMA = dataclasses.replace(FLAVOURS["llama3.1-8b"], layers=3), 16384
QWEN3 = dataclasses.replace(FLAVOURS["qwen3-0.6b"], layers=3), 65536
RECIPE = "lora_llama3_1_8b_256k_1gpu"
ALL = "all-linear"


def _adapters(model, targets: str, rank: int = 16, tokens: str = "") -> Adapters | None:
    if not targets:
        return None
    return resolve_adapters(model, rank, 32, 0.0, targets, "default", tokens)


@pytest.mark.parametrize(
    "shape, ranks, mode, targets, chunk, tolerance",
    [
        # Tight, so that a tensor too many or too few shows. tolerance: of the backward.
        (QWEN2, 1, "full", "", 0, 0.02),
        (LLAMA, 4, "selective", "", 0, 0.06),
        (QWEN3, 2, "none", "", 0, 0.06),
        (QWEN2, 1, "full", ALL, 4096, 0.02),
        (QWEN2, 2, "none", ALL, 0, 0.07),
        (LLAMA, 2, "full", f"{ALL} and a,b", 0, 0.06),
        (QWEN2, 1, "full", f"{ALL} and a,b", 0, 0.02),
    ],
)
def test_estimate_is_what_a_fake_step_counts(
    monkeypatch, shape, ranks, mode, targets, chunk, tolerance
):
    targets, _, trained_tokens = targets.partition(" and ")
    model, tokens = shape
    step = StepShape(
        model=model,
        sequences=1,
        seq_len=tokens,
        shards=ranks,
        mode=mode,
        optimizer_scratch=True,
        loss_chunk_tokens=1024,
        adapters=_adapters(model, targets, tokens=trained_tokens),
        mlp_chunk_tokens=chunk,
    )
    monkeypatch.setattr(memory, "attention_workspace", lambda step: 0)  # fake attention takes none
    totals = [sum(parts.values()) for parts in estimate(step).values()]
    block, loss, *backward, optimizer = totals
    counted = peaks_of_a_step(monkeypatch, step)
    assert max(block, loss) == pytest.approx(counted[0], rel=0.01)
    assert max(backward) == pytest.approx(counted[1], rel=tolerance)
    assert optimizer == pytest.approx(counted[2], rel=0.01)


def _ablations():
    """Options that save memory, one at a time and together, on one H200 with torch 2.11."""
    path = ROOT / "benchmarks/results/ablations_qwen2_5_3b_12layers_128k_h200.json"
    for row in json.loads(path.read_text())["rows"]:
        _, _, command = row["command"].partition("--config train_configs/")
        # Verticals were called columns at that commit.
        config, *words = shlex.split(command.replace("_columns", "_verticals"))
        measured = max(step["memory_gib"] for step in row["steps"])
        yield config.removesuffix(".toml"), "flex", words, measured, 0.04


def _recipe(tokens: str, layers: str, chunk: str, measured: float) -> tuple:
    """Three steps of LoRA on an H200 with torch 2.11."""
    words = f"""
        --training.seq_len {tokens} --model.layers {layers} --training.mlp_chunk_tokens {chunk}
        --activation_checkpoint.attention_recompute 0.0
    """
    return RECIPE, "triton", words.split(), measured, 0.1


@pytest.mark.parametrize(
    "config, backend, words, measured, tolerance",
    [
        # docs/benchmarks.md, "Training steps".
        ("qwen2_5_0_5b_128k", "flex", [], 24.71, 0.01),
        ("qwen2_5_0_5b_128k", "triton", [], 24.71, 0.01),
        ("qwen2_5_0_5b_128k", "flex", ["--attention.pattern", "dense"], 24.64, 0.01),
        *_ablations(),
        _recipe("65536", "8", "0", 38.31),
        _recipe("65536", "8", "4096", 20.75),
        _recipe("131072", "32", "16384", 93.13),
    ],
)
def test_estimate_is_what_was_measured(config, backend, words, measured, tolerance):
    path = ROOT / f"train_configs/{config}.toml"
    checked, _ = load_and_check(["--config", str(path), *words], 1, 1)
    step = step_of(checked, resolve(**vars(checked.model)), backend, 1, 1)
    assert peak_gib(step) == pytest.approx(measured, rel=tolerance)


def test_bytes_of_parameters_are_those_of_the_model():
    """Of a model with adapters on a rank of four, and what the optimizer keeps."""
    config = Config()
    config.model.flavour = "debug"
    config.training.device = "cpu"
    config.lora.rank = 8
    model = FLAVOURS["debug"]
    adapters = dataclasses.replace(
        _adapters(model, ALL, rank=8), tokens=("a", "b", "c", "d"), token_ids=(1, 4, 9, 11)
    )
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        cpu = torch.device("cpu")
        decoder = build_model(config, model, adapters, Attends(None, None), mesh, cpu)
        local = {True: 0, False: 0}
        for parameter in decoder.parameters():
            local[parameter.requires_grad] += parameter.to_local().nbytes
    step = StepShape(model=model, sequences=1, seq_len=64, shards=4, adapters=adapters)
    assert frozen_bytes(step) == local[False]
    assert master_bytes(step) == local[True]
    standing = estimate(step)["optimizer step"]
    assert standing["parameters"] * GIB == pytest.approx(local[True] + local[False])
    assert standing["optimizer states"] * GIB == pytest.approx(2 * local[True])
    assert standing["gradients"] * GIB == pytest.approx(local[True])
    # A save in the background copies what is trained, and its states.
    saves = Checkpoint(enable=True, async_mode="async")
    assert host_gib(step, saves)["copy for a save"] * GIB == pytest.approx(3 * local[True])


# By hand ---------------------------------------------------------------------------------------

LONG = StepShape(
    model=FLAVOURS["qwen2.5-3b"],
    sequences=1,
    seq_len=524288,
    compiled=True,
    backend="triton",
    loss_chunk_tokens=4096,
)
# GiB of Qwen2.5-3B with 524,288 tokens: parameters in fp32, out with its lse, an
# intermediate tensor.
PARAMETERS = 3.086e9 * 4 / GIB
LSE = 16 * 524288 * 4 / GIB
OUT = 2 + LSE


@pytest.mark.parametrize(
    "change, saved",
    [
        ({"attention_recompute": 1.0}, 36 * OUT - 2),
        ({"attention_recompute": -1.0}, 36 * OUT - 2),
        ({"attention_recompute": 0.5}, (36 * OUT - 2) / 2),
        # Weights and two states. At the peak no gradients wait yet.
        ({"offload_optimizer": True}, 3 * PARAMETERS),
        ({"accumulates": True}, -PARAMETERS),
        ({"loss_chunk_tokens": 1024}, 0),
    ],
)
def test_levers_save_what_they_are_known_to_save(change, saved):
    changed = dataclasses.replace(LONG, **change)
    assert peak_gib(LONG) - peak_gib(changed) == pytest.approx(saved, abs=0.1)


TOKENS = 4096
HIDDEN, WIDE, VOCABULARY, LAYERS = 64, 512, 1000, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
# The MLP is so wide that its backward is the worst point of a block's.
MODEL = dataclasses.replace(
    FLAVOURS["debug"],
    hidden_size=HIDDEN,
    intermediate_size=WIDE,
    vocab_size=VOCABULARY,
    layers=LAYERS,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    qkv_bias=False,
    qk_norm=False,
    tied_embeddings=True,
)
STEP = StepShape(model=MODEL, sequences=1, seq_len=TOKENS, backend="triton", compiled=True)
BACKWARD = "backward of the last block"
BLOCK_BACKWARD = (BACKWARD, "block and attention")


def _part(step: StepShape, phase: str, name: str) -> float:
    return estimate(step)[phase][name] * GIB


@pytest.mark.parametrize(
    "place, changes, added",
    [
        # Both operands, a byte an element.
        (BLOCK_BACKWARD, {"float8": True, "float8_recipe": "tensorwise"}, TOKENS * (HIDDEN + WIDE)),
        (BLOCK_BACKWARD, {"float8": True, "float8_recipe": "rowwise"}, TOKENS * 8 * WIDE),
        # Gradients of weights are summed in fp32. A single chunk of all tokens saves nothing else.
        (BLOCK_BACKWARD, {"mlp_chunk_tokens": TOKENS}, 3 * HIDDEN * WIDE * 4),
        # Every block keeps its index, and keys and values of the gathered verticals.
        (
            ("loss", "kept for backward"),
            {"index_bytes": 1000, "verticals": 256},
            LAYERS * (1000 + 2 * HEADS * 256 * HEAD_DIM * 2),
        ),
    ],
)
def test_what_an_option_adds(place, changes, added):
    more = _part(dataclasses.replace(STEP, **changes), *place) - _part(STEP, *place)
    assert more == pytest.approx(added, rel=1e-9)


def test_nothing_frozen_has_a_gradient():
    model, _ = LLAMA
    whole = StepShape(model=model, sequences=1, seq_len=4096)
    step = dataclasses.replace(whole, adapters=_adapters(model, ALL))
    head = model.vocab_size * model.hidden_size
    assert _part(whole, "loss", "loss") - _part(step, "loss", "loss") == pytest.approx(4 * head)
    of_adapters = 4 * adapter_elements(model, step.adapters)
    for phase in ("gradient of the embedding", "optimizer step"):
        assert _part(step, phase, "gradients") == pytest.approx(of_adapters)
    last = _part(step, BACKWARD, "gradients")
    assert last == pytest.approx(of_adapters / 2 / model.layers)
    # Chunks of the MLP sum up no gradients of its weights.
    chunked = dataclasses.replace(step, mlp_chunk_tokens=4096)
    assert estimate(chunked)[BACKWARD] == estimate(step)[BACKWARD]


# Attention ------------------------------------------------------------------------------------

SMALL = dataclasses.replace(FLAVOURS["debug"], heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    "schedule, inter, intra, circulates, kv_heads, most",
    [
        ("ring", 1, 3, "kv", 2, 1),
        ("all_gather", 1, 3, "auto", 2, 1),
        ("all_gather", 1, 3, "auto", 4, 1),
        ("double_ring", 3, 2, "kv", 2, 1),
        ("group_cast", 1, 3, "auto", 2, 1),
        # A KV head of twice the tokens, round a ring of nodes.
        ("ulysses", 3, 2, "kv", 2, 1),
        ("ulysses", 1, 2, "auto", 2, 1),
        # Own blocks that are handed on between nodes are not all needed.
        ("group_cast", 3, 1, "auto", 2, 1.1),
        # Some hops of the forward have a buffer that no hop of so short a backward uses.
        ("ring", 1, 4, "q", 4, 1.35),
        ("double_ring", 2, 2, "q", 2, 1.35),
    ],
)
def test_buffers_are_those_that_are_kept(schedule, inter, intra, circulates, kv_heads, most):
    """Rank 0, with collectives that transfer nothing. Received tensors still occupy memory."""
    ranks = inter * intra
    mask = Full() if schedule == "group_cast" else Causal()
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", (inter, intra), mesh_dim_names=("cp_inter", "cp_intra"))
        cp = ContextParallel(mesh, "striped", schedule, 16, backward_circulates=circulates)
        q = torch.randn(2, 4, 32, 8, requires_grad=True)
        k = torch.randn(2, kv_heads, 32, 8, requires_grad=True)
        attend(q, k, k, mask, Dense(), cp).sum().backward()
    step = StepShape(
        model=dataclasses.replace(SMALL, kv_heads=kv_heads),
        sequences=2,
        seq_len=32 * ranks,
        width=4,
        cp=ranks,
        inter=inter,
        schedule=SCHEDULES[schedule],
        circulates_queries=circulates == "q",
    )
    kept = sum(memory.nbytes for memory in (cp.by_heads or cp).memory.values())
    assert kept <= cp_buffers(step) <= most * kept


OF_RANK = 1024
"""Of a rank."""
QUERY = OF_RANK * 4 * 8
"""Elements of q."""
KV = OF_RANK * 2 * 8
"""Elements of k."""
ALONE = StepShape(model=SMALL, sequences=1, seq_len=OF_RANK, backend="triton")
MHA = {"model": dataclasses.replace(SMALL, kv_heads=4)}

MILLION = {"seq_len": 1024 * OF_RANK}


def _on_four(schedule: str, **changes) -> dict:
    return {"seq_len": 4 * OF_RANK, "cp": 4, "schedule": SCHEDULES[schedule], **changes}


# In bf16 with sums in fp32, by hand from what each schedule and backend holds.
@pytest.mark.parametrize(
    "of_both, change, expected",
    [
        # dq, dk and dv; and the keys and values, or gradients, that are sent.
        ({}, _on_four("ring"), 4 * QUERY + 4 * 2 * KV + 4 * 2 * KV),
        # dk and dv; dq as a sum and as it is sent; q, d_out and out in bf16.
        ({}, _on_four("ring", circulates_queries=True), 4 * 2 * KV + 4 * 2 * QUERY + 2 * 3 * QUERY),
        # dk and dv of four ranks, of both heads, or of the only one.
        ({}, _on_four("all_gather"), 2 * 4 * 4 * KV),
        # Two of four heads at a time: their keys and values are copied, in bf16.
        (MHA, _on_four("all_gather"), 2 * 4 * 4 * 2 * KV + 2 * 4 * 2 * KV),
        # Two stages of 1.5 chunks, each with gradients and twice: as sent and as received.
        ({}, _on_four("group_cast"), 4 * QUERY + 2 * KV * (2 * 4 + 2 * 1.5 * (2 + 4))),
        # Between nodes sums of what is handed on as well.
        ({}, _on_four("group_cast", inter=2), 4 * QUERY + 2 * KV * (3 * 4 + 2 * 1.5 * (2 + 4))),
        # FlashAttention-4 sums dq in fp32, and where query heads share keys also dk and dv.
        ({}, {"backend": "flex"}, 4 * (QUERY + 2 * KV)),
        (MHA, {"backend": "flex"}, 4 * QUERY),
        # Half of the heads of a long sequence at a time.
        (MILLION, {"backend": "flex"}, 4 * 1024 * (QUERY + 2 * KV) / 2),
        # cuDNN: dq, and where query heads share keys also rounded dk and dv of each query head.
        ({}, {"backend": "cudnn"}, 4 * QUERY + 2 * 2 * QUERY),
        # all_gather: one head at a time.
        (_on_four("all_gather"), {"backend": "cudnn"}, (4 * QUERY + 2 * 2 * QUERY) / 2),
    ],
)
def test_workspace_by_hand(of_both, change, expected):
    before = dataclasses.replace(ALONE, **of_both)
    after = dataclasses.replace(before, **change)
    assert attention_workspace(after) - attention_workspace(before) == pytest.approx(expected)
