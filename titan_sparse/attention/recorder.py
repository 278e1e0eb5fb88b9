"""Who watches attention calls. Nobody does unless a recording is on, which then costs nothing.

The ops and schedules report here, and observe/ listens: arrows go one way. What caps cut can be
counted without a recording: it costs one small kernel a selection.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class Observer(Protocol):
    """What a listener is told. `call` is an AttentionCall (attention/call.py)."""

    def selection(self, bytes_sent: int) -> None:
        """After a selection, with the bytes that this rank sent for it."""

    def forward(self, call: Any, q: Tensor, k: Tensor) -> None:
        """After a forward of the whole sequence or of a share of it, with padded inputs."""

    def layer(self, call: Any, q: Tensor, k: Tensor, lse: Tensor) -> None:
        """Once for each attention, after its forwards, with padded inputs and the lse
        [B, Hq, S_local] of all rows, without learned sinks."""


listening: Observer | None = None
"""Who records at present, if anybody does."""


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Report to this observer inside."""
    global listening
    listening = observer
    try:
        yield
    finally:
        listening = None


_capped_shares: list[Tensor] | None = None


@contextlib.contextmanager
def counting_caps() -> Iterator[list[Tensor]]:
    """What caps cut in the selections inside, in their order: a list that fills.

    Each selection of a pattern with budgets adds float64 [3]: the shares of heads, over sequences,
    in which a cap kept the verticals below the recall, the slashes, and both. Nothing waits for the
    device.
    """
    global _capped_shares
    _capped_shares = []
    try:
        yield _capped_shares
    finally:
        _capped_shares = None


def capped_shares() -> list[Tensor] | None:
    """Where a selection that runs now leaves what its caps cut; None while nobody counts.

    What activation checkpointing repeats is not counted again.
    """
    if _capped_shares is None or recomputing():
        return None
    return _capped_shares


def observer() -> Observer | None:
    """Who wants to be told of what runs now; None while nobody records.

    What activation checkpointing repeats is not told again.
    """
    if listening is None or recomputing():
        return None
    return listening


def recomputing() -> bool:
    """Whether what runs now repeats a forward for a backward, that is, runs inside autograd's."""
    # torch.utils.checkpoint asks it the same way.
    graph_task = torch._C._current_graph_task_id()
    outside_backward = -1
    return graph_task != outside_backward
