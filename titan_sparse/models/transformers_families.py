"""The families that train through transformers' own modelling code, and those that cannot.

Imports no torch.
"""

from typing import Any, Literal, NamedTuple

Windows = Literal["none", "every layer", "by layer"]
QKNorm = Literal["none", "head", "row"]


class Experts(NamedTuple):
    """A mixture of experts: the key of config.json with an expert's size, and what the code
    adds."""

    size: str
    bias: bool = False
    """of the router and of both matmuls of an expert"""


class Family(NamedTuple):
    """What transformers fixes in the code of a family, or uses if config.json gives no value."""

    architecture: str
    defaults: dict[str, Any] = {}
    """key of config.json -> its value if the file lacks it, unless that is None"""
    windows: Windows = "none"
    """"by layer": as layer_types says"""
    full_every: int = 0
    """without layer_types, layers full_every, 2 full_every, ... see everything, others a window"""
    qkv_bias: bool = False
    """biases of q, k and v whatever attention_bias says"""
    qk_norm: QKNorm = "none"
    """"head": of each head, "row": of all heads together"""
    norms: int = 2
    """of a layer's hidden states"""
    norm_starts_at: float = 1.0
    """initial weight of a norm"""
    sinks: bool = False
    experts: Experts | None = None
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    notes: str = ""
    """for docs/huggingface.md"""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", notes="transformers: also with biases"),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"sliding_window": 4096, "max_window_layers": 28},
        windows="by layer",
        qkv_bias=True,
        notes="transformers: also with windows",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        windows="by layer",
        qk_norm="head",
        notes="transformers: also with windows",
    ),
    "mistral": Family(
        "MistralForCausalLM", {"sliding_window": 4096}, windows="every layer", notes="windows"
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"tie_word_embeddings": True},
        windows="by layer",
        notes="layers without rotary embedding",
    ),
    "olmo2": Family("Olmo2ForCausalLM", qk_norm="row", notes="norms after attention and MLP"),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"sliding_window": 4096},
        windows="by layer",
        full_every=4,
        qk_norm="row",
        notes="windows in three of four layers",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {"head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True},
        windows="by layer",
        full_every=6,
        qk_norm="head",
        norms=4,
        norm_starts_at=0.0,
        notes="text only; windows in five of six layers, head_dim 256",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        windows="every layer",
        rope_types=("default", "linear", "llama3"),
        notes="not with longrope",
    ),
    "granite": Family("GraniteForCausalLM", notes="multipliers and logits_scaling"),
    "mixtral": Family(
        "MixtralForCausalLM",
        windows="every layer",
        experts=Experts("intermediate_size"),
        notes="mixture of experts",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"sliding_window": 4096},
        windows="every layer",
        qk_norm="head",
        experts=Experts("moe_intermediate_size"),
        notes="mixture of experts",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"head_dim": 64, "sliding_window": 128, "attention_bias": True},
        windows="by layer",
        full_every=2,
        sinks=True,
        experts=Experts("intermediate_size", bias=True),
        notes="mixture of experts, learned sinks, windows in every second layer; not mxfp4",
    ),
}
"""By model_type of config.json."""

_MLA = "its latent attention (MLA) has other head sizes for keys than for values"
_LINEAR = "it has linear attention or state-space layers, whose state runs over the whole sequence"
_VISION = "it has a vision or audio tower; only text models can be trained"
_SOFTCAP = "it caps logits by a tanh, which neither attention nor the fused loss does"
_CHUNKED = "its attention is chunked, and no mask here has its chunks"
_TWO_STACKS = "it is an encoder-decoder; only decoders can be trained"

# A key of config.json that is set to anything but null, false or 0 -> why such a model is refused.
_REFUSED_KEYS = {
    "is_encoder_decoder": _TWO_STACKS,
    "vision_config": _VISION,
    "audio_config": _VISION,
    "kv_lora_rank": _MLA,
    "final_logit_softcapping": _SOFTCAP,
    "attn_logit_softcapping": _SOFTCAP,
    "logits_soft_cap": _SOFTCAP,
    "attention_chunk_size": _CHUNKED,
    "linear_num_value_heads": _LINEAR,
    "linear_attn_config": _LINEAR,
    "full_attention_interval": _LINEAR,
    "mamba_d_state": _LINEAR,
    "mamba_state_dim": _LINEAR,
    "ssm_state_size": _LINEAR,
    "state_size": _LINEAR,
    "attn_layer_period": _LINEAR,
    "conv_L_cache": _LINEAR,
    "lru_width": _LINEAR,
}

# Parts of entries of layer_types -> why.
_REFUSED_LAYERS = {
    "linear": _LINEAR,
    "mamba": _LINEAR,
    "conv": _LINEAR,
    "recurrent": _LINEAR,
    "chunked": _CHUNKED,
}

# How a model_type begins -> why. Such models have no key that shows it, or only in newer files.
_REFUSED_TYPES = {
    "deepseek_v": _MLA,
    "kimi_k": _MLA,
    "minicpm3": _MLA,
    "qwen3_next": _LINEAR,
    "qwen3_5": _LINEAR,
    "kimi_linear": _LINEAR,
    "minimax": _LINEAR,
    "mamba": _LINEAR,
    "falcon_mamba": _LINEAR,
    "falcon_h1": _LINEAR,
    "jamba": _LINEAR,
    "bamba": _LINEAR,
    "zamba": _LINEAR,
    "nemotron_h": _LINEAR,
    "granitemoehybrid": _LINEAR,
    "lfm2": _LINEAR,
    "rwkv": _LINEAR,
    "recurrent_gemma": _LINEAR,
    "gemma2": _SOFTCAP,
    "llama4": _CHUNKED,
    "t5": _TWO_STACKS,
    "bart": _TWO_STACKS,
}


def refusal(values: dict[str, Any]) -> str | None:
    """Why no implementation can train what config.json describes, or None.

    values: of the file. A family that is only unknown is not refused here.
    """
    for key, reason in _REFUSED_KEYS.items():
        if values.get(key):
            return reason
    layer_types = values.get("layer_types")
    if isinstance(layer_types, list):
        for part, reason in _REFUSED_LAYERS.items():
            if any(part in str(layer_type) for layer_type in layer_types):
                return reason
    model_type = str(values.get("model_type"))
    for beginning, reason in _REFUSED_TYPES.items():
        if model_type.startswith(beginning):
            return reason
    return None
