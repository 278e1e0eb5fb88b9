"""Folders of Hugging Face that cannot be trained are refused by name, before anything starts."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.models.huggingface_reference import (
    LLAMA3,
    PLAIN,
    YARN,
    change_tensors,
    save_reference,
    write_config,
)
from tests.runs import tiny_config, write_texts
from titan_sparse.config import Config, ConfigError, check
from titan_sparse.models import flavours
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import check_weights
from titan_sparse.models.huggingface_config import config_json, read_config
from titan_sparse.trainer import Trainer

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)

ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"architectures": ["MistralForCausalLM"]}, "only Qwen2ForCausalLM"),
        ({"model_type": "mistral"}, "model_type = 'mistral' beside architectures"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu; only silu"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"transformers_weights": "b.safetensors"}, "transformers_weights"),
        ({"num_key_value_heads": 4}, "heads = 6 must be a multiple of kv_heads = 4"),
        ({ORIGINAL: "64", "rope_parameters": YARN}, f"{ORIGINAL} = '64'"),
        ({ORIGINAL: None, "rope_parameters": YARN}, f"{ORIGINAL} = null"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 5e5}}, "disagree on"),
    ],
    ids=str,
)
def test_config_json_that_cannot_be_trained(tmp_path, changes, named):
    assert_refused(tmp_path, changes, named)


@pytest.mark.parametrize(
    "table, named",
    [
        (PLAIN | {"rope_theta": 0}, "rope_theta = 0"),
        (PLAIN | {"rope_theta": 2**31}, "rope_theta = 2147483648"),
        (PLAIN | {"rope_type": "linear"}, 'rope_type = "linear" is unknown'),
        (PLAIN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (PLAIN | {"factor": 2.0}, 'rope scaling "default" with factor'),
        ({"full_attention": YARN}, 'scaling "default" with full_attention'),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor = 4.0 cannot be trained"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, 'rope scaling "yarn" needs factor'),
        (YARN | {"mscale": 0.7}, 'rope scaling "yarn" with mscale'),
        (YARN | {"rope_type": ["yarn"]}, 'rope_type = ["yarn"] is unknown'),
        (YARN | {ORIGINAL: 64.5}, f"{ORIGINAL} = 64.5"),
        (YARN | {"factor": 0.99}, "factor = 0.99 cannot be trained; write 1 or more"),
        (YARN | {"factor": 10**400}, "is not a positive number"),
        (YARN | {"beta_fast": -1}, "beta_fast = -1"),
        (YARN | {"rope_theta": 1.0}, "needs a rope_theta above 1, not 1.0"),
        (YARN | {"rope_theta": None}, "rope_theta = null"),
        (YARN | {"truncate": False}, "truncate = false"),
        # Not the same number any more, even in fp32.
        (YARN | {"attention_factor": (0.1 * math.log(4) + 1) * (1 + 1.5e-6)}, "only 1.13863"),
    ],
    ids=str,
)
def test_rotary_embeddings_that_cannot_be_trained(tmp_path, table, named):
    assert_refused(tmp_path, {"rope_parameters": table}, named)


def assert_refused(folder, changes, named):
    """config.json with these keys, of which null stays null."""
    save_reference(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError) as caught:
        read_config(str(folder))
    message = str(caught.value)
    assert named in message and message.startswith(f"model.initial_hf: {path}")
    assert "\n" not in message


@pytest.mark.parametrize(
    "rope, model, expected",
    [
        (PLAIN, {"vocab_size": 330}, "model.vocab_size = 330 does not agree with"),
        (PLAIN, {"rope_theta": 5e5}, "model.rope_theta = 500000.0 does not agree with"),
        (
            PLAIN,
            {"flavour": "qwen2.5-0.5b"},
            'model.flavour = "qwen2.5-0.5b": vocab_size = 151936 does not agree with',
        ),
        (
            PLAIN,
            {"initial_hf": "nowhere"},
            'model.initial_hf = "nowhere" needs a readable config.json',
        ),
        (
            YARN,
            {"rope_scaling": "yarn", "rope_factor": 8.0},
            "has yarn with factor 4 over 64 tokens; leave them out",
        ),
    ],
)
def test_model_section_that_does_not_agree(tmp_path, rope, model, expected):
    save_reference(tmp_path, rope_parameters=dict(rope))
    config = Config()
    for key, value in ({"initial_hf": str(tmp_path)} | model).items():
        setattr(config.model, key, value)
    with pytest.raises(ConfigError) as caught:
        check(config, 1, 1)
    assert expected in str(caught.value)


def test_model_section_that_agrees(tmp_path):
    save_reference(tmp_path, rope_parameters=dict(YARN))
    plain = resolve("debug", initial_hf=str(tmp_path))
    assert (
        plain
        == resolve("debug", 331, "yarn", 4.0, 64, 1000.0, str(tmp_path))
        == read_config(str(tmp_path))
    )


def test_a_shape_without_a_family():
    both = replace(resolve("debug"), qk_norm=True)
    with pytest.raises(ValueError, match="hidden_size = 64 to be a multiple of heads = 6"):
        config_json(replace(resolve("debug"), qkv_bias=False, hidden_size=64, heads=6), "float32")
    with pytest.raises(
        ValueError, match="no family of Hugging Face has qkv_bias = True and qk_norm = True"
    ):
        config_json(both, "float32")


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda tensors: tensors.pop(Q), f"has no tensor {Q}"),
        (
            lambda tensors: tensors.update({"model.layers.2.x": torch.zeros(1)}),
            "has an unexpected tensor model.layers.2.x",
        ),
        (
            lambda tensors: tensors.update({Q: torch.zeros(96, 63)}),
            f"{Q} in .* is \\[96, 63\\], but its config.json says \\[96, 64\\]",
        ),
        (
            lambda tensors: tensors.update({Q: torch.zeros(96, 64, dtype=torch.int8)}),
            f"{Q} in .* is I8; only F64, F32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, expected):
    save_reference(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=expected) as caught:
        check_weights(str(tmp_path), read_config(str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_tensors_are_checked_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(flavours, "FLAVOURS", dict(flavours.FLAVOURS))  # tiny_config() adds to it
    save_reference(tmp_path / "in")
    change_tensors(tmp_path / "in", lambda tensors: tensors.pop(Q))
    write_texts(tmp_path / "texts")
    settings = {"model__flavour": "debug", "model__initial_hf": str(tmp_path / "in")}
    with pytest.raises(ValueError, match=f"has no tensor {Q}"):
        Trainer(tiny_config(tmp_path, "run", **settings))
    assert not dist.is_initialized()


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "has neither model.safetensors nor model.safetensors.index.json"),
        ('{"weight_map": {"a": "model-00001.safetensors"}}', "00001.safetensors cannot be read"),
        ("[]", "has no readable weight_map"),
        ("[" * 100_000, "has no readable weight_map"),
        *[
            (json.dumps({"weight_map": {"a": name}}), "index.json names the file")
            for name in ("../aside", "/model.safetensors", "a/b.safetensors", "a.pt", 5)
        ],
    ],
    ids=lambda value: str(value)[:40],
)
def test_indices_that_are_missing_or_broken(tmp_path, text, message):
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "aside")
    if text is not None:
        (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match="model.initial_hf: .*" + message) as caught:
        check_weights(str(tmp_path), read_config(str(tmp_path)))
    assert "\n" not in str(caught.value)


POSITIVE = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "head_dim",
]


@pytest.mark.parametrize(
    "key, values",
    [
        *[(key, ("5", 0, [], 1.5, True, 2**64)) for key in POSITIVE],
        ("rms_norm_eps", ("x", 0, float("nan"), float("inf"))),
        ("tie_word_embeddings", ("x", 1, [])),
        ("rope_scaling", (5, "x", [1], {"rope_type": "yarn", "factor": []})),
        ("layer_types", (5, "x", {"a": 1})),
    ],
)
def test_values_of_config_json_have_their_type(tmp_path, key, values):
    for value in values:
        write_config(tmp_path, rope_theta=1e4, **{key: value})
        with pytest.raises(ValueError, match=f"model.initial_hf: .*{key}"):
            read_config(str(tmp_path))
