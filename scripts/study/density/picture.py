"""Figure: patterns on the real model, of results of scripts.study.density.

    python -m scripts.study.density.picture RESULT... --out docs/pictures/density_recall.png

For each kind of text a panel of density against recall, and below it one of the loss that the model
has with the pattern in all layers, less that of dense attention, against density. Results of before
losses were measured have the upper panels alone. A point is one setting, the mean over layers and
texts.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from scripts.benchmarks.options import positive
from scripts.study.density.oracles import KEYS, STATIC
from scripts.study.density.texts import KINDS

SHOWN = (
    "joint, behind sinks, both",
    "layer",
    "independent",
    "xattention, stride 16",
    "moba, chunk 128",
)
ORACLES = {KEYS: "0.75", STATIC: "black"}
"""Drawn in gray and black, without points."""
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Named beside the axis."""
LARGEST_LOSS = 0.4
"""Above dense, nats a token. More is worth no look."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.density.picture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT")
    parser.add_argument("--out", type=Path, required=True, help="the picture, png or svg")
    parser.add_argument("--length", type=positive, default=8192, help="tokens of the texts")
    parser.add_argument("--patterns", nargs="+", default=list(SHOWN), metavar="NAME")
    args = parser.parse_args(words)
    texts = []
    for path in args.results:
        result = json.loads(path.read_text(encoding="utf-8"))
        texts += [text for text in result["texts"].values() if text["tokens"] == args.length]
    try:
        draw(texts, args.patterns).savefig(args.out, dpi=120)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


def draw(texts: list[dict[str, Any]], patterns: list[str]) -> Figure:
    """texts: values of "texts" in a result. Raises ValueError for a pattern that no text has."""
    kinds = [kind for kind in KINDS if any(text["kind"] == kind for text in texts)]
    if not kinds:
        raise ValueError("no text has --length tokens; write another")
    with_losses = [text for text in texts if "at_density" in text]
    rows = 2 if with_losses else 1
    figure = Figure(figsize=(4 * len(kinds), 3.9 * rows + 0.3), layout="constrained")
    panels = figure.subplots(rows, len(kinds), sharey="row", squeeze=False)
    for panel, kind in zip(panels[0], kinds):
        _draw_recalls(panel, [text for text in texts if text["kind"] == kind], patterns)
        panel.set_title(kind)
    panels[0, 0].set_ylabel("density: pairs computed, of the causal ones")
    if with_losses:
        for panel, kind in zip(panels[1], kinds):
            _draw_losses(panel, [text for text in with_losses if text["kind"] == kind], patterns)
        panels[1, 0].set_ylabel("loss above dense, nats a token")
    named = {}
    for panel in panels[:, 0]:
        lines, names = panel.get_legend_handles_labels()
        named |= dict(zip(names, lines))
    # Names of patterns are long.
    columns = min(len(named), len(kinds) + 1)
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=columns)
    return figure


def _draw_recalls(panel: Axes, texts: list[dict[str, Any]], patterns: list[str]) -> None:
    """Density against recall. texts: of one kind."""
    for name, color in ORACLES.items():
        panel.plot(*curve(texts, name), color=color, linestyle="--", label=name)
    for number, name in enumerate(patterns):
        panel.plot(*curve(texts, name), color=f"C{number}", marker=".", label=name)
    panel.set(xlabel="recall, mean of all rows", xlim=(0.7, 1.0))
    panel.set(yscale="log", ylim=(0.005, 1.0), yticks=DENSITIES)
    panel.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.3)


def _draw_losses(panel: Axes, texts: list[dict[str, Any]], patterns: list[str]) -> None:
    """Loss above dense against density, both of the forward with the pattern in all layers."""
    panel.axhline(0.0, color="black", linewidth=1.0, label="dense")
    for number, name in enumerate(patterns):
        # Of another file than the rest, perhaps one from before losses were measured.
        if any(row["name"] == name for text in texts for row in text["rows"]):
            panel.plot(*loss_curve(texts, name), color=f"C{number}", marker=".", label=name)
    panel.set(xlabel="density in all layers", xscale="log", xlim=(0.01, 1.0))
    panel.set(ylim=(-0.02, LARGEST_LOSS), xticks=DENSITIES)
    panel.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.3)


def curve(texts: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Recalls and densities of a pattern or oracle, ascending: means over the texts that have it.

    Raises ValueError if none has.
    """
    curves = []
    for text in texts:
        rows = [row for row in (*text["oracles"], *text["rows"]) if row["name"] == name]
        if rows:
            curves.append([(row["recall"], row["density"]) for row in rows])
    if not curves:
        raise ValueError(f'--patterns: no text has "{name}"')
    return _mean_curve(curves)


def loss_curve(texts: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Densities of a pattern in all layers, ascending, and losses above dense, as in curve()."""
    curves = []
    for text in texts:
        found = [row["in_all_layers"] for row in text["rows"] if row["name"] == name]
        if found:
            curves.append([(quality["density"], quality["above_dense"]) for quality in found])
    return _mean_curve(curves)


def _mean_curve(curves: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Of curves that have the same settings: the mean point of each setting, by ascending x."""
    means = []
    for of_setting in zip(*curves, strict=True):
        xs, ys = zip(*of_setting)
        means.append((sum(xs) / len(xs), sum(ys) / len(ys)))
    means.sort()
    return [x for x, _ in means], [y for _, y in means]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
