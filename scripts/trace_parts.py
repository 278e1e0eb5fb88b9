"""What each piece of work in a Chrome trace of torch.profiler was for: attention, linear layers, ...

A GPU's kernel belongs to the call that launched it (both have its "correlation"), and that call to
the CPU ops and ranges around it. Of these the innermost that names a part decides: our custom ops
(attention, selection), the autograd functions of the loss, FSDP's and the optimizer's ranges. The
rest is linear layers, by their matmuls, and elementwise work.

A trace without a GPU's work is read by its CPU ops: each counts while none runs inside it.
"""

from collections import defaultdict
from typing import NamedTuple

from scripts.benchmarks.traces import kind

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


class Work(NamedTuple):
    """What ran from start to end, us.

    kind: of KINDS in benchmarks/traces.py. around: names of the CPU ops and ranges that it was
    launched in, outermost first. on_cpu: of an op that stands for a kernel.
    """

    start: float
    end: float
    name: str
    kind: str
    around: tuple[str, ...]
    on_cpu: bool = False


def work_of(events: list[dict]) -> list[Work]:
    """The work of the GPU, or of the CPU's ops in a trace without one."""
    ran = [event for event in events if event.get("cat") in ON_GPU]
    frames = [event for event in events if event.get("cat") in _FRAMES and "dur" in event]
    if ran:
        return _work_of_gpu(ran, events, frames)
    return _work_of_cpu(frames)


def part_of(work: Work) -> str:
    """Which of PARTS the work is for."""
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


def _part_of_transfer(work: Work, owner: str | None) -> str:
    """As part_of(), for what goes between ranks. owner: of _owner()."""
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


def _work_of_gpu(ran: list[dict], events: list[dict], frames: list[dict]) -> list[Work]:
    launches = {}
    for event in events:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launches.setdefault(event["args"]["correlation"], event)
    ops = {}
    for frame in frames:
        if frame["cat"] == "cpu_op" and "External id" in frame.get("args", {}):
            ops.setdefault(frame["args"]["External id"], frame)

    frames_of = _by_thread(frames)
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
        work = Work(event["ts"], end, event["name"], kind(event), around.get(number, ()))
        works.append(work)
    return works


def _work_of_cpu(frames: list[dict]) -> list[Work]:
    """Each op while no other runs inside it. Ranges are no work; threads of gloo have no ops."""
    works = []
    for of_thread in _by_thread(frames).values():
        edges = set()
        for frame in of_thread:
            edges |= {frame["ts"], frame["ts"] + frame["dur"]}
        bounds = sorted(edges)
        middles = [(start + end) / 2 for start, end in zip(bounds, bounds[1:])]
        found = enclosing(of_thread, middles)
        for start, end, inside in zip(bounds, bounds[1:], found):
            ops = [frame for frame in inside if frame["cat"] == "cpu_op"]
            if ops:
                names = tuple(frame["name"] for frame in inside)
                works.append(Work(start, end, ops[-1]["name"], kind(ops[-1]), names, True))
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
    """Take away the frames that have ended. Ranges of transfers that run on outlast what is around
    them."""
    is_open[:] = [frame for frame in is_open if frame["ts"] + frame["dur"] > moment]


def _thread(event: dict) -> tuple:
    return event.get("pid"), event.get("tid")


def _by_thread(frames: list[dict]) -> dict[tuple, list[dict]]:
    threads = defaultdict(list)
    for frame in frames:
        threads[_thread(frame)].append(frame)
    return threads
