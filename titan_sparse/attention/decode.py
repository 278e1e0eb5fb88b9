"""Attention of one new query per sequence to all cached keys, on this rank and the
others of its group.

Each rank attends to the keys that it holds, in any layout. The results of the ranks are merged by
log-sum-exp, on every rank in the same order, so all ranks get bitwise equal results.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import Partial
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.kernels.decode import attend_in_parts, attend_in_parts_naive
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.kernels.sinks import add_sinks


class Cached(NamedTuple):
    """Keys and values [B, Hkv, n, D] that are kept, and which of them the
    queries see: bool [B, n]."""

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
    has_kernel = q.is_cuda and q.dtype != torch.float64
    attend = attend_in_parts if has_kernel else attend_in_parts_naive
    # No part where a rank holds no keys.
    none = q.new_empty(*q.shape[:2], 0, q.shape[-1], dtype=accumulation_dtype(q.dtype))
    parts = [(none, none[..., 0])]
    parts += [attend(q, *part, scale) for part in cached]
    outs, lses = zip(*parts, strict=True)
    total = _merge(torch.cat(outs, dim=2), torch.cat(lses, dim=2))
    if cp.size > 1:
        # In one collective: [ranks, B, Hq, 1, D + 1].
        of_ranks = cp.all_gather(torch.cat([total.out, total.lse[..., None]], dim=-1))
        # [B, Hq, ranks, D + 1]
        of_ranks = of_ranks.squeeze(3).movedim(0, 2)
        total = _merge(of_ranks[..., :-1], of_ranks[..., -1])
    out, lse = total
    if sinks is not None:
        out, _ = add_sinks(out, lse, sinks)
    return out.to(q.dtype)


def _merge(out: Tensor, lse: Tensor) -> Partial:
    """Attention over all keys, for one query: out [B, Hq, 1, D] and lse [B, Hq, 1].

    out: [B, Hq, P, D], over each of P parts of the keys. lse: [B, Hq, P].
    """
    total = lse.logsumexp(-1, keepdim=True)
    # Where nothing is seen, -inf - -inf would be NaN.
    share = (lse - total.clamp(min=torch.finfo(lse.dtype).min)).exp()
    return Partial((out * share[..., None]).sum(2, keepdim=True), total)
