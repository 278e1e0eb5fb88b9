"""config.json of Hugging Face <-> DecoderConfig, for Qwen2.5, Llama-3.1 and Qwen3. Imports no
torch."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.models.config import DecoderConfig, RopeConfig, Scaling
from titan_sparse.models.huggingface_files import has_own_head


class _Family(NamedTuple):
    """What transformers fixes in the code of a model class and not in config.json."""

    model_type: str
    qkv_bias: bool
    qk_norm: bool
    head_dim: int
    """used if config.json gives none; 0: hidden_size / heads"""


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

_ORIGINAL = "original_max_position_embeddings"

# The types of keys of config.json and of its table of the rotary embedding. Numbers are positive.
_TYPES: dict[str, type] = {
    **dict.fromkeys((*_SIZES.values(), "num_key_value_heads", "head_dim", _ORIGINAL), int),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "factor", "attention_factor"), float),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), float),
    "tie_word_embeddings": bool,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "layer_types": list,
}

# Key of config.json -> its only accepted value. The decoder cannot compute others.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "use_sliding_window": False,
    "quantization_config": None,
    "partial_rotary_factor": 1,
    "per_layer_config": None,
    "transformers_weights": None,
}

# Those of them that transformers' own code computes.
_ELSEWHERE = ("hidden_act", "attention_bias", "mlp_bias", "use_sliding_window")
_INSTEAD = ' by our decoder; write model.implementation = "transformers"'

# Keys of the source that an export drops: those that it writes in the words of transformers 4,
# and the names of files with code.
_NOT_KEPT = ("rope_parameters", "dtype", "auto_map")


def read_config(folder: str) -> DecoderConfig:
    """The shape that `folder`/config.json describes, as transformers 4 or 5 writes it.

    Raises ValueError, one line, for an unreadable file, another family, or a setting that the
    decoder does not have.
    """
    return config_of(read_json(folder), Path(folder).expanduser() / "config.json")


def config_of(values: dict[str, Any], path: Path) -> DecoderConfig:
    """The shape that the content of a config.json describes. path: the file, for messages, beside
    the weights.

    Raises ValueError as read_config() does.
    """
    try:
        family = _check(values)
        heads = values["num_attention_heads"]
        return DecoderConfig(
            **{field: values[key] for field, key in _SIZES.items()},
            kv_heads=values.get("num_key_value_heads") or heads,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            head_dim=values.get("head_dim") or family.head_dim or values["hidden_size"] // heads,
            tied_embeddings=bool(values.get("tie_word_embeddings"))
            and not has_own_head(path.parent),
            rope=read_rope(values),
        )
    except ValueError as error:
        raise ValueError(f"model.initial_hf: {path}: {error}") from error


def _check(values: dict[str, Any]) -> _Family:
    """The family of a config.json that our decoder can compute. Raises ValueError otherwise."""
    names = values.get("architectures")
    name = _architecture_in(values)
    if name is None:
        raise ValueError(f"architectures = {names}; only {', '.join(_FAMILIES)} can be read")
    for key in _SIZES.values():
        if values.get(key) is None:
            raise ValueError(f"there is no {key}")
    _check_types({key: value for key, value in values.items() if value is not None})
    for key, accepted in _ONLY.items():
        if values.get(key, accepted) not in (accepted, None):
            raise ValueError(
                f"{key} = {values[key]}; "
                f"only {accepted} can be trained{_INSTEAD if key in _ELSEWHERE else ''}"
            )
    others = set(values.get("layer_types") or ()) - {"full_attention"}
    if others:
        raise ValueError(
            f"layer_types with {sorted(others)}; "
            f"only full_attention can be trained{_INSTEAD if others <= {'sliding_attention'} else ''}"
        )
    # transformers uses model_type, and ignores `architectures`.
    family = _FAMILIES[name]
    if values.get("model_type") != family.model_type:
        raise ValueError(
            f"model_type = {values.get('model_type')!r} beside architectures = {names}; "
            f'only "{family.model_type}" fits'
        )
    return family


def _check_types(values: dict[str, Any]) -> None:
    for key, value in values.items():
        kind = _TYPES.get(key)
        if kind is None:
            continue
        fits = type(value) is kind or (kind is float and type(value) is int)
        is_number = kind in (int, float)
        if not fits or (is_number and not 0 < value < 2**31):
            positive = "positive " if is_number else ""
            raise ValueError(f"{key} = {json.dumps(value)} is not a {positive}{kind.__name__}")


def _architecture_in(values: dict[str, Any]) -> str | None:
    """The class that config.json names, if our decoder has it."""
    names = values.get("architectures")
    return next((name for name in _FAMILIES if names in (name, [name])), None)


def is_native(folder: str) -> bool:
    """Whether our decoder has the family that `folder`/config.json names.

    It is enough that model_type or architectures names one. read_config() refuses a mismatch.
    """
    values = read_json(folder)
    types = [family.model_type for family in _FAMILIES.values()]
    return values.get("model_type") in types or _architecture_in(values) is not None


def config_json(config: DecoderConfig, dtype: str, source: str = "") -> dict[str, Any]:
    """The content of config.json for a model whose weights are `dtype` (such as "bfloat16").

    It uses the keys of transformers 4, which transformers 5 reads too. `source` is a folder whose
    config.json gives everything that the decoder does not decide, such as the ids of special
    tokens; empty: none. Raises ValueError if no family has such a shape.
    """
    name = architecture(config)
    values: dict[str, Any] = read_json(source) if source else {}
    for key in _NOT_KEPT:
        values.pop(key, None)
    values["architectures"] = [name]
    values["model_type"] = _FAMILIES[name].model_type
    for field, key in _SIZES.items():
        values[key] = getattr(config, field)
    values["num_key_value_heads"] = config.kv_heads
    values["head_dim"] = config.head_dim
    values["hidden_act"] = "silu"
    values["tie_word_embeddings"] = config.tied_embeddings
    values["torch_dtype"] = dtype
    rope = config.rope
    values["rope_theta"] = rope.theta
    values["rope_scaling"] = None
    if rope.scaling == "none":
        return values
    table = {"rope_type": rope.scaling, "factor": rope.factor, _ORIGINAL: rope.original_length}
    for field, key in _FREQUENCIES[rope.scaling].items():
        table[key] = getattr(rope, field)
    values["rope_scaling"] = table
    # The table has this key too, but in transformers the top level wins.
    if _ORIGINAL in values:
        values[_ORIGINAL] = rope.original_length
    # transformers 4 computes YaRN's factor as max_position_embeddings / original, so the product must
    # be right.
    extended = round(rope.factor * rope.original_length)
    longest = extended if rope.scaling == "yarn" else max(extended, config.max_positions)
    values["max_position_embeddings"] = longest
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


def read_json(folder: str) -> dict[str, Any]:
    """The content of `folder`/config.json. Raises ValueError, one line, if it is not a JSON
    object."""
    path = Path(folder).expanduser() / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"model.initial_hf = {json.dumps(folder)} needs a readable config.json: {reason}"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"model.initial_hf: {path} is not a JSON object")
    return values


_DEFAULT_THETA = 10_000.0
"""transformers' default if config.json has none."""

# rope_type of config.json -> RopeConfig.scaling.
_SCALINGS: dict[str, Scaling] = {"default": "none", "llama3": "llama3", "yarn": "yarn"}

# RopeConfig.scaling -> field of RopeConfig -> key of the table.
_FREQUENCIES: dict[Scaling, dict[str, str]] = {
    "none": {},
    "llama3": {
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
    },
    "yarn": {"beta_fast": "beta_fast", "beta_slow": "beta_slow"},
}

# RopeConfig.scaling -> the keys that the table must give for it, and those that it may give too.
_NEEDED = {
    "none": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
}
_OPTIONAL = {
    "none": {"rope_theta"},
    "llama3": {"rope_theta", _ORIGINAL},
    "yarn": {"rope_theta", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor"},
}


def read_rope(values: dict[str, Any]) -> RopeConfig:
    """The rotary embedding of a config.json whose top-level values have been checked for their
    types.

    transformers 4 writes rope_theta and rope_scaling. transformers 5 writes one table
    rope_parameters with both, and reads rope_scaling where a file has that too. Missing values have
    transformers' defaults. Raises ValueError, one line, that names the key.
    """
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    table = {
        "rope_type": given.get("type", "default"),
        "rope_theta": values.get("rope_theta", _DEFAULT_THETA),
        **given,
    }
    table.pop("type", None)
    rope_type = table.pop("rope_type")
    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        raise ValueError(
            f"rope_type = {json.dumps(rope_type)} is unknown; "
            'only "default", "llama3" and "yarn" can be trained'
        )
    scaling = _SCALINGS[rope_type]
    for key, accepted in (("partial_rotary_factor", 1), ("truncate", True)):
        value = table.pop(key, accepted)
        if value != accepted:
            raise ValueError(
                f'rope scaling "{rope_type}" with {key} = {json.dumps(value)} cannot be trained'
            )
    unknown = table.keys() - _OPTIONAL[scaling] - _NEEDED[scaling]
    if unknown:
        raise ValueError(f'rope scaling "{rope_type}" with {min(unknown)} cannot be trained')
    for key in sorted(_NEEDED[scaling] - table.keys()):
        raise ValueError(f'rope scaling "{rope_type}" needs {key}')
    original_length = values.get(_ORIGINAL) or values["max_position_embeddings"]
    if scaling != "none":
        # Unlike for rope_theta, the top level wins over the table here.
        original_length = values.get(_ORIGINAL, table.get(_ORIGINAL, original_length))
        table[_ORIGINAL] = original_length
    # As in transformers, null is no value for these, and neither is 0 for the betas.
    for key, unset in (("beta_fast", 0), ("beta_slow", 0), ("attention_factor", None)):
        if table.get(key) in (None, unset):
            table.pop(key, None)
    _check_types(table)
    frequencies = _FREQUENCIES[scaling].items()
    rope = RopeConfig(
        float(table["rope_theta"]),
        scaling,
        float(table.get("factor", 1)),
        original_length,
        **{field: float(table[key]) for field, key in frequencies if key in table},
    )
    if rope.low_frequency_factor >= rope.high_frequency_factor:
        raise ValueError(
            f'rope scaling "llama3" with low_freq_factor = {rope.low_frequency_factor} cannot be '
            f"trained; write one below high_freq_factor = {rope.high_frequency_factor}"
        )
    if scaling != "yarn":
        return rope
    if rope.factor < 1 or rope.theta <= 1:
        raise ValueError(
            f'rope scaling "yarn" with factor = {rope.factor} and rope_theta = {rope.theta} cannot '
            "be trained; write a factor of 1 or more, and a rope_theta above 1"
        )
    # The decoder multiplies cos and sin by this (models/decoder.py), and has no other factor.
    ours = 0.1 * math.log(rope.factor) + 1
    attention_factor = table.get("attention_factor", ours)
    if not math.isclose(attention_factor, ours, rel_tol=1e-6):
        raise ValueError(
            f'rope scaling "yarn" with factor = {rope.factor} and attention_factor = '
            f"{attention_factor} cannot be trained, only {ours:.6g}"
        )
    return rope
