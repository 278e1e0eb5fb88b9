"""Clocks, memory and kernels of calls on one GPU."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import DeviceType

from scripts.benchmarks.attention_cases import Attention
from titan_sparse.attention.observe.statistics import recording

LEAD_CYCLES = 20_000_000
"""GPU cycles of sleep before a timed call, about 10 ms.

This is more than the host takes to queue a forward and a backward.
"""


def training_call(call: Attention, leaves: list[Tensor], d_out: Tensor) -> list[Callable[[], None]]:
    """The two steps of one call: the forward, and the backward from its output and d_out."""
    kept = {}

    def forward() -> None:
        kept["out"] = call(*leaves)

    def backward() -> None:
        torch.autograd.grad(kept.pop("out"), leaves, d_out)

    return [forward, backward]


def times(steps: Sequence[Callable[[], object]], repeats: int, lead: bool) -> list[float]:
    """Median milliseconds of each step over `repeats` rounds of all of them.

    lead: the host runs ahead of the GPU, as in training. It queues the round while the GPU sleeps.
    """
    rounds = []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        torch.cuda.synchronize()
        if lead:
            torch.cuda._sleep(LEAD_CYCLES)
        events[0].record()
        for step, event in zip(steps, events[1:]):
            step()
            event.record()
        events[-1].synchronize()
        rounds.append([start.elapsed_time(end) for start, end in pairwise(events)])
    return [statistics.median(spent[place] for spent in rounds) for place in range(len(steps))]


def peak_extra(call: Attention, leaves: list[Tensor], d_out: Tensor) -> float:
    """Peak bytes above inputs, outputs and gradients, as a share of q + k + v + out."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*leaves)
    gradients = torch.autograd.grad(out, leaves, d_out)
    torch.cuda.synchronize()
    held = out.nbytes + sum(gradient.nbytes for gradient in gradients)
    extra = torch.cuda.max_memory_allocated() - before - held
    return extra / (out.nbytes + sum(leaf.nbytes for leaf in leaves))


def visited_share(call: Attention, leaves: list[Tensor]) -> float:
    """Density of the selection, by our own count."""
    with recording() as seen, torch.no_grad():
        call(*leaves)
    return seen.density().mean().item()


def longest_kernels(steps: Sequence[Callable[[], object]], most: int = 15) -> list[dict]:
    """The CUDA kernels of one call, by their total time: name, number of launches, milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for step in steps:
            step()
        torch.cuda.synchronize()
    return by_total_time(trace.key_averages(), most)


def by_total_time(events: Sequence, most: int) -> list[dict]:
    """The longest CUDA kernels among the profiler's averaged events, at most `most`."""
    kernels = []
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels.append((event.self_device_time_total / 1e3, event.count, event.key[:100]))
    kernels.sort(reverse=True)
    return [
        {"kernel": name, "launches": count, "ms": round(ms, 3)}
        for ms, count, name in kernels[:most]
    ]
