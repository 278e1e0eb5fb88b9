"""Static masks, which say what may be seen and can be combined with `&`.

The functions make masks of packed sequences out of lengths (slices.py).
"""

from titan_sparse.attention.masks.ranges import (
    Causal,
    Documents,
    Full,
    Intersection,
    Mask,
    MaskRanges,
    SlidingWindow,
)
from titan_sparse.attention.masks.slices import (
    Dilated,
    Slices,
    block_causal,
    dilated,
    documents,
    prefix_lm,
    shared_question,
    sliding_window,
)

__all__ = [
    "Causal",
    "Dilated",
    "Documents",
    "Full",
    "Intersection",
    "Mask",
    "MaskRanges",
    "Slices",
    "SlidingWindow",
    "block_causal",
    "dilated",
    "documents",
    "prefix_lm",
    "shared_question",
    "sliding_window",
]
