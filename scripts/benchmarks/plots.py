"""Pictures of what benchmarks of attention measured.

    python -m scripts.benchmarks.plots attention benchmarks/results/A.json ... --out attention.png
    python -m scripts.benchmarks.plots timeline benchmarks/results/FILE.json --out timeline.png

attention  time against length and against density, of rows of scripts.benchmarks.attention; dense
           attention is dashed. Times are forward + backward, without the selection. Also prints up
           to which density sparse pays at each length: with the selection, against FlashAttention-4,
           or cuDNN where that was not timed
timeline   rows of the case timeline of scripts.benchmarks.context_parallel. A lane is a stream of
           rank 0: one for the kernels, one for each communicator. Where a lane of sends and
           receives is long and the lane of kernels has no gap, the transfer is hidden. NCCL's
           kernels wait for their peer inside, so that they are longer than the transfer
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from scripts.benchmarks.options import parser_of
from scripts.benchmarks.traces import KINDS

NAMES = ("ours, dense", "flash-attn-4", "triton", "eager", "flex", "ours, triton")
NAMES += ("ours, cudnn", "cudnn")
COLORS = {name: f"C{number}" for number, name in enumerate(NAMES)}
COLORS_OF_KINDS = dict(zip(KINDS, ("tab:green", "tab:orange", "tab:blue", "tab:gray"), strict=True))


def main(words: list[str]) -> int:
    parser = parser_of("scripts.benchmarks.plots", __doc__)
    parser.add_argument("kind", choices=["attention", "timeline"])
    parser.add_argument("results", nargs="+", help="JSON files of one GPU")
    parser.add_argument("--out", required=True, help="the picture, .png")
    parser.add_argument("--heads", help="of attention, as 16:2/128; default: the first")
    parser.add_argument("--density", type=float, default=0.05, help="of attention's left side")
    args = parser.parse_args(words)
    import matplotlib

    matplotlib.use("Agg")
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(Path(path).read_text()) for path in args.results]
    gpus = {result["gpu"] for result in results}
    if len(gpus) > 1:
        sys.exit(f"the files are of different GPUs ({', '.join(sorted(gpus))}). Give those of one")
    if args.kind == "timeline":
        draw_timeline(results[0], args.out)
    else:
        draw_attention(attention_rows(results), args)
    return 0


# attention ----------------------------------------------------------------------------------------


def attention_rows(results: list[dict]) -> list[dict]:
    """Rows of several results together; of rows for the same case the last result's.

    To each row are added head_set, "16:2/128" (query heads, KV heads, head_dim), and total_ms.
    """
    rows = {}
    for result in results:
        for row in result["rows"]:
            if "target_density" in row and "error" not in row:
                row["head_set"] = f"{row['heads']}:{row['kv_heads']}/{row['head_dim']}"
                row["total_ms"] = row["forward_ms"] + row["backward_ms"]
                size = (row["head_set"], row["block_size"], row["seq_len"])
                rows[row["name"], size, row["target_density"]] = row
    if not rows:
        sys.exit("no file has rows of python -m scripts.benchmarks.attention sparse")
    return list(rows.values())


def break_even(dense: list[dict], sparse: list[dict]) -> Iterator[str]:
    """For each backend and length, up to which density sparse pays. Rows of one head set."""
    limits = {}
    for peer in ("cudnn", "flash-attn-4"):
        limits |= {row["seq_len"]: row["total_ms"] for row in dense if row["name"] == peer}
    points = defaultdict(list)
    for row in sparse:
        cost = row["total_ms"] + row["selection_ms"]
        points[row["name"], row["seq_len"]].append((row["density"], cost))
    for (backend, seq_len), measured in sorted(points.items()):
        if seq_len in limits:
            found = first_reaching(measured, limits[seq_len])
            yield f"{backend}: at {seq_len:,} tokens sparse pays up to a density of {found}"


def first_reaching(points: Iterable[tuple[float, float]], level: float) -> str:
    """The smallest x where y, linear between the (x, y) points, rises to `level`.

    Nothing is extrapolated: "above" the largest x, or "below" the smallest.
    """
    points = sorted(points)
    if points[0][1] >= level:
        return f"below {points[0][0]:.1%}"
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= level:
            return f"{x0 + (x1 - x0) * (level - y0) / (y1 - y0):.1%}"
    return f"above {points[-1][0]:.1%}"


def lines(rows: list[dict], x: str) -> dict[str, list[tuple[float, float]]]:
    """{name: (row[x], forward + backward in ms) in the order of x}."""
    points = defaultdict(list)
    for row in sorted(rows, key=lambda row: row[x]):
        points[row["name"]].append((row[x], row["total_ms"]))
    return points


def draw_attention(rows: list[dict], args: argparse.Namespace) -> None:
    from matplotlib import pyplot

    heads = args.heads or rows[0]["head_set"]
    rows = [row for row in rows if row["head_set"] == heads]
    dense = [row for row in rows if row["target_density"] is None]
    sparse = [row for row in rows if row["target_density"] is not None]
    for line in break_even(dense, sparse):
        print(line)
    of_density = [row for row in sparse if row["target_density"] == args.density]
    if not of_density:
        sys.exit(f"no row of heads {heads} has --density {args.density}")
    # The length at which most densities were measured, of several the longest.
    seen = Counter(seq_len for seq_len, _ in {(r["seq_len"], r["target_density"]) for r in sparse})
    longest = max(seen, key=lambda seq_len: (seen[seq_len], seq_len))

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for style, shown in (("--o", dense), ("-o", of_density)):
        for name, points in lines(shown, "seq_len").items():
            left.plot(*zip(*points), style, color=COLORS[name], label=name, markersize=4)
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward + backward, ms")
    left.set_title(f"against length, sparse at {args.density:.0%}")
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
    figure.savefig(args.out, dpi=110)
    pyplot.close(figure)


# timeline -----------------------------------------------------------------------------------------


def lanes(intervals: list[dict]) -> dict[str, list[dict]]:
    """The intervals of each stream under the name of its main use, the kernels' stream first."""
    streams = defaultdict(list)
    spent = defaultdict(Counter)
    for interval in intervals:
        streams[interval["stream"]].append(interval)
        spent[interval["stream"]][interval["kind"]] += interval["duration_us"]
    main = {stream: of_kind.most_common(1)[0][0] for stream, of_kind in spent.items()}
    order = sorted(streams, key=lambda stream: (KINDS.index(main[stream]), str(stream)))
    return {f"{main[stream]} {stream}": streams[stream] for stream in order}


def draw_timeline(result: dict, out: str) -> None:
    """A panel for each schedule, all to the same scale of time."""
    from matplotlib import patches, pyplot

    rows = [row for row in result["rows"] if row.get("intervals")]
    if not rows:
        sys.exit("the file has no rows of the case timeline")
    lanes_of_rows = [lanes(row["intervals"]) for row in rows]
    heights = [len(of_row) for of_row in lanes_of_rows]
    figure, panels = pyplot.subplots(
        len(rows),
        1,
        figsize=(10, 1 + sum(0.3 * height + 0.6 for height in heights)),
        sharex=True,
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for axes, row, of_row in zip(panels[:, 0], rows, lanes_of_rows):
        for place, intervals in enumerate(of_row.values()):
            bars = [(each["start_us"] / 1e3, each["duration_us"] / 1e3) for each in intervals]
            colors = [COLORS_OF_KINDS[each["kind"]] for each in intervals]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colors)
        axes.set_yticks(range(len(of_row)), list(of_row), fontsize=7)
        axes.invert_yaxis()
        described = f"{row['schedule']}, {row['layout']}, {row['seq_len']:,} tokens"
        axes.set_title(described, fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("ms")
    handles = [patches.Patch(color=color, label=kind) for kind, color in COLORS_OF_KINDS.items()]
    panels[0, 0].legend(
        handles=handles, fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1, 1)
    )
    title = f"rank 0 of {result['ranks']}, {result['gpu']}, forward and backward"
    figure.suptitle(title, fontsize=9)
    figure.savefig(out, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
