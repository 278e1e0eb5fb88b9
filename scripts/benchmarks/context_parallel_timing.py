"""Context-parallel groups and clocks over several ranks.

For scripts.benchmarks.context_parallel and scripts.benchmarks.masks.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.benchmarks.attention_cases import Shape
from scripts.benchmarks.traces import after_start, intervals
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.context_parallel.comm import Pending

LEAD_CYCLES = 40_000_000
"""GPU cycles of sleep before a timed call, about 20 ms.

The host queues the call meanwhile, as it runs ahead in training.
"""


class Bench(NamedTuple):
    """The run: its options, and this process among all others. nodes: the pretended ones count."""

    args: argparse.Namespace
    device: torch.device
    rank: int
    world: int
    nodes: int

    def shape(self, seq_len: int) -> Shape:
        """What attention is timed on, all ranks together.

        seq_len: the case's own length, where --seq-len says nothing.
        """
        heads, kv_heads = self.args.heads
        return Shape(
            heads,
            kv_heads,
            self.args.head_dim,
            self.args.block_size,
            self.args.seq_len or seq_len,
            self.device.type,
        )

    def context(
        self,
        layout: str,
        schedule: str,
        kind: type[ContextParallel] = ContextParallel,
        gradient_dtype: torch.dtype | None = None,
        overlap_stages: int = 2,
    ) -> ContextParallel:
        """A context-parallel group of all ranks, or what looks like one (WithoutTransfers)."""
        # double_ring needs two axes even where all ranks are on one node.
        axes = {"double_ring": max(2, self.nodes), "group_cast": self.nodes}
        nodes = axes.get(schedule, 1)
        mesh = cp_mesh(self.device.type, nodes, self.world)
        return kind(
            mesh,
            layout,
            schedule,
            self.args.block_size,
            gradient_dtype=gradient_dtype,
            overlap_stages=(overlap_stages, overlap_stages),
        )


@functools.cache
def cp_mesh(device_type: str, nodes: int, world: int) -> DeviceMesh:
    """Axes ("cp_inter", "cp_intra") for several nodes, ("cp",) for one."""
    if nodes == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("cp",))
    return init_device_mesh(
        device_type, (nodes, world // nodes), mesh_dim_names=("cp_inter", "cp_intra")
    )


class WithoutTransfers(ContextParallel):
    """A ring that sends nothing: the chunk in hand takes the place of the one that would come.

    Tiles and kernels are those of the schedule, so times are right and results are not. `marks`:
    the moments at which inner hops were waited for, one after each step but a window's last.
    """

    def __init__(self, mesh: DeviceMesh, layout: str, schedule: str, block_size: int, **options):
        super().__init__(mesh, layout, schedule, block_size, **options)
        self.on_gpu = mesh.device_type == "cuda"
        self.marks = []
        if self.schedule not in ("ring", "double_ring"):
            raise ValueError(
                f'WithoutTransfers knows what a ring sends, not "{self.schedule}"; '
                'write "ring" or "double_ring"'
            )

    def shift(
        self, chunk: list[Tensor], axis: str, slot: str, sends: bool = True, receives: bool = True
    ) -> "_Arrived":
        return _Arrived(self, axis, chunk if receives else [])

    def start_all_reduce(self, x: Tensor) -> Pending:
        return Pending(x)


class _Arrived:
    def __init__(self, cp: WithoutTransfers, axis: str, chunk: list[Tensor]):
        self.cp = cp
        self.axis = axis
        self.chunk = chunk

    def wait(self) -> list[Tensor]:
        if self.axis == "inner":
            self.cp.marks.append(mark(self.cp.on_gpu))
        return self.chunk


def outer_transfers(cp: ContextParallel, k: Tensor, v: Tensor) -> list[Callable[[], None]]:
    """The outer hops of a double ring's forward and of its backward, with nothing to compute.

    Keys and values go round to the last node; in the backward also their gradients, from the second
    node home.
    """
    chunk = torch.stack([k.detach(), v.detach()])  # [2, B, Hkv, S, D]
    gradient = chunk.to(cp.gradient_dtype or torch.float32)

    def forward() -> None:
        for window in range(cp.inter - 1):
            cp.shift([chunk], "outer", f"outer {window % 2}").wait()

    def backward() -> None:
        for window in range(cp.inter - 1):
            hops = [
                cp.shift([gradient], "outer_gradient", f"outer gradient {window % 2}"),
                cp.shift([chunk], "outer", f"outer {window % 2}"),
            ]
            for hop in hops:
                hop.wait()

    return [forward, backward]


def mark(on_gpu: bool) -> torch.cuda.Event | float:
    """Now: an event on the current stream, or the host's clock in seconds."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(marks: Sequence) -> list[float]:
    """Between each mark and the next."""
    if isinstance(marks[0], float):
        return [(end - start) * 1e3 for start, end in pairwise(marks)]
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def start_together(bench: Bench) -> None:
    """Let all ranks go on from here at the same time.

    On GPUs the GPUs wait for each other, while the hosts already queue what follows.
    """
    if bench.device.type == "cpu":
        dist.barrier()
        return
    torch.cuda.synchronize()
    torch.cuda._sleep(LEAD_CYCLES)
    dist.all_reduce(torch.zeros(1, device=bench.device))


def gather(bench: Bench, numbers: Sequence) -> Tensor:
    """[ranks, ...] of every rank's numbers, float64 on the CPU."""
    here = torch.tensor(numbers, dtype=torch.float64)
    every = [torch.empty_like(here) for _ in range(bench.world)]
    dist.all_gather(every, here)
    return torch.stack(every)


def timed(bench: Bench, steps: Sequence[Callable[[], object]]) -> dict:
    """Milliseconds of a forward and a backward: medians of the slowest rank, and of each rank.

    Each step's slowest rank may be another one: total_ms, the slowest rank's sum, can be less than
    both together.
    """
    on_gpu = bench.device.type == "cuda"
    spent = []
    for _ in range(bench.args.warm_ups + bench.args.repeats):
        start_together(bench)
        marks = [mark(on_gpu)]
        for step in steps:
            step()
            marks.append(mark(on_gpu))
        spent.append(milliseconds(marks))
    every = gather(bench, spent[bench.args.warm_ups :])  # [ranks, repeats, steps]

    measured = {}
    if len(steps) == 2:
        slowest = every.amax(0)  # [repeats, steps]
        measured["forward_ms"] = _median(slowest[:, 0])
        measured["backward_ms"] = _median(slowest[:, 1])
    total = every.sum(-1)  # [ranks, repeats]
    measured["total_ms"] = _median(total.amax(0))
    measured["per_rank_ms"] = [_median(of_rank) for of_rank in total]
    return measured


def _median(numbers: Tensor) -> float:
    return round(statistics.median(numbers.tolist()), 3)


def step_times(bench: Bench, cp: WithoutTransfers, steps: Sequence[Callable[[], object]]) -> Tensor:
    """Median milliseconds of every step of a plain ring, float64 [2, ranks, steps].

    First those of the forward, then those of the backward. Ranks run each for itself. RuntimeError
    if a schedule does not wait once a step.
    """
    on_gpu = bench.device.type == "cuda"
    spent = []
    for _ in range(bench.args.warm_ups + bench.args.repeats):
        start_together(bench)
        cp.marks = [mark(on_gpu)]
        for step in steps:
            step()
            cp.marks.append(mark(on_gpu))
        spent.append(milliseconds(cp.marks))
    if len(spent[-1]) != 2 * cp.size:
        raise RuntimeError(
            f"{len(spent[-1])} intervals for {cp.size} steps forward and backward: "
            "the ring waits elsewhere now"
        )
    every = gather(bench, spent[bench.args.warm_ups :])  # [ranks, repeats, 2 x steps]
    return every.median(dim=1).values.unflatten(-1, (2, -1)).transpose(0, 1)


def traced(bench: Bench, steps: Sequence[Callable[[], object]]) -> list[dict]:
    """intervals() of rank 0 in one call of the steps, after one to warm up.

    The other ranks take part and return [].
    """
    for step in steps:
        step()
    on_gpu = bench.device.type == "cuda"
    profile = contextlib.nullcontext()
    if bench.rank == 0:
        kinds = torch.profiler.ProfilerActivity
        profile = torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU])
    with profile:
        start_together(bench)
        for step in steps:
            step()
        if on_gpu:
            torch.cuda.synchronize()
    if bench.rank != 0:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    return intervals(after_start(events), on_gpu)


def attempt(bench: Bench, row: dict, measure: Callable[[], dict]) -> dict:
    """row with what was measured; with "error" if any rank failed.

    All ranks have to fail at the same place, or none: a rank that fails alone leaves the others in
    a collective.
    """
    try:
        measured = measure()
    except Exception as error:  # whatever goes wrong, the run goes on
        measured = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    every = [None] * bench.world
    dist.all_gather_object(every, measured.get("error"))
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(every) if error]
    if failed:
        return row | {"error": failed[0]}
    return row | measured
