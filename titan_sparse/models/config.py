"""The shape of a decoder and of its LoRA adapters. Imports no torch, so that configurations can be
checked without it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Scaling = Literal["none", "llama3", "yarn"]

ALL_LINEAR = "all-linear"
"""lora.targets: every linear layer of the blocks."""

_MARKS = (".lora_A.", ".lora_B.", ".trainable_tokens_delta.")


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


class Linear(NamedTuple):
    """Sizes of the linear layers of one name, and how many there are."""

    inputs: int
    outputs: int
    count: int


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
    # What only models of transformers have. TransformersConfig has fields of these names.
    runs_in_transformers = False
    """whether transformers' own code computes it"""
    model_type = ""
    """its name in config.json"""
    windows = ()
    """tokens that a query of each layer sees, 0 for all; empty where no layer has a window"""
    linear_layers = ()
    """the layers with linear attention in place of attention"""
    linear_state = 0
    """elements of the recurrent state of such a layer"""
    linear_width = 0
    """elements of a token's q, k, v, and gate in such a layer"""
    convolution = 0
    """tokens in the window of their convolution"""
    experts = 0
    """0 for a dense model"""
    router_loss = 0.0
    """weight of the load-balancing loss"""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim} must be even: rotary embeddings rotate its two halves."
            )

    @property
    def window(self) -> int:
        """Tokens that a query of a layer with a window sees; 0 if no layer has one."""
        return max(self.windows, default=0)

    def linear_sizes(self) -> dict[str, Linear]:
        """The linear layers of blocks, by the last part of their names. Experts are none."""
        hidden = self.hidden_size
        query = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        inner = self.intermediate_size
        names = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
        inputs = hidden, hidden, hidden, query, hidden, hidden, inner
        outputs = query, kv, kv, hidden, inner, inner, hidden
        return {name: Linear(*sizes, self.layers) for name, *sizes in zip(names, inputs, outputs)}

    def weights_per_token(self) -> int:
        """Elements of the blocks' matrices that one token is multiplied by."""
        return sum(x.inputs * x.outputs * x.count for x in self.linear_sizes().values())

    def number_of_parameters(self) -> int:
        """Number of trainable parameters; a tied embedding counts once."""
        vectors = 2 * self.hidden_size
        vectors += self.qkv_bias * (self.heads + 2 * self.kv_heads) * self.head_dim
        vectors += self.qk_norm * 2 * self.head_dim
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.weights_per_token() + self.layers * vectors + self.hidden_size + embeddings


@dataclass(frozen=True)
class Adapters:
    """W x becomes W x + alpha / rank * B (A x), for each linear layer of these names in every
    block. The rows of some tokens in the embedding and in the head are replaced.

    A [rank, in], B [out, rank], and the new rows [tokens, hidden] are trained, in float32 (float64
    for float64). W and all other weights are frozen, in training.dtype.
    """

    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]
    """last parts of the layers' names, such as q_proj"""
    init: str
    tokens: tuple[str, ...] = ()
    """the tokens whose rows are trained"""
    token_ids: tuple[int, ...] = ()
    """their rows, in the same order; empty where only sizes are needed, without a tokenizer"""

    @property
    def scale(self) -> float:
        """The factor of B (A x)."""
        return self.alpha / self.rank


def is_adapter(parameter_name: str) -> bool:
    """True if the parameter is an adapter's A or B, or holds the rows of trained tokens."""
    return any(mark in parameter_name for mark in _MARKS)


def resolve_adapters(
    model: DecoderConfig,
    rank: int,
    alpha: int,
    dropout: float,
    targets: str,
    init: str,
    trainable_tokens: str = "",
) -> Adapters | None:
    """The adapters that the [lora] section describes for this model; None for rank 0.

    training.preflight.build_adapters() adds the rows of trained tokens, which a tokenizer knows.
    Raises ValueError, one line, for a name in `targets` that no linear layer of its blocks has.
    """
    if rank == 0:
        return None
    tokens = tuple(filter(None, (name.strip() for name in trainable_tokens.split(","))))
    sizes = model.linear_sizes()
    if targets == ALL_LINEAR:
        return Adapters(rank, alpha, dropout, tuple(sizes), init, tokens)
    # In a mixture of experts, only attention's layers have adapters: experts are not linear layers.
    names = [name.strip() for name in targets.split(",")]
    for name in names:
        if name not in sizes:
            raise ValueError(
                f'lora.targets: "{name}" is not a linear layer of the blocks; write "{ALL_LINEAR}" '
                f"or some of {','.join(sizes)}"
            )
    chosen = tuple(name for name in sizes if name in names)
    return Adapters(rank, alpha, dropout, chosen, init, tokens)


def adapter_elements(model: DecoderConfig, adapters: Adapters | None) -> int:
    """Elements of all adapters, which is everything that is trained. 0 without adapters."""
    if adapters is None:
        return 0
    matrices = 1 if model.tied_embeddings else 2
    rows = matrices * len(adapters.tokens) * model.hidden_size
    return block_adapter_elements(model, adapters) + rows


def block_adapter_elements(model: DecoderConfig, adapters: Adapters | None) -> int:
    """Elements of the adapters of the blocks' linear layers. 0 without adapters."""
    if adapters is None:
        return 0
    linears = [model.linear_sizes()[name] for name in adapters.targets]
    return sum(x.count * adapters.rank * (x.inputs + x.outputs) for x in linears)
