"""config.json of Hugging Face <-> DecoderConfig, for Qwen2.5, Llama-3.1 and Qwen3. Imports no
torch."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.models.config import DecoderConfig, RopeConfig


class _Family(NamedTuple):
    """What transformers fixes in the code of a model class, rather than in config.json."""

    model_type: str
    qkv_bias: bool
    qk_norm: bool
    head_dim: int
    """used where config.json gives none; 0: hidden_size / heads"""


_FAMILIES = {
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, qk_norm=False, head_dim=0),
    "LlamaForCausalLM": _Family("llama", qkv_bias=False, qk_norm=False, head_dim=0),
    "Qwen3ForCausalLM": _Family("qwen3", qkv_bias=False, qk_norm=True, head_dim=128),
}

# Field of DecoderConfig -> key of config.json.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}

# Key of config.json -> its only accepted value: others compute something that the decoder does not.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1,
}

# RopeConfig.scaling -> the keys that config.json may give for it.
_ROPE_KEYS = {
    "none": set(),
    "llama3": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    },
}

# Keys of config.json that need not be integers.
_FLOATS = ("rms_norm_eps", "rope_theta")

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(folder: str) -> DecoderConfig:
    """The shape that `folder`/config.json describes, as transformers 4 or 5 writes it.

    Raises ValueError, one line, for an unreadable file, another family, or a setting that the
    decoder does not have.
    """
    path = Path(folder).expanduser() / "config.json"
    values = _read_json(folder)
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ValueError(
            f"model.initial_hf: {path} has architectures = {names}; "
            f"only {', '.join(_FAMILIES)} can be read"
        )
    family = _FAMILIES[name]
    missing = [key for key in _SIZES.values() if values.get(key) is None]
    if missing:
        raise ValueError(f"model.initial_hf: {path} has no {missing[0]}")
    _check_values(path, values)
    _refuse_settings(path, values)

    sizes = {field: values[key] for field, key in _SIZES.items()}
    heads = sizes["heads"]
    try:
        return DecoderConfig(
            **sizes,
            kv_heads=values.get("num_key_value_heads") or heads,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            head_dim=values.get("head_dim") or family.head_dim or sizes["hidden_size"] // heads,
            tied_embeddings=values.get("tie_word_embeddings") or False,
            rope=_read_rope(values),
        )
    # TypeError: a table of rotary settings that holds other things than numbers.
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.initial_hf: {path}: {error}") from error


def config_json(config: DecoderConfig, dtype: str, source: str = "") -> dict[str, Any]:
    """The content of config.json for a model whose weights are `dtype` (such as "bfloat16").

    It is written in the words of transformers 4, which transformers 5 reads too. `source` is a
    folder whose config.json lends the ids of special tokens; empty: none are written. Raises
    ValueError where no family has such a shape.
    """
    name = architecture(config)
    values: dict[str, Any] = {
        "architectures": [name],
        "model_type": _FAMILIES[name].model_type,
    }
    for field, key in _SIZES.items():
        values[key] = getattr(config, field)
    values["num_key_value_heads"] = config.kv_heads
    values["head_dim"] = config.head_dim
    values["hidden_act"] = "silu"
    values["tie_word_embeddings"] = config.tied_embeddings
    values["torch_dtype"] = dtype
    values["rope_theta"] = config.rope.theta
    values["rope_scaling"] = _rope_scaling(config.rope)

    # transformers 4 takes YaRN's factor from max_position_embeddings / original: the product has
    # to be right.
    extended = round(config.rope.factor * config.rope.original_length)
    if config.rope.scaling == "yarn":
        values["max_position_embeddings"] = extended
    elif config.rope.scaling == "llama3":
        values["max_position_embeddings"] = max(extended, config.max_positions)

    if source:
        source_values = _read_json(source)
        for key in _SPECIAL_TOKENS:
            if key in source_values:
                values[key] = source_values[key]
    return values


def architecture(config: DecoderConfig) -> str:
    """The class of transformers that computes what the decoder does; ValueError if there is
    none."""
    for name, family in _FAMILIES.items():
        if (family.qkv_bias, family.qk_norm) != (config.qkv_bias, config.qk_norm):
            continue
        if name == "LlamaForCausalLM" and config.hidden_size % config.heads:
            raise ValueError(
                f"transformers' {name} needs hidden_size = {config.hidden_size} to be a multiple "
                f"of heads = {config.heads}; write another model.flavour, or "
                "checkpoint.last_save_in_hf = false"
            )
        return name
    raise ValueError(
        f"no family of Hugging Face has qkv_bias = {config.qkv_bias} and qk_norm = "
        f"{config.qk_norm}; write another model.flavour, or checkpoint.last_save_in_hf = false"
    )


def _read_json(folder: str) -> dict[str, Any]:
    path = Path(folder).expanduser() / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"model.initial_hf = {json.dumps(folder)} needs a readable config.json: {reason}"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"model.initial_hf: {path} is no JSON object")
    return values


def _check_values(path: Path, values: dict[str, Any]) -> None:
    """Refuses sizes that are no positive integers, and other values of the wrong type."""
    for key in (*_SIZES.values(), "num_key_value_heads", "head_dim", "rope_theta"):
        value = values.get(key)
        is_number = type(value) is int or (type(value) is float and key in _FLOATS)
        if value is not None and not (is_number and 0 < value < 2**31):
            kind = "a positive number" if key in _FLOATS else "a positive integer"
            raise ValueError(f"model.initial_hf: {path} has {key} = {value!r}, which is not {kind}")
    for key, kind in (
        ("tie_word_embeddings", bool),
        ("rope_scaling", dict),
        ("rope_parameters", dict),
        ("layer_types", list),
    ):
        value = values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(
                f"model.initial_hf: {path} has {key} = {value!r}, which is no {kind.__name__}"
            )


def _refuse_settings(path: Path, values: dict[str, Any]) -> None:
    for key, accepted in _ONLY.items():
        if values.get(key, accepted) not in (accepted, None):
            raise ValueError(
                f"model.initial_hf: {path} has {key} = {values[key]}; "
                f"only {accepted} can be trained"
            )
    layer_types = set(values.get("layer_types") or ())
    others = layer_types - {"full_attention"}
    if others:
        raise ValueError(
            f"model.initial_hf: {path} has layer_types with {sorted(others)}; "
            "only full_attention can be trained"
        )


def _read_rope(values: dict[str, Any]) -> RopeConfig:
    """The rotary embedding of config.json.

    transformers 4 writes rope_theta and rope_scaling, transformers 5 one table rope_parameters
    with both.
    """
    table = {"rope_theta": values.get("rope_theta")}
    table |= values.get("rope_scaling") or values.get("rope_parameters") or {}
    table = {key: value for key, value in table.items() if value is not None}

    rope_type = table.pop("rope_type", table.get("type", "default"))
    scaling = "none" if rope_type == "default" else rope_type
    if scaling not in _ROPE_KEYS:
        raise ValueError(
            f'rope_type = "{rope_type}" is unknown; '
            'only "default", "llama3" and "yarn" can be trained'
        )
    theta = table.pop("rope_theta", None)
    if theta is None:
        raise ValueError("rope_theta is missing")
    if table.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor other than 1 cannot be trained")
    unknown = set(table) - _ROPE_KEYS[scaling] - {"type"}
    if unknown:
        raise ValueError(f'rope scaling "{rope_type}" with {min(unknown)} cannot be trained')

    original_length = table.get(
        "original_max_position_embeddings", values["max_position_embeddings"]
    )
    if scaling == "none":
        return RopeConfig(float(theta), "none", 1.0, original_length)
    if "factor" not in table:
        raise ValueError(f'rope scaling "{rope_type}" needs a factor')
    factor = float(table["factor"])
    if scaling == "llama3":
        return _read_llama3(float(theta), factor, original_length, table)
    return _read_yarn(float(theta), factor, original_length, table)


def _read_llama3(
    theta: float, factor: float, original_length: int, table: dict[str, Any]
) -> RopeConfig:
    for key in ("low_freq_factor", "high_freq_factor"):
        if key not in table:
            raise ValueError(f'rope scaling "llama3" needs {key}')
    return RopeConfig(
        theta,
        "llama3",
        factor,
        original_length,
        low_frequency_factor=float(table["low_freq_factor"]),
        high_frequency_factor=float(table["high_freq_factor"]),
    )


def _read_yarn(
    theta: float, factor: float, original_length: int, table: dict[str, Any]
) -> RopeConfig:
    # The decoder multiplies cos and sin by this (models/rope.py), and by nothing else.
    attention_factor = 0.1 * math.log(factor) + 1 if factor >= 1 else math.nan
    given = table.get("attention_factor")
    said = table.get("attention_factor", attention_factor)
    if not math.isclose(said, attention_factor, rel_tol=1e-6):
        raise ValueError(
            f'rope scaling "yarn" with factor = {factor} and attention_factor = {given} cannot be '
            f"trained, only {attention_factor:.6g}"
        )
    if not table.get("truncate", True):
        raise ValueError('rope scaling "yarn" with truncate = false cannot be trained')
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_length,
        beta_fast=float(table.get("beta_fast", 32)),
        beta_slow=float(table.get("beta_slow", 1)),
    )


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The table rope_scaling of config.json."""
    if rope.scaling == "none":
        return None
    table = {
        "rope_type": rope.scaling,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
    }
    if rope.scaling == "llama3":
        table["low_freq_factor"] = rope.low_frequency_factor
        table["high_freq_factor"] = rope.high_frequency_factor
    else:
        table["beta_fast"] = rope.beta_fast
        table["beta_slow"] = rope.beta_slow
    return table
