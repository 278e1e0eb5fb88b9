"""What the attention ops are given, for tests that call them directly."""

from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel, one_rank
from titan_sparse.attention.inputs import mask_tensors
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.ops import options_key
from titan_sparse.attention.patterns import Pattern


def op_arguments(
    index: list[Tensor],
    ranges: MaskRanges,
    pattern: Pattern,
    cp: ContextParallel,
    scale: float | None = None,
    begin: float = 0.0,
    end: float = 1.0,
) -> tuple[None, list[Tensor], list[Tensor], str]:
    """(sinks, index, mask, call), which follow q, k and v; no sinks.

    begin, end: as options_key() takes them.
    """
    facts, tensors = mask_tensors(ranges)
    key = options_key(pattern.key, cp.key, facts, scale, "eager", begin, end)
    return None, index, tensors, key


def select_arguments(
    ranges: MaskRanges, pattern: Pattern, block_size: int, scale: float | None = None
) -> tuple[list[Tensor], str]:
    """(mask, call), which follow q and k in the op select, on one rank."""
    facts, tensors = mask_tensors(ranges)
    return tensors, options_key(pattern.key, one_rank(block_size).key, facts, scale)
