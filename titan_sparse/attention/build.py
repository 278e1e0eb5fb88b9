"""The mask, for one batch, and the schedule that the [attention] section names."""

from typing import TYPE_CHECKING

from titan_sparse.attention.context_parallel import schedule as schedules
from titan_sparse.attention.masks.packed import sliding_window
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.masks.slices import Slices

if TYPE_CHECKING:
    from titan_sparse.config import Attention


def build_mask(attention: "Attention", lengths: list[list[int]]) -> Mask:
    """The mask of one batch of packed sequences, from their documents' lengths."""
    if attention.window_sinks:
        spans = [[sum(row)] if attention.mask == "causal" else row for row in lengths]
        return Slices.batch(
            [sliding_window(row, attention.sliding_window, attention.window_sinks) for row in spans]
        )
    mask = (
        Causal(valid=tuple(map(sum, lengths))) if attention.mask == "causal" else Documents(lengths)
    )
    return mask & SlidingWindow(attention.sliding_window) if attention.sliding_window else mask


def schedule_named(attention: "Attention", inter: int, intra: int) -> str:
    """The schedule for so many nodes of so many ranks. "auto": group_cast where documents or a window leave most blocks of other
    ranks unneeded and the layout is made for that; else what the mesh suggests."""
    if attention.schedule != "auto":
        return attention.schedule
    few_needed = attention.pattern == "dense" and (
        attention.mask == "documents" or attention.sliding_window > 0
    )
    if (
        inter * intra > 1
        and attention.layout == "balanced"
        and few_needed
        and attention.backward_circulates == "auto"
    ):
        return "group_cast"
    return schedules.choose(inter, intra, attention.backward_circulates).name
