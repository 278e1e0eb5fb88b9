"""Which linear layers have LoRA adapters, and of what size. Imports no torch."""

from dataclasses import dataclass
from typing import NamedTuple

from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.transformers_config import TransformersConfig

ALL_LINEAR = "all-linear"
"""lora.targets: every linear layer of the blocks."""

_MARKS = (".lora_A.", ".lora_B.")


@dataclass(frozen=True)
class Adapters:
    """W x becomes W x + alpha / rank * B (A x), for each linear layer of these names in every
    block.

    A [rank, in] and B [out, rank] are trained, in float32 (float64 for float64). W and all other
    weights are frozen, in training.dtype.
    """

    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]
    """last parts of the layers' names, such as q_proj"""
    init: str

    @property
    def scale(self) -> float:
        """The factor of B (A x)."""
        return self.alpha / self.rank


class Linear(NamedTuple):
    """Sizes of the linear layers of one name, and how many there are."""

    inputs: int
    outputs: int
    count: int


def is_adapter(parameter_name: str) -> bool:
    """Whether the parameter is an adapter's A or B."""
    return any(mark in parameter_name for mark in _MARKS)


def resolve_adapters(
    model: DecoderConfig, rank: int, alpha: int, dropout: float, targets: str, init: str
) -> Adapters | None:
    """The adapters that the [lora] section describes for this model; None for rank 0.

    Raises ValueError, one line, for a name in `targets` that no linear layer of its blocks has.
    """
    if rank == 0:
        return None
    sizes = linear_sizes(model)
    if targets == ALL_LINEAR:
        return Adapters(rank, alpha, dropout, tuple(sizes), init)
    names = [name.strip() for name in targets.split(",")]
    for name in names:
        if name not in sizes:
            raise ValueError(
                f'lora.targets: "{name}" is not a linear layer of the blocks; write "{ALL_LINEAR}" '
                f"or some of {','.join(sizes)}"
            )
    chosen = tuple(name for name in sizes if name in names)
    return Adapters(rank, alpha, dropout, chosen, init)


def linear_sizes(model: DecoderConfig) -> dict[str, Linear]:
    """The linear layers of blocks that can have adapters, by the last part of their names.

    In a mixture of experts, only attention's layers can: the experts are not linear layers.
    """
    if isinstance(model, TransformersConfig):
        return {name: Linear(*sizes) for name, *sizes in model.linears}
    hidden_size = model.hidden_size
    query_size = model.heads * model.head_dim
    kv_size = model.kv_heads * model.head_dim
    sizes = {
        "q_proj": (hidden_size, query_size),
        "k_proj": (hidden_size, kv_size),
        "v_proj": (hidden_size, kv_size),
        "o_proj": (query_size, hidden_size),
        "gate_proj": (hidden_size, model.intermediate_size),
        "up_proj": (hidden_size, model.intermediate_size),
        "down_proj": (model.intermediate_size, hidden_size),
    }
    return {name: Linear(*size, model.layers) for name, size in sizes.items()}


def adapter_elements(model: DecoderConfig, adapters: Adapters | None) -> int:
    """Elements of all adapters, which is everything that is trained. 0 without adapters."""
    if adapters is None:
        return 0
    linears = [linear_sizes(model)[name] for name in adapters.targets]
    return sum(x.count * adapters.rank * (x.inputs + x.outputs) for x in linears)
