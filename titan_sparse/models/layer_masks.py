"""Attention and masks of a model whose layers differ."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class LayerMasks(NamedTuple):
    """What a model hands to attention, by kind of layer; opaque to it, as one mask is.

    full: of layers that see everything. window: of layers with a window. tokens: bool [B, S], false
    for padding; None counts all.
    """

    full: Any
    window: Any = None
    tokens: Tensor | None = None


class Attends(NamedTuple):
    """Attention by kind of layer, each called as models.decoder.Attend; models of transformers give
    scale= besides, and sinks= where they have them."""

    full: Callable[..., Tensor]
    window: Callable[..., Tensor]
