"""Pictures of layers and heads for TensorBoard, as matplotlib figures."""

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no display, no global list of figures
from matplotlib.ticker import MaxNLocator
from torch import Tensor

_COLORS = matplotlib.colormaps["viridis"].with_extremes(bad="white")
"""Its steps look even, also without color vision. nan is white."""

_LEAST_HEIGHT = 3.5
"""Inches that what is written beside the scale needs."""


def heat_map(values: Tensor, meaning: str) -> Figure:
    """Values [layers, heads] in [0, 1] as colors, with the scale that says what they mean.

    Layer 0 is on top, head 0 on the left.
    """
    layers, heads = values.shape
    # Inches: cells that can be told apart, and room for what is written around them.
    size = (2.5 + 0.15 * heads, max(1.5 + 0.15 * layers, _LEAST_HEIGHT))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values.double().cpu().numpy(), cmap=_COLORS, vmin=0, vmax=1, aspect="auto")
    _name_axes(axes)
    figure.colorbar(image, label=meaning)
    return figure


def contact_sheet(thumbnails: Tensor, gap: int = 2) -> Figure:
    """Shares [layers, heads, P, P] as a table of pictures, keys to the right and queries down in each.

    A share's root is drawn, since single verticals are a small part of a cell; the scale has the
    shares themselves.
    """
    layers, heads, cells, _ = thumbnails.shape
    # [layers, heads, P + gap, P + gap]; nan is drawn white.
    framed = torch.nn.functional.pad(thumbnails.sqrt(), (0, gap, 0, gap), value=torch.nan)
    # [layers * (P + gap), heads * (P + gap)]
    sheet = framed.movedim(2, 1).flatten(2, 3).flatten(0, 1)

    # A pixel for each cell or more.
    inches = 1.5 * cells / 100
    size = (2.5 + heads * inches, max(1.5 + layers * inches, _LEAST_HEIGHT))
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    axes = figure.subplots()
    # In heads and layers: number 0 is drawn from -1/2 to 1/2, as in heat_map().
    extent = (-0.5, heads - 0.5, layers - 0.5, -0.5)
    image = axes.imshow(
        sheet.double().cpu().numpy(),
        cmap=_COLORS,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        extent=extent,
    )
    _name_axes(axes)
    scale = figure.colorbar(
        image, aspect=40, label="share of a cell's allowed pairs that is selected"
    )
    shares = (0, 0.01, 0.1, 0.25, 0.5, 1)
    scale.set_ticks([share**0.5 for share in shares], labels=[f"{share:g}" for share in shares])
    return figure


def _name_axes(axes: Axes) -> None:
    axes.set(xlabel="query head", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
