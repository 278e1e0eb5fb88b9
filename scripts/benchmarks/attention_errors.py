"""Errors of attention in bf16 against fp32, for scripts.benchmarks.attention to look at before it times anything."""

import functools
import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention_cases import (
    OURS_DENSE,
    Attention,
    Shape,
    dense_peers,
    draw,
    ours,
    ready_index,
    sdpa,
)
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import VerticalSlash


def errors(call: Attention, shape: Shape, seen: Tensor) -> dict[str, float]:
    """Relative Frobenius errors of out, dq, dk and dv against fp32 over bool `seen` [Hq, S, S]."""
    *leaves, d_out = draw(shape)
    got = call(*leaves)
    gradients = torch.autograd.grad(got, leaves, d_out)
    wanted = _reference([x.detach().float() for x in leaves], d_out.float(), seen)
    names = ("out", "dq", "dk", "dv")
    return {
        n: ((a.float() - b).norm() / b.norm()).item()
        for n, a, b in zip(names, (got, *gradients), wanted)
    }


def _reference(qkv: list[Tensor], d_out: Tensor, seen: Tensor) -> list[Tensor]:
    q, k, v = qkv
    group, outs = q.shape[1] // k.shape[1], []
    grads = [torch.zeros_like(x) for x in qkv]
    for head in range(q.shape[1]):
        leaves = [
            x[:, i].clone().requires_grad_()
            for x, i in ((q, head), (k, head // group), (v, head // group))
        ]
        scores = (leaves[0] @ leaves[1].mT * q.shape[-1] ** -0.5).masked_fill(
            ~seen[head], -torch.inf
        )
        # Padding sees nothing: the softmax of its rows is NaN and has to be 0.
        outs.append(scores.softmax(-1).nan_to_num() @ leaves[2])
        parts = torch.autograd.grad(outs[-1], leaves, d_out[:, head])
        grads[0][:, head], outs[-1] = parts[0], outs[-1].detach()
        grads[1][:, head // group] += parts[1]
        grads[2][:, head // group] += parts[2]
    return [torch.stack(outs, 1), *grads]


def ragged(seq_len: int) -> list[int]:
    """Document lengths: two long ones, which a selection is made for, two short ones, and padding left over."""
    return [3 * seq_len // 8 - 5, 9, 7 * seq_len // 16 + 3, seq_len // 8 + 1]


def by_document(call: Attention, lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention inside each document, one call a document; 0 for the padding after the last."""
    *pieces, padding = zip(
        *(x.split([*lengths, x.shape[2] - sum(lengths)], dim=2) for x in (q, k, v))
    )
    return torch.cat([*(call(*piece) for piece in pieces), padding[0] * 0], dim=2)


def cases_to_check(
    shape: Shape, names: list[str], peers: list[str]
) -> Iterator[tuple[str, str, Attention, Tensor]]:
    """(mask, name, attention, bool `seen` [Hq, S, S]) of all that is timed, and first of torch's flash kernel as
    "yardstick". The index is chosen by our selection, with caps that make it sparse."""
    # Documents and caps are such that tables and verticals have the same shapes for both masks: flex compiles once.
    seq_len, block_size = shape.seq_len, shape.block_size
    pattern = VerticalSlash(
        recall=0.9, max_columns=seq_len * 3 // 100, max_slashes=8, dense_below=seq_len // 4
    )
    torch_flash = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)
    for mask, lengths in ((Causal(), [seq_len]), (Documents(ragged(seq_len)), ragged(seq_len))):
        kind = type(mask).__name__.lower()
        rows = mask.rows(seq_len, shape.device)
        allowed = mask.dense(seq_len, shape.device)[0].expand(shape.heads, -1, -1)
        yield kind, "yardstick", functools.partial(by_document, torch_flash, lengths), allowed
        for name, call in dense_peers(peers, rows, block_size).items():
            if kind == "causal" or name == OURS_DENSE:
                yield kind, name, call, allowed
        index = pattern.select(*draw(shape)[:2], rows, block_size=block_size)
        ready, seen = ready_index(pattern, index.tensors()), index.dense(mask)[0]
        for name in names:
            yield kind, name, functools.partial(ours, name, ready, rows, block_size), seen


def check(cases: Iterator[tuple[str, str, Attention, Tensor]], shape: Shape) -> dict[str, dict]:
    """{mask: {name: errors()}}; ends the program if one is above 5e-3 or above twice the yardstick's before it."""
    results: dict[str, dict] = {}
    for kind, name, call, seen in cases:
        found = results.setdefault(kind, {})
        found[name] = errors(call, shape, seen)
        worse = too_large(found[name], found["yardstick"])
        if worse and name != "yardstick":
            print(json.dumps(results, indent=1))
            sys.exit(f"{name} is wrong at {shape.seq_len} tokens, {kind} mask, {shape}: {worse}")
    return results


def too_large(found: dict[str, float], yardstick: dict[str, float]) -> dict[str, float]:
    """Of errors(), those above 5e-3 or above twice the yardstick's."""
    return {
        name: error
        for name, error in found.items()
        if not (error <= 5e-3 and error <= 2 * yardstick[name])
    }
