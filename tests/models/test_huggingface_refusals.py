"""Folders of Hugging Face and [model] sections that cannot be trained are refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.models.helpers import (
    LLAMA3,
    ORIGINAL,
    PLAIN,
    QWEN2,
    YARN,
    change_tensors,
    save_reference,
)
from tests.runs import TINY, tiny_config
from titan_sparse.config import Config, ConfigError, check
from titan_sparse.models import flavours
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import check_weights
from titan_sparse.models.huggingface_config import config_json, config_of, read_config
from titan_sparse.training.trainer import Trainer

PATH = Path("folder/config.json")
GOOD = {
    "architectures": [QWEN2],
    "model_type": "qwen2",
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
INTEGERS = [key for key, value in GOOD.items() if type(value) is int]


def rope(table: dict) -> dict:
    return {"rope_parameters": table}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"architectures": ["MistralForCausalLM"]}, "only ['Qwen2ForCausalLM'] can be trained by"),
        ({"model_type": "mistral"}, "model_type = mistral has not been tested"),
        ({"hidden_size": None}, "there is no hidden_size"),
        ({"rms_norm_eps": None}, "there is no rms_norm_eps"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"; only silu'),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor = 0"),
        ({"use_sliding_window": True}, "use_sliding_window = true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"transformers_weights": "b.safetensors"}, "transformers_weights"),
        ({"num_key_value_heads": 4}, "heads = 6 must be a multiple of kv_heads = 4"),
        *[({key: "5"}, f'{key} = "5"') for key in INTEGERS],
        *[({"head_dim": value}, "head_dim") for value in (0, [], 1.5, True, 2**64)],
        *[({"rms_norm_eps": value}, "rms_norm_eps") for value in ("x", 0, math.nan, math.inf)],
        *[({"tie_word_embeddings": value}, "tie_word_embeddings") for value in ("x", 1, [])],
        *[({"layer_types": value}, "layer_types") for value in (5, "x", {"a": 1})],
        *[({"rope_scaling": value}, "rope_scaling") for value in (5, "x", [1])],
        ({"rope_scaling": {"rope_type": "yarn", "factor": []}}, "factor = []"),
        ({ORIGINAL: "64", "rope_parameters": YARN}, f'{ORIGINAL} = "64"'),
        ({ORIGINAL: None, "rope_parameters": YARN}, f"{ORIGINAL} = null"),
        (rope(PLAIN | {"rope_theta": 0}), "rope_theta = 0"),
        (rope(PLAIN | {"rope_theta": 2**31}), "rope_theta = 2147483648"),
        (rope(PLAIN | {"rope_type": "linear"}), "rope_type with linear; only default"),
        (rope(PLAIN | {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (rope(PLAIN | {"factor": 2.0}), 'rope scaling "default" with factor'),
        (rope({"full_attention": YARN}), 'scaling "default" with full_attention'),
        (rope(LLAMA3 | {"low_freq_factor": 6.0}), "only low_freq_factor < high_freq_factor"),
        (rope({"rope_type": "yarn", "rope_theta": 1e4}), 'rope scaling "yarn" without factor'),
        (rope(YARN | {"mscale": 0.7}), 'rope scaling "yarn" with mscale'),
        (rope(YARN | {"rope_type": ["yarn"]}), "rope_type with ['yarn']"),
        (rope(YARN | {ORIGINAL: 64.5}), f"{ORIGINAL} = 64.5"),
        (rope(YARN | {"factor": 0.99}), "only factor >= 1 and rope_theta > 1"),
        (rope(YARN | {"factor": 10**400}), "is not a positive float"),
        (rope(YARN | {"beta_fast": -1}), "beta_fast = -1"),
        (rope(YARN | {"rope_theta": 1.0}), "only factor >= 1 and rope_theta > 1"),
        (rope(YARN | {"rope_theta": None}), "rope_theta = null"),
        (rope(YARN | {"truncate": False}), "with truncate"),
        # Not the same number any more, even in fp32.
        (
            rope(YARN | {"attention_factor": (0.1 * math.log(4) + 1) * (1 + 1.5e-6)}),
            "only attention_factor = 1.13863",
        ),
    ],
    ids=str,
)
def test_config_json_that_cannot_be_trained(changes, named):
    assert config_of(GOOD, PATH).kv_heads == 2
    with pytest.raises(ValueError) as caught:
        config_of(GOOD | changes, PATH)
    message = str(caught.value)
    assert named in message and message.startswith(f"model.initial_hf: {PATH}")
    assert "\n" not in message


@pytest.mark.parametrize(
    "table, section, named",
    [
        (PLAIN, {"vocab_size": 330}, "330 would cut the 331 rows of"),
        (PLAIN, {"flavour": "qwen2.5-0.5b"}, '"qwen2.5-0.5b": vocab_size = 151936 does not agree'),
        (PLAIN, {"initial_hf": "nowhere"}, '"nowhere" needs a readable config.json'),
        (YARN, {"rope_scaling": "yarn", "rope_factor": 8.0}, "model.rope_scaling and what goes wi"),
        (None, {"vocab_size": -1}, "model.vocab_size"),
        (None, {"layers": -2}, "model.layers"),
        (None, {"rope_scaling": "ntk"}, "model.rope_scaling"),
        (None, {"rope_scaling": "none", "rope_factor": 4.0}, "model.rope_factor"),
        (None, {"rope_scaling": "yarn", "rope_factor": 0.0}, "model.rope_factor"),
        (None, {"rope_original_length": 4096}, "model.rope_original_length"),
        (
            None,
            {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": -1},
            "model.rope_original_length",
        ),
        (None, {"rope_theta": -1.0}, "model.rope_theta"),
    ],
)
def test_model_section_that_does_not_agree_or_would_be_ignored(tmp_path, table, section, named):
    """table: that of a folder that the section names, None for a flavour."""
    config = Config()
    config.model.flavour = "qwen2.5-3b"
    if table:
        save_reference(tmp_path, rope_parameters=dict(table))
        config.model.flavour = "debug"
        config.model.initial_hf = str(tmp_path)
    for key, value in section.items():
        setattr(config.model, key, value)
    with pytest.raises(ConfigError) as caught:
        check(config, 1, 1)
    assert named in str(caught.value)


def test_model_section_that_agrees(tmp_path):
    save_reference(tmp_path, rope_parameters=dict(YARN))
    plain = resolve("debug", initial_hf=str(tmp_path))
    as_said = resolve("debug", 331, "yarn", 4.0, 64, 1000.0, str(tmp_path))
    assert plain == as_said == read_config(str(tmp_path))


def test_shapes_that_do_not_exist():
    for change, named in (({"kv_heads": 3}, "multiple of kv_heads"), ({"head_dim": 7}, "even")):
        with pytest.raises(ValueError, match=named):
            replace(TINY, **change)
    odd = replace(TINY, qkv_bias=False, qk_norm=False, hidden_size=64, heads=6)
    for config, named in (
        (odd, "hidden_size = 64, which is not a multiple of heads = 6"),
        (TINY, "no family of Hugging Face has qkv_bias = True and qk_norm = True"),
    ):
        with pytest.raises(ValueError, match=named):
            config_json(config, "float32")


# Weights

Q = "model.layers.1.self_attn.q_proj.weight"
EXTRA = "model.layers.2.x"


@pytest.mark.parametrize(
    "name, tensor, expected",
    [
        (Q, None, f"has no tensor {Q}"),
        (EXTRA, torch.zeros(1), f"has an unexpected tensor {EXTRA}"),
        (Q, torch.zeros(96, 63), f"{Q} in .* is \\[96, 63\\], but its config.json says \\[96, 6"),
        (Q, torch.zeros(96, 64, dtype=torch.int8), f"{Q} in .* is I8; only F64, F32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(texts, monkeypatch, name, tensor, expected):
    monkeypatch.setattr(flavours, "FLAVOURS", dict(flavours.FLAVOURS))  # tiny_config() adds to it
    folder = texts / "in"
    save_reference(folder)

    def change(tensors: dict) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    change_tensors(folder, change)
    settings = {"model__flavour": "debug", "model__initial_hf": str(folder)}
    with pytest.raises(ValueError, match=expected) as caught:
        Trainer(tiny_config(texts, "run", **settings))
    assert "\n" not in str(caught.value) and not dist.is_initialized()


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
        (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="model.initial_hf: .*" + message) as caught:
        check_weights(str(tmp_path), read_config(str(tmp_path)))
    assert "\n" not in str(caught.value)
