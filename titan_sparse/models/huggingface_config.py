"""config.json of Hugging Face: which families and settings can be trained, and config.json <->
DecoderConfig for Qwen2.5, Llama-3.1 and Qwen3. Imports no torch."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.models.config import DecoderConfig, RopeConfig


class Family(NamedTuple):
    """A tested family. norm_starts_at: the weight with which its norms do not scale. needed: keys
    that must be given beside sizes. only: keys of config.json with their only accepted value."""

    architecture: str
    norm_starts_at: float = 1.0
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")
    needed: tuple[str, ...] = ("intermediate_size",)
    only: tuple[tuple[str, Any], ...] = ()


# The convolution of linear attention knows no other activation.
_HYBRID: dict[str, Any] = {
    "norm_starts_at": 0.0,
    "layer_types": ("full_attention", "linear_attention"),
    "only": (("hidden_act", "silu"),),
}

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmo3": Family("Olmo3ForCausalLM"),
    "gemma3_text": Family("Gemma3ForCausalLM", norm_starts_at=0.0),
    "phi3": Family("Phi3ForCausalLM", rope_types=("default", "linear", "llama3")),
    "granite": Family("GraniteForCausalLM"),
    "mixtral": Family("MixtralForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM"),
    "gpt_oss": Family("GptOssForCausalLM"),
    "qwen3_next": Family("Qwen3NextForCausalLM", **_HYBRID),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", **_HYBRID),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", needed=("moe_intermediate_size",), **_HYBRID
    ),
}
"""By model_type of config.json."""

_BY_OURS: dict[str, Any] = {
    "rope_types": ("default", "llama3", "yarn"),
    "layer_types": ("full_attention",),
    "needed": ("intermediate_size", "rms_norm_eps"),
    "only": (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("partial_rotary_factor", 1),
        ("transformers_weights", False),
    ),
}
NATIVE = {name: FAMILIES[name]._replace(**_BY_OURS) for name in ("qwen2", "llama", "qwen3")}
"""Those of our own decoder, with what it computes of them."""

# Keys that must be 0, false or null: there is no dropout, because activation checkpointing would
# draw other numbers, and neither attention nor the fused loss caps logits by a tanh.
_OFF = (
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "router_jitter_noise",
    "quantization_config",
    "use_bidirectional_attention",
    "per_layer_config",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)

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

# Keys that must be given.
_GIVEN = [key for key in _SIZES.values() if key not in ("intermediate_size", "rms_norm_eps")]

_ORIGINAL = "original_max_position_embeddings"

# Keys of the table of the rotary embedding, by rope_type. Those of _FREQUENCIES are fields of
# RopeConfig too.
_ROPE_KEYS = {
    "default": {"rope_theta"},
    "llama3": {"rope_theta", _ORIGINAL, "factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"rope_theta", _ORIGINAL, "factor", "beta_fast", "beta_slow", "attention_factor"},
}
_ROPE_NEEDED = {"factor", "low_freq_factor", "high_freq_factor"}
_FREQUENCIES = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")

# The types of keys of config.json and of its table of the rotary embedding. Numbers are positive.
_TYPES: dict[str, type] = {
    **dict.fromkeys((*_SIZES.values(), "num_key_value_heads", "head_dim", _ORIGINAL), int),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "factor", "attention_factor"), float),
    **dict.fromkeys(_FREQUENCIES, float),
    "moe_intermediate_size": int,
    "tie_word_embeddings": bool,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "layer_types": list,
}

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
    """The shape that the content of a config.json describes. path: the file, for messages.

    Raises ValueError as read_config() does.
    """
    try:
        model_type = check_json(values, NATIVE)
        heads = values["num_attention_heads"]
        # transformers fixes these in the code of a model class.
        head_dim = 128 if model_type == "qwen3" else values["hidden_size"] // heads
        return DecoderConfig(
            **{field: values[key] for field, key in _SIZES.items()},
            kv_heads=values.get("num_key_value_heads") or heads,
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            head_dim=values.get("head_dim") or head_dim,
            tied_embeddings=bool(values.get("tie_word_embeddings")),
            rope=read_rope(values),
        )
    except ValueError as error:
        raise ValueError(f"model.initial_hf: {path}: {error}") from error


def check_json(values: dict[str, Any], families: dict[str, Family]) -> str:
    """The model_type of a config.json. families: NATIVE or FAMILIES.

    Raises ValueError for another family, and for what cannot be trained.
    """
    model_type = str(values.get("model_type"))
    if model_type not in families:
        text = (
            "AutoModelForCausalLM reads the text part of a model, and save_pretrained() writes it"
        )
        raise ValueError(
            f"model_type = {model_type} has not been tested; write a folder of one of "
            f"{', '.join(families)}{f' ({text})' * (f'{model_type}_text' in families)}"
        )
    family = families[model_type]
    other = _INSTEAD * (families is NATIVE)
    _check_types({key: value for key, value in values.items() if value is not None})
    # transformers would use the sizes of a published model instead.
    for key in (*_GIVEN, *family.needed):
        if values.get(key) is None:
            raise ValueError(f"there is no {key}")
    own = ("architectures", [family.architecture])
    for key, accepted in (own, *((key, False) for key in _OFF), *family.only):
        value = values.get(key)
        if value not in (None, accepted) and (value or accepted):
            raise ValueError(f"{key} = {json.dumps(value)}; only {accepted} can be trained{other}")
    for key, found, known in (
        ("layer_types", values.get("layer_types") or (), family.layer_types),
        ("rope_type", map(_rope_type, _rope_tables(values)), family.rope_types),
    ):
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise ValueError(
                f"{key} with {', '.join(unknown)}; only {' and '.join(known)} can be trained{other}"
            )
    return model_type


def _rope_tables(values: dict[str, Any]) -> list[dict[str, Any]]:
    tables = []
    for key in ("rope_scaling", "rope_parameters"):
        table = values.get(key) or {}
        # Some models have one table for each kind of layer.
        tables += [inner for inner in table.values() if isinstance(inner, dict)] or [table]
    return tables


def _rope_type(table: dict[str, Any]) -> str:
    return str(table.get("rope_type", table.get("type", "default")))


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


def is_native(folder: str) -> bool:
    """True if our decoder has the family that `folder`/config.json names."""
    return read_json(folder).get("model_type") in NATIVE


def config_json(config: DecoderConfig, dtype: str, source: str = "") -> dict[str, Any]:
    """The content of config.json for a model whose weights are `dtype` (such as "bfloat16").

    It uses the keys of transformers 4, which transformers 5 reads too. `source` is a folder whose
    config.json gives everything that the decoder does not decide, such as the ids of special
    tokens; empty: none. Raises ValueError if no family has such a shape.
    """
    model_type = family_of(config)
    rope = config.rope
    values: dict[str, Any] = read_json(source) if source else {}
    for key in _NOT_KEPT:
        values.pop(key, None)
    values |= {key: getattr(config, field) for field, key in _SIZES.items()}
    values |= {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
        "rope_theta": rope.theta,
        "rope_scaling": None,
    }
    # model.layers may be another number than that of the folder.
    if values.get("layer_types"):
        values["layer_types"] = ["full_attention"] * config.layers
    if rope.scaling == "none":
        return values
    table = {"rope_type": rope.scaling, "factor": rope.factor, _ORIGINAL: rope.original_length}
    table |= {key: getattr(rope, key) for key in _FREQUENCIES if key in _ROPE_KEYS[rope.scaling]}
    values["rope_scaling"] = table
    # The table has this key too, but in transformers the top level wins.
    if _ORIGINAL in values:
        values[_ORIGINAL] = rope.original_length
    # transformers 4 computes YaRN's factor as max_position_embeddings / original, so the
    # product must be right.
    extended = round(rope.factor * rope.original_length)
    longest = extended if rope.scaling == "yarn" else max(extended, config.max_positions)
    values["max_position_embeddings"] = longest
    return values


def set_theta(values: dict[str, Any], theta: float) -> None:
    """Write the base of the rotary frequencies to the content of a config.json, where it has it."""
    # transformers 5 has it in a table, and transformers 4 at the top level.
    places = [place for place in (values, *_rope_tables(values)) if "rope_theta" in place]
    for place in places or [values]:
        if place.get("rope_theta") != theta:
            place["rope_theta"] = theta


def set_positions(values: dict[str, Any], longest: int) -> None:
    """Raise max_position_embeddings of the content of a config.json to `longest`, tokens.

    YaRN keeps it, because transformers 4 computes YaRN's factor from it.
    """
    published = values["max_position_embeddings"]
    tables = _rope_tables(values)
    if longest <= published or "yarn" in map(_rope_type, tables):
        return
    for table in tables:
        # Without this key, transformers scales from max_position_embeddings.
        if _rope_type(table) == "llama3" and _ORIGINAL not in values:
            table.setdefault(_ORIGINAL, published)
    values["max_position_embeddings"] = longest


def family_of(config: DecoderConfig) -> str:
    """The model_type of transformers that computes what the decoder does; ValueError if there is
    none."""
    model_types = {(True, False): "qwen2", (False, False): "llama", (False, True): "qwen3"}
    model_type = model_types.get((config.qkv_bias, config.qk_norm))
    wrong = f"qkv_bias = {config.qkv_bias} and qk_norm = {config.qk_norm}"
    if model_type == "llama" and config.hidden_size % config.heads:
        model_type = None
        wrong = (
            f"hidden_size = {config.hidden_size}, which is not a multiple of heads = {config.heads}"
        )
    if model_type is None:
        raise ValueError(
            f"no family of Hugging Face has {wrong}; write another model.flavour, or "
            "checkpoint.last_save_in_hf = false"
        )
    return model_type


def read_json(folder: str) -> dict[str, Any]:
    """The content of `folder`/config.json. Raises ValueError, one line, if it is not a JSON object,
    or the folder is one of adapters."""
    path = Path(folder).expanduser() / "config.json"
    # Next to whole weights, transformers would add them to these.
    if path.with_name("adapter_config.json").is_file():
        raise ValueError(
            f"model.initial_hf = {json.dumps(folder)} holds adapters, which are not read; write a folder "
            "with the whole model, as titan-sparse export_hf --merge or PEFT's merge_and_unload() give it"
        )
    return read_object(path, f"model.initial_hf = {json.dumps(folder)}")


def read_object(path: Path, named: str) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError, one line with the words `named` in front, for
    anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{named} needs a readable {path.name}: {reason}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{named}: {path} is not a JSON object")
    return values


_READ_BY_OTHERS = ("partial_rotary_factor", "mscale", "mscale_all_dim", "truncate")
"""Keys of a rotary embedding that transformers' own code reads."""
_INSTEAD = ' by our decoder; write model.implementation = "transformers"'
"""What ends a refusal of a model that transformers' own code trains."""


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
        "rope_theta": values.get("rope_theta", 10_000.0),
        **given,
    }
    table.pop("type", None)
    rope_type = table.pop("rope_type")
    known = _ROPE_KEYS[rope_type]
    original_length = values.get(_ORIGINAL) or values["max_position_embeddings"]
    if _ORIGINAL in known:
        # Unlike for rope_theta, the top level wins over the table here.
        original_length = values.get(_ORIGINAL, table.get(_ORIGINAL, original_length))
        table[_ORIGINAL] = original_length
    # As in transformers, null is no value for these, and neither is 0 for the betas.
    for key, unset in (
        ("beta_fast", 0),
        ("beta_slow", 0),
        ("attention_factor", None),
        ("partial_rotary_factor", 1),
        ("truncate", True),
    ):
        if table.get(key) in (None, unset):
            table.pop(key, None)
    missing = (known & _ROPE_NEEDED) - table.keys()
    for problem, keys in (("with", table.keys() - known), ("without", missing)):
        if keys:
            other = _INSTEAD * (min(keys) in _READ_BY_OTHERS)
            raise ValueError(
                f'rope scaling "{rope_type}" {problem} {min(keys)} cannot be trained{other}'
            )
    _check_types(table)
    rope = RopeConfig(
        float(table["rope_theta"]),
        "none" if rope_type == "default" else rope_type,
        float(table.get("factor", 1)),
        original_length,
        **{key: float(table[key]) for key in _FREQUENCIES if key in table},
    )
    # The decoder multiplies YaRN's cos and sin by this (models/decoder.py), and
    # has no other factor.
    factor = 0.1 * math.log(rope.factor) + 1
    is_published = math.isclose(table.get("attention_factor", factor), factor, rel_tol=1e-6)
    rules = {
        "low_freq_factor < high_freq_factor": rope.low_freq_factor < rope.high_freq_factor,
        "factor >= 1 and rope_theta > 1": rope_type != "yarn"
        or (rope.factor >= 1 and rope.theta > 1),
        f"attention_factor = {factor:.6g}": is_published,
    }
    for rule, holds in rules.items():
        if not holds:
            other = _INSTEAD * rule.startswith("attention_factor")
            raise ValueError(
                f'rope scaling "{rope_type}" = {table} cannot be trained, only {rule}{other}'
            )
    return rope
