"""The shape of a decoder. Imports no torch, so that configurations can be checked without it."""

from dataclasses import dataclass
from typing import Literal

Scaling = Literal["none", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the fields of Hugging Face's `rope_scaling`. Lengths are in
    tokens.

    `original_length` is the length at which the model was trained before any scaling. It is not
    used with scaling "none", but a later "yarn" or "llama3" starts from it.
    """

    theta: float
    scaling: Scaling
    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. Sizes are in elements, `max_positions` (the published
    max_position_embeddings) in tokens.

    Raises ValueError when the heads cannot be grouped or the head cannot be rotated by halves.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    norm_eps: float
    max_positions: int
    rope: RopeConfig

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim} must be even: rotary embeddings rotate its two halves."
            )


def number_of_parameters(config: DecoderConfig) -> int:
    """Number of trainable parameters; a tied embedding counts once."""
    # A TransformersConfig has its own count.
    counted = getattr(config, "parameters", None)
    if counted is not None:
        return counted
    query_size = config.heads * config.head_dim
    kv_size = config.kv_heads * config.head_dim

    # q_proj and o_proj have the size of the queries, k_proj and v_proj that of keys and values.
    attention = 2 * config.hidden_size * (query_size + kv_size)
    if config.qkv_bias:
        attention += query_size + 2 * kv_size
    if config.qk_norm:
        attention += 2 * config.head_dim

    mlp = 3 * config.hidden_size * config.intermediate_size
    block_norms = 2 * config.hidden_size
    blocks = config.layers * (attention + mlp + block_norms)

    final_norm = config.hidden_size
    embedding = config.vocab_size * config.hidden_size
    head = 0 if config.tied_embeddings else embedding
    return blocks + final_norm + embedding + head
