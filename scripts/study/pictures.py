"""Pictures of the study's results, and of density against recall; needs pip install -e ".[eval]".

    python -m scripts.study.pictures RESULT... --out docs/pictures/density_recall.png

draws results of scripts.study.density. For each kind of text: density against recall, and below it
the loss with the pattern in all layers, less that of dense attention, against density. A point is
one setting, the mean over layers and texts.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from scripts.benchmarks.options import positive
from scripts.study.settings import DENSE, FULL, SPARSE, START, methods

COLORS = {name: f"C{number % 10}" for number, name in enumerate([START, *methods(FULL)])}
"""The same in all pictures of a study; seeds of a method share one."""
PATTERNS = (
    "joint, behind sinks, both",
    "layer",
    "independent",
    "xattention, stride 16",
    "moba, chunk 128",
)
ORACLES = {"best keys of each row": "0.75", "best verticals + diagonals": "black"}
"""Drawn in gray and black, without points."""
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Named next to the axis."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT")
    parser.add_argument("--out", type=Path, required=True, help="the picture, png or svg")
    parser.add_argument("--length", type=positive, default=8192, help="tokens of the texts")
    parser.add_argument("--patterns", nargs="+", metavar="NAME")
    args = parser.parse_args(words)
    texts = []
    for path in args.results:
        result = json.loads(path.read_text(encoding="utf-8"))
        texts += [text for text in result["texts"].values() if text["tokens"] == args.length]
    if not texts:
        parser.error(f"--length {args.length}: no text has as many tokens")
    known = dict.fromkeys(row["name"] for text in texts for row in text["rows"])
    patterns = args.patterns or [name for name in PATTERNS if name in known]
    unknown = [name for name in patterns if name not in known]
    if unknown:
        parser.error(f"--patterns {unknown[0]} was not measured; write some of {', '.join(known)}")
    density_figure(texts, patterns).savefig(args.out, dpi=120)
    print(f"wrote {args.out}")
    return 0


def density_figure(texts: list[dict[str, Any]], patterns: list[str]) -> Figure:
    """texts: values of "texts" in a result."""
    kinds = list(dict.fromkeys(text["kind"] for text in texts))
    figure = Figure(figsize=(4 * len(kinds), 8.1), layout="constrained")
    panels = figure.subplots(2, len(kinds), sharey="row", squeeze=False)
    for (above, below), kind in zip(panels.T, kinds):
        of_kind = [text for text in texts if text["kind"] == kind]
        for name, color in ORACLES.items():
            above.plot(*curve(of_kind, name), color=color, linestyle="--", label=name)
        for number, name in enumerate(patterns):
            style = {"color": f"C{number}", "marker": "."}
            above.plot(*curve(of_kind, name), label=name, **style)
            below.plot(*loss_curve(of_kind, name), **style)
        above.set(title=kind, xlabel="recall, mean of all rows", xlim=(0.7, 1.0))
        above.set(yscale="log", ylim=(0.005, 1.0), yticks=DENSITIES)
        below.axhline(0.0, color="black", linewidth=1.0)
        below.set(xlabel="density in all layers", xscale="log", xlim=(0.01, 1.0))
        below.set(ylim=(-0.02, 0.4), xticks=DENSITIES)
        for axis in (above.yaxis, below.xaxis):
            axis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            axis.set_minor_locator(NullLocator())
    panels[0, 0].set_ylabel("density: pairs computed, of the causal ones")
    panels[1, 0].set_ylabel("loss above dense, nats a token")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def curve(texts: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Recalls and densities of a pattern or best choice, ascending: means over the texts."""
    curves = []
    for text in texts:
        rows = [row for row in (*text["oracles"], *text["rows"]) if row["name"] == name]
        curves.append([(row["recall"], row["density"]) for row in rows])
    return _mean_curve(curves)


def loss_curve(texts: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Densities of a pattern in all layers, ascending, and losses above dense, as in curve()."""
    curves = []
    for text in texts:
        found = [row["in_all_layers"] for row in text["rows"] if row["name"] == name]
        curves.append([(quality["density"], quality["above_dense"]) for quality in found])
    return _mean_curve(curves)


def _mean_curve(curves: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """The mean point of each setting, by ascending x. All curves have the same settings."""
    points = [np.mean(of_setting, axis=0).tolist() for of_setting in zip(*curves, strict=True)]
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


def draw(out: Path, found: dict[str, Any]) -> None:
    """loss.png, position.png and lengths.png of a study in `out`, of what is there."""
    rows = found["evaluations"]
    figures = {}
    if found["runs"]:
        figures["loss"] = loss_figure(found["runs"], found["differences"])
    if any(row["position"] for row in rows):
        figures["position"] = position_figure(rows)
    if any(row["scores"] for row in rows):
        figures["lengths"] = lengths_figure(rows, found["lengths"])
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=120)


def loss_figure(runs: dict[str, Any], differences: dict[str, Any]) -> Figure:
    """Loss against steps and against time, and its difference from dense training on the same data."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    by_step, by_time, below = figure.subplots(1, 3)
    for name, run in runs.items():
        style = _style(name, run["method"], run["seed"])
        by_step.plot(run["steps"], smooth(run["loss"]), **style)
        by_time.plot(run["seconds"], smooth(run["loss"]), **style)
        if name in differences:
            part = differences[name]
            below.plot(part["steps"], 100 * smooth(part["shares"]), **style)
    by_step.set(xlabel="step", ylabel="training loss (running mean)")
    by_time.set(xlabel="seconds of training on one GPU", ylabel="training loss (running mean)")
    below.set(xlabel="step", ylabel="difference to dense (%)")
    below.axhline(0, color="gray", linewidth=0.8)
    by_step.legend(fontsize="x-small")
    return figure


def smooth(values: list[float]) -> np.ndarray:
    """Running mean over a tenth of the values, shorter at the ends."""
    half = len(values) // 20
    means = []
    for middle in range(len(values)):
        means.append(np.mean(values[max(0, middle - half) : middle + half + 1]))
    return np.array(means)


def position_figure(rows: list[dict[str, Any]]) -> Figure:
    """Held-out loss against position by kind of text, in the attention that was trained with."""
    kinds = list(next(row["position"] for row in rows if row["position"]))
    figure = Figure(figsize=(5 * len(kinds), 4.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds):
        for row in rows:
            if not _is_as_trained(row) or kind not in row["position"]:
                continue
            known = [part for part in row["position"][kind]["buckets"] if part["loss"] is not None]
            middles = [(part["start"] + part["stop"]) / 2 for part in known]
            style = _style(row["weights"], row["method"], row["seed"])
            axes.plot(middles, [part["loss"] for part in known], marker=".", **style)
        axes.set(title=kind, xlabel="position (tokens)", ylabel="loss")
        axes.legend(fontsize="x-small")
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
            known = [length for length in lengths if f"{task}, {length}" in row["scores"]]
            scores = [row["scores"][f"{task}, {length}"] for length in known]
            style = _style(f"{row['weights']}, {row['mode']}", row["method"], row["seed"])
            axes.plot(known, scores, "-" if _is_as_trained(row) else ":", marker=".", **style)
        _by_length(axes, task)
    grid.flat[0].legend(fontsize="xx-small")
    return figure


def _by_length(axes: Axes, task: str) -> None:
    axes.set_title(task, fontsize="small")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="length (tokens)", ylabel="score (%)")


def _is_as_trained(row: dict[str, Any]) -> bool:
    return row["mode"] in (row["method"], "as_published")


def _style(name: str, method: str, seed: int) -> dict[str, Any]:
    return {"color": COLORS[method], "label": name, "linewidth": 0.8 if seed else 1.6}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
