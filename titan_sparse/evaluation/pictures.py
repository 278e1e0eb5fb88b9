"""Pictures of results, as matplotlib figures; needs pip install -e ".[eval]".

matplotlib is loaded by the first picture, so its types are Any here.
"""

import importlib.util
from typing import Any


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def _figure(title: str) -> tuple[Any, Any]:
    """A figure and its axes."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global list of figures

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def needle_figure(cells: list[dict[str, Any]], value: str = "score") -> Any:
    """Heat map of by_cell()'s cells, depth over length; red is 0, green is 1."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    value_at = {(cell["depth"], cell["length"]): cell[value] for cell in cells}
    grid = [[value_at[depth, length] for length in lengths] for depth in depths]
    figure, axes = _figure(f"Needle In A Haystack: {value}")
    image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="length (tokens)", ylabel="depth (%)")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
    figure.colorbar(image)
    return figure


def position_figure(results: list[dict[str, Any]]) -> Any:
    """Loss against position, a curve for each result of position_loss()."""
    figure, axes = _figure("Loss by position")
    for result in results:
        known = [bucket for bucket in result["buckets"] if bucket["loss"] is not None]
        middles = [(bucket["start"] + bucket["stop"]) / 2 for bucket in known]
        losses = [bucket["loss"] for bucket in known]
        axes.plot(middles, losses, marker="o", label=f"windows of {result['length']:,}")
    axes.set(xlabel="position in the window (tokens)", ylabel="cross-entropy (nats)")
    axes.legend()
    return figure
