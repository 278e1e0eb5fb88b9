"""Attention by the schedules that move chunks from rank to rank: ring and double_ring.

Block pairs follow the schedule, chunk by chunk. Verticals do not: they are gathered once and dealt
out over the steps, but for the first of the forward and the last of the backward, so that their
exchanges have work to hide behind. Partial results merge in fp32 by log-sum-exp. The backward of
every chunk takes the global out and lse, which makes the sum exact.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import timing
from titan_sparse.attention.backends.base import Partial, Piece, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.schedule import head_groups, vertical_steps
from titan_sparse.attention.merge import Results, at_last, results
from titan_sparse.attention.schedules import rectangles, verticals
from titan_sparse.attention.schedules.needs import needed_chunks
from titan_sparse.attention.schedules.transport import (
    Chunk,
    Route,
    Step,
    circulate,
    circulate_with_gradients,
    route_of,
)


class HeadGroup(NamedTuple):
    """Some KV heads, the query heads that share them, and the call for those."""

    call: AttentionCall
    heads: slice
    kv_heads: slice


@timing.timed
def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the gathered verticals [2, B, Hq, C, D].

    The running sum over chunks is fp32 (fp64 for fp64): rounding it at every step would add up.
    The last step rounds.
    """
    call.count_plain_ring(k)
    gathered = verticals.gather(call, k, v)
    groups = _head_groups(call, q, k)
    route = route_of(call.cp, needed_chunks(call))
    blocks_of_verticals = gathered.result.shape[3] // call.cp.block_size
    with_verticals = vertical_steps(route.computes_by_step, blocks_of_verticals)
    result, places = _places(q, groups, route)
    dtype = call.sum_dtype(q)
    totals: list[Partial | None] = [None] * len(groups)

    for step in circulate(call.cp, route, _kv_chunks(groups, k, v)):
        if not route.computes[step.window][step.place]:
            continue
        group = groups[step.group]
        total = totals[step.group]
        into = next(places[step.group])
        q_group = q[:, group.heads]
        kv = _keys_and_values(step.chunk)
        vertical_kv = gathered.wait() if step.number in with_verticals else None
        with timing.computing(step.number):
            rectangle = None
            if vertical_kv is None:
                rectangle = rectangles.rectangle_of(call, q, step.source)
            if rectangle is not None:
                total = rectangles.forward(call, rectangle, q_group, kv, total, dtype, into)
            else:
                tiles = group.call.tiles_of_rank(len(q), step.source, transpose=False)
                pieces = [Piece(*kv, tiles)]
                if vertical_kv is not None:
                    share = with_verticals.index(step.number)
                    pieces.append(
                        group.call.vertical_piece(
                            vertical_kv[:, :, group.heads],
                            len(q),
                            transpose=False,
                            share=share,
                            shares=len(with_verticals),
                        )
                    )
                total = call.backend.forward(q_group, pieces, total, call.scale, dtype, into)
        totals[step.group] = total

    out = result.joined([total.out for total in totals])
    lse = _joined([total.lse for total in totals], 1)
    return out, lse, gathered.wait()


def backward(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    q = queries.q
    call.count_plain_ring(k, backward=True)
    if _circulates_queries(call, q, k):
        return _backward_with_queries_circulating(call, queries, k, v, vertical_kv)
    groups = _head_groups(call, q, k)
    route = route_of(call.cp, needed_chunks(call))
    blocks_of_verticals = vertical_kv.shape[3] // call.cp.block_size
    shares = len(vertical_steps(route.computes_by_step, blocks_of_verticals))
    result, places = _places(q, groups, route)
    dtype = call.sum_dtype(q)
    by_key = call.backend.READS_BY_KEY
    dq: list[Tensor | None] = [None] * len(groups)
    d_verticals = verticals.new_gradients(vertical_kv)
    shares_done = [0] * len(groups)
    reduced = None

    def gradient_of(step: Step) -> Tensor:
        """dk and dv of the step's chunk, [2, B, Hkv of the group, S_local, D]."""
        nonlocal reduced
        group = groups[step.group]
        queries_of_group = Queries(*(x[:, group.heads] for x in queries))
        kv = _keys_and_values(step.chunk)
        dq_so_far = dq[step.group]
        into = next(places[step.group])
        rectangle = rectangles.rectangle_of(call, q, step.source)
        if rectangle is not None:
            dq[step.group], dk, dv = rectangles.backward(
                call, rectangle, queries_of_group, kv, dq_so_far, dtype, into
            )
            return _stacked(dk, dv, dtype)
        tiles = group.call.tiles_of_rank(len(q), step.source, by_key)
        pieces = [Piece(*kv, tiles)]
        share = shares_done[step.group]
        if share < shares:
            vertical_kv_of_group = vertical_kv[:, :, group.heads]
            pieces.append(
                group.call.vertical_piece(vertical_kv_of_group, len(q), by_key, share, shares)
            )
        dq[step.group], gradients = call.backend.backward(
            queries_of_group, pieces, dq_so_far, call.scale, dtype, into
        )
        if share < shares:
            d_verticals_of_group = d_verticals[:, :, group.heads]
            verticals.put_share(
                d_verticals_of_group, gradients[1], share, shares, call.cp.block_size
            )
            shares_done[step.group] += 1
            # Groups come in another order than steps do. The exchange begins when all of them have
            # met all verticals.
            if sum(shares_done) == shares * len(groups):
                reduced = verticals.reduce_gradients(call, d_verticals)
        return _stacked(*gradients[0], dtype)

    d_kv = circulate_with_gradients(call.cp, route, _kv_chunks(groups, k, v), gradient_of)
    # [2, B, Hkv, S_local, D]
    d_kv = _joined(d_kv, 2)
    if reduced is not None:
        verticals.add_gradients(call, d_kv, reduced.wait())
    return _outputs(result.joined(dq), d_kv[0], d_kv[1], q.dtype)


def _head_groups(call: AttentionCall, q: Tensor, k: Tensor) -> list[HeadGroup]:
    """What travels on its own: all heads at once, but up to four groups in a double ring.

    With several groups, the first chunk from another node is computed while the next is on its
    way, and its gradient leaves while the next is computed. With all heads at once a rank of two
    nodes waits for one transfer with half of its work still to do.
    """
    count = head_groups(k.shape[1], len(call.cp.windows))
    if count == 1:
        return [HeadGroup(call, slice(None), slice(None))]
    heads_a_group = q.shape[1] // count
    kv_heads_a_group = k.shape[1] // count
    groups = []
    for number in range(count):
        heads = slice(number * heads_a_group, (number + 1) * heads_a_group)
        kv_heads = slice(number * kv_heads_a_group, (number + 1) * kv_heads_a_group)
        groups.append(HeadGroup(call.of_heads(heads), heads, kv_heads))
    return groups


def _places(
    q: Tensor, groups: list[HeadGroup], route: Route
) -> tuple[Results, list[Iterator[Tensor | None]]]:
    """Memory for out or dq, and for each group where the sum after each of its steps is written.

    Only the last step's sum is written there.
    """
    steps = sum(route.computes_by_step)
    result = results(q, [group.heads for group in groups], steps)
    return result, [at_last(steps, memory) for memory in result.parts]


def _kv_chunks(groups: list[HeadGroup], k: Tensor, v: Tensor) -> list[Chunk]:
    """Keys and values of each group as one tensor, which travels: [2, B, Hkv, S_local, D]."""
    chunks = []
    for group in groups:
        chunks.append([torch.stack([k[:, group.kv_heads], v[:, group.kv_heads]])])
    return chunks


def _keys_and_values(chunk: Chunk) -> tuple[Tensor, Tensor]:
    [kv] = chunk
    return kv[0], kv[1]


def _stacked(dk: Tensor, dv: Tensor, dtype: torch.dtype) -> Tensor:
    """dk and dv in `dtype`: [2, B, Hkv, S_local, D]."""
    stacked = dk.new_empty(2, *dk.shape, dtype=dtype)
    stacked[0].copy_(dk)
    stacked[1].copy_(dv)
    return stacked


def _joined(groups: list[Tensor], dim: int) -> Tensor:
    return groups[0] if len(groups) == 1 else torch.cat(groups, dim=dim)


def _outputs(
    dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """In `dtype`, and no two in one piece of memory: the outputs of an op must not share it."""
    return dq.to(dtype), dk.to(dtype, copy=True), dv.to(dtype, copy=True)


def _circulates_queries(call: AttentionCall, q: Tensor, k: Tensor) -> bool:
    """Whether queries travel in the backward instead of keys and values.

    That is as the user says, or whichever sends fewer bytes a token. Keys and values with their
    gradients: Hkv D (2 e + 2 g), with e bytes an element of the inputs and g of gradients between
    ranks. Queries, d_out and out with the gradient of the queries and lse: Hq D (3 e + g) + 4 Hq.
    In bf16 with fp32 gradients that is 12 Hkv D against 10 Hq D: queries are cheaper when every
    head has keys of its own (MHA), keys and values for all grouped-query models. (BurstEngine,
    section 3.2, sends out summed up with d_out: 8 Hq D.)
    """
    if call.cp.backward_circulates != "auto":
        return call.cp.backward_circulates == "q"
    element_bytes = q.element_size()
    gradient_bytes = (call.cp.gradient_dtype or call.sum_dtype(q)).itemsize
    kv_bytes = k.shape[1] * k.shape[3] * 2 * (element_bytes + gradient_bytes)
    query_bytes = q.shape[1] * (q.shape[3] * (3 * element_bytes + gradient_bytes) + 4)
    return query_bytes < kv_bytes


def _backward_with_queries_circulating(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As backward(). Each rank adds up dk and dv of its own keys while the others' queries pass,
    and their dq travels with them."""
    q, d_out, out, lse = queries
    dtype = call.sum_dtype(q)
    by_key = call.backend.READS_BY_KEY
    d_kv: list[Tensor] = []

    reduced = None
    if vertical_kv.shape[3] > 0:
        piece = call.vertical_piece(vertical_kv, len(q), by_key)
        dq_of_verticals, [(dk, dv)] = call.backend.backward(
            queries, [piece], None, call.scale, dtype
        )
        reduced = verticals.reduce_gradients(call, _stacked(dk, dv, dtype))

    def gradient_of(step: Step) -> Tensor:
        """dq of the step's queries through this rank's keys."""
        (passing_q, passing_d_out, passing_out), passing_lse = step.chunk
        passing = Queries(passing_q, passing_d_out, passing_out, passing_lse)
        tiles = call.tiles_of_rank(len(q), call.cp.rank, by_key, query_rank=step.source)
        dq, [(dk, dv)] = call.backend.backward(
            passing, [Piece(k, v, tiles)], None, call.scale, dtype
        )
        if d_kv:
            d_kv[0].add_(dk)
            d_kv[1].add_(dv)
        else:
            d_kv.extend((dk.to(dtype), dv.to(dtype)))
        return dq.to(dtype)

    # What travels is needed by those whose keys it meets: the other way around than chunks of keys.
    needed = needed_chunks(call)
    route = route_of(call.cp, None if needed is None else needed.T)
    chunk = [torch.stack([q, d_out, out.to(q.dtype)]), lse]
    [dq] = circulate_with_gradients(call.cp, route, [chunk], gradient_of)
    if reduced is not None:
        dq += dq_of_verticals
        verticals.add_gradients(call, d_kv, reduced.wait())
    return _outputs(dq, d_kv[0], d_kv[1], q.dtype)
