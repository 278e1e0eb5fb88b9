"""The case patterns of scripts.benchmarks.masks.

What a selection costs, and what attention over it keeps.
"""

import argparse
import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention_cases import Attention, Shape, chosen_backend, ready_index, sdpa
from scripts.benchmarks.context_parallel_cases import attention, realistic, rounded
from scripts.benchmarks.context_parallel_timing import Bench, attempt, timed
from scripts.benchmarks.masks_cases import about, shapes
from scripts.benchmarks.timing import training_call
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention

READ_OFF = ("selection_ms", "forward_ms", "backward_ms", "step_ms", "density")
"""What is interpolated at equal recall."""

PUBLISHED: dict[str, Any] = {
    "probe": 64,
    "probe_rows": "last",
    "sinks": 30,
    "count_sinks": True,
    "local_slashes": 2,
}
"""MTraining's probe and what it has on in any case."""


def patterns(bench: Bench) -> Iterator[dict]:
    """Patterns over their knobs on realistic q and k, and times at equal recall."""
    for shape in shapes(bench, 524288, [(16, 2)]):
        row = about("patterns", shape)
        tensors: list[Tensor] = []
        drawn = attempt(
            bench, row | {"name": "inputs"}, functools.partial(_draw, bench, shape, tensors)
        )
        if "error" in drawn:
            yield drawn
            continue
        dense = {}
        for name, call in dense_calls(bench, shape):
            measure = functools.partial(_dense, bench, tensors, call)
            dense[name] = attempt(bench, row | {"name": name}, measure)
            yield dense[name]
        measured = []
        for name, knob, value, pattern in grid(bench.args):
            named = row | {"name": name, "knob": knob, "value": value}
            measure = functools.partial(_pattern, bench, shape, pattern, tensors)
            found = attempt(bench, named, measure)
            measured.append(found | of_dense(found, dense["dense"]))
            yield measured[-1]
        read_off = []
        for recall in bench.args.at_recalls:
            read_off += [row | at for at in at_recall(measured, recall)]
        yield from read_off
        if bench.rank == 0:
            print(table(read_off), flush=True)


def grid(args: argparse.Namespace) -> Iterator[tuple[str, str, float, Pattern]]:
    """(name, knob, its value, pattern)."""
    recalls = {
        "joint": args.joint_recalls,
        "independent": args.independent_recalls,
    }
    for budget, of_budget in recalls.items():
        of_paper = PUBLISHED if budget == "independent" else {}
        for recall in of_budget:
            pattern = VerticalSlash(
                recall=recall, max_verticals=args.max_columns, budget=budget, **of_paper
            )
            yield f"vertical_slash, {budget}", "recall", recall, pattern
    for threshold in args.thresholds:
        yield "xattention", "threshold", threshold, XAttention(threshold=threshold)
    for chunk_size in args.chunk_size:
        name = "moba" if len(args.chunk_size) == 1 else f"moba, chunks of {chunk_size}"
        for top_k in args.top_ks:
            yield name, "top_k", top_k, MoBA(chunk_size, top_k)


def _draw(bench: Bench, shape: Shape, tensors: list[Tensor]) -> dict:
    """Put q, k, v that want a gradient, and the upstream gradient, into `tensors`."""
    q, k = realistic(bench, shape)
    torch.manual_seed(1)
    v = torch.randn_like(k)
    d_out = torch.randn_like(q)
    tensors += [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out]
    return {}


def dense_calls(bench: Bench, shape: Shape) -> Iterator[tuple[str, Attention]]:
    """(name, attention): ours, and on a GPU cuDNN's through torch."""
    yield "dense", attention(bench, Dense(), Causal().rows(shape.seq_len, bench.device), None)
    if bench.device.type == "cuda":
        yield "cudnn", functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION)


def _dense(bench: Bench, tensors: list[Tensor], call: Attention) -> dict:
    """One call after one to warm up: it takes seconds at full length."""
    options = vars(bench.args) | {"repeats": 1, "warm_ups": 1}
    once = bench._replace(args=argparse.Namespace(**options))
    measured = timed(once, training_call(call, tensors[:3], tensors[3]))
    return measured | {"step_ms": measured["total_ms"]}


def _pattern(bench: Bench, shape: Shape, pattern: Pattern, tensors: list[Tensor]) -> dict:
    """Times of the selection, and of attention with the index given; and what it keeps.

    step_ms is all of it.
    """
    q, k, v, d_out = tensors
    ranges = Causal().rows(shape.seq_len, bench.device)
    select = functools.partial(
        pattern.select, q.detach(), k.detach(), ranges, block_size=shape.block_size
    )
    selection_ms = timed(bench, [select])["total_ms"]
    call = attention(bench, ready_index(pattern, select().tensors()), ranges, None)
    steps = training_call(call, [q, k, v], d_out)
    measured = timed(bench, steps)
    backend = chosen_backend(bench.args.backend, shape, dynamic=True)
    if isinstance(pattern, MoBA) and BACKENDS[backend].GATHERS_QUERIES:
        with by_blocks():
            for name, ms in timed(bench, steps).items():
                measured[f"by_blocks_{name}"] = ms
    with torch.no_grad(), recording(recall_rows=bench.args.recall_rows) as seen:
        call(q, k, v)
    kept = {
        "density": seen.density().mean(),
        "recall": seen.recall[0].mean(),
        "recall_of_worst_head": seen.recall[0].amin(),
    }
    if seen.capped:  # of patterns with caps
        kept["capped"] = seen.capped[0].mean()
    return {
        "selection_ms": selection_ms,
        **measured,
        "step_ms": rounded(selection_ms + measured["total_ms"]),
        **{name: rounded(value.item()) for name, value in kept.items()},
        "backend": backend,
    }


@contextlib.contextmanager
def by_blocks() -> Iterator[None]:
    """Inside, no backend gathers queries: each block of them computes the union of their choices."""
    with contextlib.ExitStack() as stack:
        for backend in BACKENDS.values():
            stack.enter_context(mock.patch.object(backend, "GATHERS_QUERIES", False))
        yield


def of_dense(row: dict, dense: dict) -> dict:
    """What attention would take if its time followed density; {} where a measurement failed."""
    if "error" in row or "error" in dense:
        return {}
    ideal_ms = dense["total_ms"] * row["density"]
    return {
        "dense_x_density_ms": rounded(ideal_ms),
        "of_dense_x_density": rounded(row["total_ms"] / ideal_ms),
    }


def at_recall(measured: list[dict], recall: float) -> Iterator[dict]:
    """A row for each pattern: READ_OFF at this recall, linear between the measurements around it.

    "error" where there are none. measured: rows of _pattern(), in any order, failed ones too.
    """
    for name in dict.fromkeys(row["name"] for row in measured):
        of_pattern = [row for row in measured if row["name"] == name and "error" not in row]
        of_pattern.sort(key=lambda row: row["recall"])
        recalls = [row["recall"] for row in of_pattern]
        found = {"name": name, "at_recall": recall}
        if not recalls:
            yield found | {"error": "nothing was measured"}
        elif not recalls[0] <= recall <= recalls[-1]:
            span = f"{recalls[0]:.3f} to {recalls[-1]:.3f}"
            yield found | {"error": f"{span} was measured"}
        else:
            for key in READ_OFF:
                values = [row[key] for row in of_pattern]
                found[key] = rounded(float(np.interp(recall, recalls, values)))
            yield found


def table(rows: list[dict]) -> str:
    """Rows of at_recall() for people."""
    line = "{:26} {:>8} {:>12} {:>12} {:>12} {:>12} {:>9}"
    lines = [line.format("pattern", "recall", *READ_OFF)]
    for row in rows:
        if "error" in row:
            cells = [row["error"], "", "", "", ""]
        else:
            cells = [f"{row[key]:.4g}" for key in READ_OFF]
        lines.append(line.format(row["name"], row["at_recall"], *cells).rstrip())
    return "\n".join(lines)
