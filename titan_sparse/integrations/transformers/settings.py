"""The settings of register(): how the attention of one name is computed."""

import functools
from dataclasses import dataclass, field

from transformers import AttentionInterface

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.patterns.base import Dense, Pattern


def check_block_size(size: int) -> None:
    """Raises ValueError for blocks that kernels on GPUs do not compute."""
    if type(size) is not int or size < 16 or size.bit_count() != 1:
        raise ValueError(
            f"block_size={size!r} is not a power of two of at least 16; write 64 or 128"
        )


@dataclass(frozen=True)
class AttentionSettings:
    """How attention of one name is computed. The defaults: dense, on one rank, the fastest kernel.

    pattern: of full-attention layers. Layers with a window or chunks compute all of it.
    cp: the ranks that share each sequence. Inputs of the model are then those of shard_batch().
    backend, recomputed: as in attend().
    block_size: tokens, for cp=None only; a power of two, at least 16; default 128.
    """

    pattern: Pattern = field(default_factory=Dense)
    cp: ContextParallel | None = None
    backend: str = "auto"
    block_size: int | None = None
    recomputed: float = 0.0

    def __post_init__(self) -> None:
        # attend() checks the others.
        if self.block_size is not None:
            check_block_size(self.block_size)

    @property
    def ranks(self) -> int:
        """How many ranks share a sequence."""
        return 1 if self.cp is None else self.cp.size


def settings_of(name: object) -> AttentionSettings | None:
    """The settings registered under this name; None for other names."""
    function = AttentionInterface().get(name)
    if isinstance(function, functools.partial) and isinstance(function.args[0], AttentionSettings):
        return function.args[0]
    return None
