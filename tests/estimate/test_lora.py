"""Memory and FLOPs of a step with adapters: against fake tensors, the real model's bytes, and torch's
counter of FLOPs."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from tests.estimate.steps import ROOT, step_of_words
from tests.fake_step import fake_world, peaks_of_a_step
from titan_sparse.attention.backends import has_flash_attention_4
from titan_sparse.config import Checkpoint, Config
from titan_sparse.estimate import memory
from titan_sparse.estimate.dry_run import host_gib
from titan_sparse.estimate.flops import flops_per_token, linear_flops_per_token
from titan_sparse.estimate.memory import (
    GIB,
    Step,
    estimate,
    frozen_bytes,
    master_bytes,
    peak_gib,
)
from titan_sparse.models.decoder import Attends, Decoder
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.models.initialization import initialize
from titan_sparse.models.lora import add_adapters
from titan_sparse.models.lora_config import Adapters, adapter_elements, resolve_adapters
from titan_sparse.training.build_model import build_model

pytest.importorskip("peft")
torch.set_num_threads(1)

QWEN = dataclasses.replace(FLAVOURS["qwen2.5-0.5b"], layers=3)
LLAMA = dataclasses.replace(FLAVOURS["llama3.1-8b"], layers=3)
RECIPE = "lora_llama3_1_8b_256k_1gpu"


def _adapters(model=QWEN, targets: str = "all-linear", rank: int = 16) -> Adapters:
    return resolve_adapters(model, rank, 32, 0.0, targets, "default")


@pytest.mark.parametrize(
    "model, tokens, ranks, mode, targets, chunk",
    [
        (QWEN, 32768, 1, "full", "all-linear", 0),
        (QWEN, 32768, 1, "full", "all-linear", 4096),
        (QWEN, 32768, 2, "none", "all-linear", 0),
        (QWEN, 32768, 1, "none", "q_proj,v_proj", 0),
        pytest.param(LLAMA, 16384, 4, "full", "q_proj,v_proj", 0, marks=pytest.mark.slow),
        pytest.param(LLAMA, 16384, 4, "full", "all-linear", 4096, marks=pytest.mark.slow),
        pytest.param(LLAMA, 16384, 4, "none", "all-linear", 0, marks=pytest.mark.slow),
    ],
)
def test_estimate_is_what_fake_tensors_count(
    monkeypatch, model, tokens, ranks, mode, targets, chunk
):
    adapters = _adapters(model, targets)
    step = Step(
        model=model,
        sequences=1,
        seq_len=tokens,
        shards=ranks,
        mode=mode,
        optimizer_scratch=True,
        loss_chunk_tokens=1024,
        adapters=adapters,
        mlp_chunk_tokens=chunk,
    )
    monkeypatch.setattr(memory, "attention_workspace", lambda step: 0)  # fake attention takes none
    totals = [sum(parts.values()) for parts in estimate(step).values()]
    block, loss, *backward, optimizer = totals
    counted = peaks_of_a_step(monkeypatch, model, mode, tokens, ranks, 1024, adapters, chunk)
    assert max(block, loss) == pytest.approx(counted[0], rel=0.1)
    assert max(backward) == pytest.approx(counted[1], rel=0.1)
    assert optimizer == pytest.approx(counted[2], rel=0.01)


def test_bytes_of_parameters_are_those_of_the_model():
    """On a rank of four, and what the optimizer keeps."""
    config = Config()
    config.model.flavour = "debug"
    config.training.device = "cpu"
    config.lora.rank = 8
    model = FLAVOURS["debug"]
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        decoder = build_model(config, model, Attends(None, None), mesh, torch.device("cpu"))
        local = {True: 0, False: 0}
        for parameter in decoder.parameters():
            local[parameter.requires_grad] += parameter.to_local().nbytes
    step = Step(model=model, sequences=1, seq_len=64, shards=4, adapters=_adapters(model, rank=8))
    assert frozen_bytes(step) == local[False]
    assert master_bytes(step) == local[True]
    standing = estimate(step)["optimizer step"]
    assert standing["parameters"] * GIB == pytest.approx(local[True] + local[False])
    assert standing["optimizer states"] * GIB == pytest.approx(2 * local[True])
    assert standing["gradients"] * GIB == pytest.approx(local[True])
    # A save in the background copies what is trained, and its states.
    saves = Checkpoint(enable=True, async_mode="async")
    assert host_gib(step, saves)["copy for a save"] * GIB == pytest.approx(3 * local[True])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("chunk", ["0", "4096"])
def test_estimate_is_what_a_gpu_measures(tmp_path, chunk):
    """The estimate against torch.cuda.max_memory_allocated after three compiled steps, of eight layers
    of Llama-3.1-8B."""
    words = ["--training.seq_len", "65536", "--training.steps", "3", "--model.layers", "8"]
    words += ["--training.mlp_chunk_tokens", chunk, "--lr_scheduler.warmup_steps", "1"]
    words += ["--activation_checkpoint.attention_recompute", "0.0"]
    of_data = ["--data.source", "python", "--data.join_packages", "true"]
    of_data += ["--data.tokenizer", "bytes", "--checkpoint.enable", "false"]
    of_data += ["--metrics.recall_every", "0", "--training.output_dir", str(tmp_path)]
    command = [sys.executable, "train.py", "--config", f"train_configs/{RECIPE}.toml"]
    subprocess.run([*command, *words, *of_data], cwd=ROOT, check=True)
    measured = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["memory_gib"]
    backend = "flex" if has_flash_attention_4() else "triton"
    expected = peak_gib(step_of_words(RECIPE, backend, 1, *words))
    print(f"chunks of {chunk}: expected {expected:.2f} GiB, measured {measured:.2f}")
    assert expected == pytest.approx(measured, rel=0.1)


MEASURED = (
    ("65536", "8", "0", 38.31),
    ("65536", "8", "4096", 20.75),
    ("131072", "32", "16384", 93.13),
)
"""Tokens, layers, tokens of an MLP's chunk, and GiB of three steps on an H200 with torch 2.11."""


@pytest.mark.parametrize("tokens, layers, chunk, measured", MEASURED)
def test_estimate_is_what_was_measured(tokens, layers, chunk, measured):
    words = ["--training.seq_len", tokens, "--model.layers", layers]
    words += ["--training.mlp_chunk_tokens", chunk]
    words += ["--activation_checkpoint.attention_recompute", "0.0"]
    expected = peak_gib(step_of_words(RECIPE, "triton", 1, *words))
    assert expected == pytest.approx(measured, rel=0.1)


def test_nothing_frozen_has_a_gradient():
    step = Step(model=LLAMA, sequences=1, seq_len=4096, adapters=_adapters(LLAMA))
    whole = dataclasses.replace(step, adapters=None)
    head = LLAMA.vocab_size * LLAMA.hidden_size
    loss = [estimate(s)["loss"]["loss"] for s in (whole, step)]
    assert (loss[0] - loss[1]) * GIB == pytest.approx(4 * head)
    of_adapters = 4 * adapter_elements(LLAMA, step.adapters)
    for phase in ("gradient of the embedding", "optimizer step"):
        assert estimate(step)[phase]["gradients"] * GIB == pytest.approx(of_adapters)
    last = estimate(step)["backward of the last block"]["gradients"] * GIB
    assert last == pytest.approx(of_adapters / 2 / LLAMA.layers)
    # Chunks of the MLP sum up no gradients of its weights.
    chunked = dataclasses.replace(step, mlp_chunk_tokens=4096)
    assert (
        estimate(chunked)["backward of the last block"]
        == estimate(step)["backward of the last block"]
    )


@pytest.mark.parametrize("targets", ["all-linear", "o_proj,up_proj"])
def test_flops_are_those_of_torchs_counter(targets):
    """Of linear layers, without gradients that are not needed: those of the first adapters' inputs."""
    model = dataclasses.replace(FLAVOURS["debug"], layers=2)
    adapters = _adapters(model, targets, rank=4)
    with torch.device("meta"):
        decoder = Decoder(model, lambda q, k, v, mask: q + (k + v).sum(1, keepdim=True))
        add_adapters(decoder, adapters)
    decoder = decoder.to_empty(device="cpu")
    initialize(decoder, 0, model)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, tokens, None, tokens).backward()
    query_size = model.heads * model.head_dim
    kv_size = model.kv_heads * model.head_dim
    columns = query_size + 2 * kv_size
    if targets == "all-linear":
        columns += 3 * adapters.rank
    else:
        # The output's projection reads what no adapter has touched.
        columns += query_size + adapters.rank
    not_needed = 2 * model.hidden_size * columns
    expected = linear_flops_per_token(model, adapters)
    assert counter.get_total_flops() / 64 == expected - not_needed
    # The loss multiplies in place, which the counter does not see: logits, and hidden's gradient.
    head = 2 * 2 * model.vocab_size * model.hidden_size
    assert flops_per_token(model, 0.0, adapters) == expected + head
