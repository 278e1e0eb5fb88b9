"""Shared parts of all benchmarks: cases that yield rows, on one rank or several, and clocks.

A benchmark is a table {name: case}. A case takes a Bench and yields rows, on all ranks alike. A
measurement that fails on any rank is a row with `error`, and the run goes on.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.benchmarks.attention_cases import Attention, Shape, ours
from scripts.benchmarks.provenance import provenance
from titan_sparse.attention import ContextParallel, backends
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import Pattern
from titan_sparse.commands import positive
from titan_sparse.data.shards import write_json
from titan_sparse.training.faults.process_groups import choose_device, init_distributed

LEAD_CYCLES = 40_000_000
"""GPU cycles of sleep before a timed call, about 20 ms.

The host queues the call meanwhile, as it runs ahead in training.
"""

Step = Callable[[], object]


class Bench(NamedTuple):
    """The run: its options, and this process among all others. nodes: simulated nodes count."""

    args: argparse.Namespace
    device: torch.device
    rank: int
    world: int
    nodes: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def shapes(self, seq_len: int, heads: list[tuple[int, int]]) -> Iterator[Shape]:
        """The shapes to time, for all ranks together. --heads and --seq-lens override them."""
        args = self.args
        for query_heads, kv_heads in dict.fromkeys(args.heads or heads):
            for tokens in dict.fromkeys(args.seq_lens or [seq_len]):
                sizes = (args.head_dim, args.block_size, tokens, self.device.type)
                yield Shape(query_heads, kv_heads, *sizes)

    def context(
        self,
        layout: str,
        schedule: str,
        gradient_dtype: torch.dtype | None = None,
        overlap_stages: int = 2,
    ) -> ContextParallel:
        # double_ring needs two axes even where all ranks are on one node.
        axes = {"double_ring": max(2, self.nodes), "group_cast": self.nodes}
        stages = (overlap_stages, overlap_stages) if schedule == "group_cast" else None
        return ContextParallel(
            cp_mesh(self.device.type, axes.get(schedule, 1), self.world),
            layout,
            schedule,
            self.args.block_size,
            gradient_dtype=gradient_dtype,
            overlap_stages=stages,
        )

    def attention(
        self, pattern: Pattern, ranges: MaskRanges, cp: ContextParallel | None = None
    ) -> Attention:
        """attend() by --backend, of this rank's q, k, v with cp, of all tokens without."""
        return ours(self.args.backend, pattern, ranges, self.args.block_size, cp)

    def attempt(self, row: dict, measure: Callable[..., dict], *words: object) -> dict:
        """row with what measure(bench, *words) returns, or with "error" if any rank failed.

        All ranks have to fail at the same place, or none: a rank that fails alone leaves the
        others in a collective.
        """
        try:
            measured = measure(self, *words)
        except Exception as error:  # whatever goes wrong, the run goes on
            measured = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        every = [None] * self.world
        dist.all_gather_object(every, measured.get("error"))
        for rank, error in enumerate(every):
            if error:
                return row | {"error": f"rank {rank}: {error}"}
        return row | measured


Case = Callable[[Bench], Iterator[dict]]


@functools.cache
def cp_mesh(device_type: str, nodes: int, world: int) -> DeviceMesh:
    """Axes ("cp_inter", "cp_intra") for several nodes, ("cp",) for one."""
    if nodes == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("cp",))
    return init_device_mesh(
        device_type, (nodes, world // nodes), mesh_dim_names=("cp_inter", "cp_intra")
    )


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Options of every benchmark that harness.measure() runs."""
    add = parser.add_argument
    add("--head-dim", type=positive, default=128)
    add("--block-size", type=positive, default=128)
    add("--backend", default="auto", choices=["auto", *backends.BACKENDS])
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--repeats", type=positive, default=5)
    add("--warm-ups", type=int, default=2, help="calls before the timed ones")
    add("--timeout", type=positive, default=180, help="seconds until a missing rank ends the run")
    add("--out", default="", help="JSON file, written anew after each row")


# Rows ---------------------------------------------------------------------------------------------


def place() -> tuple[int, int]:
    """This process's rank and the number of processes, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def measure(
    runs: list[argparse.Namespace],
    cases: dict[str, Case],
    refused: str | None = None,
    nodes: int = 1,
) -> int:
    """Measure args.cases of each run in one process group.

    refused: why these options cannot run, None if they can. Returns the exit status: 0, or 2 with
    one line on stderr.
    """
    rank, world = place()
    if refused is None and runs[0].device == "cuda" and not torch.cuda.is_available():
        refused = "there is no GPU here; write --device cpu and small sizes to try it out"
    if refused:
        if rank == 0:
            print(refused, file=sys.stderr)
        return 2
    device = choose_device(runs[0].device)
    init_distributed(device, runs[0].timeout)
    for args in runs:
        result = provenance(args, device) | {"ranks": world, "rows": []}
        run(Bench(args, device, rank, world, nodes), result, cases)
        if rank == 0 and args.out:
            write_json(Path(args.out), result | {"complete": True})
    dist.destroy_process_group()
    return 0


def run(bench: Bench, result: dict, cases: dict[str, Case]) -> None:
    """All cases in the order asked for. Rank 0 reports their rows as they come."""

    def report_case(bench: Bench, case: Case) -> dict:
        for row in case(bench):
            report(bench, result, row)
        return {}

    for name in bench.args.cases:
        failed = bench.attempt({"case": name}, report_case, cases[name])
        if "error" in failed:
            report(bench, result, failed)
        if bench.on_gpu:
            torch.cuda.empty_cache()


def report(bench: Bench, result: dict, row: dict) -> None:
    """Print a row, and write all rows so far."""
    if bench.rank != 0:
        return
    print(json.dumps(row), flush=True)
    result["rows"].append(row)
    if bench.args.out:
        write_json(Path(bench.args.out), result)


def about(case: str, shape: Shape) -> dict:
    return {"case": case, **shape._asdict()}


# Times and memory ---------------------------------------------------------------------------------


def training_call(call: Callable[..., Tensor], tensors: list[Tensor | None]) -> list[Step]:
    """The two steps of one call: the forward, and the backward.

    tensors: what the call takes, and the gradient of its result, None for a scalar.
    """
    *leaves, d_out = tensors
    kept = {}

    def forward() -> None:
        kept["out"] = call(*leaves)

    def backward() -> None:
        torch.autograd.grad(kept.pop("out"), leaves, d_out)

    return [forward, backward]


def mark(on_gpu: bool) -> torch.cuda.Event | float:
    """Now: an event on the current stream, or the host's clock in seconds."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(marks: Sequence) -> list[float]:
    if isinstance(marks[0], float):
        return [(end - start) * 1e3 for start, end in pairwise(marks)]
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def start_together(bench: Bench) -> None:
    """Let all ranks continue from here at the same time.

    On GPUs the GPUs wait for each other, while the hosts already queue what follows.
    """
    if not bench.on_gpu:
        dist.barrier()
        return
    torch.cuda.synchronize()
    torch.cuda._sleep(LEAD_CYCLES)
    if bench.world > 1:
        dist.all_reduce(torch.zeros(1, device=bench.device))


def timed(bench: Bench, steps: Sequence[Step], repeats: int = 0) -> dict:
    """Milliseconds of a forward and a backward: medians of the slowest rank, and of each rank.

    Each step's slowest rank may be another one: total_ms, the slowest rank's sum, can be less than
    both together. repeats: 0 takes --repeats.
    """
    warm_ups = bench.args.warm_ups
    spent = []
    for _ in range(warm_ups + (repeats or bench.args.repeats)):
        start_together(bench)
        marks = [mark(bench.on_gpu)]
        for step in steps:
            step()
            marks.append(mark(bench.on_gpu))
        spent.append(milliseconds(marks))
    here = torch.tensor(spent[warm_ups:], dtype=torch.float64)
    of_ranks = [torch.empty_like(here) for _ in range(bench.world)]
    dist.all_gather(of_ranks, here)
    # [ranks, repeats, steps]
    every = torch.stack(of_ranks)
    measured = {}
    if len(steps) == 2:
        slowest = every.amax(0)  # [repeats, steps]
        measured["forward_ms"] = _median(slowest[:, 0])
        measured["backward_ms"] = _median(slowest[:, 1])
    total = every.sum(-1)  # [ranks, repeats]
    slowest_total = total.amax(0)
    measured["total_ms"] = _median(slowest_total)
    if bench.world > 1:
        measured["per_rank_ms"] = [_median(of_rank) for of_rank in total]
    return measured


def _median(numbers: Tensor) -> float:
    return round(statistics.median(numbers.tolist()), 3)


def visited_share(call: Attention, leaves: list[Tensor]) -> float:
    """Density of the selection, by our own count."""
    with recording() as seen, torch.no_grad():
        call(*leaves)
    return seen.density().mean().item()
