"""Draws timelines of attention over several GPUs, from JSON of scripts.benchmarks.context_parallel.

    python -m scripts.benchmarks.plot_timeline benchmarks/results/FILE.json \\
        --out docs/pictures/timeline.png

A lane is a stream of rank 0: one for the kernels, one for each communicator. Where a lane of sends
and receives is long and the lane of kernels has no gap, the transfer is hidden. NCCL's kernels wait
for their peer inside, so that they are longer than the transfer.
Needs matplotlib: pip install -e ".[eval]"
"""

import argparse
import json
import os
import sys

from scripts.benchmarks.traces import KINDS

COLOURS = dict(zip(KINDS, ("tab:green", "tab:orange", "tab:blue", "tab:gray"), strict=True))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.plot_timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "result", help="JSON file of scripts.benchmarks.context_parallel with the case timeline"
    )
    parser.add_argument("--out", required=True, help="the picture, .png")
    parser.add_argument("--schedules", nargs="+", help="default: all in the file")
    args = parser.parse_args(words)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit('scripts.benchmarks.plot_timeline needs matplotlib: pip install -e ".[eval]"')

    with open(args.result) as file:
        result = json.load(file)
    rows = [row for row in result["rows"] if row["case"] == "timeline" and row.get("intervals")]
    measured = [row["schedule"] for row in rows]
    missing = sorted({*(args.schedules or [])} - {*measured})
    if missing or not rows:
        sys.exit(
            f"no timeline of {', '.join(missing) or 'any schedule'} in {args.result}; "
            f"there are: {measured}"
        )
    if args.schedules:
        rows = [row for row in rows if row["schedule"] in args.schedules]
    picture(rows, f"rank 0 of {result['ranks']}, {result['gpu']}, forward and backward", args.out)


def lanes(intervals: list[dict]) -> dict[str, list[dict]]:
    """The intervals of each stream under the name of what it is mostly for, the kernels' first."""
    streams: dict[object, list[dict]] = {}
    for interval in intervals:
        streams.setdefault(interval["stream"], []).append(interval)

    main_kind = {}
    for stream, of_stream in streams.items():
        spent = dict.fromkeys(KINDS, 0)
        for interval in of_stream:
            spent[interval["kind"]] += interval["duration_us"]
        main_kind[stream] = max(KINDS, key=spent.get)

    order = sorted(streams, key=lambda stream: (KINDS.index(main_kind[stream]), str(stream)))
    return {f"{main_kind[stream]} {stream}": streams[stream] for stream in order}


def picture(rows: list[dict], title: str, out: str) -> None:
    """A panel for each row, all to the same scale of time, written to `out`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    lanes_of_rows = [lanes(row["intervals"]) for row in rows]
    heights = [max(1, len(of_row)) for of_row in lanes_of_rows]
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
            bars = []
            colours = []
            for interval in intervals:
                bars.append((interval["start_us"] / 1e3, interval["duration_us"] / 1e3))
                colours.append(COLOURS[interval["kind"]])
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colours)
        axes.set_yticks(range(len(of_row)), list(of_row), fontsize=7)
        axes.invert_yaxis()
        described = f"{row['schedule']}, {row['layout']}, {row['seq_len']:,} tokens"
        axes.set_title(described, fontsize=9, loc="left")
    panels[-1, 0].set_xlabel("ms")
    handles = [patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    panels[0, 0].legend(
        handles=handles, fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1, 1)
    )
    figure.suptitle(title, fontsize=9)
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    figure.savefig(out, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
