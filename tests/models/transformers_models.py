"""Small random models of transformers, one of each family, and the decoder that trains them."""

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from titan_sparse.attention import linear
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.linear import split_documents
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.config import Attention
from titan_sparse.models.build import build_decoder
from titan_sparse.models.decoder import LayerMasks
from titan_sparse.models.huggingface import load_weights
from titan_sparse.models.transformers_config import TransformersConfig, read_transformers_config
from titan_sparse.training.attention import build_attends

VOCAB = 320
LENGTH = 80
WINDOW = 8

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Every model's, unless its settings say otherwise."""

TWO_KINDS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}

# Name -> its configuration's class, and what differs from SHAPE.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2, windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", TWO_KINDS),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 256, **TWO_KINDS}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "granite": ("GraniteConfig", MULTIPLIERS),
    "mixtral": ("MixtralConfig", EXPERTS),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        EXPERTS | {"num_hidden_layers": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
    "gpt_oss": ("GptOssConfig", EXPERTS | TWO_KINDS),
    "qwen3_next": ("Qwen3NextConfig", LINEAR | SHARED_EXPERT),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", LINEAR | SHARED_EXPERT),
}


def tiny_model(config_class: str, **settings: Any) -> nn.Module:
    """A model in fp32 with transformers' eager attention. Its weights follow from the settings."""
    config = getattr(transformers, config_class)(**SHAPE | settings, attn_implementation="eager")
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_model(folder: Path, name: str, **settings: Any) -> nn.Module:
    """The model of that name, written by save_pretrained(). Norms and biases are random too."""
    config_class, differences = MODELS[name]
    model = tiny_model(config_class, **differences | settings)
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(0.15 * torch.randn_like(parameter) + is_norm)
    model.save_pretrained(folder)
    return model


def read_model(folder: Path) -> nn.Module:
    """A folder in float32, read by transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def decoder_of(folder: Path) -> tuple[nn.Module, TransformersConfig]:
    """The decoder with the folder's weights in float32, dense attention in blocks of 16."""
    config = read_transformers_config(str(folder))
    section = Attention(pattern="dense", block_size=16)
    with torch.device("meta"):
        model = build_decoder(config, build_attends(section, None)).to(torch.float32)
    model = model.to_empty(device="cpu")
    load_weights(model, str(folder), config)
    return model, config


@functools.cache
def delta_rule_in_float64() -> Callable:
    """transformers' gated delta rule, which is in fp32 whatever it is given, in fp64."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    source = inspect.getsource(inspect.unwrap(theirs.torch_chunk_gated_delta_rule))
    source = source[source.index("def ") :].replace("torch.float32", "torch.float64")
    found = dict(vars(theirs))
    exec(source, found)
    return found["torch_chunk_gated_delta_rule"]


def widen_hybrid(monkeypatch: pytest.MonkeyPatch, *models: nn.Module) -> None:
    """Models with linear attention in fp64, but for what transformers has in fp32 by itself.

    In fp32, transformers' own gradients of dt_bias are 2.5e-5 from those in fp64.
    """
    rule = delta_rule_in_float64()
    monkeypatch.setattr(linear, "_torch_rule", lambda: rule)
    for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", rule)
    for model in models:
        for module in model.double().modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_experts_implementation"):
                # The others do not compute in fp64.
                config._experts_implementation = "eager"


def masks_of(config: TransformersConfig, lengths: list[list[int]] | None, batch: int) -> LayerMasks:
    """Of LENGTH tokens: packed documents, or with None one sequence each."""
    mask = Causal() if lengths is None else Documents(lengths)
    full = mask.rows(LENGTH)
    window = None
    if config.window:
        window = (mask & SlidingWindow(config.window)).rows(LENGTH)
    linear = None
    if config.linear_layers:
        lengths = lengths or [[LENGTH]] * batch
        linear = split_documents(
            lengths, LENGTH, config.convolution, one_rank(16), torch.device("cpu")
        )
    return LayerMasks(full, window, linear=linear)


def batch_of_tokens(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their positions, and labels: each [batch, LENGTH]."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (batch, LENGTH), generator=generator)
    labels = torch.randint(3, VOCAB, (batch, LENGTH), generator=generator)
    return tokens, torch.arange(LENGTH).expand(batch, -1), labels
