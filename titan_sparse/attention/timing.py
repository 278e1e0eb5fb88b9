"""How long the steps of a context-parallel call compute, and the whole call. It costs nothing
unless a recording is on.

Times come from events on the compute stream, on the CPU from the clock. They are read when somebody
asks for them, so that the host never waits for the GPU inside a call.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.context_parallel.schedule import Moves
from titan_sparse.attention.recorder import recomputing

Moment = torch.cuda.Event | float


class BytesSent(NamedTuple):
    """What this rank has sent so far.

    ring: keys, values and gradients around the ranks. plain_ring: what a ring would have sent in
    which each chunk visits every rank. verticals: the gathered verticals and their gradients.
    """

    ring: int
    plain_ring: int
    verticals: int


class TimedCall:
    """The forward of one attention call on this rank, timed from here on.

    steps: how many the schedule has. bytes_before: when the call began.
    """

    def __init__(self, cp: ContextParallel, steps: int, device: torch.device):
        self.cp = cp
        self.steps = steps
        self.device = device
        self.bytes_before = bytes_so_far(cp)
        self.intervals: list[tuple[int, Moment, Moment]] = []
        self.began = mark(device)
        self.ended = self.began

    @contextlib.contextmanager
    def computing(self, step: int) -> Iterator[None]:
        """What is launched inside is work of this step. A step may have several such intervals."""
        began = mark(self.device)
        yield
        ended = mark(self.device)
        self.intervals.append((step, began, ended))

    def milliseconds(self) -> Tensor:
        """float64 [2, steps]: computing, and elapsed since the step before was done.

        0 for steps without work. The first elapsed time begins with the call, and the last one
        lasts until the call's end. Waits for the GPU.
        """
        if isinstance(self.ended, torch.cuda.Event):
            self.ended.synchronize()
        times = torch.zeros(2, self.steps, dtype=torch.float64)
        previous_end = self.began
        for step, began, ended in self.intervals:
            computing = _milliseconds_between(began, ended)
            elapsed = _milliseconds_between(previous_end, ended)
            times[0, step] += computing
            times[1, step] += elapsed
            previous_end = ended
        # What comes after the last step, such as joining results, counts as time of that step.
        last_step, _, _ = self.intervals[-1]
        times[1, last_step] += _milliseconds_between(previous_end, self.ended)
        return times


def bytes_so_far(cp: ContextParallel) -> BytesSent:
    """What this rank has sent until now."""
    return BytesSent(
        ring=cp.bytes_sent,
        plain_ring=cp.plain_ring_bytes,
        verticals=cp.sent["verticals"],
    )


_timed_calls: list[TimedCall] | None = None
_call_in_progress: TimedCall | None = None


@contextlib.contextmanager
def timed_calls() -> Iterator[list[TimedCall]]:
    """The forwards inside with several context-parallel ranks, in their order."""
    global _timed_calls
    _timed_calls = []
    try:
        yield _timed_calls
    finally:
        _timed_calls = None


def timed(forward: Callable) -> Callable:
    """A schedule's forward(call, q, k, v), timed inside timed_calls().

    A step of all_gather is a KV head; of group_cast the own blocks, or a stage of others; of a ring
    a chunk. A forward that activation checkpointing repeats is not timed again.
    """

    @functools.wraps(forward)
    def timed_forward(call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        global _call_in_progress
        if _timed_calls is None or call.cp.size == 1 or recomputing():
            return forward(call, q, k, v)
        steps = call.cp.size
        if call.cp.moves is Moves.HEADS:
            steps = k.shape[1]
        elif call.cp.moves is Moves.BLOCKS:
            steps = 1 + call.cp.overlap_stages[0]
        timed_call = TimedCall(call.cp, steps, q.device)
        _call_in_progress = timed_call
        try:
            result = forward(call, q, k, v)
        finally:
            _call_in_progress = None
        timed_call.ended = mark(q.device)
        _timed_calls.append(timed_call)
        return result

    return timed_forward


def computing(step: int) -> contextlib.AbstractContextManager[None]:
    """Around what step `step` of the forward computes; does nothing unless the call is timed."""
    if _call_in_progress is None:
        return contextlib.nullcontext()
    return _call_in_progress.computing(step)


def mark(device: torch.device) -> Moment:
    """This moment on the compute stream of a GPU, or by the clock in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds_between(began: Moment, ended: Moment) -> float:
    if isinstance(began, float):
        return (ended - began) * 1e3
    return began.elapsed_time(ended)
