"""Attention over two pieces: lists of blocks, and whole chunks that single queries chose.

Sums of the gathered queries are kept in fp32, for some of the heads at a time, so that their memory
is bounded. The block-sparse kernel goes on from them and rounds the result.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import GradientOutput, Lists, Piece, QuerySide
from titan_sparse.kernels.gathered.backward import add_key_gradient, add_query_gradient
from titan_sparse.kernels.gathered.forward import add_attention
from titan_sparse.kernels.gathered.launch import parts
from titan_sparse.kernels.gathered.lists import (
    Choices,
    Gathered,
    chosen_pairs,
    gather_queries,
)


class Plan(NamedTuple):
    """What is computed besides the gathered pairs, and for whom.

    own: the lists of blocks. start, stop: int32 [B, S], contiguous: in their partial tiles a query
    sees start <= p < stop. block_size: no larger than a chunk. scale: of the logits, above 0.
    """

    own: Piece
    choices: Choices
    start: Tensor
    stop: Tensor
    block_size: int
    scale: float


class Part(NamedTuple):
    """Some of the sequences and heads of a plan."""

    batches: slice
    heads: slice
    kv_heads: slice
    plan: Plan
    gathered: Gathered


def forward(q: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """out like q [B, Hq, S, D], contiguous, and natural-log lse fp32 [B, Hq, S].

    Keys and values are those of plan.own. Rows that see nothing: 0 and -inf.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    for part in _parts(q, plan):
        rows = (part.batches, part.heads)
        own = part.plan.own
        total = torch.zeros(q[rows].shape, dtype=torch.float32, device=q.device)
        add_attention(
            q[rows],
            own.k,
            own.v,
            part.plan.choices,
            part.gathered,
            plan.scale,
            plan.block_size,
            (total, lse[rows]),
        )
        block_sparse.forward(
            q[rows],
            [own],
            part.plan.start,
            part.plan.stop,
            plan.block_size,
            plan.scale,
            total=(total, lse[rows]),
            into=out[rows],
        )
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, in q's dtype. out and lse are forward()'s."""
    queries = block_sparse.query_side(
        d_out, q, out, lse, plan.start, plan.stop, plan.block_size, plan.scale
    )
    # What the chunks add is summed up with it before it is rounded.
    dk, dv = block_sparse.key_gradient(queries, plan.own, torch.float32)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for part in _parts(q, plan):
        rows = (part.batches, part.heads)
        keys = (part.batches, part.kv_heads)
        own = part.plan.own
        of_part = _some_queries(queries, part)
        total = torch.zeros(q[rows].shape, dtype=torch.float32, device=q.device)
        pairs = (part.plan.choices, part.gathered)
        add_query_gradient(of_part, own.k, own.v, *pairs, total)
        add_key_gradient(of_part, own.k, own.v, *pairs, (dk[keys], dv[keys]))
        output = GradientOutput(q.dtype, [], before=total, into=dq[rows])
        block_sparse.query_gradient(of_part, [own], output)
    return dq, dk.to(q.dtype), dv.to(q.dtype)


def _parts(q: Tensor, plan: Plan) -> Iterator[Part]:
    """The parts of a plan, each with its lists, which are made when their turn comes."""
    batch, heads, q_len, dim = q.shape
    own = plan.own
    kv_heads = own.k.shape[1]
    row_bytes = q_len * dim * 4
    for batches, some_heads, some_kv_heads in parts(batch, heads, kv_heads, row_bytes):
        by_key = own.by_key
        if by_key is not None:
            by_key = _some_lists(by_key, batches, some_heads)
        piece = own._replace(
            k=own.k[batches, some_kv_heads],
            v=own.v[batches, some_kv_heads],
            by_query=_some_lists(own.by_query, batches, some_heads),
            by_key=by_key,
        )
        choices = plan.choices.of(batches, some_heads)
        some = plan._replace(
            own=piece,
            choices=choices,
            start=plan.start[batches],
            stop=plan.stop[batches],
        )
        gathered = gather_queries(chosen_pairs(choices), choices.begin.shape[1])
        yield Part(batches, some_heads, some_kv_heads, some, gathered)


def _some_lists(lists: Lists, batches: slice, heads: slice) -> Lists:
    fields = []
    for field in lists:
        fields.append(None if field is None else field[batches, heads])
    return Lists._make(fields)


def _some_queries(queries: QuerySide, part: Part) -> QuerySide:
    rows = (part.batches, part.heads)
    return queries._replace(
        q=queries.q[rows],
        d_out=queries.d_out[rows],
        lse_2=queries.lse_2[rows],
        delta=queries.delta[rows],
        start=part.plan.start,
        stop=part.plan.stop,
    )
