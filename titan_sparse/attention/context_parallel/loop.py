"""The loop over the steps of a schedule: the sums of a forward and of a backward.

A schedule is a Transport: it brings keys and values step by step (transport.py). The gathered
verticals are dealt out over the steps, block by block. The first step of a forward and the last one
of a backward get none, so that work hides their exchanges.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from titan_sparse.attention import moba_gathered, recorder
from titan_sparse.attention.backends.base import Partial, Queries, Sum
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel import dense, ring, verticals
from titan_sparse.attention.context_parallel.all_gather import AllGather
from titan_sparse.attention.context_parallel.group_cast import GroupCast
from titan_sparse.attention.context_parallel.ring import Ring
from titan_sparse.attention.context_parallel.schedules import Moves
from titan_sparse.attention.context_parallel.transport import Group, OneRank, Step, Transport
from titan_sparse.attention.merge import accumulation_dtype

TRANSPORTS: dict[Moves, type[Transport]] = {
    Moves.NOTHING: OneRank,
    Moves.CHUNKS: Ring,
    Moves.HEADS: AllGather,
    Moves.BLOCKS: GroupCast,
}


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the keys and values of the gathered
    verticals [2, B, Hq, C, D]."""
    geometry = moba_gathered.geometry_of(call, len(q))
    if geometry is not None:
        no_verticals = q.new_empty(2, *q.shape[:2], 0, q.shape[3])
        return *moba_gathered.forward(call, geometry, q, k, v), no_verticals
    call.cp.count_plain_ring(k)
    gathered = verticals.gather(call, k, v)
    transport = TRANSPORTS[call.cp.moves](call, q, k, v, backward=False)
    groups = transport.groups
    out = _memory(groups, q)
    totals: list[Partial | None] = [None] * len(groups)
    for step, group, number, is_last in _numbered(transport):
        q_here = q[:, group.heads]
        # In fp32 (fp64 for fp64), because errors of rounding at every step would add up.
        dtype = q.dtype if is_last else accumulation_dtype(q.dtype)
        total = Sum(dtype, totals[step.group])
        # The last steps meet the verticals.
        shares = group.vertical_shares(gathered.result)
        share = number + shares - group.steps
        if share >= 0:
            gathered.wait()
        with recorder.computing():
            if step.rectangle is not None:
                total = dense.forward(call, step.rectangle, q_here, step.k, step.v, total)
            else:
                pieces = group.pieces(step, False, gathered.result, share)
                total = call.backend.forward(q_here, pieces, call.scale, total)
        if is_last and out is not None:
            out[:, group.heads] = total.out
            total = total._replace(out=None)
        totals[step.group] = total
    if out is None:
        out, lse = totals[0]
    else:
        lse = torch.cat([total.lse for total in totals], dim=1)
    return out, lse, gathered.wait()


def backward(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    geometry = moba_gathered.geometry_of(call, len(k))
    if geometry is not None:
        return moba_gathered.backward(call, geometry, queries, k, v)
    call.cp.count_plain_ring(k, backward=True)
    q = queries.q
    if call.cp.moves is Moves.CHUNKS and ring.circulates_queries_of(call, q, k):
        return ring.backward_with_queries_circulating(call, queries, k, v, vertical_kv)
    transport = TRANSPORTS[call.cp.moves](call, q, k, v, backward=True)
    groups = transport.groups
    dq_of_all = _memory(groups, q)
    # Their exchange begins when all groups have met all verticals.
    shares = sum(group.vertical_shares(vertical_kv) for group in groups)
    d_verticals = verticals.Gradients(call, vertical_kv, missing=shares)
    dq_of_groups: list[Tensor | None] = [None] * len(groups)
    for step, group, number, is_last in _numbered(transport):
        here = Queries._make(tensor[:, group.heads] for tensor in queries)
        total = Sum(call.sum_dtype(q), dq_of_groups[step.group])
        if step.rectangle is not None:
            dq, step.d_kv = dense.backward(call, step.rectangle, here, step.k, step.v, total)
        else:
            # The first steps meet the verticals.
            pieces = group.pieces(step, call.backend.READS_BY_KEY, vertical_kv, share=number)
            dq, gradients = call.backend.backward(here, pieces, call.scale, total)
            step.d_kv = gradients[0]
            for d_kv in gradients[1:]:
                of_group = group.vertical_shares(vertical_kv)
                d_verticals.put(d_kv, group.heads, number, of_group)
        if is_last and dq_of_all is not None:
            dq_of_all[:, group.heads] = dq
            dq = dq_of_all
        dq_of_groups[step.group] = dq
    # If the verticals' gradients are still to be added, dk and dv are not rounded before that.
    has_verticals = d_verticals.reduced is not None
    dk, dv = transport.gradients(call.sum_dtype(q) if has_verticals else q.dtype)
    d_verticals.add_to((dk, dv))
    return dq_of_groups[0].to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _memory(groups: list[Group], q: Tensor) -> Tensor | None:
    """What several groups of heads write their results to; a single group's own is the whole."""
    return q.new_empty(q.shape) if len(groups) > 1 else None


def _numbered(transport: Transport) -> Iterator[tuple[Step, Group, int, bool]]:
    """Each step, its group, its number among the group's steps, and whether it is their last."""
    done = Counter()
    for step in transport.steps():
        group = transport.groups[step.group]
        # How many steps of the group came before.
        number = done[step.group]
        done[step.group] += 1
        yield step, group, number, number + 1 == group.steps
