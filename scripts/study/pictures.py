"""Pictures of the study's results (scripts.study.report); needs pip install -e ".[eval]"."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.study.runs import DENSE, SPARSE, START, methods
from scripts.study.sizes import FULL

_METHODS = [START, *methods(FULL)]
COLORS = {name: f"C{number % 10}" for number, name in enumerate(_METHODS)}
"""The same in all pictures; seeds of a method share one."""


def draw(out: Path, found: dict[str, Any]) -> None:
    """loss.png, sparsity.png, position.png, needle.png and lengths.png in `out`, of what is there."""
    runs = found["runs"]
    rows = found["evaluations"]
    figures = {}
    if runs:
        figures["loss"] = loss_figure(runs, found["differences"])
        first_seeds = {name: run for name, run in runs.items() if run["seed"] == 0}
        if first_seeds:
            figures["sparsity"] = sparsity_figure(first_seeds)
    if any(row["position"] for row in rows):
        figures["position"] = position_figure(rows)
    if any(row["needle"] for row in rows):
        figures["needle"] = needle_figure([row for row in rows if row["needle"]])
    if any(row["scores"] for row in rows):
        figures["lengths"] = lengths_figure(rows, found["lengths"])
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=120)


def smooth(values: list[float]) -> np.ndarray:
    """Running mean over a tenth of the values, shorter at the ends."""
    count = len(values)
    half = count // 20
    # sums[i] is the sum of the values before i.
    sums = np.zeros(count + 1)
    sums[1:] = np.cumsum(values, dtype=np.float64)
    middle = np.arange(count)
    starts = np.maximum(middle - half, 0)
    stops = np.minimum(middle + half + 1, count)
    return (sums[stops] - sums[starts]) / (stops - starts)


def loss_figure(runs: dict[str, Any], differences: dict[str, Any]) -> Figure:
    """Loss against steps and against time, and what it differs from dense on the same data."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    by_step, by_time, below = figure.subplots(1, 3)
    for name, run in runs.items():
        style = _style(name, run["method"], run["seed"])
        by_step.plot(run["steps"], smooth(run["loss"]), **style)
        by_time.plot(run["seconds"], smooth(run["loss"]), **style)
    for name, part in differences.items():
        style = _style(name, runs[name]["method"], runs[name]["seed"])
        below.plot(part["steps"], 100 * smooth(part["shares"]), **style)
    by_step.set(xlabel="step", ylabel="training loss (running mean)")
    by_time.set(xlabel="seconds of training on one GPU", ylabel="training loss (running mean)")
    below.set(xlabel="step", ylabel="difference to dense (%)")
    below.axhline(0, color="gray", linewidth=0.8)
    by_step.legend(fontsize="x-small")
    return figure


def _style(name: str, method: str, seed: int) -> dict[str, Any]:
    return {"color": COLORS[method], "label": name, "linewidth": 0.8 if seed else 1.6}


def sparsity_figure(runs: dict[str, dict[str, Any]]) -> Figure:
    """Density and recall of each layer over the steps, a row for each run."""
    figure = Figure(figsize=(10, 1.7 * len(runs) + 1), layout="constrained")
    grid = figure.subplots(len(runs), 2, squeeze=False)
    for row, (name, run) in zip(grid, runs.items(), strict=True):
        for axes, (kind, layers) in zip(row, run["by_layer"].items(), strict=True):
            axes.set_title(f"{name}: {kind}", fontsize="small")
            if layers and layers[0]:
                _draw_layers(figure, axes, layers)
            axes.set(xlabel="step", ylabel="layer")
            axes.label_outer()
    return figure


def _draw_layers(figure: Figure, axes: Axes, layers: list[dict[int, float]]) -> None:
    steps = sorted(map(int, layers[0]))
    image = axes.imshow(
        [[layer[step] for step in steps] for layer in layers],
        aspect="auto",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(steps[0], max(steps[-1], steps[0] + 1), len(layers) - 0.5, -0.5),
    )
    figure.colorbar(image)


def position_figure(rows: list[dict[str, Any]]) -> Figure:
    """Held-out loss against position by kind of text, in the attention that was trained with."""
    kinds = list(next(row["position"] for row in rows if row["position"]))
    figure = Figure(figsize=(5 * len(kinds), 4.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds):
        for row in rows:
            if row["mode"] not in (row["method"], "as_published") or kind not in row["position"]:
                continue
            known = [part for part in row["position"][kind]["buckets"] if part["loss"] is not None]
            middles = [(part["start"] + part["stop"]) / 2 for part in known]
            style = _style(row["weights"], row["method"], row["seed"])
            axes.plot(middles, [part["loss"] for part in known], marker=".", **style)
        axes.set(title=kind, xlabel="position (tokens)", ylabel="loss")
        axes.legend(fontsize="x-small")
    return figure


def needle_figure(rows: list[dict[str, Any]]) -> Figure:
    """Share of needles found by generation.

    A row for each pair of weights and attention, a column for each length and depth.
    """
    cells = max((row["needle"] for row in rows), key=len)
    places = [(cell["length"], cell["depth"]) for cell in cells]
    grid = np.full((len(rows), len(places)), np.nan)
    for line, row in zip(grid, rows):
        for cell in row["needle"]:
            line[places.index((cell["length"], cell["depth"]))] = cell["score"]
    figure = Figure(figsize=(3 + 0.4 * len(places), 0.3 * len(rows) + 2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    names = [f"{row['weights']}, {row['mode']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    names = [f"{length // 1024}K\n{100 * depth:.0f}" for length, depth in places]
    axes.set_xticks(range(len(places)), names, fontsize="x-small")
    axes.set(title="needles found", xlabel="length (tokens), depth (%)")
    figure.colorbar(image)
    return figure


def lengths_figure(rows: list[dict[str, Any]], lengths: list[int]) -> Figure:
    """Score of each task against length: dense throughout, sparse throughout, and their mixtures."""
    rows = [row for row in rows if row["method"] in (START, DENSE, SPARSE)]
    names = [name for row in rows for name in row["scores"] if not name.startswith("loss")]
    tasks = list(dict.fromkeys(name.rpartition(", ")[0] for name in names))
    columns = min(4, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = Figure(figsize=(4 * columns, 3 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes, task in zip(grid.flat, tasks):
        for row in rows:
            score_of_length = {}
            for length in lengths:
                if f"{task}, {length}" in row["scores"]:
                    score_of_length[length] = row["scores"][f"{task}, {length}"]
            as_trained = row["mode"] in (row["method"], "as_published")
            dashes = "-" if as_trained else ":"
            style = _style(f"{row['weights']}, {row['mode']}", row["method"], row["seed"])
            known = list(score_of_length)
            scores = list(score_of_length.values())
            axes.plot(known, scores, dashes, marker=".", **style)
        axes.set_title(task, fontsize="small")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="length (tokens)", ylabel="score (%)")
    grid.flat[0].legend(fontsize="xx-small")
    return figure
