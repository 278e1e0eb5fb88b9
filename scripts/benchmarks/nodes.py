"""The case nodes of scripts.benchmarks.context_parallel: a ring and a double ring across nodes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from scripts.benchmarks.attention_cases import Shape
from scripts.benchmarks.harness import (
    DTYPES,
    Bench,
    Step,
    about,
    sent_by_rank,
    sparse,
    timed,
    training_call,
)
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.context_parallel.comm import Pending


class WithoutTransfers(ContextParallel):
    """A ring that sends nothing: the current chunk takes the place of the received one.

    Tiles and kernels are those of the schedule, so times are right and results are not.
    """

    def shift(
        self, chunk: list[Tensor], axis: str, slot: str, sends: bool = True, receives: bool = True
    ) -> Pending:
        return Pending(chunk if receives else [])

    def start_all_reduce(self, x: Tensor) -> Pending:
        return Pending(x)


def nodes(bench: Bench) -> Iterator[dict]:
    """ring and double_ring over the same (simulated) nodes.

    Also the computation alone, and the outer hops alone.
    """
    for shape in bench.shapes(524288, [(16, 2)]):
        for dtype in DTYPES:
            row = about("nodes", shape) | {"nodes": bench.nodes, "gradient_dtype": dtype}
            rows = {}
            for schedule in ("ring", "double_ring"):
                named = row | {"schedule": schedule}
                rows[schedule] = bench.attempt(named, _across, shape, schedule, DTYPES[dtype])
                yield rows[schedule]
            if not any("error" in found for found in rows.values()):
                times_faster = rows["ring"]["total_ms"] / rows["double_ring"]["total_ms"]
                named = {"name": "double_ring against ring", "times_faster": round(times_faster, 3)}
                yield row | named


def _across(bench: Bench, shape: Shape, schedule: str, gradient_dtype: torch.dtype) -> dict:
    cp = bench.context("striped", schedule, ContextParallel, gradient_dtype)
    silent = bench.context("striped", schedule, WithoutTransfers, gradient_dtype)
    call, tensors, _ = sparse(bench, shape, cp)
    leaves = tensors[:3]
    d_out = tensors[3]
    steps = training_call(call, leaves, d_out)
    measured = timed(bench, steps)
    forward, backward = sent_by_rank(bench, cp, steps).amax(0).tolist()
    measured["megabytes_sent"] = {"forward": forward, "backward": backward}
    alone, _, _ = sparse(bench, shape, silent)
    limits = {"compute_alone": timed(bench, training_call(alone, leaves, d_out))}
    if schedule == "double_ring":
        limits["outer_alone"] = timed(bench, outer_transfers(cp, leaves[1], leaves[2]))
        for key in ("forward_ms", "backward_ms", "total_ms"):
            limit = max(times[key] for times in limits.values())
            measured[key.replace("ms", "of_limit")] = round(measured[key] / limit, 3)
    return measured | limits


def outer_transfers(cp: ContextParallel, k: Tensor, v: Tensor) -> list[Step]:
    """The outer hops of a double ring's forward and of its backward, with nothing to compute.

    Keys and values go around to the last node; in the backward also their gradients, from the
    second node back to the first.
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
