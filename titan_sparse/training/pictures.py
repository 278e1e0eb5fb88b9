"""Pictures of results and of layers and heads, as matplotlib figures; needs pip install -e ".[eval]".

matplotlib is loaded by the first picture, so its types are Any here.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

_LEAST_HEIGHT = 3.5
"""Inches that the text beside the scale needs."""


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(inches: tuple[float, float], panels: int = 1) -> tuple[Any, Any]:
    """A figure of this size, and its axes. No pyplot: no display, no global list of figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    return figure, figure.subplots(1, panels)


def needle_figure(cells: list[dict[str, Any]], value: str = "score") -> Any:
    """Heat map of by_cell()'s cells, depth over length; red is 0, green is 1."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    value_at = {(cell["depth"], cell["length"]): cell[value] for cell in cells}
    grid = [[value_at[depth, length] for length in lengths] for depth in depths]
    figure, axes = new_figure((7, 4))
    axes.set_title(f"Needle In A Haystack: {value}")
    image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="length (tokens)", ylabel="depth (%)")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
    figure.colorbar(image)
    return figure


def position_figure(results: list[dict[str, Any]]) -> Any:
    """Loss against position, a curve for each result of position_loss()."""
    figure, axes = new_figure((7, 4))
    axes.set_title("Loss by position")
    for result in results:
        known = [bucket for bucket in result["buckets"] if bucket["loss"] is not None]
        middles = [(bucket["start"] + bucket["stop"]) / 2 for bucket in known]
        losses = [bucket["loss"] for bucket in known]
        axes.plot(middles, losses, marker="o", label=f"windows of {result['length']:,}")
    axes.set(xlabel="position in the window (tokens)", ylabel="cross-entropy (nats)")
    axes.legend()
    return figure


def heat_map(values: Tensor, meaning: str) -> Any:
    """Draw values [layers, heads] in [0, 1] as colors, with a scale that is labeled `meaning`.

    Layer 0 is on top, head 0 on the left.
    """
    layers, heads = values.shape
    # Inches. Cells must be large enough to be distinguished, and labels need room around them.
    size = (2.5 + 0.15 * heads, max(1.5 + 0.15 * layers, _LEAST_HEIGHT))
    figure, axes = new_figure(size)
    image = axes.imshow(
        values.double().cpu().numpy(), cmap=_colors(), vmin=0, vmax=1, aspect="auto"
    )
    _name_axes(axes)
    figure.colorbar(image, label=meaning)
    return figure


def contact_sheet(thumbnails: Tensor, gap: int = 2) -> Any:
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
    figure, axes = new_figure(size)
    figure.set_dpi(100)
    # In heads and layers: number 0 is drawn from -1/2 to 1/2, as in heat_map().
    extent = (-0.5, heads - 0.5, layers - 0.5, -0.5)
    image = axes.imshow(
        sheet.double().cpu().numpy(),
        cmap=_colors(),
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


def _name_axes(axes: Any) -> None:
    axes.set(xlabel="query head", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)


def _colors() -> Any:
    """Their steps look even, also without color vision. nan is white."""
    import matplotlib

    return matplotlib.colormaps["viridis"].with_extremes(bad="white")
