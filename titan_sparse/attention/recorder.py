"""The reports of attention calls to a recording, and the time that their forwards compute.

The ops and schedules report here, and observe.py listens. Without a recording this costs nothing.
What caps cut can be counted without a recording: it costs one small kernel a selection.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel


class _Listeners(threading.local):
    """The listeners of one thread, as others may compute attention at the same time."""

    recording: Any = None
    """The Recording (observe.py) that attention calls are reported to, or None."""
    capped: list[Tensor] | None = None
    """Where selections leave what their caps cut (counting_caps()), or None."""


listeners = _Listeners()


@contextlib.contextmanager
def observed_by(observer: Any) -> Iterator[None]:
    """Report all attention calls in this context to the observer."""
    outer, listeners.recording = listeners.recording, observer
    try:
        yield
    finally:
        listeners.recording = outer


@contextlib.contextmanager
def counting_caps() -> Iterator[list[Tensor]]:
    """Collect in a list what caps cut in the selections in this context, in order.

    Each selection of a pattern with budgets adds float64 [3]: the shares of heads, over sequences,
    in which a cap kept the verticals below the recall, the slashes, and both. Nothing waits for the
    device. Within another such context, the inner list alone gets them.
    """
    counted: list[Tensor] = []
    outer, listeners.capped = listeners.capped, counted
    try:
        yield counted
    finally:
        listeners.capped = outer


def observer() -> Any:
    """The listener of what runs now; None while nothing is recorded.

    What activation checkpointing repeats is not reported again.
    """
    if listeners.recording is None or recomputing():
        return None
    return listeners.recording


def recomputing() -> bool:
    """True if what runs now repeats a forward for a backward, that is, runs inside autograd's.

    torch.utils.checkpoint asks it the same way.
    """
    return torch._C._current_graph_task_id() != -1


# Times of context-parallel calls. They come from events on the compute stream, on the CPU from the
# clock, and are read when they are asked for, so that the host never waits inside a call.

Moment = torch.cuda.Event | float


class TimedCall:
    """The forward of one attention call on this rank, timed from here on."""

    def __init__(self, cp: ContextParallel, device: torch.device):
        self.cp = cp
        self.device = device
        self.intervals: list[tuple[Moment, Moment]] = []
        self.trades: list[tuple[Moment, Moment]] = []
        self.began = mark(device)
        self.ended = self.began

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        began = mark(self.device)
        yield
        self.intervals.append((began, mark(self.device)))

    def milliseconds(self) -> tuple[float, float]:
        """The time that the call computed, and the time that it took, with the trades of heads
        before and after it. Waits for the GPU."""
        ends = [self.ended, *(end for _, end in self.trades)]
        last = ends[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        computed = sum(_milliseconds_between(*interval) for interval in self.intervals)
        trading = sum(_milliseconds_between(*interval) for interval in self.trades)
        return computed, _milliseconds_between(self.began, self.ended) + trading


def computing() -> contextlib.AbstractContextManager[None]:
    """Around what a forward computes; does nothing unless the call is timed."""
    seen = observer()
    if seen is None or seen.timed is None:
        return contextlib.nullcontext()
    return seen.timed.computing()


def trading(
    cp: ContextParallel, device: torch.device, before: bool
) -> contextlib.AbstractContextManager[None]:
    """Around what a forward does to trade tokens for heads, or heads for tokens (ulysses.py).

    before: whether the call that it belongs to is still to come.
    """
    seen = observer()
    return contextlib.nullcontext() if seen is None else seen.trading(cp, device, before)


def mark(device: torch.device) -> Moment:
    """The current time, as an event on a GPU's compute stream, or in seconds by the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    # Inside a CUDA graph, an external event tells the time of each replay.
    event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
    event.record()
    return event


def _milliseconds_between(began: Moment, ended: Moment) -> float:
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return began.elapsed_time(ended)
    assert isinstance(began, float) and isinstance(ended, float)
    return (ended - began) * 1e3
