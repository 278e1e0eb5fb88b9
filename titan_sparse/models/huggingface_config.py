"""config.json of Hugging Face <-> DecoderConfig, for Qwen2.5, Llama-3.1 and Qwen3. Imports no torch."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.models.flavours import DecoderConfig, RopeConfig


class _Family(NamedTuple):
    """What transformers fixes in a model class's code; head_dim: where config.json gives none, 0: hidden / heads."""

    model_type: str
    qkv_bias: bool
    qk_norm: bool
    head_dim: int


_FAMILIES = {
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, qk_norm=False, head_dim=0),
    "LlamaForCausalLM": _Family("llama", qkv_bias=False, qk_norm=False, head_dim=0),
    "Qwen3ForCausalLM": _Family("qwen3", qkv_bias=False, qk_norm=True, head_dim=128),
}
_SIZES = {  # of DecoderConfig: of config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}
_ONLY = {  # other values would compute something that the decoder does not
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1,
}
_ROPE_KEYS = {
    "none": set(),
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    },
}
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(folder: str) -> DecoderConfig:
    """The shape that `folder`/config.json describes, as transformers 4 or 5 writes it.

    Raises ValueError, one line, for an unreadable file, another family, or a setting that the decoder does not have.
    """
    path, values = Path(folder).expanduser() / "config.json", _read_json(folder)
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ValueError(
            f"model.initial_hf: {path} has architectures = {names}; "
            f"only {', '.join(_FAMILIES)} can be read"
        )
    family = _FAMILIES[name]
    _refuse_settings(path, values)
    missing = [key for key in _SIZES.values() if values.get(key) is None]
    if missing:
        raise ValueError(f"model.initial_hf: {path} has no {missing[0]}")
    sizes = {ours: values[theirs] for ours, theirs in _SIZES.items()}
    heads = sizes["heads"]
    try:
        return DecoderConfig(
            **sizes,
            kv_heads=values.get("num_key_value_heads") or heads,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            head_dim=values.get("head_dim") or family.head_dim or sizes["hidden_size"] // heads,
            tied_embeddings=values.get("tie_word_embeddings", False),
            rope=_read_rope(values),
        )
    except ValueError as error:
        raise ValueError(f"model.initial_hf: {path}: {error}") from error


def config_json(config: DecoderConfig, dtype: str, source: str = "") -> dict[str, Any]:
    """config.json of a model whose weights are `dtype` ("bfloat16"), in words of transformers 4 that 5 reads too.

    source: a folder whose config.json lends the ids of special tokens; empty: none. Raises ValueError where no family
    has such a shape.
    """
    name, rope = architecture(config), config.rope
    values = {"architectures": [name], "model_type": _FAMILIES[name].model_type}
    values |= {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()}
    values |= {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
        "rope_theta": rope.theta,
        "rope_scaling": _rope_scaling(rope),
    }
    if rope.scaling != "none":
        # transformers 4 takes YaRN's factor from max_position_embeddings / original: the product must be right.
        extended = round(rope.factor * rope.original_length)
        values["max_position_embeddings"] = (
            extended if rope.scaling == "yarn" else max(extended, config.max_positions)
        )
    special = _read_json(source) if source else {}
    return values | {key: special[key] for key in _KEPT if key in special}


def architecture(config: DecoderConfig) -> str:
    """The class of transformers that computes what the decoder does. Raises ValueError if there is none."""
    for name, family in _FAMILIES.items():
        if (family.qkv_bias, family.qk_norm) == (config.qkv_bias, config.qk_norm):
            if name == "LlamaForCausalLM" and config.hidden_size % config.heads:
                raise ValueError(
                    f"transformers' {name} needs hidden_size = {config.hidden_size} to be a multiple of "
                    f"heads = {config.heads}; write another model.flavour, or checkpoint.last_save_in_hf = false"
                )
            return name
    raise ValueError(
        f"no family of Hugging Face has qkv_bias = {config.qkv_bias} and qk_norm = {config.qk_norm}; "
        "write another model.flavour, or checkpoint.last_save_in_hf = false"
    )


def _read_json(folder: str) -> dict[str, Any]:
    path = Path(folder).expanduser() / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.initial_hf = {json.dumps(folder)} needs a readable config.json: {error}"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"model.initial_hf: {path} is no JSON object")
    return values


def _refuse_settings(path: Path, values: dict[str, Any]) -> None:
    for key, only in _ONLY.items():
        if values.get(key, only) not in (only, None):
            raise ValueError(
                f"model.initial_hf: {path} has {key} = {values[key]}; only {only} can be trained"
            )
    others = set(values.get("layer_types") or ()) - {"full_attention"}
    if others:
        raise ValueError(
            f"model.initial_hf: {path} has layer_types with {sorted(others)}; "
            "only full_attention can be trained"
        )


def _read_rope(values: dict[str, Any]) -> RopeConfig:
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 both in one table rope_parameters."""
    table = values.get("rope_scaling") or values.get("rope_parameters") or {}
    table = {"rope_theta": values.get("rope_theta")} | table
    table = {key: value for key, value in table.items() if value is not None}
    kind = table.pop("rope_type", table.get("type", "default"))
    scaling = {"default": "none"}.get(kind, kind)
    if scaling not in _ROPE_KEYS:
        raise ValueError(
            f'rope_type = "{kind}" is unknown; only "default", "llama3" and "yarn" can be trained'
        )
    theta = table.pop("rope_theta", None)
    if theta is None:
        raise ValueError("rope_theta is missing")
    if table.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor other than 1 cannot be trained")
    unknown = set(table) - _ROPE_KEYS[scaling] - {"type"}
    if unknown:
        raise ValueError(f'rope scaling "{kind}" with {sorted(unknown)[0]} cannot be trained')
    length = table.get("original_max_position_embeddings", values["max_position_embeddings"])
    if scaling == "none":
        return RopeConfig(float(theta), "none", 1.0, length)
    if "factor" not in table:
        raise ValueError(f'rope scaling "{kind}" needs a factor')
    return _scaled(float(theta), scaling, float(table["factor"]), length, table)


def _scaled(
    theta: float, scaling: str, factor: float, length: int, table: dict[str, Any]
) -> RopeConfig:
    if scaling == "llama3":
        missing = [key for key in ("low_freq_factor", "high_freq_factor") if key not in table]
        if missing:
            raise ValueError(f'rope scaling "llama3" needs {missing[0]}')
        return RopeConfig(
            theta,
            "llama3",
            factor,
            length,
            low_frequency_factor=float(table["low_freq_factor"]),
            high_frequency_factor=float(table["high_freq_factor"]),
        )
    usual = 0.1 * math.log(factor) + 1 if factor >= 1 else math.nan
    if not math.isclose(table.get("attention_factor", usual), usual, rel_tol=1e-6):
        given = table.get("attention_factor")
        raise ValueError(
            f'rope scaling "yarn" with factor = {factor} and attention_factor = {given} cannot be trained, '
            f"only {usual:.6g}"
        )
    if not table.get("truncate", True):
        raise ValueError('rope scaling "yarn" with truncate = false cannot be trained')
    return RopeConfig(
        theta,
        "yarn",
        factor,
        length,
        beta_fast=float(table.get("beta_fast", 32)),
        beta_slow=float(table.get("beta_slow", 1)),
    )


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    table = {
        "rope_type": rope.scaling,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
    }
    if rope.scaling == "llama3":
        return table | {
            "low_freq_factor": rope.low_frequency_factor,
            "high_freq_factor": rope.high_frequency_factor,
        }
    return table | {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
