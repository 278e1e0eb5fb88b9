"""The shape of a decoder. Imports no torch, so that configurations can be checked without it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Linear(NamedTuple):
    """Sizes of the linear layers of one name, and how many there are."""

    inputs: int
    outputs: int
    count: int


def linear_sizes(config: DecoderConfig) -> dict[str, Linear]:
    """The linear layers of blocks, by the last part of their names. Experts are none."""
    # A TransformersConfig has its own counts, here and below.
    if hasattr(config, "linears"):
        return {name: Linear(*sizes) for name, *sizes in config.linears}
    hidden = config.hidden_size
    query = config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    inner = config.intermediate_size
    names = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    inputs = hidden, hidden, hidden, query, hidden, hidden, inner
    outputs = query, kv, kv, hidden, inner, inner, hidden
    return {name: Linear(*sizes, config.layers) for name, *sizes in zip(names, inputs, outputs)}


def linear_weights(config: DecoderConfig) -> int:
    """Elements of the blocks' matrices that one token is multiplied by."""
    if hasattr(config, "linear_weights"):
        return config.linear_weights
    return sum(x.inputs * x.outputs * x.count for x in linear_sizes(config).values())


def number_of_parameters(config: DecoderConfig) -> int:
    """Number of trainable parameters; a tied embedding counts once."""
    if hasattr(config, "parameters"):
        return config.parameters
    vectors = 2 * config.hidden_size
    vectors += config.qkv_bias * (config.heads + 2 * config.kv_heads) * config.head_dim
    vectors += config.qk_norm * 2 * config.head_dim
    embeddings = (1 if config.tied_embeddings else 2) * config.vocab_size * config.hidden_size
    return linear_weights(config) + config.layers * vectors + config.hidden_size + embeddings
