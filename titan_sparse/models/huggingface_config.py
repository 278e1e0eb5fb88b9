"""config.json of Hugging Face <-> DecoderConfig, for Qwen2.5, Llama-3.1 and Qwen3. Imports no
torch."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.huggingface_files import has_own_head
from titan_sparse.models.huggingface_rope import read_rope, write_rope


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
    "per_layer_config": None,
    "transformers_weights": None,
}

# Of these, what transformers' own code computes.
_ELSEWHERE = ("hidden_act", "attention_bias", "mlp_bias", "use_sliding_window")
_INSTEAD = ' by our decoder; write model.implementation = "transformers"'

# Keys of config.json that need not be integers.
_FLOATS = ("rms_norm_eps", "rope_theta")

# What an export does not take from its source: what it writes in the words of transformers 4, and
# the names of files with code.
_NOT_KEPT = ("rope_parameters", "dtype", "auto_map")


def read_config(folder: str) -> DecoderConfig:
    """The shape that `folder`/config.json describes, as transformers 4 or 5 writes it.

    Raises ValueError, one line, for an unreadable file, another family, or a setting that the
    decoder does not have.
    """
    path = Path(folder).expanduser() / "config.json"
    values = read_json(folder)
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
    # transformers goes by model_type, and leaves `architectures` alone.
    if values.get("model_type") != family.model_type:
        raise ValueError(
            f"model.initial_hf: {path} has model_type = {values.get('model_type')!r} beside "
            f'architectures = {names}; only "{family.model_type}" fits'
        )

    sizes = {field: values[key] for field, key in _SIZES.items()}
    heads = sizes["heads"]
    try:
        return DecoderConfig(
            **sizes,
            kv_heads=values.get("num_key_value_heads") or heads,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            head_dim=values.get("head_dim") or family.head_dim or sizes["hidden_size"] // heads,
            tied_embeddings=bool(values.get("tie_word_embeddings"))
            and not has_own_head(path.parent),
            rope=read_rope(values),
        )
    except ValueError as error:
        raise ValueError(f"model.initial_hf: {path}: {error}") from error


def native_types() -> list[str]:
    """The model_type of each family that our decoder has."""
    return [family.model_type for family in _FAMILIES.values()]


def is_native(folder: str) -> bool:
    """Whether our decoder has the family that `folder`/config.json names.

    Also where neither has it to be told so: no family of transformers, or names that do not fit.
    """
    values = read_json(folder)
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    return values.get("model_type") in native_types() or name in list(_FAMILIES)


def config_json(config: DecoderConfig, dtype: str, source: str = "") -> dict[str, Any]:
    """The content of config.json for a model whose weights are `dtype` (such as "bfloat16").

    It is written in the words of transformers 4, which transformers 5 reads too. `source` is a
    folder whose config.json lends all that the decoder does not decide, such as the ids of special
    tokens; empty: none. Raises ValueError where no family has such a shape.
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
    values["rope_theta"] = config.rope.theta
    values["rope_scaling"] = write_rope(config.rope)
    # The table has it too, but transformers lets the top level win.
    if config.rope.scaling != "none" and "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = config.rope.original_length

    # transformers 4 takes YaRN's factor from max_position_embeddings / original: the product has
    # to be right.
    extended = round(config.rope.factor * config.rope.original_length)
    if config.rope.scaling == "yarn":
        values["max_position_embeddings"] = extended
    elif config.rope.scaling == "llama3":
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
    """The content of `folder`/config.json. Raises ValueError, one line, for what is no JSON object."""
    path = Path(folder).expanduser() / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
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
    others = ("num_key_value_heads", "head_dim", "rope_theta", "original_max_position_embeddings")
    for key in (*_SIZES.values(), *others):
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
                f"only {accepted} can be trained{_INSTEAD if key in _ELSEWHERE else ''}"
            )
    layer_types = set(values.get("layer_types") or ())
    others = layer_types - {"full_attention"}
    if others:
        raise ValueError(
            f"model.initial_hf: {path} has layer_types with {sorted(others)}; "
            f"only full_attention can be trained{_INSTEAD if others <= {'sliding_attention'} else ''}"
        )
