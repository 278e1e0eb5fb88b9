"""Where the time of traced training steps goes: a table from a trace of [profiling].

    python -m scripts.summarize_trace outputs/RUN/profile/rank0.json [--json OUT] [--top 15]

Exclusive shares, which add up to the whole: computing (whatever else runs beside it), exposed
communication and copies (nothing computes meanwhile), idle (nothing runs: the GPU waits for the
host). Below, the kernels that take longest.
"""

import argparse
import json
import sys
from collections import defaultdict

from scripts.benchmarks.traces import KINDS, kind, short

Interval = tuple[float, float]


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.summarize_trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", help="<output_dir>/profile/rank<r>.json")
    parser.add_argument("--json", help="a file for the same numbers")
    parser.add_argument("--top", type=int, default=15, help="kernels listed")
    args = parser.parse_args(words)
    with open(args.trace) as file:
        events = json.load(file)["traceEvents"]
    try:
        found = summary(events, args.top)
    except ValueError as error:
        sys.exit(f"{args.trace}: {error}; write profiling.enable = true for a run on a GPU")
    print(table(found))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


def union(intervals: list[Interval]) -> list[Interval]:
    """Disjoint (start, end) in order that cover the same."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(intervals: list[Interval]) -> float:
    """Of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def summary(events: list[dict], top: int = 15) -> dict:
    """Milliseconds of the events of a Chrome trace.

    Returns span_ms, launches, share_ms by kind, and the `top` kernels. ValueError if nothing ran on
    a GPU.
    """
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    ran = [event for event in events if event.get("cat") in on_gpu]
    if not ran:
        raise ValueError("the trace has no work of a GPU")
    by_kind = defaultdict(list)
    by_name = defaultdict(list)
    for event in ran:
        by_kind[kind(event)].append((event["ts"], event["ts"] + event["dur"]))
        by_name[short(event["name"])].append(event["dur"])

    # A kind counts where none before it in KINDS runs.
    shares = {}
    covered: list[Interval] = []
    covered_us = 0.0
    for name in KINDS:
        covered = union(covered + by_kind[name])
        shares[name] = (length(covered) - covered_us) / 1e3
        covered_us = length(covered)
    span_ms = (covered[-1][1] - covered[0][0]) / 1e3
    shares["idle"] = span_ms - covered_us / 1e3

    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    kernels = [
        {"name": name, "calls": len(times), "total_ms": sum(times) / 1e3} for name, times in longest
    ]
    return {"span_ms": span_ms, "launches": len(ran), "share_ms": shares, "kernels": kernels}


def table(found: dict) -> str:
    """The summary as text."""
    span = found["span_ms"]
    lines = [f"{span:.1f} ms, {found['launches']} launches"]
    for name, time in found["share_ms"].items():
        lines.append(f"  {name:<14}{time:9.1f} ms {100 * time / span:6.1f} %")
    for kernel in found["kernels"]:
        total_ms = kernel["total_ms"]
        lines.append(f"  {total_ms:9.1f} ms {kernel['calls']:6d} x  {kernel['name']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
