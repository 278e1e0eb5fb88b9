"""config.json of Hugging Face -> TransformersConfig, for models that run through transformers' own
code.

What cannot be trained is refused before transformers is imported. transformers itself reads the
rest, and shapes are those of the model that it builds.
"""

import functools
import json
import logging
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.models.config import DecoderConfig, RopeConfig
from titan_sparse.models.huggingface_config import read_json
from titan_sparse.models.huggingface_files import has_own_head


@dataclass(frozen=True)
class TransformersConfig(DecoderConfig):
    """Shape of a model of transformers, with the fields that this project counts or compares.

    intermediate_size: in a mixture of experts, the total of the experts of one token, their inputs
    included. qkv_bias, norm_eps: not used. rope: theta alone; transformers reads its own. windows:
    tokens that a query of each layer sees, 0 for all. parameters: the number of all parameters.
    linear_weights: elements of the layers' matrices that one token is multiplied by. linears: name,
    inputs, outputs and number of the layers' linear layers, without those of experts. experts: 0 for
    a dense model. router_loss: weight of the load-balancing loss. settings: the other entries of
    config.json except names and ids, sorted. linear_layers: those with linear attention in place of
    attention. convolution: tokens in the window of their convolution. linear_state: elements of one
    layer's recurrent state. linear_width: elements of a token's q, k, v and gate in such a layer.
    """

    folder: str
    """the folder with config.json, which transformers reads"""
    model_type: str
    windows: tuple[int, ...]
    sinks: bool
    parameters: int
    linear_weights: int
    linears: tuple[tuple[str, int, int, int], ...]
    experts: int
    experts_per_token: int
    router_loss: float
    settings: tuple[tuple[str, Any], ...]
    linear_layers: tuple[int, ...] = ()
    convolution: int = 0
    linear_state: int = 0
    linear_width: int = 0

    @property
    def window(self) -> int:
        """Tokens that a query of a layer with a window sees; 0 if no layer has one."""
        return max(self.windows)


class Family(NamedTuple):
    """A tested family. norm_starts_at: the weight with which its norms do not scale. mlp_size: the key
    that must be given."""

    architecture: str
    norm_starts_at: float = 1.0
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")
    mlp_size: str = "intermediate_size"


_HYBRID = ("full_attention", "linear_attention")

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
    "qwen3_next": Family("Qwen3NextForCausalLM", norm_starts_at=0.0, layer_types=_HYBRID),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", norm_starts_at=0.0, layer_types=_HYBRID),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        norm_starts_at=0.0,
        layer_types=_HYBRID,
        mlp_size="moe_intermediate_size",
    ),
}
"""By model_type of config.json."""

# Keys that must be positive integers. transformers would use those of a published model instead.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

_BUT_LINEAR = (
    "linear attention or state-space layers have a state that runs over the whole sequence"
)
_BUT_TEXT = (
    "only text models can be trained (of Qwen3.5, AutoModelForCausalLM.from_pretrained() reads the "
    "text part, and its save_pretrained() writes a folder of it)"
)
_BUT_TANH = "neither attention nor the fused loss caps logits by a tanh"
_BUT_NUMBERS = "activation checkpointing would draw other numbers"

# Keys that must be 0, false or null -> why.
_MUST_BE_OFF = {
    "attention_dropout": "attention has no dropout",
    "resid_pdrop": _BUT_NUMBERS,
    "embd_pdrop": _BUT_NUMBERS,
    "router_jitter_noise": _BUT_NUMBERS,
    "quantization_config": "only weights of floating point can be trained",
    "use_bidirectional_attention": "attention is causal",
    "per_layer_config": "layers of different shapes cannot be trained",
    "is_encoder_decoder": "an encoder-decoder cannot be trained",
    "vision_config": _BUT_TEXT,
    "audio_config": _BUT_TEXT,
    "kv_lora_rank": "latent attention (MLA) has other head sizes for keys than for values",
    "final_logit_softcapping": _BUT_TANH,
    "attn_logit_softcapping": _BUT_TANH,
    "logits_soft_cap": _BUT_TANH,
    "attention_chunk_size": "no mask here has the chunks of chunked attention",
    "linear_num_value_heads": _BUT_LINEAR,
    "linear_attn_config": _BUT_LINEAR,
    "full_attention_interval": _BUT_LINEAR,
    "mamba_d_state": _BUT_LINEAR,
    "mamba_state_dim": _BUT_LINEAR,
    "ssm_state_size": _BUT_LINEAR,
    "state_size": _BUT_LINEAR,
    "attn_layer_period": _BUT_LINEAR,
    "conv_L_cache": _BUT_LINEAR,
    "lru_width": _BUT_LINEAR,
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

_OF_HYBRIDS = ("linear_num_value_heads", "full_attention_interval")

AS_PUBLISHED = -1.0
"""model.router_loss: as config.json says."""


def read_transformers_config(
    folder: str, router_loss: float = AS_PUBLISHED, layers: int = 0
) -> TransformersConfig:
    """The model that `folder`/config.json describes.

    router_loss: model.router_loss. layers: the first ones only; 0 for all. Raises ValueError, one
    line, for an unreadable file, a family that is not in FAMILIES, or a setting that cannot be
    trained, and where transformers is missing.
    """
    path = Path(folder).expanduser() / "config.json"
    given = read_json(folder)
    _refuse(path, given)
    theirs = read_their_config(folder, layers)
    tied = theirs.tie_word_embeddings and not has_own_head(path.parent)
    config = _read(folder, json.dumps(given), layers, tied)
    if router_loss > 0 and not config.experts:
        raise ValueError(
            f"model.router_loss = {router_loss:g}, but a {config.model_type} has no router; "
            "leave it out"
        )
    return config if router_loss == AS_PUBLISHED else replace(config, router_loss=router_loss)


def _refuse(path: Path, values: dict[str, Any]) -> None:
    """Raises ValueError for a model that cannot be trained, or has not been tested."""
    model_type = values.get("model_type")
    is_hybrid = model_type in FAMILIES and FAMILIES[model_type].layer_types == _HYBRID
    for key, reason in _MUST_BE_OFF.items():
        if values.get(key) and not (is_hybrid and key in _OF_HYBRIDS):
            raise ValueError(
                f'model.initial_hf: {path}, model_type = "{model_type}", has {key} = '
                f"{json.dumps(values[key])}, but {reason}; write 0, false or null, or a folder of "
                f"another family ({', '.join(FAMILIES)})"
            )
    has = f"model.initial_hf: {path} has"
    if model_type not in FAMILIES:
        raise ValueError(
            f"{has} model_type = {json.dumps(model_type)}, a family that has not been tested; "
            f"write a folder of one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    names = values.get("architectures")
    if names not in (None, [family.architecture]):
        raise ValueError(
            f'{has} architectures = {names} beside model_type = "{model_type}"; '
            f"only {family.architecture} can be trained"
        )
    for key in (*_SIZES, family.mlp_size):
        value = values.get(key)
        if type(value) is not int or value <= 0:
            raise ValueError(f"{has} {key} = {value!r}, which is not a positive integer")
    unknown = set(values.get("layer_types") or ()) - set(family.layer_types)
    if unknown:
        raise ValueError(
            f"{has} layer_types with {sorted(unknown)}; "
            f"only {' and '.join(family.layer_types)} can be trained"
        )
    if is_hybrid and values.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"{has} hidden_act = {values['hidden_act']!r}; the convolution of linear attention is "
            "only computed with silu"
        )
    for rope_type in _rope_types(values):
        if rope_type not in family.rope_types:
            raise ValueError(
                f'{has} the rotary embedding "{rope_type}", whose angles depend on a batch\'s '
                "longest document or are not tested; "
                f"only {', '.join(family.rope_types)} can be trained"
            )


def _rope_types(values: dict[str, Any]) -> list[str]:
    types = []
    for key in ("rope_scaling", "rope_parameters"):
        table = values.get(key) or {}
        # Some models have one table for each kind of layer.
        tables = [inner for inner in table.values() if isinstance(inner, dict)] or [table]
        types += [inner.get("rope_type", inner.get("type", "default")) for inner in tables]
    return types


def _theta(values: dict[str, Any]) -> float:
    """The base of the rotary frequencies. It is only recorded."""
    table = values.get("rope_parameters") or values
    table = table.get("full_attention", table)
    return float(table.get("rope_theta") or 1e4)


def read_their_config(folder: str, layers: int = 0) -> Any:
    """transformers' own PreTrainedConfig of `folder`, cut to the first `layers` layers (0: all).

    Raises ValueError, one line, if transformers is missing or refuses the file.
    """
    try:
        # Imported only when needed: it is optional, and loads slowly.
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError(
            f"model.initial_hf = {folder} runs through transformers, which cannot be imported "
            f'({error}); pip install "transformers>=5.17"'
        ) from error
    path = str(Path(folder).expanduser())
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(_cannot_read(folder, error)) from error
    config.num_hidden_layers = layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def build_their_model(folder: str, layers: int, tied: bool, attention: str = "eager") -> Any:
    """transformers' own model of `folder`. Call it on the "meta" device, because it draws weights.

    tied: whether its head is its embedding. attention: its attn_implementation. Raises ValueError,
    one line, if transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    config = read_their_config(folder, layers)
    # transformers keeps a head whose weights differ, whatever the file says.
    config.tie_word_embeddings = tied
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except (AssertionError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(_cannot_read(folder, error)) from error
    finally:
        logger.setLevel(level)


def _cannot_read(folder: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    return f"model.initial_hf: transformers cannot build {folder}/config.json: {reason}"


@functools.cache
def _read(folder: str, text: str, layers: int, tied: bool) -> TransformersConfig:
    """text: the content of config.json, because it may change under the same name."""
    import torch

    with torch.device("meta"):
        model = build_their_model(folder, layers, tied)
    given = json.loads(text)
    config = model.config
    experts = 0
    # Of one token, in a mixture of experts.
    mlp_size = 0
    linear_weights = 0
    for name, parameter in model.model.layers.named_parameters():
        if parameter.ndim == 3 and not name.endswith("conv1d.weight"):
            experts, rows, columns = parameter.shape
            linear_weights += rows * columns * config.num_experts_per_tok
            if name.endswith("down_proj"):
                expert_size = rows * columns // config.hidden_size
                mlp_size = config.num_experts_per_tok * (expert_size + config.hidden_size)
        elif parameter.ndim >= 2 and not name.endswith("bias"):
            linear_weights += parameter.numel()
    linears = Counter(
        (name.rpartition(".")[2], module.in_features, module.out_features)
        for name, module in model.model.layers.named_modules()
        if isinstance(module, torch.nn.Linear) and not (experts and ".mlp." in name)
    )
    attention = next(x.self_attn for x in model.model.layers if hasattr(x, "self_attn"))
    has_router_loss = experts and config.output_router_logits
    return TransformersConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        intermediate_size=mlp_size or config.intermediate_size,
        qkv_bias=given["model_type"] == "qwen2",
        qk_norm=hasattr(attention, "q_norm"),
        tied_embeddings=tied,
        norm_eps=given.get("rms_norm_eps") or 1e-6,
        max_positions=config.max_position_embeddings,
        rope=RopeConfig(_theta(given), "none", 1.0, config.max_position_embeddings),
        folder=folder,
        model_type=given["model_type"],
        windows=_windows(config),
        sinks=hasattr(attention, "sinks"),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_weights=linear_weights,
        linears=tuple((*linear, count) for linear, count in linears.items()),
        experts=experts,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        router_loss=float(config.router_aux_loss_coef) if has_router_loss else 0.0,
        settings=_settings(given),
        **_linear_shape(config),
    )


def _windows(config: Any) -> tuple[int, ...]:
    """Tokens that a query of each layer sees, as transformers has read them; 0 for all."""
    # A file may have entries that the family does not read.
    known = {field.name: getattr(config, field.name) for field in fields(config)}
    window = known.get("sliding_window") or 0
    layer_types = known.get("layer_types") or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if name == "sliding_attention" else 0 for name in layer_types)


def _linear_shape(config: Any) -> dict[str, Any]:
    """The fields of TransformersConfig that linear attention adds."""
    if not hasattr(config, "linear_num_value_heads"):
        return {}
    kinds = enumerate(config.layer_types)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return {
        "linear_layers": tuple(layer for layer, kind in kinds if kind == "linear_attention"),
        "convolution": config.linear_conv_kernel_dim,
        "linear_state": values * config.linear_key_head_dim,
        "linear_width": 2 * (keys + values),
    }


def _settings(given: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The entries that affect what the model computes or its shape, sorted by key."""
    kept = []
    for key in sorted(given):
        is_name = key.startswith("_") or key.endswith(("token_id", "token_ids"))
        if key not in _NO_FUNCTION and not is_name and given[key] is not None:
            kept.append((key, given[key]))
    return tuple(kept)
