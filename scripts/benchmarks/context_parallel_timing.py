"""Clocks and context-parallel groups for scripts.benchmarks.context_parallel and scripts.benchmarks.masks."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.benchmarks.attention_cases import Shape
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.context_parallel.group import Pending

LEAD_CYCLES = 40_000_000
"""GPU cycles of sleep before a timed call, about 20 ms: the host queues the call meanwhile, as it
runs ahead in training."""


class Bench(NamedTuple):
    """The run: its options, this process's device and rank, and the number of processes and of (pretended) nodes."""

    args: argparse.Namespace
    device: torch.device
    rank: int
    world: int
    nodes: int

    def shape(self, seq_len: int) -> Shape:
        """What attention is timed on, all ranks together; --seq-len wins over the case's own length."""
        return Shape(
            *self.args.heads,
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
        nodes = {"double_ring": max(2, self.nodes), "group_cast": self.nodes}.get(schedule, 1)
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
    """Nothing of a ring is sent: the chunk in hand stands in for the one that would come.

    Tiles and kernels are those of the schedule, so that times are right and results are not. `marks`: the moments at
    which inner hops were waited for, one after each step but a window's last.
    """

    def __init__(self, mesh: DeviceMesh, *args, **kwargs):
        super().__init__(mesh, *args, **kwargs)
        self.on_gpu, self.marks = mesh.device_type == "cuda", []
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
        self.cp, self.axis, self.chunk = cp, axis, chunk

    def wait(self) -> list[Tensor]:
        if self.axis == "inner":
            self.cp.marks.append(mark(self.cp.on_gpu))
        return self.chunk


# Clocks -------------------------------------------------------------------------------------------------------------


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
        return [(b - a) * 1e3 for a, b in zip(marks, marks[1:])]
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def start_together(bench: Bench) -> None:
    """All ranks go on from here at the same time; on GPUs the GPUs do, while the hosts already queue what follows."""
    if bench.device.type == "cpu":
        dist.barrier()
        return
    torch.cuda.synchronize()
    torch.cuda._sleep(LEAD_CYCLES)
    dist.all_reduce(torch.zeros(1, device=bench.device))


def gather(bench: Bench, numbers: Sequence) -> Tensor:
    """[ranks, ...] of every rank's numbers, float64 on the CPU."""
    own = torch.tensor(numbers, dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(bench.world)]
    dist.all_gather(every, own)
    return torch.stack(every)


def timed(bench: Bench, steps: Sequence[Callable[[], object]]) -> dict:
    """Milliseconds of a forward and a backward: medians over repeats of the slowest rank, and of each rank.

    Each step's slowest rank may be another one: total_ms, the slowest rank's sum, can be less than both together.
    """
    spent = []
    for _ in range(bench.args.warm_ups + bench.args.repeats):
        start_together(bench)
        marks = [mark(bench.device.type == "cuda")]
        for step in steps:
            step()
            marks.append(mark(bench.device.type == "cuda"))
        spent.append(milliseconds(marks))
    every = gather(bench, spent[bench.args.warm_ups :])
    slowest = [_median(every[..., place].amax(0)) for place in range(len(steps))]
    found = {"forward_ms": slowest[0], "backward_ms": slowest[1]} if len(steps) == 2 else {}
    total = every.sum(-1)
    return found | {
        "total_ms": _median(total.amax(0)),
        "per_rank_ms": [_median(own) for own in total],
    }


def _median(numbers: Tensor) -> float:
    return round(statistics.median(numbers.tolist()), 3)


def step_times(bench: Bench, cp: WithoutTransfers, steps: Sequence[Callable[[], object]]) -> Tensor:
    """Median milliseconds of every step of a plain ring's forward and of its backward, float64 [2, ranks, steps].

    Ranks run each for itself. RuntimeError if a schedule does not wait once a step.
    """
    spent = []
    for _ in range(bench.args.warm_ups + bench.args.repeats):
        start_together(bench)
        cp.marks = [mark(bench.device.type == "cuda")]
        for step in steps:
            step()
            cp.marks.append(mark(bench.device.type == "cuda"))
        spent.append(milliseconds(cp.marks))
    if len(spent[-1]) != 2 * cp.size:
        raise RuntimeError(
            f"{len(spent[-1])} intervals for {cp.size} steps forward and backward: "
            "the ring waits elsewhere now"
        )
    every = gather(bench, spent[bench.args.warm_ups :])
    return every.median(dim=1).values.unflatten(-1, (2, -1)).transpose(0, 1)


def attempt(bench: Bench, row: dict, measure: Callable[[], dict]) -> dict:
    """row with what was measured; with "error" if any rank failed, for which all ranks have to fail or none."""
    try:
        found = measure()
    except Exception as error:  # whatever goes wrong, the run goes on with the next measurement
        found = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    every = [None] * bench.world
    dist.all_gather_object(every, found.get("error"))
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(every) if error]
    return row | ({"error": failed[0]} if failed else found)
