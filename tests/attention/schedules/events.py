"""What one of several ranks does, in order: start transfers, wait for transfers, compute.

The process group's collectives transfer nothing, so nothing depends on timing.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend, call_tiles
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.comm import Communicator, Pending
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import Pattern

eager = BACKENDS["eager"]

BLOCK = 16


class Events:
    """The events so far.

    lines: "start NAME", "wait NAME" (the first time only), "compute", and "tables" where those of
    all ranks' blocks are made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        # What is named must live, or another object may get its id.
        self.named: list[object] = []
        for method in ("shift", "start_all_gather", "start_reduce_scatter", "start_all_reduce"):
            self._record_starts(monkeypatch, method)
        self._record_starts(monkeypatch, "start_exchange")
        self._record_waits(monkeypatch, Pending)
        for function in (eager.forward, eager.backward):
            recorded = self._recorded(function, "compute")
            monkeypatch.setattr(eager, function.__name__, recorded)
        tiles_of_rank = call_tiles.tiles_of_rank

        def seen_tiles(call, batch, source, transpose):
            if source is None:
                self.lines.append("tables")
            return tiles_of_rank(call, batch, source, transpose)

        monkeypatch.setattr(call_tiles, "tiles_of_rank", seen_tiles)

    def take(self) -> list[str]:
        lines = self.lines
        self.lines = []
        return lines

    def _record_starts(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        start = getattr(Communicator, method)

        @functools.wraps(start)
        def recorded(cp: Communicator, *args, **kwargs) -> Pending:
            name = _name(method, args, kwargs)
            self.lines.append(f"start {name}")
            pending = start(cp, *args, **kwargs)
            self.names[id(pending)] = name
            self.named.append(pending)
            return pending

        monkeypatch.setattr(Communicator, method, recorded)

    def _record_waits(self, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
        wait = kind.wait

        def recorded(pending: Pending):
            name = self.names.pop(id(pending), None)
            if name is not None:
                self.lines.append(f"wait {name}")
            return wait(pending)

        monkeypatch.setattr(kind, "wait", recorded)

    def _recorded(self, function: Callable, line: str) -> Callable:
        @functools.wraps(function)
        def recorded(*args, **kwargs):
            self.lines.append(line)
            return function(*args, **kwargs)

        return recorded


def _name(method: str, args: tuple, kwargs: dict) -> str:
    if method == "shift":
        return args[1]
    if method == "start_exchange":
        return kwargs["axis"]
    if method == "start_all_gather":
        return args[1].split()[0]
    return {"start_reduce_scatter": "scatter", "start_all_reduce": "verticals"}[method]


def events_of_attention(
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    axes: tuple[int, int],
    pattern: Pattern,
    kv_heads: int = 1,
    overlap_stages: tuple[int, int] = (2, 2),
) -> tuple[list[str], list[str]]:
    """The events of a forward and of its backward, on rank 0; every rank needs every chunk. Keys and
    values circulate."""
    ranks = axes[0] * axes[1]
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_inter", "cp_intra"))
        options = {"overlap_stages": overlap_stages, "backward_circulates": "kv"}
        cp = ContextParallel(mesh, "striped", schedule, BLOCK, **options)
        events = Events(monkeypatch)
        generator = torch.Generator().manual_seed(0)
        seq_len = 4 * BLOCK
        q = torch.randn(1, kv_heads, seq_len, 8, generator=generator, requires_grad=True)
        k = torch.randn(1, kv_heads, seq_len, 8, generator=generator, requires_grad=True)
        out = attend(q, k, k.detach().clone(), Causal(), pattern, cp, "eager")
        forward = events.take()
        out.sum().backward()
        return forward, events.take()
