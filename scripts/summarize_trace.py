"""Show where the time of traced training steps goes: a table from a trace of [profiling].

    python -m scripts.summarize_trace outputs/RUN/profile/rank0.json [--top 15]

By part of the step (attention, linear layers, ...), then the kernels that take longest;
milliseconds a step. `ms` and shares are exclusive and add up to the whole: where several run at the
same time, computing counts before copies and communication, and idle is where nothing runs, so that
the GPU waits for the host. `ran` is the time of a part whatever else runs beside it.

A GPU's kernel belongs to the call that launched it (both have its "correlation"), and that call to
the CPU ops and ranges around it. Of these the innermost that names a part decides: our custom ops
(attention, selection), the autograd functions of the loss, FSDP's and the optimizer's ranges. The
rest is linear layers, by their matmuls, and elementwise work.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from titan_sparse.commands import parser_of, positive

Interval = tuple[float, float]

PARTS = (
    "attention, forward",
    "attention, backward",
    "selection",
    "linear layers",
    "norms, rope, elementwise",
    "loss",
    "optimizer",
    "not attributed",
    "FSDP copies",
    "other copies",
    "FSDP all-gather",
    "FSDP reduce-scatter",
    "context-parallel transfers",
    "other collectives",
)
"""In order: where several run at the same time, the first of them counts."""

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_FRAMES = ("cpu_op", "user_annotation")

_OWNERS = {
    "titan_sparse::select": "selection",
    "titan_sparse::attend_backward": "attention, backward",
    "titan_sparse::attend_sinks_backward": "attention, backward",
    "titan_sparse::attend_": "attention, forward",
    "_LinearCrossEntropy": "loss",
    "_TokenCrossEntropy": "loss",
    "FSDP::": "FSDP",
    "RegisterPostBackwardFunction": "FSDP",
    "Optimizer.": "optimizer",
}
"""How the names of ops and ranges begin that own all work inside them; the first that fits."""
_EVALUATED = "autograd::engine::evaluate_function: "
_ATTENTION_NODE = "GeneratedBackwardFor_titan_sparse_attend"
"""Begins the name of attention's autograd node; in the backward, "Backward" ends it."""

_MATMULS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::matmul",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
}
_MATMUL_KERNELS = ("gemm", "cutlass", "nvjet", "xmma", "triton_tem_")
_ELEMENTWISE_KERNELS = ("triton_poi_", "triton_red_", "triton_per_", "elementwise_kernel")


class GpuWork(NamedTuple):
    """The kernels that ran from start to end, us.

    kind: compute, send-receive, collective, or copy. around: names of the CPU ops and ranges that
    it was launched in, outermost first.
    """

    start: float
    end: float
    name: str
    kind: str
    around: tuple[str, ...]


def main(words: list[str]) -> None:
    parser = parser_of(__doc__, "scripts.summarize_trace")
    parser.add_argument("trace", help="<output_dir>/profile/rank<r>.json")
    parser.add_argument("--top", type=positive, default=15, help="kernels listed")
    args = parser.parse_args(words)
    try:
        with open(args.trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(
            f"{args.trace} cannot be read as a trace ({type(error).__name__}: {error}); write "
            "<output_dir>/profile/rank0.json of a run with profiling.enable = true"
        )
    try:
        found = summary(events, args.top)
    except ValueError as error:
        sys.exit(f"{args.trace}: {error}; write profiling.enable = true for a run on a GPU")
    print(table(found))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint (start, end) in order that cover the same."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if not joined or start > joined[-1][1]:
            joined.append((start, end))
            continue
        first, last = joined[-1]
        last = max(end, last)
        joined[-1] = (first, last)
    return joined


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def summary(events: list[dict], top: int = 15) -> dict:
    """Milliseconds a step of the events of a Chrome trace, the mean of the steps that it marks.

    Returns steps, span_ms, launches, part_ms, ran_ms and launches by part, and the `top`
    kernels. ValueError if nothing ran.
    """
    works = work_of(events)
    if not works:
        raise ValueError("the trace has no work of a GPU")
    marks = set()
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#"):
            marks.add(event["name"])
    steps = max(1, len(marks))
    ms = 1e3 * steps
    by_part = defaultdict(list)
    by_name = defaultdict(list)
    for work in works:
        by_part[part_of(work)].append((work.start, work.end))
        by_name[short(work.name)].append(work.end - work.start)

    part_ms = {}
    covered: list[Interval] = []
    covered_us = 0.0
    for part in PARTS:
        # What a part takes where none before it runs.
        covered = union([*covered, *by_part[part]])
        part_ms[part] = (length(covered) - covered_us) / ms
        covered_us = length(covered)
    span_us = covered[-1][1] - covered[0][0]
    kernels = []
    for name, times in by_name.items():
        kernels.append({"name": name, "calls": len(times) / steps, "total_ms": sum(times) / ms})
    kernels.sort(key=lambda kernel: -kernel["total_ms"])
    return {
        "steps": steps,
        "span_ms": span_us / ms,
        "launches": len(works) / steps,
        "part_ms": part_ms | {"idle": (span_us - covered_us) / ms},
        "ran_ms": {part: length(union(by_part[part])) / ms for part in PARTS},
        "launches_of_part": {part: len(by_part[part]) / steps for part in PARTS},
        "kernels": kernels[:top],
    }


def table(found: dict) -> str:
    span = found["span_ms"]
    lines = [
        f"{span:.1f} ms a step, {found['launches']:.0f} launches (mean of {found['steps']} steps)",
        f"  {'part':<28}{'ms':>9}{'%':>8}{'ran ms':>10}{'launches':>10}",
    ]
    for part, time in found["part_ms"].items():
        line = f"  {part:<28}{time:9.1f}{100 * time / span:8.1f}"
        if part != "idle":
            line += f"{found['ran_ms'][part]:10.1f}{found['launches_of_part'][part]:10.0f}"
        lines.append(line)
    lines.append("  longest")
    for kernel in found["kernels"]:
        lines.append(f"  {kernel['total_ms']:9.1f} ms {kernel['calls']:8.1f} x  {kernel['name']}")
    return "\n".join(lines)


def kind(event: dict) -> str:
    name = event["name"].lower()
    if "sendrecv" in name:
        return "send-receive"
    if "nccl" in name:
        return "collective"
    if "memcpy" in event["cat"] or "memset" in event["cat"]:
        return "copy"
    return "compute"


def short(name: str) -> str:
    """A kernel's name without return type, templates and arguments, at most 40 characters."""
    return re.split(r"[<(]", name.removeprefix("void "))[0][:40]


# Parts --------------------------------------------------------------------------------------------


def part_of(work: GpuWork) -> str:
    owner = _owner(work.around)
    if work.kind in ("send-receive", "collective"):
        return _part_of_transfer(work, owner)
    if owner == "FSDP":
        return "FSDP copies"
    if owner is not None:
        return owner
    if work.kind == "copy":
        return "other copies"
    name = work.name.lower()
    if _MATMULS & {*work.around, work.name} or any(word in name for word in _MATMUL_KERNELS):
        return "linear layers"
    if work.around or any(word in name for word in _ELEMENTWISE_KERNELS):
        return "norms, rope, elementwise"
    return "not attributed"


def _owner(around: tuple[str, ...]) -> str | None:
    """The part of the innermost op or range that owns all work inside it; None if none does."""
    for name in reversed(around):
        name = name.removeprefix(_EVALUATED)
        if name.startswith(_ATTENTION_NODE):
            # The node of the same name runs in the forward too, around the op.
            if name.endswith("Backward"):
                return "attention, backward"
            continue
        for beginning, part in _OWNERS.items():
            if name.startswith(beginning):
                return part
    return None


def _part_of_transfer(work: GpuWork, owner: str | None) -> str:
    """As part_of(), for transfers between ranks. owner: of _owner()."""
    if owner == "FSDP":
        if any("allgather" in _plain(name) for name in (work.name, *work.around)):
            return "FSDP all-gather"
        # Replicas add up what each has scattered.
        return "FSDP reduce-scatter"
    if owner in ("selection", "attention, forward", "attention, backward"):
        return "context-parallel transfers"
    if owner is not None:
        return owner
    if work.kind == "send-receive":
        return "context-parallel transfers"
    if not work.around and "allgather" in _plain(work.name):
        return "FSDP all-gather"
    if not work.around and "reducescatter" in _plain(work.name):
        return "FSDP reduce-scatter"
    return "other collectives"


def _plain(name: str) -> str:
    """ncclDevKernel_AllGather, c10d::_allgather_base_ and FSDP::all_gather alike."""
    return name.lower().replace("_", "")


def work_of(events: list[dict]) -> list[GpuWork]:
    ran = [event for event in events if event.get("cat") in ON_GPU]
    frames = [event for event in events if event.get("cat") in _FRAMES and "dur" in event]
    launches = {}
    for event in events:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launches.setdefault(event["args"]["correlation"], event)
    ops = {}
    for frame in frames:
        if frame["cat"] == "cpu_op" and "External id" in frame.get("args", {}):
            ops.setdefault(frame["args"]["External id"], frame)

    frames_of = defaultdict(list)
    for frame in frames:
        frames_of[_thread(frame)].append(frame)
    by_thread = defaultdict(list)
    for number, event in enumerate(ran):
        args = event.get("args", {})
        launch = launches.get(args.get("correlation"))
        if launch is None or _thread(launch) not in frames_of:
            # Not recorded, or in a thread by another number: the op itself will do.
            launch = ops.get(args.get("External id"))
        if launch is not None:
            by_thread[_thread(launch)].append((number, launch["ts"]))
    around: dict[int, tuple[str, ...]] = {}
    for thread, launched in by_thread.items():
        moments = [moment for _, moment in launched]
        found = enclosing(frames_of[thread], moments)
        for (number, _), inside in zip(launched, found, strict=True):
            around[number] = tuple(frame["name"] for frame in inside)

    works = []
    for number, event in enumerate(ran):
        end = event["ts"] + event["dur"]
        works.append(GpuWork(event["ts"], end, event["name"], kind(event), around.get(number, ())))
    return works


def enclosing(frames: list[dict], moments: list[float]) -> list[list[dict]]:
    """For each moment the frames of one thread that have begun and not ended, outermost first."""
    frames = sorted(frames, key=lambda frame: (frame["ts"], -frame["dur"]))
    found: list[list[dict]] = [[] for _ in moments]
    is_open: list[dict] = []
    following = 0
    for number in sorted(range(len(moments)), key=moments.__getitem__):
        moment = moments[number]
        while following < len(frames) and frames[following]["ts"] <= moment:
            _close(is_open, frames[following]["ts"])
            is_open.append(frames[following])
            following += 1
        _close(is_open, moment)
        found[number] = list(is_open)
    return found


def _close(is_open: list[dict], moment: float) -> None:
    """Remove the frames that have ended. Ranges of transfers may outlast the frames around them."""
    is_open[:] = [frame for frame in is_open if frame["ts"] + frame["dur"] > moment]


def _thread(event: dict) -> tuple:
    return event.get("pid"), event.get("tid")


if __name__ == "__main__":
    main(sys.argv[1:])
