"""What a mask function of transformers says, read from what it is made of.

transformers.masking_utils composes functions of (batch, head, query, key). To call one for all
pairs would take S x S; its parts are few and known by name.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class MaskRule(NamedTuple):
    """Causal attention, less what these rules hide.

    window: keys that a query sees, its own included; None for all (sliding_window).
    chunk: a query sees keys of its own chunk of that many tokens, counted from the beginning of
    its document; None for all (Llama 4's attention_chunk_size).
    documents: int [B, S], equal for tokens of one document; None where transformers saw one.
    unknown: the name of a part that is none of these, if there is one.
    """

    window: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None
    unknown: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether a window or chunks keep queries from far keys."""
        return self.window is not None or self.chunk is not None


BIDIRECTIONAL = "bidirectional attention"
"""What MaskRule.unknown says of encoders."""

# What makes a mask function -> the field that it sets, and its variable that holds the value.
_FIELDS = {
    "sliding_window_overlay": ("window", "sliding_window"),
    "chunked_overlay": ("chunk", "chunk_size"),
    "packed_sequence_mask_function": ("documents", "packed_sequence_mask"),
}


def read_rule(mask_function: Callable) -> MaskRule:
    """The rule that a mask function of transformers computes."""
    found: dict[str, object] = {}
    is_causal = _read(mask_function, found)
    if not is_causal and "unknown" not in found:
        found["unknown"] = BIDIRECTIONAL
    return MaskRule(**found)


def _read(function: Callable, found: dict[str, object]) -> bool:
    """Adds the fields of MaskRule that `function` sets. Returns whether it is causal."""
    name = _name(function)
    parts = _closure(function)
    if name == "causal_mask_function":
        return True
    if name == "and_masks":
        causal = [_read(part, found) for part in parts["mask_functions"]]
        return any(causal)
    if name == "remap_positions_for_packed_sequence":
        # Distances inside a document are the same in its own positions.
        return _read(parts["mask_function"], found)
    if name in _FIELDS:
        field, variable = _FIELDS[name]
        if field in found:
            found["unknown"] = f"two mask functions {name}"
        found[field] = parts[variable]
    elif name != "bidirectional_mask_function":
        found["unknown"] = f"the mask function {name}"
    return False


def _name(function: Callable) -> str:
    """The name in transformers.masking_utils; whatever a function of others is called, if it is one.

    An inner function is named by the function that made it: "and_masks.<locals>.and_mask".
    """
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return f"{name} of others"
    return name.partition(".")[0]


def _closure(function: Callable) -> dict[str, object]:
    """The variables that an inner function has from the function that made it."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells)}
