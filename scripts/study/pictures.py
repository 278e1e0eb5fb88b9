"""Pictures of the study's results (scripts.study.report); needs pip install -e ".[eval]"."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from scripts.study.runs import FULL, PRETRAIN, methods

COLOURS = {PRETRAIN: "black"} | {name: f"C{number}" for number, name in enumerate(methods(FULL))}
"""The same in all pictures."""


def draw(out: Path, found: dict[str, Any]) -> None:
    """loss.png, sparsity.png, position.png and needle.png in `out`, of what is there."""
    extensions = {name: run for name, run in found["runs"].items() if name != PRETRAIN}
    figures = {
        "loss": loss_figure(found),
        "sparsity": sparsity_figure(extensions) if extensions else None,
        "position": position_figure(found["evaluations"]),
        "needle": needle_figure(found["evaluations"]),
    }
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(out / f"{name}.png", dpi=120)


def smooth(values: list[float]) -> np.ndarray:
    """Running mean over a twentieth of the values, shorter at the ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    starts = np.maximum(np.arange(len(values)) - half, 0)
    stops = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[stops] - sums[starts]) / (stops - starts)


def loss_figure(found: dict[str, Any]) -> Figure:
    """Above the loss of each run, below what it differs from dense; MTraining's figure 6a."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    first, above, below = figure.subplots(3, 1)
    for name, run in found["runs"].items():
        (first if name == PRETRAIN else above).plot(
            run["steps"], smooth(run["loss"]), color=COLOURS[name], label=name
        )
    for part in found["differences"].values():
        if part["a"] == "dense":
            below.plot(
                part["steps"],
                100 * smooth(part["shares"]),
                color=COLOURS[part["b"]],
                label=part["b"],
            )
    first.set(title="before the extension", ylabel="loss")
    above.set(title="extension, by method (running means)", ylabel="loss")
    below.set(xlabel="step", ylabel="difference to dense (%)")
    below.axhspan(-1, 1, color="0.9")
    for axes in (above, below):
        if axes.lines:
            axes.legend(fontsize="small")
    return figure


def sparsity_figure(runs: dict[str, dict[str, Any]]) -> Figure:
    """Density and recall of each layer over the steps, a row for each method."""
    figure = Figure(figsize=(10, 1.7 * len(runs) + 1), layout="constrained")
    for row, (name, run) in zip(
        figure.subplots(len(runs), 2, squeeze=False), runs.items(), strict=True
    ):
        for axes, (kind, layers) in zip(row, run["by_layer"].items(), strict=True):
            axes.set_title(f"{name}: {kind}", fontsize="small")
            if layers and layers[0]:
                steps = sorted(map(int, layers[0]))
                grid = [[layer[step] for step in steps] for layer in layers]
                image = axes.imshow(
                    grid,
                    aspect="auto",
                    vmin=0,
                    vmax=1,
                    interpolation="nearest",
                    extent=(steps[0], max(steps[-1], steps[0] + 1), len(layers) - 0.5, -0.5),
                )
                figure.colorbar(image)
                axes.set_yticks(range(len(layers)))
            axes.set(xlabel="step", ylabel="layer")
            axes.label_outer()
    return figure


def position_figure(rows: list[dict[str, Any]]) -> Figure | None:
    """Validation loss against position at the longest length, in the attention trained with and densely."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, dense in zip(figure.subplots(1, 2, sharey=True), (False, True)):
        axes.set(
            title=f"inference {'dense' if dense else 'as trained'}",
            xlabel="position (tokens)",
            ylabel="loss",
        )
        for row in rows:
            if row["mode"] == ("dense" if dense else row["weights"]):
                longest = max(row["position"], key=lambda part: part["length"])
                known = [part for part in longest["buckets"] if part["loss"] is not None]
                axes.plot(
                    [(part["start"] + part["stop"]) / 2 for part in known],
                    [part["loss"] for part in known],
                    color=COLOURS[row["weights"]],
                    label=row["weights"],
                )
        if axes.lines:
            axes.legend(fontsize="small")
    return figure if rows else None


def needle_figure(rows: list[dict[str, Any]]) -> Figure | None:
    """Share of the needle's tokens that are right: a row for each pair of weights and attention, a column for each
    length and depth."""
    if not rows:
        return None
    figure = Figure(figsize=(9, 0.35 * len(rows) + 1.8), layout="constrained")
    axes = figure.subplots()
    cells = rows[0]["needle"]
    grid = [[cell["correct"] for cell in row["needle"]] for row in rows]
    image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_yticks(
        range(len(rows)), [f"{row['weights']}, {row['mode']}" for row in rows], fontsize="small"
    )
    names = [f"{cell['length']:,}\n{100 * cell['depth']:.0f} %" for cell in cells]
    axes.set_xticks(range(len(cells)), names, fontsize="small")
    axes.set(title="needle: right tokens of the answer", xlabel="length (tokens), depth")
    figure.colorbar(image)
    return figure
