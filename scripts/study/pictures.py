"""A picture of density against recall, and of the loss; needs pip install -e ".[eval]".

    python -m scripts.study.pictures RESULT... --out docs/pictures/density_recall.png

draws results of scripts.study.density, or the equal-time results of scripts.study: held-out loss
against seconds of training. Of density, for each kind of text: density against recall, and below it
the loss with the pattern in all layers, less that of dense attention, against density. A point is
one setting, the mean over layers and texts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from scripts.benchmarks.options import parser_of, positive
from scripts.study.settings import DENSE, SPARSE

PATTERNS = (
    "joint, behind sinks, both",
    "independent",
    "xattention, stride 16",
    "moba, chunk 128",
)
ORACLES = {"best keys of each row": "0.75", "best verticals + diagonals": "black"}
"""Drawn in gray and black, without points."""
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Named next to the axis."""


def main(words: list[str]) -> int:
    parser = parser_of("scripts.study.pictures", __doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT")
    parser.add_argument("--out", type=Path, required=True, help="the picture, png or svg")
    parser.add_argument("--length", type=positive, default=8192, help="tokens of the texts")
    parser.add_argument("--patterns", nargs="+", metavar="NAME")
    args = parser.parse_args(words)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    if all("runs" in result for result in results):
        equal_time_figure(results, args.patterns or [DENSE, SPARSE]).savefig(args.out, dpi=120)
        print(f"wrote {args.out}")
        return 0
    texts = []
    for result in results:
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


def equal_time_figure(results: list[dict[str, Any]], methods: list[str]) -> Figure:
    """A panel for each study: held-out loss, mean over kinds of text and seeds, in the attention
    that is trained with."""
    figure = Figure(figsize=(5 * len(results), 3.6), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, found in zip(panels, results, strict=True):
        for method in methods:
            runs = [run for run in found["runs"].values() if run["method"] == method]
            curves = []
            for run in runs:
                losses = [np.mean(list(point["loss"].values())) for point in run["held_out"]]
                seconds = [run["step_seconds"] * point["step"] for point in run["held_out"]]
                curves.append(list(zip(seconds, losses)))
            if curves:
                label = "dense attention" if method == DENSE else f"titan_sparse, {method}"
                axes.plot(*mean_curve(curves), marker=".", label=label)
        axes.set(title=f"{max(found['lengths']):,} tokens", xlabel="seconds of training on one GPU")
        axes.set(ylabel="held-out loss, nats a token")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def density_figure(texts: list[dict[str, Any]], patterns: list[str]) -> Figure:
    """texts: values of "texts" in a result."""
    kinds = list(dict.fromkeys(text["kind"] for text in texts))
    figure = Figure(figsize=(4 * len(kinds), 8.1), layout="constrained")
    panels = figure.subplots(2, len(kinds), sharey="row", squeeze=False)
    for (above, below), kind in zip(panels.T, kinds):
        of_kind = [text for text in texts if text["kind"] == kind]
        for name, color in ORACLES.items():
            above.plot(
                *curve(of_kind, name, "recall", "density"), color=color, linestyle="--", label=name
            )
        for number, name in enumerate(patterns):
            style = {"color": f"C{number}", "marker": "."}
            above.plot(*curve(of_kind, name, "recall", "density"), label=name, **style)
            below.plot(*curve(of_kind, name, "density", "above_dense"), **style)
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


def curve(
    texts: list[dict[str, Any]], name: str, x: str, y: str
) -> tuple[list[float], list[float]]:
    """Two measures of a pattern or best choice, ascending by the first: means over the texts."""
    curves = []
    for text in texts:
        rows = [row for row in (*text["oracles"], *text["rows"]) if row["name"] == name]
        if y == "above_dense":
            rows = [row["in_all_layers"] for row in rows]
        curves.append([(row[x], row[y]) for row in rows])
    return mean_curve(curves)


def mean_curve(curves: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """The mean point of each setting, by ascending x. All curves have the same settings."""
    points = [np.mean(of_setting, axis=0).tolist() for of_setting in zip(*curves, strict=True)]
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
