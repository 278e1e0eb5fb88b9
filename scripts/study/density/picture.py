"""Figure: density against recall on the real model, of results of scripts.study.density.

    python -m scripts.study.density.picture RESULT... --out docs/pictures/density_recall.png

A panel for each kind of text. A point is one setting, the mean over layers and texts.
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

SHOWN = ("layer", "joint", "independent", "xattention, stride 8", "moba, chunk 128")
ORACLES = {KEYS: "0.75", STATIC: "black"}
"""Drawn in gray and black, without points."""
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Named beside the axis."""


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
    figure = Figure(figsize=(4 * len(kinds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for panel, kind in zip(panels, kinds):
        of_kind = [text for text in texts if text["kind"] == kind]
        for name in (*ORACLES, *patterns):
            _line(panel, name, curve(of_kind, name))
        panel.set(title=kind, xlabel="recall, mean of all rows", xlim=(0.7, 1.0))
        panel.set(yscale="log", ylim=(0.005, 1.0), yticks=DENSITIES)
        panel.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("density: pairs computed, of the causal ones")
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper center", ncols=len(names))
    return figure


def curve(texts: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Recalls and densities of a pattern or oracle, ascending: means over the texts that have it.

    Raises ValueError if none has.
    """
    points = []
    for text in texts:
        rows = [row for row in (*text["oracles"], *text["rows"]) if row["name"] == name]
        if rows:
            points.append([(row["recall"], row["density"]) for row in rows])
    if not points:
        raise ValueError(f'--patterns: no text has "{name}"')
    means = []
    for of_setting in zip(*points, strict=True):
        recalls, densities = zip(*of_setting)
        means.append((sum(recalls) / len(recalls), sum(densities) / len(densities)))
    means.sort()
    return [recall for recall, _ in means], [density for _, density in means]


def _line(panel: Axes, name: str, points: tuple[list[float], list[float]]) -> None:
    if name in ORACLES:
        panel.plot(*points, color=ORACLES[name], linestyle="--", label=name)
    else:
        panel.plot(*points, marker=".", label=name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
