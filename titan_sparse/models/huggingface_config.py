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

# Keys of config.json that are numbers, if they are given, and those that need not be integers.
_FLOATS = ("rms_norm_eps", "rope_theta")
_NUMBERS = (*_SIZES.values(), "num_key_value_heads", "head_dim", "rope_theta", _ORIGINAL)

# Other keys whose type is checked.
_TYPES = {
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
    for key in _NUMBERS:
        if values.get(key) is not None:
            _check_number(key, values[key], is_integer=key not in _FLOATS)
    for key, kind in _TYPES.items():
        value = values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{key} = {json.dumps(value)} is not a {kind.__name__}")
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


def _check_number(key: str, value: Any, is_integer: bool) -> None:
    is_number = type(value) is int or (type(value) is float and not is_integer)
    if not (is_number and 0 < value < 2**31):
        kind = "integer" if is_integer else "number"
        raise ValueError(f"{key} = {json.dumps(value)} is not a positive {kind}")


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
    values["rope_scaling"] = table
    # The table has this key too, but in transformers the top level wins.
    if _ORIGINAL in values:
        values[_ORIGINAL] = rope.original_length
    extended = round(rope.factor * rope.original_length)
    if rope.scaling == "yarn":
        table["beta_fast"] = rope.beta_fast
        table["beta_slow"] = rope.beta_slow
        # transformers 4 computes YaRN's factor as max_position_embeddings / original, so the
        # product must be right.
        values["max_position_embeddings"] = extended
    else:
        table["low_freq_factor"] = rope.low_frequency_factor
        table["high_freq_factor"] = rope.high_frequency_factor
        values["max_position_embeddings"] = max(extended, config.max_positions)
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

# Keys that transformers ignores if they are null; the betas also if they are 0.
_BETAS = ("beta_fast", "beta_slow")
_NULLABLE = (*_BETAS, "attention_factor")

# RopeConfig.scaling -> the keys that config.json must give for it, and those that it may give too.
_NEEDED = {
    "none": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL = {
    "none": {"rope_theta"},
    "llama3": {"rope_theta", _ORIGINAL},
    "yarn": {"rope_theta", _ORIGINAL, *_NULLABLE},
}


def read_rope(values: dict[str, Any]) -> RopeConfig:
    """The rotary embedding of a config.json whose top-level values have been checked for their
    types.

    transformers 4 writes rope_theta and rope_scaling. transformers 5 writes one table
    rope_parameters with both. Missing values have transformers' defaults. Raises ValueError, one
    line, that names the key.
    """
    table = _table(values)
    rope_type = table.pop("rope_type")
    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        raise ValueError(
            f"rope_type = {json.dumps(rope_type)} is unknown; "
            'only "default", "llama3" and "yarn" can be trained'
        )
    scaling = _SCALINGS[rope_type]
    # truncate is an option of YaRN.
    only = {"partial_rotary_factor": 1} | ({"truncate": True} if scaling == "yarn" else {})
    for key, accepted in only.items():
        value = table.pop(key, accepted)
        if value != accepted:
            raise ValueError(
                f'rope scaling "{rope_type}" with {key} = {json.dumps(value)} cannot be trained'
            )
    unknown = set(table) - _OPTIONAL[scaling] - set(_NEEDED[scaling])
    if unknown:
        raise ValueError(f'rope scaling "{rope_type}" with {min(unknown)} cannot be trained')
    for key in _NEEDED[scaling]:
        if key not in table:
            raise ValueError(f'rope scaling "{rope_type}" needs {key}')
    original_length = values.get(_ORIGINAL) or values["max_position_embeddings"]
    if scaling != "none":
        table.setdefault(_ORIGINAL, original_length)
        # Unlike for rope_theta, the top level wins over the table here.
        original_length = table[_ORIGINAL] = values.get(_ORIGINAL, table[_ORIGINAL])
    for key, value in table.items():
        is_unset = (value is None and key in _NULLABLE) or (value == 0 and key in _BETAS)
        if not is_unset:
            _check_number(key, value, is_integer=key == _ORIGINAL)
    rope = RopeConfig(
        float(table["rope_theta"]),
        scaling,
        float(table.get("factor", 1)),
        original_length,
        low_frequency_factor=float(table.get("low_freq_factor", 1)),
        high_frequency_factor=float(table.get("high_freq_factor", 4)),
        # transformers also uses these values for null and 0.
        beta_fast=float(table.get("beta_fast") or 32),
        beta_slow=float(table.get("beta_slow") or 1),
    )
    if rope.low_frequency_factor >= rope.high_frequency_factor:
        raise ValueError(
            f'rope scaling "llama3" with low_freq_factor = {rope.low_frequency_factor} cannot be '
            f"trained; write one below high_freq_factor = {rope.high_frequency_factor}"
        )
    if scaling == "yarn":
        _check_yarn(rope, table.get("attention_factor"))
    return rope


def _check_yarn(rope: RopeConfig, attention_factor: float | None) -> None:
    """attention_factor: as the table says, which may leave it out."""
    if rope.factor < 1:
        raise ValueError(
            f'rope scaling "yarn" with factor = {rope.factor} cannot be trained; write 1 or more'
        )
    if rope.theta <= 1:
        raise ValueError(f'rope scaling "yarn" needs a rope_theta above 1, not {rope.theta}')
    # The decoder multiplies cos and sin by this (models/decoder.py), and has no other factor.
    ours = 0.1 * math.log(rope.factor) + 1
    if attention_factor is not None and not math.isclose(attention_factor, ours, rel_tol=1e-6):
        raise ValueError(
            f'rope scaling "yarn" with factor = {rope.factor} and attention_factor = '
            f"{attention_factor} cannot be trained, only {ours:.6g}"
        )


def _table(values: dict[str, Any]) -> dict[str, Any]:
    """The table that transformers reads, with rope_type and rope_theta filled in."""
    defaults = {"rope_theta": values.get("rope_theta", _DEFAULT_THETA)}
    tables = []
    for key in ("rope_scaling", "rope_parameters"):
        given = values.get(key)
        if given:
            table = {"rope_type": given.get("type", "default")} | defaults | given
            table.pop("type", None)
            tables.append(table)
    if not tables:
        return {"rope_type": "default"} | defaults
    if len(tables) == 2 and tables[0] != tables[1]:
        first, second = tables
        keys = [key for key in first | second if first.get(key) != second.get(key)]
        raise ValueError(
            f"rope_scaling and rope_parameters disagree on {min(keys, default='a null')}; "
            "transformers reads rope_scaling only: remove one of them"
        )
    return tables[0]
