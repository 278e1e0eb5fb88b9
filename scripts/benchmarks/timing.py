"""Clocks and memory of calls on one device."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from scripts.benchmarks.attention_cases import Attention
from titan_sparse.attention.observe.statistics import recording

LEAD_CYCLES = 40_000_000
"""GPU cycles of sleep before a timed call, about 20 ms.

The host queues the call meanwhile, as it runs ahead in training.
"""

Step = Callable[[], object]


def training_call(call: Attention, leaves: list[Tensor], d_out: Tensor) -> list[Step]:
    """The two steps of one call: the forward, and the backward from its output and d_out."""
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
    """Between each mark and the next."""
    if isinstance(marks[0], float):
        return [(end - start) * 1e3 for start, end in pairwise(marks)]
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def rounds(steps: Sequence[Step], repeats: int, on_gpu: bool, begin: Step) -> list[list[float]]:
    """Milliseconds of each step, for each round of all of them. begin: called before a round."""
    spent = []
    for _ in range(repeats):
        begin()
        marks = [mark(on_gpu)]
        for step in steps:
            step()
            marks.append(mark(on_gpu))
        spent.append(milliseconds(marks))
    return spent


def times(steps: Sequence[Step], repeats: int, lead: bool) -> list[float]:
    """Median milliseconds of each step over `repeats` rounds.

    lead: the host runs ahead of the GPU, as in training. It queues the round while the GPU sleeps.
    """
    on_gpu = torch.cuda.is_available()

    def begin() -> None:
        if on_gpu:
            torch.cuda.synchronize()
            if lead:
                torch.cuda._sleep(LEAD_CYCLES)

    spent = rounds(steps, repeats, on_gpu, begin)
    return [statistics.median(of_step) for of_step in zip(*spent)]


def peak_bytes(steps: Sequence[Step]) -> int:
    """Most bytes that the GPU holds above what it holds now."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in steps:
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_extra(call: Attention, leaves: list[Tensor], d_out: Tensor) -> float:
    """Peak bytes above inputs, outputs and gradients, as a share of q + k + v + out."""
    inputs = sum(leaf.nbytes for leaf in leaves)
    held = d_out.nbytes + inputs  # out is as large as its gradient
    kept = []

    def step() -> None:
        out = call(*leaves)
        kept.extend([out, *torch.autograd.grad(out, leaves, d_out)])

    return (peak_bytes([step]) - held) / held


def visited_share(call: Attention, leaves: list[Tensor]) -> float:
    """Density of the selection, by our own count."""
    with recording() as seen, torch.no_grad():
        call(*leaves)
    return seen.density().mean().item()
