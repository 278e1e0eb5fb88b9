"""titan_sparse.models.flavours: the overrides of the [model] section."""

from dataclasses import replace

import pytest

from titan_sparse.models.config import RopeConfig
from titan_sparse.models.flavours import FLAVOURS, resolve


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_resolve_without_overrides_is_the_flavour(flavour: str) -> None:
    assert resolve(flavour) == FLAVOURS[flavour]
    assert resolve(flavour, 0, "flavour", 0, 0, 0) == FLAVOURS[flavour]


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
