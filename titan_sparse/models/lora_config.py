"""Which linear layers have LoRA adapters, and of what size. Imports no torch."""

from dataclasses import dataclass

from titan_sparse.models.config import DecoderConfig, linear_sizes

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
    # In a mixture of experts, only attention's layers have adapters: experts are not linear layers.
    names = [name.strip() for name in targets.split(",")]
    for name in names:
        if name not in sizes:
            raise ValueError(
                f'lora.targets: "{name}" is not a linear layer of the blocks; write "{ALL_LINEAR}" '
                f"or some of {','.join(sizes)}"
            )
    chosen = tuple(name for name in sizes if name in names)
    return Adapters(rank, alpha, dropout, chosen, init)


def adapter_elements(model: DecoderConfig, adapters: Adapters | None) -> int:
    """Elements of all adapters, which is everything that is trained. 0 without adapters."""
    if adapters is None:
        return 0
    linears = [linear_sizes(model)[name] for name in adapters.targets]
    return sum(x.count * adapters.rank * (x.inputs + x.outputs) for x in linears)
