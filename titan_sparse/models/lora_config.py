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


class Size(NamedTuple):
    """Sizes of a linear layer's input and output."""

    inputs: int
    outputs: int


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


def linear_sizes(model: DecoderConfig) -> dict[str, Size]:
    """The linear layers of blocks that can have adapters, by the last part of their names.

    In a mixture of experts, only attention's layers can: the experts are not linear layers.
    """
    hidden_size = model.hidden_size
    of_linear = _sizes_of_linear_attention(model)
    query_size = model.heads * model.head_dim
    kv_size = model.kv_heads * model.head_dim
    if _is_phi3(model):
        sizes = {"qkv_proj": Size(hidden_size, query_size + 2 * kv_size)}
    else:
        sizes = {
            # With linear attention in other layers, q comes with a gate.
            "q_proj": Size(hidden_size, (2 if of_linear else 1) * query_size),
            "k_proj": Size(hidden_size, kv_size),
            "v_proj": Size(hidden_size, kv_size),
        }
    sizes["o_proj"] = Size(query_size, hidden_size)
    sizes |= of_linear
    if isinstance(model, TransformersConfig) and model.experts:
        return sizes
    if _is_phi3(model):
        sizes["gate_up_proj"] = Size(hidden_size, 2 * model.intermediate_size)
    else:
        sizes["gate_proj"] = Size(hidden_size, model.intermediate_size)
        sizes["up_proj"] = Size(hidden_size, model.intermediate_size)
    sizes["down_proj"] = Size(model.intermediate_size, hidden_size)
    return sizes


def _is_phi3(model: DecoderConfig) -> bool:
    return isinstance(model, TransformersConfig) and model.model_type == "phi3"


def _sizes_of_linear_attention(model: DecoderConfig) -> dict[str, Size]:
    if not isinstance(model, TransformersConfig) or not model.linear_layers:
        return {}
    keys, values, heads = model.linear_keys, model.linear_values, model.linear_heads
    if model.model_type == "qwen3_next":
        outputs = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
    else:
        outputs = {
            "in_proj_qkv": 2 * keys + values,
            "in_proj_z": values,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
    sizes = {name: Size(model.hidden_size, size) for name, size in outputs.items()}
    return sizes | {"out_proj": Size(values, model.hidden_size)}


def block_elements(model: DecoderConfig, adapters: Adapters) -> float:
    """Elements of all adapters of a block, on average over the blocks."""
    return adapter_elements(model, adapters) / model.layers


def adapter_elements(model: DecoderConfig, adapters: Adapters | None) -> int:
    """Elements of all adapters, which is everything that is trained. 0 without adapters."""
    if adapters is None:
        return 0
    sizes = linear_sizes(model)
    of_linear = _sizes_of_linear_attention(model)
    linear_layers = len(getattr(model, "linear_layers", ()))
    elements = 0
    for name in adapters.targets:
        layers = model.layers
        if name in of_linear:
            layers = linear_layers
        elif name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layers -= linear_layers
        elements += layers * adapters.rank * sum(sizes[name])
    return elements
