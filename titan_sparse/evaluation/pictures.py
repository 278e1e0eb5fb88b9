"""Pictures of results and of layers and heads, as matplotlib figures.

matplotlib is loaded by the first picture, so its types are Any here.
"""

from typing import Any

import torch
from torch import Tensor

_LEAST_HEIGHT = 3.5
"""Inches that the text beside the scale needs."""


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


def loss_figure(steps: dict[int, float], validated: dict[int, float]) -> Any:
    """Training loss by step, and that of validation where there is any."""
    figure, axes = new_figure((7, 4))
    axes.set_title("Loss")
    axes.plot(list(steps), list(steps.values()), label="training")
    if validated:
        axes.plot(list(validated), list(validated.values()), "o:", label="validation")
    axes.set(xlabel="step", ylabel="cross-entropy (nats)")
    axes.legend()
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


def heat_map(values: Tensor, meaning: str, ticks: tuple[float, ...] = ()) -> Any:
    """Draw values in [0, 1] as colors, with a scale that is labeled `meaning`.

    values: [layers, heads], or [layers, heads, P, P] for a picture of each head, keys to the right
    and queries down. Layer 0 is on top, head 0 on the left. ticks: of the scale, where roots of
    shares are drawn, since single verticals are a small part of a cell.
    """
    import matplotlib

    layers, heads = values.shape[:2]
    # Inches. Cells must be large enough to be distinguished, and labels need room around them.
    inches = 0.15
    if values.ndim == 4:
        # A pixel for each cell or more.
        inches = 1.5 * values.shape[-1] / 100
        framed = torch.nn.functional.pad(values, (0, 2, 0, 2), value=torch.nan)
        # [layers * (P + 2), heads * (P + 2)]
        values = framed.movedim(2, 1).flatten(2, 3).flatten(0, 1)
    size = (2.5 + inches * heads, max(1.5 + inches * layers, _LEAST_HEIGHT))
    figure, axes = new_figure(size)
    image = axes.imshow(
        (values.sqrt() if ticks else values).double().cpu().numpy(),
        # Its steps look even, also without color vision. nan is white.
        cmap=matplotlib.colormaps["viridis"].with_extremes(bad="white"),
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        # In heads and layers: number 0 is drawn from -1/2 to 1/2.
        extent=(-0.5, heads - 0.5, layers - 0.5, -0.5),
    )
    axes.set(xlabel="query head", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    scale = figure.colorbar(image, label=meaning)
    if ticks:
        scale.set_ticks([share**0.5 for share in ticks], labels=[f"{share:g}" for share in ticks])
    return figure
