"""The case patterns of scripts.benchmarks.attention: what a selection costs, and what it keeps.

On realistic q and k (synthetic.py): vertical_slash with joint budgets and with independent
ones (these as published: the last 64 rows, 30 sinks, 2 local slashes), xattention, and moba, over a
few values of the knob of each. The index is given to forward and backward, choosing it is
`selection_ms`; `step_ms` is all three. Density is counted; recall is the share of the softmax mass
that --recall-rows sampled rows keep. `of_dense_x_density` is attention's time / (the time of dense
x the density).
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks import synthetic
from scripts.benchmarks.attention_cases import Shape, chosen_backend, ready_index
from scripts.benchmarks.harness import Bench, about, rounded, timed, training_call
from scripts.benchmarks.options import positive
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention

PUBLISHED: dict[str, Any] = {
    "budget": "independent",
    "probe": 64,
    "probe_rows": "last",
    "sinks": 30,
    "count_sinks": True,
    "local_slashes": 2,
}
"""MTraining's probe, and what it always selects."""
RECALLS = {"joint": (0.8, 0.85, 0.9, 0.95, 0.98), "independent": (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)}
THRESHOLDS = (0.5, 0.9, 0.99, 0.999)
TOP_KS = (4, 12, 24, 48)


def add_pattern_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--points", type=positive, help="only the first values of each knob, of patterns")
    add("--chunk-size", type=positive, default=4096, help="of moba, tokens")
    add("--max-verticals", type=positive, default=4096, help="of vertical_slash")
    add("--recall-rows", type=positive, default=256, help="rows that are measured")


def patterns(bench: Bench) -> Iterator[dict]:
    for shape in bench.shapes(524288, [(16, 2)]):
        row = about("patterns", shape)
        q, k = realistic(shape)
        torch.manual_seed(1)
        tensors = [
            q.requires_grad_(),
            k.requires_grad_(),
            torch.randn_like(k).requires_grad_(),
            torch.randn_like(q),
        ]
        dense = bench.attempt(row | {"name": "dense"}, _dense, shape, tensors)
        yield dense
        for name, value, pattern in grid(bench.args):
            named = row | {"name": name, "value": value}
            found = bench.attempt(named, _pattern, shape, pattern, tensors)
            if "error" not in found and "error" not in dense:
                ideal_ms = dense["total_ms"] * found["density"]
                found["of_dense_x_density"] = rounded(found["total_ms"] / ideal_ms)
            yield found


def realistic(shape: Shape) -> tuple[Tensor, Tensor]:
    """q, k [1, H, S, D] in bf16."""
    heads = synthetic.draw_heads(shape.seq_len, shape.heads, shape.kv_heads, shape.head_dim)
    q = synthetic.queries(heads, torch.bfloat16).to(shape.device)
    k = synthetic.keys(heads, torch.bfloat16).to(shape.device)
    if not (q.isfinite().all() and k.isfinite().all()):
        raise ValueError(f"no realistic inputs of head_dim {shape.head_dim}; write a larger one")
    return q, k


def grid(args: argparse.Namespace) -> Iterator[tuple[str, float, Pattern]]:
    """(name, value of the knob, pattern)."""
    for budget, recalls in RECALLS.items():
        options = {"max_verticals": args.max_verticals}
        options |= PUBLISHED if budget == "independent" else {}
        for recall in recalls[: args.points]:
            yield f"vertical_slash, {budget}", recall, VerticalSlash(recall=recall, **options)
    for threshold in THRESHOLDS[: args.points]:
        yield "xattention", threshold, XAttention(threshold=threshold)
    for top_k in TOP_KS[: args.points]:
        yield "moba", top_k, MoBA(args.chunk_size, top_k)


def _dense(bench: Bench, shape: Shape, tensors: list[Tensor]) -> dict:
    """One call: it takes seconds at full length."""
    call = bench.attention(Dense(), Causal().rows(shape.seq_len, bench.device))
    return timed(bench, training_call(call, tensors), repeats=1)


def _pattern(bench: Bench, shape: Shape, pattern: Pattern, tensors: list[Tensor]) -> dict:
    """Times of the selection, and of attention with the index given; and what it keeps."""
    *qkv, _ = tensors
    q, k, _ = (leaf.detach() for leaf in qkv)
    ranges = Causal().rows(shape.seq_len, bench.device)
    select = functools.partial(pattern.select, q, k, ranges, block_size=shape.block_size)
    selection_ms = timed(bench, [select])["total_ms"]
    call = bench.attention(ready_index(pattern, select().tensors()), ranges)
    measured = timed(bench, training_call(call, tensors))
    with torch.no_grad(), recording(recall_rows=bench.args.recall_rows) as seen:
        call(*qkv)
    density = seen.density().mean()
    kept = {
        "density": density,
        "recall": seen.recall[0].mean(),
        "recall_of_worst_head": seen.recall[0].amin(),
    }
    if seen.capped:  # of patterns with caps
        kept["capped"] = seen.capped[0].mean()
    step_ms = selection_ms + measured["total_ms"]
    return {
        "selection_ms": selection_ms,
        **measured,
        "step_ms": rounded(step_ms),
        **{name: rounded(value.item()) for name, value in kept.items()},
        "backend": chosen_backend(bench.args.backend, shape, dynamic=True),
    }
