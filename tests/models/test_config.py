"""The shape of a decoder, its number of parameters, and the overrides of the [model] section."""

from dataclasses import replace

import pytest
import torch

from tests.models.helpers import TINY, dense_attend, variants
from titan_sparse.models.config import DecoderConfig, RopeConfig, number_of_parameters
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import FLAVOURS, resolve

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
    assert sum(p.numel() for p in model.parameters()) == number_of_parameters(config)
    assert number_of_parameters(config) == TOTALS[flavour]


@variants
def test_parameter_counts_of_other_shapes(config: DecoderConfig) -> None:
    parameters = Decoder(config, dense_attend).parameters()
    assert sum(p.numel() for p in parameters) == number_of_parameters(config)


@pytest.mark.parametrize(
    "change, message", [({"kv_heads": 2}, "multiple of kv_heads"), ({"head_dim": 7}, "even")]
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


# Overrides of the [model] section


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


@pytest.mark.parametrize(
    "overrides, key",
    [
        ({"flavour": "qwen2.5-3"}, 'model.flavour = "qwen2.5-3" is unknown; write "qwen2.5-3b"'),
        ({"vocab_size": -1}, "model.vocab_size"),
        ({"layers": -2}, "model.layers"),
        ({"rope_scaling": "ntk"}, "model.rope_scaling"),
        ({"rope_factor": 4.0}, "model.rope_factor"),
        ({"rope_scaling": "none", "rope_factor": 4.0}, "model.rope_factor"),
        ({"rope_scaling": "yarn", "rope_factor": 1.0}, "model.rope_factor"),
        ({"rope_scaling": "yarn", "rope_factor": 0.0}, "model.rope_factor"),
        ({"rope_original_length": 4096}, "model.rope_original_length"),
        (
            {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": -1},
            "model.rope_original_length",
        ),
        ({"rope_theta": -1.0}, "model.rope_theta"),
    ],
)
def test_resolve_refuses_what_it_would_ignore(overrides: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        resolve(**{"flavour": "qwen2.5-3b", **overrides})
