"""The settings of register(): how the attention of one name is computed."""

import functools
from dataclasses import dataclass, field

from transformers import AttentionInterface

from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.patterns.base import Dense, Pattern

ON_ONE_RANK = (
    'To generate or evaluate, write register(name="one_rank") and '
    'model.set_attn_implementation("one_rank")'
)
"""How messages continue that refuse what context parallelism does not compute."""


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
    cp: the ranks that share each sequence, with their layout and schedule. Inputs of the model,
    position_ids among them, are then this rank's blocks of them, and attention_mask is an
    AttentionMask of whole sequences. shard_batch() makes both.
    backend: "auto", or a name of titan_sparse.attention.backends.
    block_size: tokens, for cp=None only; a power of two, at least 16; default 128.
    recomputed: as in attend(), for activation checkpointing that keeps SAVED_OPS.
    Raises ValueError for a pattern, group of ranks, backend, or block size that is not one.
    """

    pattern: Pattern = field(default_factory=Dense)
    cp: ContextParallel | None = None
    backend: str = "auto"
    block_size: int | None = None
    recomputed: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise ValueError(
                f"AttentionSettings(pattern={self.pattern!r}) is not a pattern; write one of "
                "titan_sparse.attention.patterns, for example Dense()"
            )
        if self.cp is not None and not isinstance(self.cp, ContextParallel):
            raise ValueError(
                f"AttentionSettings(cp={self.cp!r}) is not a group of ranks; "
                "write ContextParallel(mesh), or None for one rank"
            )
        if self.backend not in ("auto", *BACKENDS):
            raise ValueError(
                f"AttentionSettings(backend={self.backend!r}) is unknown; "
                f'write "auto" or one of {", ".join(BACKENDS)}'
            )
        if self.block_size is None:
            return
        check_block_size(self.block_size)
        if self.cp is not None and self.block_size != self.cp.block_size:
            raise ValueError(
                f"AttentionSettings(block_size={self.block_size}) differs from that of cp "
                f"({self.cp.block_size}); leave it out"
            )

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
