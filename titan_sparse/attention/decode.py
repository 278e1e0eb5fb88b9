"""Attention of one new query per sequence to all cached keys, on this rank and the others of its group.

Each rank attends to the keys that it holds, in any layout. The results of the ranks are merged by
log-sum-exp, on every rank in the same order, so all ranks get bitwise equal results.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import Partial, merge
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.kernels.sinks import add_sinks

_CHUNK = 32768
"""Number of keys whose scores are in memory at a time."""


class Cached(NamedTuple):
    """Keys and values [B, Hkv, n, D] that are kept, and which of them the queries see: bool [B, n]."""

    keys: Tensor
    values: Tensor
    seen: Tensor


def attend_cached(
    q: Tensor,
    cached: Sequence[Cached],
    cp: ContextParallel,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Dense attention of q over the cached keys of all ranks of `cp`: [B, Hq, 1, D], as q.

    q: [B, Hq, 1, D], the same on all ranks. cached: this rank's, of which all may be hidden. scale:
    of the scores; default D ** -0.5. sinks: [Hq], as attend() has them. Collective over `cp`.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    parts = []
    for part in cached:
        for start in range(0, part.keys.shape[2], _CHUNK):
            chunk = slice(start, start + _CHUNK)
            keys = part.keys[:, :, chunk]
            values = part.values[:, :, chunk]
            parts.append(_attend(q, keys, values, part.seen[:, chunk], scale))
    if not parts:
        dtype = accumulation_dtype(q.dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        parts.append(Partial(torch.zeros_like(q, dtype=dtype), lse))
    total = functools.reduce(_merge, parts)
    if cp.size > 1:
        # In one collective: [ranks, B, Hq, 1, D + 1].
        of_ranks = cp.all_gather(torch.cat([total.out, total.lse[..., None]], dim=-1))
        parts = [Partial(x[..., :-1].contiguous(), x[..., -1].contiguous()) for x in of_ranks]
        total = functools.reduce(_merge, parts)
    out, lse = total
    if sinks is not None:
        out, _ = add_sinks(out, lse, sinks)
    return out.to(q.dtype)


def _merge(total: Partial, part: Partial) -> Partial:
    return merge(total, part.out, part.lse, part.out.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Partial:
    """Attention to some keys, in fp32 (fp64 for fp64)."""
    kv_heads = keys.shape[1]
    # [B, Hkv, G, D]: the queries of a group share its keys.
    grouped = q.squeeze(2).unflatten(1, (kv_heads, -1))
    # [B, Hkv, G, n]
    scores = _matmul(grouped, keys.transpose(2, 3)) * scale
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    # Where nothing is seen, -inf - -inf would be NaN.
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    lse = largest + total.log()
    out = _matmul(weights.to(values.dtype), values) / total.clamp(min=1)
    return Partial(out.flatten(1, 2)[:, :, None], lse.flatten(1, 3)[..., None])


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [B, H, M, K] @ b [B, H, K, N], summed and returned in fp32 (fp64 for fp64), also under
    torch.autocast."""
    dtype = accumulation_dtype(a.dtype)
    with torch.autocast(a.device.type, enabled=False):
        if a.is_cuda and a.dtype != dtype:
            # Sums that are not rounded to 16 bits, without copies of a and b in fp32.
            product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype)
            return product.unflatten(0, a.shape[:2])
        return a.to(dtype) @ b.to(dtype)
