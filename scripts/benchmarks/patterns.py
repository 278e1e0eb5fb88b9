"""The case patterns of scripts.benchmarks.attention: what a selection costs, and what it keeps.

On realistic q and k (synthetic.py): vertical_slash with joint budgets and with independent
ones (these as published: the last 64 rows, 30 sinks, 2 local slashes), xattention, and moba, over a
few values of the knob of each. The index is given to forward and backward, choosing it is
`selection_ms`; `step_ms` is all three. Density is counted; recall is the share of the softmax mass
that --recall-rows sampled rows keep. `of_dense_x_density` is attention's time / (the time of dense
x the density). At the end what each costs --at-recalls, linear between measurements.
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks import synthetic
from scripts.benchmarks.attention_cases import Attention, Shape, chosen_backend, ready_index, sdpa
from scripts.benchmarks.harness import Bench, about, rounded, timed, training_call
from scripts.benchmarks.options import positive, share
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention

READ_OFF = ("selection_ms", "forward_ms", "backward_ms", "step_ms", "density")
"""What is interpolated at equal recall."""

PUBLISHED: dict[str, Any] = {
    "budget": "independent",
    "probe": 64,
    "probe_rows": "last",
    "sinks": 30,
    "count_sinks": True,
    "local_slashes": 2,
}
"""MTraining's probe, and what it always selects."""


def add_pattern_options(parser: argparse.ArgumentParser) -> None:
    def add(name: str, kind: type, default: list | int, text: str = "") -> None:
        many = {"nargs": "*"} if isinstance(default, list) else {}
        parser.add_argument(name, type=kind, default=default, help=text, **many)

    recalls = [0.3, 0.5, 0.7, 0.8, 0.9, 0.95]
    add("--independent-recalls", share, recalls, "of patterns, as all below")
    add("--joint-recalls", share, [0.8, 0.85, 0.9, 0.95, 0.98])
    add("--max-verticals", positive, 4096, "of vertical_slash")
    add("--thresholds", share, [0.5, 0.9, 0.99, 0.999], "of xattention")
    add("--top-ks", positive, [4, 12, 24, 48], "of moba")
    add("--chunk-size", positive, [4096], "of moba, tokens")
    add("--recall-rows", positive, 256, "rows whose recall is measured")
    add("--at-recalls", share, [0.9, 0.95], "where costs are compared")


def patterns(bench: Bench) -> Iterator[dict]:
    """Patterns over their knobs, and times at equal recall."""
    args = bench.args
    for shape in bench.shapes(524288, [(16, 2)]):
        row = about("patterns", shape)
        q, k = realistic(shape)
        torch.manual_seed(1)
        v = torch.randn_like(k)
        d_out = torch.randn_like(q)
        tensors = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out]
        dense = {}
        for name, call in dense_calls(bench, shape):
            dense[name] = bench.attempt(row | {"name": name}, _dense, tensors, call)
            yield dense[name]
        measured = []
        for name, knob, value, pattern in grid(args):
            named = row | {"name": name, "knob": knob, "value": value}
            found = bench.attempt(named, _pattern, shape, pattern, tensors)
            if "error" not in found and "error" not in dense["dense"]:
                ideal_ms = dense["dense"]["total_ms"] * found["density"]
                found["of_dense_x_density"] = rounded(found["total_ms"] / ideal_ms)
            measured.append(found)
            yield found
        for recall in args.at_recalls:
            for at in at_recall(measured, recall):
                yield row | at


def realistic(shape: Shape) -> tuple[Tensor, Tensor]:
    """q, k [1, H, S, D] in bf16."""
    heads = synthetic.draw_heads(shape.seq_len, shape.heads, shape.kv_heads, shape.head_dim)
    q = synthetic.queries(heads, torch.bfloat16).to(shape.device)
    k = synthetic.keys(heads, torch.bfloat16).to(shape.device)
    if not (q.isfinite().all() and k.isfinite().all()):
        raise ValueError(f"no realistic inputs of head_dim {shape.head_dim}; write a larger one")
    return q, k


def dense_calls(bench: Bench, shape: Shape) -> Iterator[tuple[str, Attention]]:
    """(name, attention): ours, and on a GPU cuDNN's through torch."""
    yield "dense", bench.attention(Dense(), Causal().rows(shape.seq_len, bench.device))
    if bench.on_gpu:
        yield "cudnn", functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION)


def grid(args: argparse.Namespace) -> Iterator[tuple[str, str, float, Pattern]]:
    """(name, knob, its value, pattern)."""
    recalls = {"joint": args.joint_recalls, "independent": args.independent_recalls}
    for budget, of_budget in recalls.items():
        options = PUBLISHED if budget == "independent" else {}
        for recall in of_budget:
            pattern = VerticalSlash(recall=recall, max_verticals=args.max_verticals, **options)
            yield f"vertical_slash, {budget}", "recall", recall, pattern
    for threshold in args.thresholds:
        yield "xattention", "threshold", threshold, XAttention(threshold=threshold)
    for chunk_size in args.chunk_size:
        name = "moba" if len(args.chunk_size) == 1 else f"moba, chunks of {chunk_size}"
        for top_k in args.top_ks:
            yield name, "top_k", top_k, MoBA(chunk_size, top_k)


def _dense(bench: Bench, tensors: list[Tensor], call: Attention) -> dict:
    """One call: it takes seconds at full length."""
    measured = timed(bench, training_call(call, tensors[:3], tensors[3]), repeats=1)
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
    call = bench.attention(ready_index(pattern, select().tensors()), ranges)
    measured = timed(bench, training_call(call, [q, k, v], d_out))
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
        "backend": chosen_backend(bench.args.backend, shape, dynamic=True),
    }


def at_recall(measured: list[dict], recall: float) -> Iterator[dict]:
    """A row for each pattern: READ_OFF at this recall, linear between the measurements around it.

    "error" where there are none. measured: rows of _pattern(), in any order, including failed ones.
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
