"""Dense causal attention around a ring by kernels that know no block lists: in the layouts contiguous and zigzag the
queries of one rank and the keys of another make one rectangle without holes, or a causal square.

It is what dense attention costs at the least: block lists take FlashAttention-4 some 10 % (docs/benchmarks.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.call import Run
from titan_sparse.attention.merge import merge


class Rectangle(NamedTuple):
    """What queries see of a chunk: local queries from `q_start` on the local keys before `k_stop`; if `causal`, of the same
    chunk and each query its own and earlier keys."""

    q_start: int
    k_stop: int
    causal: bool


def rectangle(run: Run, q: Tensor, source: int) -> Rectangle | None:
    """Of this rank's queries and the keys of rank `source`; None if they make none or no kernel serves it.

    Zigzag: rank r has runs r and 2 W - 1 - r. All of its queries see the first run of an earlier rank and nothing else of
    it; those of the second run see all keys of a later rank.
    """
    layout, rank, length = run.cp.layout, run.cp.rank, q.shape[2]
    if not run.plain or layout not in ("contiguous", "zigzag") or not run.backend.serves_causal(q):
        return None
    if source == rank:
        return Rectangle(0, length, True)
    if layout == "zigzag":
        return (
            Rectangle(0, length // 2, False)
            if source < rank
            else Rectangle(length // 2, length, False)
        )
    return Rectangle(0, length, False) if source < rank else None


def forward(
    run: Run,
    part: Rectangle,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    total: tuple[Tensor, Tensor] | None,
    into: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As a backend's forward(); `total` is of all queries and is changed in place."""
    compute = run.backend.forward_causal if part.causal else run.backend.forward_full
    out, lse = compute(
        q[:, :, part.q_start :], k[:, :, : part.k_stop], v[:, :, : part.k_stop], run.scale
    )
    if total is None:  # the own chunk comes first, and all queries see some of it
        return out.to(dtype) if into is None else into.copy_(out), lse
    own = [x[:, :, part.q_start :] for x in total]
    for x, merged in zip(own, merge(own, out, lse, dtype)):
        x.copy_(merged)
    return total if into is None else (into.copy_(total[0]), total[1])


def backward(
    run: Run,
    part: Rectangle,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    dq: Tensor | None,
    into: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As a backend's backward()."""
    compute = run.backend.backward_causal if part.causal else run.backend.backward_full
    by_query = [x[:, :, part.q_start :] for x in (d_out, q, out.to(q.dtype), lse)]
    d_own, *d_kv = compute(
        by_query[0],
        by_query[1],
        *(x[:, :, : part.k_stop] for x in (k, v)),
        *by_query[2:],
        run.scale,
    )
    unseen = k.shape[2] - part.k_stop
    dk, dv = (torch.nn.functional.pad(x.to(dtype), (0, 0, 0, unseen)) for x in d_kv)
    if dq is None:
        dq = d_own.to(dtype)
    else:
        dq[:, :, part.q_start :] += d_own
    return dq if into is None else into.copy_(dq), dk, dv
