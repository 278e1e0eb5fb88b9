"""config.json of Hugging Face -> TransformersConfig, for models that run through transformers' own
code. Imports no torch, and not transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.models.config import DecoderConfig, RopeConfig
from titan_sparse.models.huggingface_config import read_json
from titan_sparse.models.huggingface_files import has_own_head
from titan_sparse.models.transformers_families import FAMILIES, Experts, Family, refusal


@dataclass(frozen=True)
class TransformersConfig(DecoderConfig):
    """Shape of a model of transformers, with the fields that this project counts or compares.

    intermediate_size: in a mixture of experts, the total of the experts of one token, their inputs
    included. qkv_bias, norm_eps: not used. rope: theta alone; transformers reads its own. windows:
    tokens that a query of each layer sees, 0 for all. parameters: the number of all parameters.
    linear_weights: elements of the layers' matrices that one token is multiplied by. experts: 0 for
    a dense model. router_loss: weight of the load-balancing loss. settings: the other entries of
    config.json except names and ids, sorted.
    """

    folder: str
    """the folder with config.json, which transformers reads"""
    model_type: str
    windows: tuple[int, ...]
    sinks: bool
    parameters: int
    linear_weights: int
    experts: int
    experts_per_token: int
    router_loss: float
    settings: tuple[tuple[str, Any], ...]

    @property
    def window(self) -> int:
        """Tokens that a query of a layer with a window sees; 0 if no layer has one."""
        return max(self.windows)


# Keys that must be positive integers.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)

# Keys that must be 0, false or null. Dropout would differ between forward and recomputation.
_MUST_BE_OFF = {
    "attention_dropout": "attention has no dropout",
    "resid_pdrop": "activation checkpointing would draw other numbers",
    "embd_pdrop": "activation checkpointing would draw other numbers",
    "router_jitter_noise": "activation checkpointing would draw other numbers",
    "quantization_config": "only weights of floating point can be trained",
    "use_bidirectional_attention": "attention is causal",
    "per_layer_config": "layers of different shapes cannot be trained",
}

# Keys that do not change what is computed.
_NO_FUNCTION = (
    "architectures",
    "auto_map",
    "dtype",
    "initializer_range",
    "max_position_embeddings",
    "output_router_logits",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)

AS_PUBLISHED = -1.0
"""model.router_loss: as config.json says."""


def read_transformers_config(
    folder: str, router_loss: float = AS_PUBLISHED, layers: int = 0
) -> TransformersConfig:
    """The model that `folder`/config.json describes.

    router_loss: model.router_loss. layers: the first ones only; 0 for all. Raises ValueError, one
    line, for an unreadable file, a family that is not in FAMILIES, or a setting that cannot be
    trained.
    """
    path = Path(folder).expanduser() / "config.json"
    given = read_json(folder)
    family = _family(path, given)
    values = _with_defaults(given, family)
    _check_sizes(path, values, family)
    _refuse_settings(path, values, family)
    if layers:
        values["num_hidden_layers"] = layers
        if "layer_types" in values:
            values["layer_types"] = values["layer_types"][:layers]
    try:
        tied = bool(values.get("tie_word_embeddings")) and not has_own_head(path.parent)
        rope = RopeConfig(_theta(values), "none", 1.0, values["max_position_embeddings"])
        counts = parameters_of_layers(values, family)
        tables = values["vocab_size"] * values["hidden_size"] * (1 if tied else 2)
        final_norm = values["hidden_size"]
        per_token = values["num_experts_per_tok"] if family.experts else 0
        return TransformersConfig(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            layers=values["num_hidden_layers"],
            heads=values["num_attention_heads"],
            kv_heads=kv_heads_of(values),
            head_dim=head_dim_of(values),
            intermediate_size=_width_of_mlp(values, family),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm != "none",
            tied_embeddings=tied,
            norm_eps=values.get("rms_norm_eps", 1e-6),
            max_positions=values["max_position_embeddings"],
            rope=rope,
            folder=folder,
            model_type=values["model_type"],
            windows=_windows(path, values, family),
            sinks=family.sinks,
            parameters=counts.matrices + counts.vectors + final_norm + tables,
            linear_weights=counts.of_token,
            experts=values["num_local_experts"] if family.experts else 0,
            experts_per_token=per_token,
            router_loss=_router_loss(values, family, router_loss),
            settings=_settings(given),
        )
    except ValueError as error:
        message = str(error)
        if message.startswith("model."):
            raise
        raise ValueError(f"model.initial_hf: {path}: {message}") from error


def _family(path: Path, values: dict[str, Any]) -> Family:
    """Raises ValueError for a model that cannot be trained, or has not been tested."""
    model_type = values.get("model_type")
    reason = refusal(values)
    if reason is not None:
        raise ValueError(
            f'model.initial_hf: {path} has model_type = "{model_type}", which cannot be trained: '
            f"{reason}; write a folder of another family ({', '.join(FAMILIES)})"
        )
    if model_type not in FAMILIES:
        raise ValueError(
            f"model.initial_hf: {path} has model_type = {json.dumps(model_type)}, a family that has "
            f"not been tested; write a folder of one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    names = values.get("architectures")
    if names not in (None, [family.architecture]):
        raise ValueError(
            f'model.initial_hf: {path} has architectures = {names} beside model_type = "{model_type}"; '
            f"only {family.architecture} can be trained"
        )
    return family


def _with_defaults(given: dict[str, Any], family: Family) -> dict[str, Any]:
    """The values that are read here, with transformers' defaults."""
    defaults = dict(family.defaults)
    if "sliding_window" in given:
        # Null is a valid choice here: no window.
        defaults.pop("sliding_window", None)
    values = defaults | {key: value for key, value in given.items() if value is not None}
    # The name of this key in files of transformers 4.
    if "num_experts" in values:
        values.setdefault("num_local_experts", values["num_experts"])
    return values


def _check_sizes(path: Path, values: dict[str, Any], family: Family) -> None:
    needed = list(_SIZES)
    if family.experts:
        needed += ["num_local_experts", family.experts.size, "num_experts_per_tok"]
    for key in needed:
        if key not in values:
            raise ValueError(f"model.initial_hf: {path} has no {key}")
    optional = ("num_key_value_heads", "head_dim", "sliding_window")
    for key in [*needed, *(key for key in optional if key in values)]:
        value = values[key]
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(
                f"model.initial_hf: {path} has {key} = {value!r}, which is not a positive integer"
            )


def _refuse_settings(path: Path, values: dict[str, Any], family: Family) -> None:
    for key, reason in _MUST_BE_OFF.items():
        if values.get(key):
            raise ValueError(
                f"model.initial_hf: {path} has {key} = {json.dumps(values[key])}, but {reason}; "
                "only 0, false or null can be trained"
            )
    for rope_type in _rope_types(values):
        if rope_type not in family.rope_types:
            raise ValueError(
                f'model.initial_hf: {path} has the rotary embedding "{rope_type}", whose angles '
                "depend on a batch's longest document or are not tested; "
                f"only {', '.join(family.rope_types)} can be trained"
            )


def _rope_types(values: dict[str, Any]) -> list[str]:
    types = []
    for key in ("rope_scaling", "rope_parameters"):
        table = values.get(key)
        if not isinstance(table, dict):
            continue
        tables = [inner for inner in table.values() if isinstance(inner, dict)] or [table]
        types += [inner.get("rope_type", inner.get("type", "default")) for inner in tables]
    return types


def _theta(values: dict[str, Any]) -> float:
    """The base of the rotary frequencies. It is only recorded."""
    table = values.get("rope_parameters")
    if isinstance(table, dict):
        table = table.get("full_attention", table)
        return float(table.get("rope_theta", 1e4))
    return float(values.get("rope_theta", 1e4))


def _width_of_mlp(values: dict[str, Any], family: Family) -> int:
    """Elements of a token that one intermediate tensor of an MLP holds."""
    if family.experts is None:
        return values["intermediate_size"]
    of_expert = values[family.experts.size] + values["hidden_size"]
    return values["num_experts_per_tok"] * of_expert


def _windows(path: Path, values: dict[str, Any], family: Family) -> tuple[int, ...]:
    """Tokens that a query of each layer sees; 0 for all."""
    layers = values["num_hidden_layers"]
    window = values.get("sliding_window", 0)
    # If a family has this switch, it is off by default.
    if family.architecture in _SWITCHED and not values.get("use_sliding_window"):
        window = 0
    if family.windows == "none" or not window:
        return (0,) * layers
    if family.windows == "every layer":
        return (window,) * layers
    layer_types = values.get("layer_types") or _default_layer_types(values, family)
    if len(layer_types) != layers:
        raise ValueError(
            f"model.initial_hf: {path} has {len(layer_types)} layer_types for {layers} layers"
        )
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"model.initial_hf: {path} has layer_types with {sorted(unknown)}; "
            "only full_attention and sliding_attention can be trained"
        )
    return tuple(window if name == "sliding_attention" else 0 for name in layer_types)


_SWITCHED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM")


def _default_layer_types(values: dict[str, Any], family: Family) -> list[str]:
    layers = range(values["num_hidden_layers"])
    if family.full_every:
        every = values.get("sliding_window_pattern", family.full_every)
        is_full = [(layer + 1) % every == 0 for layer in layers]
    elif "no_rope_layer_interval" in values or family.architecture == "SmolLM3ForCausalLM":
        every = values.get("no_rope_layer_interval", 4)
        rotated = values.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        is_full = [bool(rope) for rope in rotated]
    else:
        is_full = [layer < values["max_window_layers"] for layer in layers]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def _router_loss(values: dict[str, Any], family: Family, wanted: float) -> float:
    if family.experts is None:
        if wanted > 0:
            raise ValueError(
                f"model.router_loss = {wanted:g}, but a {values['model_type']} has no router; "
                "leave it out"
            )
        return 0.0
    if wanted != AS_PUBLISHED:
        return wanted
    if values.get("output_router_logits"):
        return float(values.get("router_aux_loss_coef", 0.001))
    return 0.0


def _settings(given: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The entries that affect what the model computes or its shape, sorted by key."""
    kept = []
    for key in sorted(given):
        is_name = key.startswith("_") or key.endswith(("token_id", "token_ids"))
        if key not in _NO_FUNCTION and not is_name and given[key] is not None:
            kept.append((key, given[key]))
    return tuple(kept)


class Counts(NamedTuple):
    """Numbers of elements. of_token: those of `matrices` that one token is multiplied by."""

    matrices: int
    of_token: int
    vectors: int


def parameters_of_layers(values: dict[str, Any], family: Family) -> Counts:
    """All layers together.

    values: of config.json, with the family's defaults, after read_transformers_config() has checked
    them.
    """
    layers = values["num_hidden_layers"]
    dense_layers = len(dense_layers_of(values, family))
    attention = _attention(values, family)
    dense = _dense_mlp(values)
    routed = _experts(values, family.experts) if family.experts else Counts(0, 0, 0)
    norms = family.norms * values["hidden_size"]
    counts = []
    for of_attention, of_dense, of_routed in zip(attention, dense, routed, strict=True):
        mlps = dense_layers * of_dense + (layers - dense_layers) * of_routed
        counts.append(layers * of_attention + mlps)
    matrices, of_token, vectors = counts
    return Counts(matrices, of_token, vectors + layers * norms)


def dense_layers_of(values: dict[str, Any], family: Family) -> list[int]:
    """The layers whose MLP is not a mixture of experts."""
    layers = values["num_hidden_layers"]
    if family.experts is None:
        return list(range(layers))
    every = values.get("decoder_sparse_step", 1)
    without = values.get("mlp_only_layers") or []
    return [layer for layer in range(layers) if layer in without or (layer + 1) % every]


def head_dim_of(values: dict[str, Any]) -> int:
    """The value of config.json, or hidden_size / heads."""
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def kv_heads_of(values: dict[str, Any]) -> int:
    """The value of config.json, or the number of query heads."""
    return values.get("num_key_value_heads") or values["num_attention_heads"]


def _attention(values: dict[str, Any], family: Family) -> Counts:
    hidden_size = values["hidden_size"]
    head_dim = head_dim_of(values)
    query_size = values["num_attention_heads"] * head_dim
    kv_size = kv_heads_of(values) * head_dim
    matrices = 2 * hidden_size * (query_size + kv_size)
    vectors = 0
    if family.qkv_bias or values.get("attention_bias"):
        vectors += query_size + 2 * kv_size
    if values.get("attention_bias") and not family.qkv_bias:
        vectors += hidden_size
    if family.qk_norm == "head":
        vectors += 2 * head_dim
    if family.qk_norm == "row":
        vectors += query_size + kv_size
    if family.sinks:
        vectors += values["num_attention_heads"]
    return Counts(matrices, matrices, vectors)


def _dense_mlp(values: dict[str, Any]) -> Counts:
    hidden_size = values["hidden_size"]
    size = values["intermediate_size"]
    matrices = 3 * hidden_size * size
    vectors = 2 * size + hidden_size if values.get("mlp_bias") else 0
    return Counts(matrices, matrices, vectors)


def _experts(values: dict[str, Any], experts: Experts) -> Counts:
    hidden_size = values["hidden_size"]
    count = values["num_local_experts"]
    size = values[experts.size]
    of_expert = 3 * hidden_size * size
    router = count * hidden_size
    vectors = 0
    if experts.bias:
        vectors = count * (2 * size + hidden_size + 1)
    return Counts(
        matrices=count * of_expert + router,
        of_token=values["num_experts_per_tok"] * of_expert + router,
        vectors=vectors,
    )
