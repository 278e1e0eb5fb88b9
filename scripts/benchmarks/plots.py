"""A picture of what scripts.benchmarks.attention measured.

    python -m scripts.benchmarks.plots benchmarks/results/A.json ... --out attention.png

Time against length and against density; dense attention is dashed. Times are forward + backward,
without the selection.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

from scripts.benchmarks.options import parser_of

NAMES = ("ours, dense", "flash-attn-4", "triton", "eager", "flex", "ours, triton")
NAMES += ("ours, cudnn", "cudnn")
COLORS = {name: f"C{number}" for number, name in enumerate(NAMES)}


def main(words: list[str]) -> int:
    parser = parser_of("scripts.benchmarks.plots", __doc__)
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
    draw_attention(attention_rows(results), args)
    return 0


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
    if not rows:
        sys.exit("no file has rows of python -m scripts.benchmarks.attention sparse")
    return list(rows.values())


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
