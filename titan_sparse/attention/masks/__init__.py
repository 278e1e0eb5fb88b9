"""What may be seen: static masks, composable with `&`."""

from titan_sparse.attention.masks.ranges import (
    Causal,
    Documents,
    Full,
    Intersection,
    Mask,
    MaskRanges,
    SlidingWindow,
)
from titan_sparse.attention.masks.slices import Slices

__all__ = [
    "Causal",
    "Documents",
    "Full",
    "Intersection",
    "Mask",
    "MaskRanges",
    "SlidingWindow",
    "Slices",
]
