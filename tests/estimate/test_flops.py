"""FLOPs of a step, MFU, and what is kept apart from it."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.models.helpers import build
from tests.runs import TINY, metrics_of, tiny_config, train
from titan_sparse.estimate.flops import (
    causal_pairs,
    flops_per_token,
    linear_flops_per_token,
    peak_flops,
    utilization,
)
from titan_sparse.models.config import resolve_adapters
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import FLAVOURS


@pytest.mark.parametrize("model", [TINY, FLAVOURS["llama3.1-8b"], FLAVOURS["qwen2.5-3b"]])
def test_matmul_flops_are_six_a_weight_of_a_matrix(model):
    with torch.device("meta"):
        decoder = Decoder(model, lambda q, k, v, mask: q)
    weights = 0
    for module in decoder.layers.modules():
        if isinstance(module, torch.nn.Linear):
            weights += module.weight.numel()
    head = 6 * decoder.embed_tokens.weight.numel()
    assert linear_flops_per_token(model) == 6 * weights
    assert flops_per_token(model, 0.0) == 6 * weights + head
    assert flops_per_token(model, 10.0) == 6 * weights + head + 120 * model.head_dim


@pytest.mark.parametrize("targets", ["all-linear", "o_proj,up_proj"])
def test_flops_with_adapters_are_those_of_torchs_counter(targets):
    """Of linear layers, without gradients that are not needed: those of the
    first adapters' inputs."""
    model = dataclasses.replace(FLAVOURS["debug"], layers=2)
    adapters = resolve_adapters(model, 4, 32, 0.0, targets, "default")
    attend = lambda q, k, v, mask: q + (k + v).sum(1, keepdim=True)  # noqa: E731
    decoder = build(model, dtype=torch.float32, attend=attend, adapters=adapters)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, tokens, None, tokens).backward()
    query_size = model.heads * model.head_dim
    columns = query_size + 2 * model.kv_heads * model.head_dim
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


@pytest.mark.parametrize(
    "seq_len, window, sinks",
    [(7, 0, 0), (7, 3, 0), (7, 7, 0), (7, 9, 0), (1, 1, 0)]
    + [(9, 3, 2), (9, 3, 8), (9, 9, 2), (9, 12, 2)],
)
def test_causal_pairs(seq_len, window, sinks):
    pairs = 0
    for query in range(seq_len):
        for key in range(query + 1):
            pairs += query - key < (window or seq_len) or key < sinks
    assert causal_pairs(seq_len, window, sinks) == pairs


@pytest.mark.parametrize(
    "device, sparse",
    [
        ("A100-SXM4-80GB", 624),
        ("H100 80GB HBM3", 1979),
        ("H200", 1979),
        ("H200 NVL", 1671),
        ("B200", 4500),
        ("GB200", 5000),
        ("H20", None),
    ],
)
def test_peak_is_half_of_what_nvidia_publishes(device, sparse):
    """The datasheets give bf16 with structured sparsity, which is twice as fast as dense."""
    dense = sparse and pytest.approx(sparse / 2 * 1e12, rel=0.015)
    assert peak_flops(f"NVIDIA {device}", 0.0) == dense


@pytest.mark.parametrize("float8", [False, True])
def test_utilization_is_one_at_the_peak_and_never_more(float8):
    """A device that does every matmul at its own peak, and nothing else, has a utilization of 1."""
    model, pairs, peak = FLAVOURS["qwen2.5-3b"], 5e6, peak_flops("NVIDIA H200", 0.0)
    linear = linear_flops_per_token(model) / (2 * peak if float8 else peak)
    rest = (6 * model.vocab_size * model.hidden_size + 12 * model.head_dim * pairs) / peak
    assert utilization(model, pairs, 1 / (linear + rest), peak, float8) == pytest.approx(1.0)
    # The same throughput counts less where linear layers could have been twice as fast.
    with_float8 = utilization(model, pairs, 100.0, peak, True)
    assert with_float8 < utilization(model, pairs, 100.0, peak, False) < 1


def test_log_keeps_dense_equivalent_apart(texts, caplog):

    def lines(peak_tflops: float) -> list[dict]:
        settings = {"metrics__peak_tflops": peak_tflops, "metrics__recall_every": 0}
        config = tiny_config(texts, f"{peak_tflops}", training__steps=2, **settings)
        train(config)
        return metrics_of(config)

    for line in lines(1000.0):
        per_second = line["tokens_per_second_per_device"]
        matmul = flops_per_token(TINY, 0.0)
        dense_attention = line["dense_equivalent_tflops"] * 1e12 / per_second - matmul
        visited_attention = line["mfu"] * 1e15 / per_second - matmul
        assert 0 < line["mfu"] < 1 and line["density"] < 1
        assert visited_attention == pytest.approx(dense_attention * line["density"], rel=1e-6)
    assert "peak_tflops" not in caplog.text
    # A peak that this device has passed is wrong.
    assert [line["mfu"] for line in lines(1e-9)] == [None, None]
    assert "metrics.peak_tflops = 1e-09 is too small" in caplog.text
