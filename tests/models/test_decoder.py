"""titan_sparse.models.decoder and flavours: counts, overrides, dtypes, dense layers, and compiled
blocks without breaks."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.models.helpers import dense_attend
from tests.models.transformers_models import VOCAB, save_model
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.config import Attention
from titan_sparse.models.build import build_decoder
from titan_sparse.models.config import RopeConfig
from titan_sparse.models.decoder import Decoder, LayerMasks
from titan_sparse.models.flavours import FLAVOURS, resolve
from titan_sparse.models.huggingface import load_weights
from titan_sparse.options.patterns import MoBAOptions
from titan_sparse.training.attention import build_attends, build_pattern

TOTALS = {  # published, but for debug
    "debug": 829_568,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("flavour", TOTALS)
def test_parameter_counts(flavour: str) -> None:
    config = resolve(flavour)
    with torch.device("meta"):
        model = Decoder(config, dense_attend)
    assert sum(p.numel() for p in model.parameters()) == config.number_of_parameters()
    assert config.number_of_parameters() == TOTALS[flavour]


def test_resolve_applies_overrides() -> None:
    config = resolve("qwen2.5-3b", 1000, "yarn", 16.0, 0, 5e6)
    assert config.vocab_size == 1000 and config.layers == FLAVOURS["qwen2.5-3b"].layers
    assert resolve("qwen2.5-3b", layers=6) == replace(FLAVOURS["qwen2.5-3b"], layers=6)
    assert config.rope == RopeConfig(theta=5e6, scaling="yarn", factor=16.0, original_length=32768)
    assert resolve(
        "llama3.1-8b", rope_scaling="llama3", rope_factor=32.0, rope_original_length=4096
    ).rope == replace(FLAVOURS["llama3.1-8b"].rope, factor=32.0, original_length=4096)
    unscaled = resolve("llama3.1-8b", rope_scaling="none").rope
    assert (unscaled.scaling, unscaled.factor, unscaled.theta) == ("none", 1.0, 5e5)


# attention.dense_layers

SECTION = Attention(pattern="moba", moba=MoBAOptions(chunk_size=128, top_k=2), dense_layers="1")


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_their_attention_is_dense_and_that_of_others_the_pattern(tmp_path, implementation):
    save_model(tmp_path, "llama")
    config = resolve("debug", initial_hf=str(tmp_path), implementation=implementation)
    with torch.device("meta"):
        model = build_decoder(config, build_attends(SECTION, None))
    model = model.to_empty(device="cpu")
    load_weights(model, str(tmp_path), config)
    calls = []

    def noted(function):
        def call(q, k, v, mask, **options):
            calls.append((q, k, v, mask, function(q, k, v, mask, **options)))
            return calls[-1][-1]

        return call

    for layer in model.layers.values():
        layer.self_attn.attend = noted(layer.self_attn.attend)
    tokens = torch.randint(3, VOCAB, (1, 400), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(400)[None]
    mask = Causal().rows(400)
    with torch.no_grad():
        model(tokens, positions, mask if implementation == "native" else LayerMasks(mask))
    is_dense = []
    for q, k, v, mask, out in calls:
        dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        is_dense.append(torch.allclose(out, dense, atol=1e-5))
        if not is_dense[-1]:
            torch.testing.assert_close(out, attend(q, k, v, mask, build_pattern(SECTION)))
    assert is_dense == [False, True]


def test_a_run_counts_them(tmp_path):
    """Density and caps in metrics.jsonl, in TensorBoard, and what the cap kept below the recall."""
    write_texts(tmp_path / "texts")
    lines = {}
    for layers in ("", "0", "0,1"):
        config = tiny_config(
            tmp_path,
            f"dense {layers}",
            training__steps=1,
            metrics__tensorboard=layers == "0",
            attention__dense_layers=layers,
            attention__vertical_slash__max_verticals=2,
            attention__vertical_slash__max_slashes=1,
        )
        train(config)
        lines[layers] = metrics_of(config)[0]
    sparse, mixed, dense = lines.values()
    assert sparse["density"] < mixed["density"] < dense["density"] == 1
    assert mixed["density"] > 0.5
    assert sparse["heads_capped"] > 0 and mixed["heads_capped"] > 0
    assert "heads_capped" not in dense
    assert mixed["recall"] > sparse["recall"] and dense["recall"] == pytest.approx(1)
