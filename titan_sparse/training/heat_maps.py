"""Tables and thumbnails as coloured images for TensorBoard, without matplotlib."""

import torch
from torch import Tensor

_COLOURS = torch.tensor(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=torch.float64
)
"""Of the values 0, 1/4 ... 1: dark violet to yellow, evenly told apart also without colour vision (viridis)."""
_NONE = 255


def coloured(values: Tensor) -> Tensor:
    """uint8 [3, h, w] of values in [0, 1], [h, w]; what is beyond is clamped, nan is white."""
    place = values.double().cpu().nan_to_num().clamp(0, 1) * (len(_COLOURS) - 1)
    low = place.long().clamp(max=len(_COLOURS) - 2)
    mixed = torch.lerp(_COLOURS[low], _COLOURS[low + 1], (place - low)[..., None])
    return (
        torch.where(values.cpu().isnan()[..., None], _NONE, mixed)
        .round()
        .to(torch.uint8)
        .movedim(-1, 0)
    )


def heat_map(values: Tensor, pixels: int = 12) -> Tensor:
    """uint8 [3, layers * pixels, heads * pixels] of values in [0, 1], [layers, heads]: layer 0 on top, head 0 on the left."""
    return coloured(values).repeat_interleave(pixels, 1).repeat_interleave(pixels, 2)


def contact_sheet(thumbnails: Tensor, gap: int = 2) -> Tensor:
    """uint8 [3, layers * (P + gap), heads * (P + gap)] of shares [layers, heads, P, P], white between them.

    A share's root is drawn: single columns are a small part of a cell.
    """
    framed = torch.nn.functional.pad(thumbnails.sqrt(), (0, gap, 0, gap), value=torch.nan)
    return coloured(framed.movedim(2, 1).flatten(2, 3).flatten(0, 1))
