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
from typing import Any

from titan_sparse.models.config import DecoderConfig, Linear, RopeConfig
from titan_sparse.models.huggingface_config import FAMILIES, check_json, read_json
from titan_sparse.options.values import one_line


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(DecoderConfig):
    """Shape of a model of transformers, with the fields that this project counts or compares.

    intermediate_size: in a mixture of experts, the total of the experts of one token, their inputs
    included. qkv_bias, norm_eps: not used. rope: theta alone; transformers reads its own.
    parameters: the number of all parameters. linear_weights: elements of the layers' matrices that
    one token is multiplied by. linears: name, inputs, outputs and number of the layers' linear
    layers, without those of experts. settings: the other entries of config.json except names and
    ids, sorted.
    """

    folder: str
    """the folder with config.json, which transformers reads"""
    model_type: str
    windows: tuple[int, ...]
    sinks: bool
    has_one_theta: bool
    """whether all layers with rotary embedding have the same base"""
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

    runs_in_transformers = True

    def linear_sizes(self) -> dict[str, Linear]:
        return {name: Linear(*sizes) for name, *sizes in self.linears}

    def weights_per_token(self) -> int:
        return self.linear_weights

    def number_of_parameters(self) -> int:
        return self.parameters


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
    folder: str,
    router_loss: float = AS_PUBLISHED,
    layers: int = 0,
    vocab_size: int = 0,
    rope_theta: float = 0.0,
) -> TransformersConfig:
    """The model that `folder`/config.json describes.

    router_loss: model.router_loss. layers: the first ones only; 0 for all. vocab_size and
    rope_theta: in place of those of the file; 0 for these. Raises ValueError, one line, for an
    unreadable file, a family that is not in FAMILIES, or a setting that cannot be trained.
    """
    path = Path(folder).expanduser() / "config.json"
    given = read_json(folder)
    try:
        check_json(given, FAMILIES)
    except ValueError as error:
        raise ValueError(f"model.initial_hf: {path}: {error}") from error
    config = _read(folder, json.dumps(given), layers, vocab_size, rope_theta)
    if router_loss > 0 and not config.experts:
        raise ValueError(
            f"model.router_loss = {router_loss:g}, but a {config.model_type} has no router; "
            "leave it out"
        )
    return config if router_loss == AS_PUBLISHED else replace(config, router_loss=router_loss)


def build_their_model(
    folder: str,
    layers: int,
    attention: str = "eager",
    vocab_size: int = 0,
    rope_theta: float = 0.0,
) -> Any:
    """transformers' own model of `folder`, cut to the first `layers` layers (0: all). Call it on
    the "meta" device, because it draws weights.

    attention: its attn_implementation. vocab_size and rope_theta: as in read_transformers_config().
    Raises ValueError, one line, if transformers cannot build it.
    """
    # Imported only when needed, because it loads slowly.
    from transformers import AutoConfig, AutoModelForCausalLM

    path = str(Path(folder).expanduser())
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config.num_hidden_layers = layers or config.num_hidden_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        config.vocab_size = vocab_size or config.vocab_size
        if rope_theta:
            config.rope_parameters["rope_theta"] = rope_theta
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except Exception as error:
        raise ValueError(
            f"model.initial_hf: transformers cannot build {folder}/config.json: {one_line(error)}"
        ) from error
    finally:
        logger.setLevel(level)


@functools.cache
def _read(
    folder: str, text: str, layers: int, vocab_size: int, rope_theta: float
) -> TransformersConfig:
    """text: the content of config.json, because it may change under the same name."""
    import torch

    with torch.device("meta"):
        model = build_their_model(folder, layers, vocab_size=vocab_size, rope_theta=rope_theta)
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
    # A file may have entries that the family does not read.
    known = {field.name: getattr(config, field.name) for field in fields(config)}
    window = known.get("sliding_window") or 0
    layer_types = known.get("layer_types") or ["sliding_attention"] * config.num_hidden_layers
    attention = next((x.self_attn for x in model.model.layers if hasattr(x, "self_attn")), None)
    if attention is None:
        raise ValueError(
            f"model.initial_hf: the first {config.num_hidden_layers} layers of {folder} have linear "
            "attention alone; write more model.layers"
        )
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
        tied_embeddings=config.tie_word_embeddings,
        norm_eps=given.get("rms_norm_eps") or 1e-6,
        max_positions=config.max_position_embeddings,
        rope=RopeConfig(_theta(config), "none", 1.0, config.max_position_embeddings),
        folder=folder,
        model_type=given["model_type"],
        windows=tuple(window * (x == "sliding_attention") for x in layer_types),
        sinks=hasattr(attention, "sinks"),
        has_one_theta=_has_one_theta(config),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_weights=linear_weights,
        linears=tuple((*linear, count) for linear, count in linears.items()),
        experts=experts,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        router_loss=float(config.router_aux_loss_coef) if has_router_loss else 0.0,
        settings=tuple(
            (key, value)
            for key, value in sorted(given.items())
            if value is not None
            and key not in _NO_FUNCTION
            and not key.startswith("_")
            and not key.endswith(("token_id", "token_ids"))
        ),
        **_linear_attention(config, layer_types),
    )


def _theta(config: Any) -> float:
    """The base of the rotary frequencies of layers that see everything. config: of transformers."""
    table = config.rope_parameters
    return float(table.get("full_attention", table)["rope_theta"])


def _has_one_theta(config: Any) -> bool:
    """config: of transformers."""
    has_tables = any(isinstance(table, dict) for table in config.rope_parameters.values())
    # A layer with 0 has no rotary embedding.
    return not has_tables and any(getattr(config, "no_rope_layers", None) or [1])


def _linear_attention(config: Any, layer_types: list[str]) -> dict[str, Any]:
    """The fields of a hybrid model; empty for others. config: of transformers."""
    if not hasattr(config, "linear_num_value_heads"):
        return {}
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return {
        "linear_layers": tuple(i for i, x in enumerate(layer_types) if x == "linear_attention"),
        "convolution": config.linear_conv_kernel_dim,
        "linear_state": values * config.linear_key_head_dim,
        "linear_width": 2 * (keys + values),
    }
