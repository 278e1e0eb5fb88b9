"""Pictures of results: attention, density of patterns or by length, or the study at equal time.

    python -m scripts.benchmarks.plots benchmarks/results/attention_h200.json --out attention.png

Needs pip install -e ".[train]". The results say which it is:

scripts.benchmarks.attention  forward + backward, without the selection, against length and against
                              density; dense attention is dashed
scripts.study.density         by kind of text, density against recall, and below it the loss with
                              the pattern in all layers, less that of dense attention, against
                              density. A point is one setting, the mean over layers and texts
titan-sparse choose           density and speed of a training step of each recall against length
scripts.study --equal-time    held-out loss against seconds of training
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from scripts.study.settings import DENSE, SPARSE
from titan_sparse.commands import parser_of, positive

NAMES = ("ours, dense", "flash-attn-4", "triton", "eager", "flex", "ours, triton")
NAMES += ("ours, cudnn", "cudnn")
COLORS = {name: f"C{number}" for number, name in enumerate(NAMES)}
PATTERNS = (
    "joint, behind sinks, both",
    "independent",
    "xattention, stride 16",
    "moba, chunk 128",
)
ORACLES = {"best keys of each row": "0.75", "best verticals + diagonals": "black"}
"""The best choices given all rows, of older results: drawn in gray and black, without points."""
DENSE_SETTING = "dense"
"""The setting of titan-sparse choose that the others are compared with."""
SPEEDUPS = (0.5, 1, 2, 4, 8)
"""Named next to the axis."""
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Named next to the axis."""


def main(words: list[str]) -> int:
    parser = parser_of(__doc__, "scripts.benchmarks.plots")
    add = parser.add_argument
    add("results", type=Path, nargs="+", metavar="RESULT")
    add("--out", type=Path, required=True, help="the picture, png or svg")
    add("--density", type=float, default=0.05, help="of attention against length")
    add("--length", type=positive, default=8192, help="tokens of the texts of patterns")
    add("--patterns", nargs="+", metavar="NAME", help="patterns, or methods of the study")
    add("--against", choices=("seconds", "tokens"), default="seconds", help="of the study's curves")
    args = parser.parse_args(words)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    try:
        if all("runs" in result for result in results):
            methods = args.patterns or [DENSE, SPARSE]
            figure = equal_time_figure(results, methods, args.against)
        elif all("texts" in result for result in results):
            figure = density_figure(results, args.length, args.patterns)
        elif all("setting" in row for result in results for row in result["rows"]):
            figure = growth_figure(results)
        else:
            figure = attention_figure(results, args.density)
    except ValueError as error:
        parser.error(str(error))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=120)
    print(f"wrote {args.out}")
    return 0


def attention_figure(results: list[dict], density: float) -> Figure:
    gpus = {result["gpu"] for result in results}
    if len(gpus) > 1:
        raise ValueError(f"the files are of {', '.join(sorted(gpus))}; write those of one GPU")
    rows = attention_rows(results)
    heads = rows[0]["head_set"] if rows else ""
    rows = [row for row in rows if row["head_set"] == heads]
    dense = [row for row in rows if row["target_density"] is None]
    sparse = [row for row in rows if row["target_density"] is not None]
    of_density = [row for row in sparse if row["target_density"] == density]
    if not of_density:
        raise ValueError(f"no row of attention has --density {density}; write a measured one")
    # The length at which most densities were measured, of several the longest.
    seen = Counter(seq_len for seq_len, _ in {(r["seq_len"], r["target_density"]) for r in sparse})
    longest = max(seen, key=lambda seq_len: (seen[seq_len], seq_len))

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for style, shown in (("--o", dense), ("-o", of_density)):
        for name, points in lines(shown, "seq_len").items():
            left.plot(*zip(*points), style, color=COLORS[name], label=name, markersize=4)
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward + backward, ms")
    left.set_title(f"against length, sparse at {density:.0%}")
    for name, points in lines([r for r in dense if r["seq_len"] == longest], "seq_len").items():
        right.axhline(points[0][1], linestyle="--", color=COLORS[name], label=name)
    for name, points in lines([r for r in sparse if r["seq_len"] == longest], "density").items():
        right.plot(*zip(*points), "-o", color=COLORS[name], label=name, markersize=4)
    right.set(xlabel="density", title=f"against density at {longest:,} tokens")
    right.set_xlim(left=0)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"attention, heads {heads}, bf16, causal", fontsize=10)
    return figure


def attention_rows(results: list[dict]) -> list[dict]:
    """Rows of several results together; of rows for the same case the last result's.

    To each row are added head_set, "16:2/128" (query heads, KV heads, head_dim), and total_ms.
    """
    rows = {}
    for result in results:
        for row in result["rows"]:
            if "target_density" not in row or "error" in row:
                continue
            row["head_set"] = f"{row['heads']}:{row['kv_heads']}/{row['head_dim']}"
            row["total_ms"] = row["forward_ms"] + row["backward_ms"]
            size = (row["head_set"], row["block_size"], row["seq_len"])
            case = (row["name"], size, row["target_density"])
            rows[case] = row
    return list(rows.values())


def lines(rows: list[dict], x: str) -> dict[str, list[tuple[float, float]]]:
    """{name: (row[x], forward + backward in ms) in the order of x}."""
    points = defaultdict(list)
    for row in sorted(rows, key=lambda row: row[x]):
        points[row["name"]].append((row[x], row["total_ms"]))
    return points


def equal_time_figure(results: list[dict[str, Any]], methods: list[str], against: str) -> Figure:
    """A panel for each study: held-out loss, mean over kinds of text and seeds, in the attention
    that is trained with. A band shows the seeds. against: "seconds" or "tokens" of training."""
    figure = Figure(figsize=(5 * len(results), 3.6), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, found in zip(panels, results, strict=True):
        context = max(found["lengths"])
        for method in methods:
            runs = [run for run in found["runs"].values() if run["method"] == method]
            curves = []
            for run in runs:
                losses = [np.mean(list(point["loss"].values())) for point in run["held_out"]]
                of_step = run["step_seconds"] if against == "seconds" else context
                curves.append(list(zip((of_step * p["step"] for p in run["held_out"]), losses)))
            if curves:
                name = method.replace("recall_", "recall 0.")
                label = "dense attention" if method == DENSE else f"titan_sparse, {name}"
                [line] = axes.plot(*mean_curve(curves), marker=".", label=label)
                seconds = mean_curve(curves)[0]
                losses = [[loss for _, loss in sorted(of_seed)] for of_seed in curves]
                least, most = np.min(losses, axis=0), np.max(losses, axis=0)
                axes.fill_between(seconds, least, most, color=line.get_color(), alpha=0.2)
        seeds = len({run["seed"] for run in found["runs"].values()})
        title = f"{found['model']}, {context:,} tokens" + (f", {seeds} seeds" if seeds > 1 else "")
        axes.set(title=title, ylabel="held-out loss, nats per token")
        axes.set(xlabel=f"{against} of training on one GPU")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def growth_figure(results: list[dict[str, Any]]) -> Figure:
    """Density and speed-up of each recall, against length."""
    seconds: dict[int, float] = {}
    points = defaultdict(list)
    for row in (row for result in results for row in result["rows"]):
        if row["setting"] == DENSE_SETTING:
            seconds[row["tokens"]] = row["step_seconds"]
        else:
            points[row["setting"]].append(row)

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for setting, rows in points.items():
        tokens = [row["tokens"] for row in rows]
        left.plot(tokens, [row["density"] for row in rows], "-o", label=setting, markersize=4)
        speedups = [seconds[row["tokens"]] / row["step_seconds"] for row in rows]
        right.plot(tokens, speedups, "-o", label=setting, markersize=4)
    left.set(yscale="log", title="Density: share of the allowed pairs\nthat are computed")
    left.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    left.set_yticks(DENSITIES[2:6])
    right.set(yscale="log", title="Speed of a training step,\nrelative to dense attention")
    right.set_yticks(SPEEDUPS, [f"{speedup:g}x" for speedup in SPEEDUPS])
    right.axhline(1, color="black", linewidth=1)
    right.axhspan(right.get_ylim()[0], 1, color="tab:red", alpha=0.12, linewidth=0)
    right.text(max(tokens), 0.96, "dense is faster", ha="right", va="top", color="tab:red")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="sequence length (tokens)")
        axes.set_xticks(tokens, [f"{length // 1024}K" for length in tokens])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def density_figure(
    results: list[dict[str, Any]], tokens: int, patterns: list[str] | None
) -> Figure:
    texts = []
    for result in results:
        texts += [text for text in result["texts"].values() if text["tokens"] == tokens]
    if not texts:
        raise ValueError(f"no text has --length {tokens}; write a measured one")
    known = dict.fromkeys(row["name"] for text in texts for row in text["rows"])
    patterns = patterns or [name for name in PATTERNS if name in known]
    unknown = [name for name in patterns if name not in known]
    if unknown:
        raise ValueError(
            f"--patterns {unknown[0]} was not measured; write some of {', '.join(known)}"
        )
    kinds = list(dict.fromkeys(text["kind"] for text in texts))
    figure = Figure(figsize=(4 * len(kinds), 8.1), layout="constrained")
    panels = figure.subplots(2, len(kinds), sharey="row", squeeze=False)
    for (above, below), kind in zip(panels.T, kinds):
        of_kind = [text for text in texts if text["kind"] == kind]
        known = {row["name"] for text in of_kind for row in text.get("oracles", ())}
        for name, color in ORACLES.items():
            if name not in known:
                continue
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
        rows = [row for row in (*text.get("oracles", ()), *text["rows"]) if row["name"] == name]
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
