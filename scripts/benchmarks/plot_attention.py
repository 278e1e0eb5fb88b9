"""A picture of what scripts.benchmarks.attention measured: time against length, and time against density.

    python -m scripts.benchmarks.plot_attention benchmarks/results/A.json ... \\
        --out docs/pictures/attention_h200.png

Times are forward + backward, without the selection. Dense attention is dashed.
Needs matplotlib: pip install -e ".[eval]"
"""

import argparse
import os
import sys
from collections import Counter

from scripts.benchmarks.break_even import head_set, is_sparse, read_rows

COLOURS = {
    "cudnn": "tab:gray",
    "flash-attn-4": "tab:orange",
    "ours, dense": "tab:blue",
    "ours, cudnn": "tab:cyan",
    "ours, triton": "tab:olive",
    "flex": "tab:purple",
    "triton": "tab:green",
    "eager": "tab:brown",
}


def lines(rows: list[dict], x: str) -> dict[str, list[tuple[float, float]]]:
    """{name: (row[x], forward + backward in ms) in the order of x}."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        total_ms = row["forward_ms"] + row["backward_ms"]
        points.setdefault(row["name"], []).append((row[x], total_ms))
    return {name: sorted(of_name) for name, of_name in points.items()}


def longest_scan(rows: list[dict]) -> int:
    """The length at which most densities were measured, of several the longest."""
    cases = {(row["seq_len"], row["target_density"]) for row in rows if is_sparse(row)}
    seen = Counter(seq_len for seq_len, _ in cases)
    return max(seen, key=lambda seq_len: (seen[seq_len], seq_len))


def plot_lengths(axes, rows: list[dict], density: float) -> None:
    """Left: log-log, dense rows and those of one density."""
    dense = [row for row in rows if not is_sparse(row)]
    sparse = [row for row in rows if is_sparse(row) and row["target_density"] == density]
    for name, points in lines(dense, "seq_len").items():
        plot_points(axes, points, "--o", name, name)
    for name, points in lines(sparse, "seq_len").items():
        plot_points(axes, points, "-o", name, f"{name}, {density:.0%}")
    lengths = sorted({row["seq_len"] for row in rows})
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="forward + backward, ms",
        title="against length",
    )
    labels = [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in lengths]
    axes.set_xticks(lengths, labels)
    axes.minorticks_off()


def plot_densities(axes, rows: list[dict], seq_len: int) -> None:
    """Right: every density at one length, dense attention as level lines."""
    rows = [row for row in rows if row["seq_len"] == seq_len]
    dense = [row for row in rows if not is_sparse(row)]
    sparse = [row for row in rows if is_sparse(row)]
    for name, points in lines(dense, "seq_len").items():
        axes.axhline(points[0][1], linestyle="--", color=COLOURS[name], label=name)
    for name, points in lines(sparse, "density").items():
        percent = [(100 * density, ms) for density, ms in points]
        plot_points(axes, percent, "-o", name, name)
    axes.set(xlabel="density, %", title=f"against density at {seq_len:,} tokens")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def plot_points(axes, points: list[tuple[float, float]], style: str, name: str, label: str) -> None:
    """A line in the color of `name`."""
    x = [point[0] for point in points]
    y = [point[1] for point in points]
    axes.plot(x, y, style, color=COLOURS[name], label=label, markersize=4)


def picture(rows: list[dict], density: float, seq_len: int, title: str, out: str) -> None:
    """Write both panels to `out`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    plot_lengths(left, rows, density)
    plot_densities(right, rows, seq_len)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.plot_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "results", nargs="+", help="JSON files of scripts.benchmarks.attention, of one GPU"
    )
    parser.add_argument("--out", required=True, help="the picture, .png")
    parser.add_argument(
        "--heads", default="", help="head set, as 16:2/128; default: the first in the files"
    )
    parser.add_argument("--density", type=float, default=0.05, help="of the left side")
    parser.add_argument(
        "--seq-len",
        type=int,
        default=0,
        help="of the right side; default: where most densities are",
    )
    return parser.parse_args(arguments)


def main(words: list[str]) -> None:
    args = parse(words)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit('scripts.benchmarks.plot_attention needs matplotlib: pip install -e ".[eval]"')
    rows = read_rows(args.results)
    heads = args.heads
    if not heads and rows:
        heads = head_set(rows[0])
    rows = [row for row in rows if head_set(row) == heads]
    densities = {row["target_density"] for row in rows if is_sparse(row)}
    if args.density not in densities:
        sys.exit(
            f"no sparse row at --density {args.density} for heads {heads}; "
            f"measured: {sorted(densities)}"
        )
    seq_len = args.seq_len or longest_scan(rows)
    if not any(row["seq_len"] == seq_len for row in rows):
        sys.exit(
            f"no row at --seq-len {seq_len}; measured: {sorted({row['seq_len'] for row in rows})}"
        )
    picture(rows, args.density, seq_len, f"attention, heads {heads}, bf16, causal", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
