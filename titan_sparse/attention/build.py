"""The mask that the [attention] section names, for one batch."""

from typing import TYPE_CHECKING

from titan_sparse.attention.masks import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.slice_masks import sliding_window
from titan_sparse.attention.slices import Slices

if TYPE_CHECKING:
    from titan_sparse.config import Attention


def build_mask(attention: "Attention", lengths: list[list[int]]) -> Mask:
    """The mask of one batch of packed sequences, from their documents' lengths."""
    if attention.window_sinks:
        spans = [[sum(row)] if attention.mask == "causal" else row for row in lengths]
        return Slices.batch([sliding_window(row, attention.sliding_window, attention.window_sinks) for row in spans])
    mask = Causal(valid=tuple(map(sum, lengths))) if attention.mask == "causal" else Documents(lengths)
    return mask & SlidingWindow(attention.sliding_window) if attention.sliding_window else mask
