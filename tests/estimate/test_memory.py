"""The memory estimate: against the bytes of the real model's step on fake tensors, against a
measured run, lever by lever."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from tests.estimate.steps import ROOT, step_of_words
from tests.fake_step import peaks_of_a_step
from titan_sparse.attention.context_parallel.schedule import ALL_GATHER
from titan_sparse.estimate import memory
from titan_sparse.estimate.memory import GIB, Step, estimate, peak_gib
from titan_sparse.models.flavours import FLAVOURS

# Published shapes with few layers: tied with biases; a head of its own; queries wider than the model, with their norms.
SHAPES = {
    "qwen2.5-0.5b": (dataclasses.replace(FLAVOURS["qwen2.5-0.5b"], layers=3), 32768, 1),
    "llama3.1-8b": (dataclasses.replace(FLAVOURS["llama3.1-8b"], layers=3), 16384, 4),
    "qwen3-0.6b": (dataclasses.replace(FLAVOURS["qwen3-0.6b"], layers=3), 65536, 2),
}


@pytest.mark.parametrize(
    "shape, mode",
    [
        pytest.param(
            shape,
            mode,
            marks=pytest.mark.slow if (mode == "full") != (shape == "qwen2.5-0.5b") else (),
        )
        for shape in SHAPES
        for mode in ("full", "selective", "none")
    ],
)
def test_estimate_is_what_fake_tensors_count(monkeypatch, shape, mode):
    model, tokens, ranks = SHAPES[shape]
    step = Step(
        model=model,
        sequences=1,
        seq_len=tokens,
        shards=ranks,
        mode=mode,
        optimizer_scratch=True,
        loss_chunk_tokens=1024,
    )
    monkeypatch.setattr(memory, "attention_workspace", lambda step: 0)  # fake attention takes none
    totals = [sum(parts.values()) for parts in estimate(step).values()]
    block, loss, *backward, optimizer = totals
    counted = peaks_of_a_step(monkeypatch, model, mode, tokens, ranks, 1024)
    # Tight where the counts are exact, so that a tensor too many or too few shows
    if mode != "full":
        tolerance = 0.1
    elif model.tied_embeddings:
        tolerance = 0.02
    else:
        tolerance = 0.05
    assert max(block, loss) == pytest.approx(counted[0], rel=tolerance)
    assert max(backward) == pytest.approx(counted[1], rel=tolerance)
    assert optimizer == pytest.approx(counted[2], rel=0.01)


@pytest.mark.parametrize("backend", ["flex", "triton"])
def test_estimate_is_what_was_measured(backend):
    # docs/benchmarks.md, "Training steps": one H200, compiled, full checkpointing
    assert peak_gib(step_of_words("qwen2_5_0_5b_128k", backend)) == pytest.approx(25.0, rel=0.1)
    assert peak_gib(
        step_of_words("qwen2_5_0_5b_128k", backend, 1, "--attention.pattern", "dense")
    ) == pytest.approx(24.9, rel=0.1)


LONG = Step(
    model=FLAVOURS["qwen2.5-3b"],
    sequences=1,
    seq_len=524288,
    compiled=True,
    backend="triton",
    loss_chunk_tokens=4096,
)


def test_levers_take_what_they_are_known_to_take():
    """Qwen2.5-3B, 524,288 tokens, by hand in GiB. An intermediate tensor is 10.75, a hidden or
    query tensor is 2.
    """
    hidden = 2.0
    query = 2.0
    intermediate = 10.75
    layers = 36

    def change(**levers) -> float:
        return peak_gib(LONG) - peak_gib(dataclasses.replace(LONG, **levers))

    lse = 16 * 524288 * 4 / GIB
    assert change(attention_recompute=1.0) == pytest.approx(layers * (query + lse) - query, abs=0.1)
    assert change(attention_recompute=0.5) == pytest.approx(
        (layers * (query + lse) - query) / 2, abs=0.1
    )
    assert change(attention_recompute=-1.0) == change(attention_recompute=1.0)
    kept = [
        estimate(dataclasses.replace(LONG, offload=on))["loss"]["kept for backward"]
        for on in (False, True)
    ]
    assert kept[0] - kept[1] == pytest.approx((layers - 3) * (hidden + query + lse), abs=0.1)
    assert (
        change(mlp_chunk_tokens=4096) > 3 * intermediate
    )  # until attention's backward is the worst
    assert change(offload_optimizer=True) == pytest.approx(
        3.086e9 * 12 / GIB, abs=0.1
    )  # at the peak no gradients wait yet
    assert change(accumulates=True) == pytest.approx(-3.086e9 * 4 / GIB, abs=0.1)
    assert change(loss_chunk_tokens=1024) == 0
    assert change(shards=8) == pytest.approx(3.086e9 * 12 * 7 / 8 / GIB, abs=0.3)
    together = dataclasses.replace(
        LONG, attention_recompute=1.0, offload=True, mlp_chunk_tokens=4096
    )
    assert peak_gib(together) < 100 < peak_gib(LONG)


def test_context_parallelism_divides_activations():
    cp = dataclasses.replace(LONG, cp=4, schedule=ALL_GATHER)
    kept = [parts["kept for backward"] for parts in (estimate(LONG)["loss"], estimate(cp)["loss"])]
    assert kept[1] == pytest.approx(kept[0] / 4, rel=0.01)
    assert (
        estimate(cp)["loss"]["context-parallel buffers"] == 2 * 2 * 524288 * 128 * 2 / GIB
    )  # K and V of two heads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["full", "selective", "none"])
def test_estimate_is_what_a_gpu_measures(tmp_path, mode):
    """The banner's peak against torch.cuda.max_memory_allocated after three compiled steps."""
    words = [
        "--training.seq_len",
        "32768",
        "--training.steps",
        "3",
        "--activation_checkpoint.mode",
        mode,
        "--lr_scheduler.warmup_steps",
        "1",
    ]
    subprocess.run(
        [
            sys.executable,
            "train.py",
            "--config",
            "train_configs/qwen2_5_0_5b_128k.toml",
            *words,
            "--metrics.recall_every",
            "0",
            "--training.output_dir",
            str(tmp_path),
        ],
        cwd=ROOT,
        check=True,
    )
    measured = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["memory_gib"]
    expected = peak_gib(step_of_words("qwen2_5_0_5b_128k", "flex", 1, *words))
    print(f"{mode}: expected {expected:.2f} GiB, measured {measured:.2f}")
    assert expected == pytest.approx(measured, rel=0.1)


# Single parts, added up by hand ---------------------------------------------------------------

TOKENS = 4096
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 64, 512, 1000, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
# The MLP is so wide that its backward is the worst point of a block's.
MODEL = dataclasses.replace(
    FLAVOURS["debug"],
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    vocab_size=VOCABULARY,
    layers=LAYERS,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    qkv_bias=False,
    qk_norm=False,
    tied_embeddings=True,
)
STEP = Step(model=MODEL, sequences=1, seq_len=TOKENS, backend="triton", compiled=True)
BACKWARD = "backward of the last block"


def part(step: Step, phase: str, name: str) -> float:
    return estimate(step)[phase][name] * GIB


def added(phase: str, name: str, **changes) -> float:
    return part(dataclasses.replace(STEP, **changes), phase, name) - part(STEP, phase, name)


def exactly(size: float) -> object:
    return pytest.approx(size, rel=1e-9)


def test_float8_keeps_operands():
    """tensorwise: both, a byte an element. rowwise: eight bytes an intermediate element."""
    name = "block and attention"
    tensorwise = added(BACKWARD, name, float8=True, float8_recipe="tensorwise")
    rowwise = added(BACKWARD, name, float8=True, float8_recipe="rowwise")
    assert tensorwise == exactly(TOKENS * (HIDDEN + INTERMEDIATE))
    assert rowwise == exactly(TOKENS * 8 * INTERMEDIATE)


def test_a_chunked_mlp_sums_its_weights_gradients():
    """The sum is in fp32. A single chunk of all tokens saves nothing else."""
    more = added(BACKWARD, "block and attention", mlp_chunk_tokens=TOKENS)
    assert more == exactly(3 * HIDDEN * INTERMEDIATE * 4)


def test_every_block_keeps_its_selection():
    """The index, and keys and values of the gathered verticals."""
    more = added("loss", "kept for backward", index_bytes=1000, verticals=256)
    assert more == exactly(LAYERS * (1000 + 2 * HEADS * 256 * HEAD_DIM * 2))


def test_what_all_blocks_share():
    """cos and sin in fp32, three int32 of the mask, and the gradient that the embedding reads."""
    kept = part(STEP, "gradient of the embedding", "kept for backward")
    assert kept == exactly(2 * TOKENS * HEAD_DIM * 4 + 3 * TOKENS * 4 + TOKENS * HIDDEN * 2)


# Queries and out, keys and values; gate, up and down; two norms.
BLOCK = HIDDEN * 2 * (HEADS + KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN
# The last norm lies in no block, and is counted as if it did.
BLOCK += HIDDEN / LAYERS
EMBEDDING = VOCABULARY * HIDDEN


@pytest.mark.parametrize(
    "shards, reshards, phase, elements",
    [
        (1, True, "loss", EMBEDDING),
        # The last block stays gathered for its backward.
        (4, True, "loss", EMBEDDING + BLOCK),
        # A block, the next one, and the buffer that it arrives in.
        (4, True, BACKWARD, EMBEDDING + 3 * BLOCK),
        (1, False, "loss", EMBEDDING + LAYERS * BLOCK),
        (4, False, BACKWARD, EMBEDDING + (LAYERS + 1) * BLOCK),
    ],
)
def test_gathered_weights(shards, reshards, phase, elements):
    step = dataclasses.replace(STEP, shards=shards, reshard_after_forward=reshards)
    assert part(step, phase, "gathered weights") == exactly(2 * elements)
