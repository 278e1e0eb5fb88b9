"""Attention over two pieces: lists of blocks, and whole chunks that single queries chose.

Sums of the gathered queries are kept in fp32, for some of the heads at a time, so that their memory
is bounded. The block-sparse kernel goes on from them and rounds the result.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import QuerySide
from titan_sparse.kernels.gathered.kernel import add_attention, add_key_gradient, add_query_gradient
from titan_sparse.kernels.gathered.launch import Share, list_shares, row_tile, total_shares
from titan_sparse.kernels.gathered.lists import Plan, Work, chosen_pairs, gather_queries, tile_table


def forward(q: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """out like q [B, Hq, S, D], contiguous, and natural-log lse fp32 [B, Hq, S].

    Rows that see nothing: 0 and -inf.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    for work in _works(q, plan):
        for part in _parts(q, work):
            rows = (part.share.batches, part.share.heads)
            total = (torch.zeros(q[rows].shape, dtype=torch.float32, device=q.device), lse[rows])
            add_attention(q[rows], part, total)
            plan = part.plan
            block_sparse.forward(q[rows], [plan.own], plan.scale, total=total, into=out[rows])
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, in q's dtype. out and lse are forward()'s; plan.own needs by_key."""
    queries = block_sparse.query_side(d_out, q, out, lse, plan.own.tiles, plan.scale)
    # In fp32: what the chunks add is summed up with it before it is rounded.
    dk, dv = block_sparse.key_gradient(queries, plan.own, torch.float32)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for work in _works(q, plan):
        keys = (work.share.batches, work.share.kv_heads)
        add_key_gradient(_queries_of(queries, work), work, (dk[keys], dv[keys]))
        for part in _parts(q, work):
            some = _queries_of(queries, part)
            total = torch.zeros(some.q.shape, dtype=torch.float32, device=q.device)
            add_query_gradient(some, part, total)
            into = dq[part.share.batches, part.share.heads]
            block_sparse.query_gradient(some, [part.plan.own], dq.dtype, before=total, into=into)
    return dq, dk.to(q.dtype), dv.to(q.dtype)


def _works(q: Tensor, plan: Plan) -> Iterator[Work]:
    """All shares of a plan; the lists of each are made when its turn comes."""
    kv_heads = plan.own.k.shape[1]
    chunks = plan.choices.begin.shape[1]
    chunk = plan.choices.tokens
    rows, _ = row_tile(q.shape[-1], plan.own.tiles.block_size, q.element_size(), chunk)
    for share in list_shares(tuple(q.shape[:3]), kv_heads, chunks, plan.choices.slots):
        some = plan.of(share)
        gathered = gather_queries(chosen_pairs(some.choices), chunks)
        yield Work(share, some, gathered, tile_table(gathered, rows))


def _parts(q: Tensor, work: Work) -> Iterator[Work]:
    """Smaller shares of `work`, whose sums are kept at once. Their heads count in the whole."""
    batches, heads, kv_heads = work.share
    shape = q[batches, heads].shape
    for inner in total_shares(tuple(shape), kv_heads.stop - kv_heads.start):
        share = Share(
            batches=_within(batches, inner.batches),
            heads=_within(heads, inner.heads),
            kv_heads=_within(kv_heads, inner.kv_heads),
        )
        yield Work(share, work.plan.of(inner), inner.of(work.gathered), inner.of(work.tiles))


def _within(outer: slice, inner: slice) -> slice:
    """Shift `inner`, which counts from the beginning of `outer`, to count in the whole."""
    return slice(outer.start + inner.start, outer.start + inner.stop)


def _queries_of(queries: QuerySide, work: Work) -> QuerySide:
    rows = (work.share.batches, work.share.heads)
    return queries._replace(
        q=queries.q[rows],
        d_out=queries.d_out[rows],
        lse_2=queries.lse_2[rows],
        delta=queries.delta[rows],
        start=work.plan.own.tiles.start,
        stop=work.plan.own.tiles.stop,
    )
