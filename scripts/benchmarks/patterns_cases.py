"""The case patterns of scripts.benchmarks.masks: what a selection costs and what attention over it keeps."""

import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention import training_call
from scripts.benchmarks.attention_cases import Attention, Shape, ready_index, sdpa
from scripts.benchmarks.context_parallel_cases import attention, realistic, rounded
from scripts.benchmarks.context_parallel_timing import Bench, attempt, timed
from scripts.benchmarks.masks_cases import about, chosen_backend, shapes
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention

READ_OFF = ("selection_ms", "forward_ms", "backward_ms", "step_ms", "density")
"""What is interpolated at equal recall."""


def patterns(bench: Bench) -> Iterator[dict]:
    """Patterns over their knobs on realistic q and k, and times at equal recall."""
    for shape in shapes(bench, 524288, [(16, 2)]):
        row, tensors = about("patterns", shape), []
        drawn = attempt(
            bench, row | {"name": "inputs"}, lambda: tensors.extend(_inputs(bench, shape)) or {}
        )
        if "error" in drawn:
            yield drawn
            continue
        for name, call in dense_calls(bench, shape):
            yield attempt(
                bench, row | {"name": name}, functools.partial(_dense, bench, shape, tensors, call)
            )
        found = []
        for name, knob, value, pattern in grid(bench):
            found.append(
                attempt(
                    bench,
                    row | {"name": name, "knob": knob, "value": value},
                    functools.partial(_pattern, bench, shape, pattern, tensors),
                )
            )
            yield found[-1]
        read_off = [row | at for recall in bench.args.at_recalls for at in at_recall(found, recall)]
        yield from read_off
        if bench.rank == 0:
            print(table(read_off), flush=True)


def grid(bench: Bench) -> Iterator[tuple[str, str, float, Pattern]]:
    """(name, knob, its value, pattern)."""
    args = bench.args
    for budget in ("independent", "joint"):
        for recall in getattr(args, f"{budget}_recalls"):
            yield (
                f"vertical_slash, {budget}",
                "recall",
                recall,
                VerticalSlash(recall=recall, max_columns=args.max_columns, budget=budget),
            )
    for threshold in args.thresholds:
        yield "xattention", "threshold", threshold, XAttention(threshold=threshold)
    for top_k in args.top_ks:
        yield "moba", "top_k", top_k, MoBA(args.chunk_size, top_k)


def _inputs(bench: Bench, shape: Shape) -> list[Tensor]:
    """q, k, v that want a gradient, and the upstream gradient."""
    q, k = realistic(bench, shape)
    torch.manual_seed(1)
    return [
        q.requires_grad_(),
        k.requires_grad_(),
        torch.randn_like(k).requires_grad_(),
        torch.randn_like(q),
    ]


def dense_calls(bench: Bench, shape: Shape) -> Iterator[tuple[str, Attention]]:
    """(name, attention): ours, and on a GPU cuDNN's through torch."""
    yield "dense", attention(bench, Dense(), Causal().rows(shape.seq_len, bench.device), None)
    if bench.device.type == "cuda":
        yield "cudnn", functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION)


def _dense(bench: Bench, shape: Shape, tensors: list[Tensor], call: Attention) -> dict:
    """One call after one to warm up: it takes seconds at full length."""
    once = bench._replace(args=type(bench.args)(**vars(bench.args) | {"repeats": 1, "warm_ups": 1}))
    *leaves, d_out = tensors
    found = timed(once, training_call(call, leaves, d_out))
    return found | {"step_ms": found["total_ms"]}


def _pattern(bench: Bench, shape: Shape, pattern: Pattern, tensors: list[Tensor]) -> dict:
    """Times of the selection, and of attention with the index given; what it keeps. step_ms: all of it."""
    (*leaves, d_out), size = tensors, shape.block_size
    rows = Causal().rows(shape.seq_len, bench.device)
    select = functools.partial(
        pattern.select, *(x.detach() for x in leaves[:2]), rows, block_size=size
    )
    selection = timed(bench, [select])["total_ms"]
    call = attention(bench, ready_index(pattern, select().tensors()), rows, None)
    found = timed(bench, training_call(call, leaves, d_out))
    with torch.no_grad(), recording(recall_rows=bench.args.recall_rows) as seen:
        call(*leaves)
    kept = {
        "density": seen.density().mean(),
        "recall": seen.recall[0].mean(),
        "recall_of_worst_head": seen.recall[0].amin(),
        **({"capped": seen.capped[0].mean()} if seen.capped else {}),
    }
    return {
        "selection_ms": selection,
        **found,
        "step_ms": rounded(selection + found["total_ms"]),
        **{name: rounded(x.item()) for name, x in kept.items()},
        "backend": chosen_backend(bench, shape),
    }


# At equal recall ----------------------------------------------------------------------------------------------------


def at_recall(found: list[dict], recall: float) -> Iterator[dict]:
    """A row for each pattern: READ_OFF at this recall, linear between the two measurements around it; "error" where
    there are none. found: rows of _pattern(), in any order, failed ones too."""
    for name in dict.fromkeys(row["name"] for row in found):
        own = [row for row in found if row["name"] == name and "error" not in row]
        own.sort(key=lambda row: row["recall"])
        kept, row = [x["recall"] for x in own], {"name": name, "at_recall": recall}
        if not own or not kept[0] <= recall <= kept[-1]:
            measured = f"{kept[0]:.3f} to {kept[-1]:.3f} was" if own else "nothing was"
            yield row | {"error": f"{measured} measured"}
            continue
        yield row | {
            key: rounded(float(np.interp(recall, kept, [x[key] for x in own]))) for key in READ_OFF
        }


def table(rows: list[dict]) -> str:
    """Rows of at_recall() for people."""
    line = "{:26} {:>8} {:>12} {:>12} {:>12} {:>12} {:>9}".format
    lines = [line("pattern", "recall", *READ_OFF)]
    for row in rows:
        numbers = (
            [f"{row[key]:.4g}" for key in READ_OFF]
            if "error" not in row
            else [row["error"], "", "", "", ""]
        )
        lines.append(line(row["name"], row["at_recall"], *numbers).rstrip())
    return "\n".join(lines)
