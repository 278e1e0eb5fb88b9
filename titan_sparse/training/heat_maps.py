"""Tables and thumbnails as colored images for TensorBoard, without matplotlib."""

import torch
from torch import Tensor

_COLORS = torch.tensor(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=torch.float64
)
"""RGB of the values 0, 1/4 ... 1: dark violet to yellow (viridis). Its steps look even, also without
color vision."""
_WHITE = 255


def coloured(values: Tensor) -> Tensor:
    """Colors, uint8 [3, h, w], of values [h, w] in [0, 1]. Values beyond are clamped, nan is white."""
    # [h, w]: where a value lies between the colors `low` and `low + 1`.
    place = values.double().cpu().nan_to_num().clamp(0, 1) * (len(_COLORS) - 1)
    low = place.long().clamp(max=len(_COLORS) - 2)
    # [h, w, 3]
    mixed = torch.lerp(_COLORS[low], _COLORS[low + 1], (place - low)[..., None])
    is_nan = values.cpu().isnan()[..., None]
    colors = torch.where(is_nan, _WHITE, mixed)
    return colors.round().to(torch.uint8).movedim(-1, 0)


def heat_map(values: Tensor, pixels: int = 12) -> Tensor:
    """uint8 [3, layers * pixels, heads * pixels] of values [layers, heads] in [0, 1].

    Layer 0 is on top, head 0 on the left.
    """
    cells = coloured(values)
    return cells.repeat_interleave(pixels, 1).repeat_interleave(pixels, 2)


def contact_sheet(thumbnails: Tensor, gap: int = 2) -> Tensor:
    """uint8 [3, layers * (P + gap), heads * (P + gap)] of shares [layers, heads, P, P], white between.

    A share's root is drawn, since single verticals are a small part of a cell.
    """
    # [layers, heads, P + gap, P + gap]; nan is drawn white.
    framed = torch.nn.functional.pad(thumbnails.sqrt(), (0, gap, 0, gap), value=torch.nan)
    # [layers * (P + gap), heads * (P + gap)]
    sheet = framed.movedim(2, 1).flatten(2, 3).flatten(0, 1)
    return coloured(sheet)
