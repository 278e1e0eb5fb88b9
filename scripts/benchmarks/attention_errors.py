"""Errors of attention in bf16 against fp32.

scripts.benchmarks.attention looks at them before it times anything.
"""

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

LIMIT = 5e-3
"""The largest error of anything that is right."""


def errors(call: Attention, shape: Shape, seen: Tensor) -> dict[str, float]:
    """Relative Frobenius errors of out, dq, dk and dv against fp32 over bool `seen` [Hq, S, S]."""
    q, k, v, d_out = draw(shape)
    out = call(q, k, v)
    computed = [out, *torch.autograd.grad(out, (q, k, v), d_out)]
    exact = _reference([x.detach().float() for x in (q, k, v)], d_out.float(), seen)
    found = {}
    for name, value, reference in zip(("out", "dq", "dk", "dv"), computed, exact):
        found[name] = ((value.float() - reference).norm() / reference.norm()).item()
    return found


def _reference(qkv: list[Tensor], d_out: Tensor, seen: Tensor) -> list[Tensor]:
    """out, dq, dk, dv in the dtype of the inputs, head by head: the scores of one fit in memory."""
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]  # query heads of a KV head
    outs = []
    dq, dk, dv = (torch.zeros_like(x) for x in qkv)
    for head in range(q.shape[1]):
        kv_head = head // group
        q_head = q[:, head].clone().requires_grad_()  # [B, S, D]
        k_head = k[:, kv_head].clone().requires_grad_()
        v_head = v[:, kv_head].clone().requires_grad_()
        scores = (q_head @ k_head.mT * q.shape[-1] ** -0.5).masked_fill(~seen[head], -torch.inf)
        # Padding sees nothing: the softmax of its rows is NaN and has to be 0.
        out = scores.softmax(-1).nan_to_num() @ v_head
        gradients = torch.autograd.grad(out, (q_head, k_head, v_head), d_out[:, head])
        outs.append(out.detach())
        dq[:, head] = gradients[0]
        dk[:, kv_head] += gradients[1]
        dv[:, kv_head] += gradients[2]
    return [torch.stack(outs, 1), dq, dk, dv]


def ragged(seq_len: int) -> list[int]:
    """Document lengths: two long ones, which a selection is made for, two short ones, and padding."""
    return [3 * seq_len // 8 - 5, 9, 7 * seq_len // 16 + 3, seq_len // 8 + 1]


def by_document(call: Attention, lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention inside each document, one call a document; 0 for the padding."""
    outs = []
    start = 0
    for length in lengths:
        end = start + length
        outs.append(call(q[:, :, start:end], k[:, :, start:end], v[:, :, start:end]))
        start = end
    outs.append(q[:, :, start:] * 0)
    return torch.cat(outs, dim=2)


def cases_to_check(
    shape: Shape, names: list[str], peers: list[str]
) -> Iterator[tuple[str, str, Attention, Tensor]]:
    """(mask, name, attention, bool `seen` [Hq, S, S]) of everything that is timed.

    For each mask the first is torch's flash kernel, named "yardstick". names: our backends. Their
    index is chosen by our selection, with caps that make it sparse. Budgets are independent: prices of
    random inputs are alike, and most would be left out under a cap.
    """
    # Documents and caps give tables and verticals of the same shapes for both masks, so that flex
    # compiles once.
    seq_len = shape.seq_len
    block_size = shape.block_size
    pattern = VerticalSlash(
        recall=0.9,
        max_verticals=seq_len * 3 // 100,
        max_slashes=8,
        dense_below=seq_len // 4,
        budget="independent",
        probe_rows="last",
        count_sinks=True,
    )
    torch_flash = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)
    for mask, lengths in ((Causal(), [seq_len]), (Documents(ragged(seq_len)), ragged(seq_len))):
        kind = type(mask).__name__.lower()
        ranges = mask.rows(seq_len, shape.device)
        allowed = mask.dense(seq_len, shape.device)[0].expand(shape.heads, -1, -1)  # [Hq, S, S]
        yield kind, "yardstick", functools.partial(by_document, torch_flash, lengths), allowed
        for name, call in dense_peers(peers, ranges, block_size).items():
            if kind == "causal" or name in OURS_DENSE:
                yield kind, name, call, allowed
        q, k, _, _ = draw(shape)
        index = pattern.select(q, k, ranges, block_size=block_size)
        ready = ready_index(pattern, index.tensors())
        seen = index.dense(mask)[0]
        for name in names:
            yield kind, name, functools.partial(ours, name, ready, ranges, block_size), seen


def check(cases: Iterator[tuple[str, str, Attention, Tensor]], shape: Shape) -> dict[str, dict]:
    """{mask: {name: errors()}}.

    Ends the program if an error is above LIMIT, or above twice that of the yardstick before it.
    """
    results: dict[str, dict] = {}
    for kind, name, call, seen in cases:
        of_mask = results.setdefault(kind, {})
        of_mask[name] = errors(call, shape, seen)
        worse = too_large(of_mask[name], of_mask["yardstick"])
        if worse and name != "yardstick":
            print(json.dumps(results, indent=1))
            sys.exit(f"{name} is wrong at {shape.seq_len} tokens, {kind} mask, {shape}: {worse}")
    return results


def too_large(found: dict[str, float], yardstick: dict[str, float]) -> dict[str, float]:
    """Of errors(), those above LIMIT or above twice the yardstick's; NaN is too large."""
    return {
        name: error
        for name, error in found.items()
        if not (error <= LIMIT and error <= 2 * yardstick[name])
    }
