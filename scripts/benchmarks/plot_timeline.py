"""Timelines of attention over several GPUs: recorded for scripts.benchmarks.context_parallel, drawn from its JSON.

    python -m scripts.benchmarks.plot_timeline benchmarks/results/FILE.json --out docs/pictures/timeline.png

A lane is a stream of rank 0: one for the kernels, one for each communicator. Where a lane of sends and receives is long
and the lane of kernels has no gap, the transfer is hidden. NCCL's kernels wait for their peer inside, so that they are
longer than the transfer. Needs matplotlib: pip install -e ".[eval]"
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from scripts.benchmarks.context_parallel_timing import Bench

MOST_INTERVALS = 2000
"""Kept of one trace: about 250 KB of JSON."""
COLOURS = {
    "compute": "tab:green",
    "send-receive": "tab:orange",
    "collective": "tab:blue",
    "copy": "tab:gray",
}


# Recording ----------------------------------------------------------------------------------------------------------


def traced(bench: "Bench", steps: Sequence[Callable[[], object]]) -> list[dict]:
    """intervals() of rank 0 in one call of the steps, after one to warm up; the other ranks take part and return []."""
    from scripts.benchmarks.context_parallel_timing import start_together

    for step in steps:
        step()
    on_gpu = bench.device.type == "cuda"
    activity = (
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    )
    with (
        torch.profiler.profile(activities=[activity])
        if bench.rank == 0
        else contextlib.nullcontext() as profile
    ):
        start_together(bench)
        for step in steps:
            step()
        if on_gpu:
            torch.cuda.synchronize()
    return intervals(after_start(_trace(profile)), on_gpu) if bench.rank == 0 else []


def _trace(profile: torch.profiler.profile) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            return json.load(file)["traceEvents"]


def after_start(events: list[dict]) -> list[dict]:
    """What began after start_together(), which ends with the first collective."""
    timed = [e for e in events if "dur" in e and e.get("cat") in ("kernel", "cpu_op")]
    start = min((e for e in timed if kind(e) == "collective"), key=lambda e: e["ts"])
    return [e for e in events if e.get("ts", 0) >= start["ts"] + start["dur"]]


def intervals(events: list[dict], on_gpu: bool) -> list[dict]:
    """start_us, duration_us, stream, kind (a key of COLOURS) and short name of what ran, by start, the first at 0.

    events: of a Chrome trace. Neighbours of one kind on one stream are merged over gaps that are short, and longer ones
    until MOST_INTERVALS are left. Without a GPU the operators of the CPU, by thread.
    """
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    found = [
        {
            "start_us": e["ts"],
            "duration_us": e["dur"],
            "stream": e["tid"],
            "kind": kind(e),
            "name": short(e["name"]),
        }
        for e in events
        if e.get("cat") in wanted
    ]
    found.sort(key=lambda x: (x["start_us"], -x["duration_us"]))
    gap, merged = 5.0, _merge(found, 5.0)
    while len(merged) > MOST_INTERVALS:
        gap *= 2
        merged = _merge(found, gap)
    first = merged[0]["start_us"] if merged else 0
    return [
        x | {"start_us": round(x["start_us"] - first, 1), "duration_us": round(x["duration_us"], 1)}
        for x in merged
    ]


def _merge(found: list[dict], gap: float) -> list[dict]:
    """Neighbours become one interval, under the name of the longest of them."""
    merged, last = [], {}
    for x in found:
        before, longest = last.get(x["stream"], (None, 0))
        if (
            before
            and before["kind"] == x["kind"]
            and x["start_us"] <= before["start_us"] + before["duration_us"] + gap
        ):
            end = max(before["start_us"] + before["duration_us"], x["start_us"] + x["duration_us"])
            before["duration_us"] = end - before["start_us"]
            if x["duration_us"] > longest:
                before["name"], longest = x["name"], x["duration_us"]
        else:
            before, longest = dict(x), x["duration_us"]
            merged.append(before)
        last[x["stream"]] = (before, longest)
    return merged


def kind(event: dict) -> str:
    """compute, send-receive, collective or copy."""
    name = event["name"].lower()
    if "sendrecv" in name or any(
        word in name for word in ("gloo:send", "gloo:recv", "c10d::send", "c10d::recv")
    ):
        return "send-receive"
    if any(word in name for word in ("nccl", "gloo:", "c10d::")):
        return "collective"
    return "copy" if "memcpy" in event["cat"] or "memset" in event["cat"] else "compute"


def short(name: str) -> str:
    """A kernel's name without return type, templates and arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:40]


# Drawing ------------------------------------------------------------------------------------------------------------


def lanes(intervals: list[dict]) -> dict[str, list[dict]]:
    """The intervals of each stream under the name of what it is mostly for, the kernels' first."""
    streams: dict[object, list[dict]] = {}
    for x in intervals:
        streams.setdefault(x["stream"], []).append(x)
    spent = lambda some, kind: sum(x["duration_us"] for x in some if x["kind"] == kind)
    main = {
        stream: max(COLOURS, key=lambda kind: spent(some, kind)) for stream, some in streams.items()
    }
    order = sorted(streams, key=lambda stream: (list(COLOURS).index(main[stream]), str(stream)))
    return {f"{main[stream]} {stream}": streams[stream] for stream in order}


def picture(rows: list[dict], title: str, out: str) -> None:
    """A panel for each row, all to the same scale of time, written to `out`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    drawn = [lanes(row["intervals"]) for row in rows]
    heights = [max(1, len(x)) for x in drawn]
    figure, panels = pyplot.subplots(
        len(rows),
        1,
        figsize=(10, 1 + sum(0.3 * n + 0.6 for n in heights)),
        sharex=True,
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for axes, row, found in zip(panels[:, 0], rows, drawn):
        for place, some in enumerate(found.values()):
            bars = [(x["start_us"] / 1e3, x["duration_us"] / 1e3) for x in some]
            axes.broken_barh(
                bars, (place - 0.4, 0.8), facecolors=[COLOURS[x["kind"]] for x in some]
            )
        axes.set_yticks(range(len(found)), list(found), fontsize=7)
        axes.invert_yaxis()
        axes.set_title(
            f"{row['schedule']}, {row['layout']}, {row['seq_len']:,} tokens", fontsize=9, loc="left"
        )
    panels[-1, 0].set_xlabel("ms")
    handles = [patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    panels[0, 0].legend(
        handles=handles, fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1, 1)
    )
    figure.suptitle(title, fontsize=9)
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    figure.savefig(out, dpi=100)
    pyplot.close(figure)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    found = [row["schedule"] for row in rows]
    missing = sorted({*(args.schedules or [])} - {*found})
    if missing or not rows:
        sys.exit(
            f"no timeline of {', '.join(missing) or 'any schedule'} in {args.result}; there are: {found}"
        )
    rows = [row for row in rows if not args.schedules or row["schedule"] in args.schedules]
    picture(rows, f"rank 0 of {result['ranks']}, {result['gpu']}, forward and backward", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
