"""How long the steps of a context-parallel attention call compute, and the whole call: while recording, else at no cost.

Times come from events on the compute stream, on the CPU from the clock. They are read when they are asked for, so that
the host never waits for the GPU inside a call.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from titan_sparse.attention.call import Run
    from titan_sparse.attention.context_parallel.group import ContextParallel


class Call:
    """The forward of one attention call on this rank, timed from here on. steps: how many the schedule has.

    bytes_before: cp.bytes_sent, cp.plain_ring_bytes and the bytes of verticals when the call began.
    """

    def __init__(self, cp: "ContextParallel", steps: int, device: torch.device):
        self.cp, self.steps, self.device = cp, steps, device
        self.bytes_before = bytes_so_far(cp)
        self.intervals: list[tuple] = []
        self.began = self.ended = mark(device)

    @contextlib.contextmanager
    def computing(self, step: int) -> Iterator[None]:
        """What is launched inside is work of this step; a step may have several such intervals."""
        began = mark(self.device)
        yield
        self.intervals.append((step, began, mark(self.device)))

    def milliseconds(self) -> Tensor:
        """float64 [2, steps]: computing, and elapsed since the step before was done; 0 for steps without work.

        The first elapsed time begins with the call, the last one lasts until its end. Waits for the GPU.
        """
        times, before = torch.zeros(2, self.steps, dtype=torch.float64), self.began
        if isinstance(self.ended, torch.cuda.Event):
            self.ended.synchronize()
        for step, began, ended in self.intervals:
            times[:, step] += torch.tensor(
                [_between(began, ended), _between(before, ended)], dtype=torch.float64
            )
            before = ended
        times[1, self.intervals[-1][0]] += _between(before, self.ended)
        return times


def bytes_so_far(cp: "ContextParallel") -> tuple[int, int, int]:
    """What this rank has sent around the ranks, what a plain ring would have, and what it has sent of verticals."""
    return cp.bytes_sent, cp.plain_ring_bytes, cp.sent["verticals"]


_calls: list[Call] | None = None
_call: Call | None = None


@contextlib.contextmanager
def timed_calls() -> Iterator[list[Call]]:
    """The forwards inside of this with several context-parallel ranks, in their order."""
    global _calls
    _calls = []
    try:
        yield _calls
    finally:
        _calls = None


def timed(forward: Callable) -> Callable:
    """A schedule's forward(run, q, k, v), timed inside timed_calls(). A step of all_gather is a KV head, of group_cast the
    own blocks or a stage of others, else a chunk.

    A forward that activation checkpointing repeats is not timed again."""

    @functools.wraps(forward)
    def timed_forward(run: "Run", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        global _call
        if _calls is None or run.cp.size == 1 or recomputing():
            return forward(run, q, k, v)
        steps = {"all_gather": k.shape[1], "group_cast": 1 + run.cp.overlap_stages[0]}
        _call = call = Call(run.cp, steps.get(run.cp.schedule, run.cp.size), q.device)
        try:
            result = forward(run, q, k, v)
        finally:
            _call = None
        call.ended = mark(q.device)
        _calls.append(call)
        return result

    return timed_forward


def recomputing() -> bool:
    """Whether a forward called now is a repetition for a backward: it runs inside of autograd's."""
    return torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks it


def computing(step: int) -> contextlib.AbstractContextManager[None]:
    """Around what step `step` of the forward computes; does nothing unless the call is timed."""
    return contextlib.nullcontext() if _call is None else _call.computing(step)


def mark(device: torch.device) -> "torch.cuda.Event | float":
    """This moment on the compute stream of a GPU, or by the clock in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(began: "torch.cuda.Event | float", ended: "torch.cuda.Event | float") -> float:
    """Milliseconds."""
    return (ended - began) * 1e3 if isinstance(began, float) else began.elapsed_time(ended)
