"""Where the time of traced training steps goes: a table from a trace of [profiling].

    python -m scripts.summarize_trace outputs/RUN/profile/rank0.json [--json OUT] [--top 15]

By part of the step (attention, linear layers, ...: trace_parts.py), then by kind of work, then the
kernels that take longest; milliseconds a step. `ms` and shares are exclusive and add up to the
whole: where several run at the same time, computing counts before copies and communication, and
idle is where nothing runs, so that the GPU waits for the host. `ran` is the time of a part whatever
else runs beside it.

A trace without a GPU is read by its CPU ops.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable

from scripts.benchmarks.traces import KINDS, short
from scripts.trace_parts import PARTS, Work, part_of, work_of

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
    parser.add_argument(
        "--steps",
        type=int,
        help="steps in the trace, over which times are averaged; default: as it marks them, or 1",
    )
    args = parser.parse_args(words)
    if args.steps is not None and args.steps < 1:
        sys.exit(f"--steps {args.steps}: write 1 or more")
    with open(args.trace) as file:
        events = json.load(file)["traceEvents"]
    try:
        found = summary(events, args.top, args.steps)
    except ValueError as error:
        sys.exit(f"{args.trace}: {error}; write profiling.enable = true for a run on a GPU")
    print(table(found))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


def union(intervals: Iterable[Interval]) -> list[Interval]:
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


def summary(events: list[dict], top: int = 15, steps: int | None = None) -> dict:
    """Milliseconds a step of the events of a Chrome trace.

    Returns steps, device, span_ms, launches, part_ms, ran_ms and launches by part, share_ms by
    kind, and the `top` kernels. steps: in the trace; None: as many as it marks. ValueError if
    nothing ran.
    """
    works = work_of(events)
    if not works:
        raise ValueError("the trace has no work of a GPU, nor ops of a CPU")
    if steps is None:
        steps = _marked_steps(events)
    by_part = defaultdict(list)
    by_kind = defaultdict(list)
    by_name = defaultdict(list)
    for work in works:
        by_part[part_of(work)].append(work)
        by_kind[work.kind].append(work)
        by_name[short(work.name)].append(work.end - work.start)

    ms = 1e3 * steps
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    return {
        "steps": steps,
        "device": "cpu" if works[0].on_cpu else "gpu",
        "span_ms": _span(works) / ms,
        "launches": len(works) / steps,
        "part_ms": exclusive(by_part, PARTS, ms),
        "ran_ms": {part: length(union(_intervals(by_part[part]))) / ms for part in PARTS},
        "launches_of_part": {part: len(by_part[part]) / steps for part in PARTS},
        "share_ms": exclusive(by_kind, KINDS, ms),
        "kernels": [
            {"name": name, "calls": len(times) / steps, "total_ms": sum(times) / ms}
            for name, times in longest
        ],
    }


def exclusive(works: dict[str, list[Work]], names: tuple[str, ...], ms: float) -> dict[str, float]:
    """What each name takes where none before it in `names` runs, and "idle"; in units of `ms` us."""
    shares = {}
    covered: list[Interval] = []
    covered_us = 0.0
    for name in names:
        covered = union([*covered, *_intervals(works[name])])
        shares[name] = (length(covered) - covered_us) / ms
        covered_us = length(covered)
    shares["idle"] = (covered[-1][1] - covered[0][0] - covered_us) / ms
    return shares


def _intervals(works: list[Work]) -> list[Interval]:
    return [(work.start, work.end) for work in works]


def _span(works: list[Work]) -> float:
    """From the first start to the last end, us."""
    return max(work.end for work in works) - min(work.start for work in works)


def _marked_steps(events: list[dict]) -> int:
    """How many steps the profiler has marked; 1 if none."""
    marks = set()
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "user_annotation" and name.startswith("ProfilerStep#"):
            marks.add(name)
    return max(1, len(marks))


def table(found: dict) -> str:
    """The summary as text."""
    span = found["span_ms"]
    steps = found["steps"]
    unit = "launches" if found["device"] == "gpu" else "pieces of CPU ops"
    lines = [f"{span:.1f} ms a step, {found['launches']:.0f} {unit} (mean of {steps} steps)"]
    if steps == 1:
        lines = [f"{span:.1f} ms, {found['launches']:.0f} {unit}"]
    lines.append(f"  {'part':<28}{'ms':>9}{'%':>8}{'ran ms':>10}{unit.split()[0]:>10}")
    for part, time in found["part_ms"].items():
        line = f"  {part:<28}{time:9.1f}{100 * time / span:8.1f}"
        if part != "idle":
            line += f"{found['ran_ms'][part]:10.1f}{found['launches_of_part'][part]:10.0f}"
        lines.append(line)
    lines.append("  kind")
    for name, time in found["share_ms"].items():
        lines.append(f"  {name:<28}{time:9.1f}{100 * time / span:8.1f}")
    lines.append("  longest")
    for kernel in found["kernels"]:
        lines.append(f"  {kernel['total_ms']:9.1f} ms {kernel['calls']:8.1f} x  {kernel['name']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
