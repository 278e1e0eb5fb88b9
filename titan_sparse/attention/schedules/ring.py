"""Attention by the schedules that move chunks from rank to rank: ring and double_ring.

Block pairs follow the schedule, chunk by chunk. Verticals do not: they are gathered once and dealt
out over the steps (steps.py). Partial results merge in fp32 by log-sum-exp. The backward of every
chunk takes the global out and lse, which makes the sum exact.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import call_tiles, recorder
from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.schedule import circulates_queries, head_groups
from titan_sparse.attention.merge import Results, results
from titan_sparse.attention.schedules import rectangles, verticals
from titan_sparse.attention.schedules.needs import needed_chunks
from titan_sparse.attention.schedules.steps import BackwardSum, ForwardSum
from titan_sparse.attention.schedules.transport import (
    Chunk,
    Route,
    Step,
    circulate,
    circulate_with_gradients,
    route_of,
)
from titan_sparse.kernels.block_sparse import Piece


class HeadGroup(NamedTuple):
    """Some KV heads, the query heads that share them, the call for those, and how their keys and
    values travel."""

    call: AttentionCall
    route: Route
    heads: slice
    kv_heads: slice


@recorder.timed
def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the gathered verticals [2, B, Hq, C, D]."""
    call.count_plain_ring(k)
    gathered = verticals.gather(call, k, v)
    groups = _head_groups(call, q, k)
    result = _results(q, groups)
    sums = []
    for group, into in zip(groups, result.parts, strict=True):
        steps = group.route.computing_steps
        q_group = q[:, group.heads]
        sums.append(ForwardSum(group.call, q_group, steps, into, gathered, group.heads))

    routes = [group.route for group in groups]
    for step in circulate(call.cp, routes, _kv_chunks(groups, k, v)):
        if step.computes:
            group = groups[step.group]
            tiles = functools.partial(call_tiles.tiles_of_rank, group.call, len(q), step.source)
            rectangle = rectangles.rectangle_of(call, q, step.source)
            sums[step.group].add(*step.chunk[0], tiles, rectangle)

    # [B, Hq, S_local, D] and [B, Hq, S_local]
    totals = [forward_sum.total for forward_sum in sums]
    out = result.joined([total.out for total in totals])
    lse = _joined([total.lse for total in totals], dim=1)
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
    result = _results(q, groups)
    # Groups come in another order than steps do. The exchange begins when all of them have met all
    # verticals.
    d_verticals = verticals.Gradients(call, vertical_kv)
    sums = []
    for group, into in zip(groups, result.parts, strict=True):
        steps = group.route.computing_steps
        sums.append(BackwardSum(group.call, queries, steps, into, d_verticals, group.heads))

    def gradient_of(step: Step) -> Tensor:
        """dk and dv of the step's chunk, [2, B, Hkv of the group, S_local, D]."""
        group = groups[step.group]
        tiles = functools.partial(call_tiles.tiles_of_rank, group.call, len(q), step.source)
        rectangle = rectangles.rectangle_of(call, q, step.source)
        dk, dv = sums[step.group].add(*step.chunk[0], tiles, rectangle)
        return _stacked(dk, dv, call.sum_dtype(q))

    routes = [group.route for group in groups]
    chunks = _kv_chunks(groups, k, v)
    d_kv_by_group = circulate_with_gradients(call.cp, routes, chunks, gradient_of)
    # [2, B, Hkv, S_local, D]
    d_kv = _joined(d_kv_by_group, dim=2)
    d_verticals.add_to(d_kv)
    dq = result.joined([backward_sum.dq for backward_sum in sums])
    return _outputs(dq, d_kv[0], d_kv[1], q.dtype)


def _head_groups(call: AttentionCall, q: Tensor, k: Tensor) -> list[HeadGroup]:
    """What travels on its own: all heads at once, but up to four groups in a double ring.

    With several groups, the first chunk from another node is computed while the next is on its
    way, and its gradient leaves while the next is computed. With all heads at once a rank of two
    nodes waits for one transfer with half of its work still to do.
    """
    count = head_groups(k.shape[1], len(call.cp.windows))
    heads = _equal_slices(q.shape[1], count)
    kv_heads = _equal_slices(k.shape[1], count)
    needed = needed_chunks(call, heads)
    groups = []
    for number in range(count):
        # The heads of a single group are not taken out of the index.
        group_call = call if count == 1 else call.of_heads(heads[number])
        route = route_of(call.cp, needed[number])
        groups.append(HeadGroup(group_call, route, heads[number], kv_heads[number]))
    return groups


def _equal_slices(heads: int, count: int) -> list[slice]:
    """`count` slices of equal length: `_equal_slices(4, 2)` is those of heads 0, 1 and of 2, 3."""
    length = heads // count
    return [slice(first, first + length) for first in range(0, heads, length)]


def _results(q: Tensor, groups: list[HeadGroup]) -> Results:
    """Memory for out or dq, to which the last step of each group writes."""
    heads = [group.heads for group in groups]
    steps = max(group.route.computing_steps for group in groups)
    return results(q, heads, steps)


def _kv_chunks(groups: list[HeadGroup], k: Tensor, v: Tensor) -> list[Chunk]:
    """Keys and values of each group as one tensor, which travels: [2, B, Hkv, S_local, D]."""
    chunks = []
    for group in groups:
        k_group = k[:, group.kv_heads]
        v_group = v[:, group.kv_heads]
        kv = torch.stack([k_group, v_group])
        chunks.append([kv])
    return chunks


def _stacked(dk: Tensor, dv: Tensor, dtype: torch.dtype) -> Tensor:
    """dk and dv in `dtype`: [2, B, Hkv, S_local, D]."""
    stacked = dk.new_empty(2, *dk.shape, dtype=dtype)
    stacked[0].copy_(dk)
    stacked[1].copy_(dv)
    return stacked


def _joined(by_group: list[Tensor], dim: int) -> Tensor:
    """The tensors of all groups as one. A single group is not copied."""
    if len(by_group) == 1:
        return by_group[0]
    return torch.cat(by_group, dim=dim)


def _outputs(
    dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in `dtype`, each in its own memory: outputs of an op must not share it."""
    dq = dq.to(dtype)
    # dk and dv are halves of one tensor up to here.
    dk = dk.to(dtype, copy=True)
    dv = dv.to(dtype, copy=True)
    return dq, dk, dv


def _circulates_queries(call: AttentionCall, q: Tensor, k: Tensor) -> bool:
    """Whether queries travel in the backward instead of keys and values."""
    gradient_dtype = call.cp.gradient_dtype or call.sum_dtype(q)
    return circulates_queries(
        call.cp.backward_circulates,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        width=q.element_size(),
        gradient_width=gradient_dtype.itemsize,
    )


def _backward_with_queries_circulating(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As backward(), with queries traveling instead of keys and values.

    Each rank adds up dk and dv of its own keys while the others' queries pass by. Their dq travels
    with them. Their out does not: a backward needs its product with d_out alone, one number a row
    (BurstEngine, section 3.2).
    """
    q, d_out, out, lse = queries
    dtype = call.sum_dtype(q)
    by_key = call.backend.READS_BY_KEY
    d_kv: list[Tensor] = []

    reduced = None
    if vertical_kv.shape[3] > 0:
        # Verticals do not travel: every rank has them. Their gradients hide behind the ring.
        piece = call_tiles.vertical_piece(call, vertical_kv, len(q), by_key)
        dq_of_verticals, [(dk, dv)] = call.backend.backward(
            queries,
            [piece],
            dq=None,
            scale=call.scale,
            dtype=dtype,
        )
        reduced = call.cp.start_all_reduce(_stacked(dk, dv, dtype))

    def gradient_of(step: Step) -> Tensor:
        """dq of the step's queries through this rank's keys."""
        (passing_q, passing_d_out), (passing_lse, passing_delta) = step.chunk
        passing_out = _out_with(passing_d_out, passing_delta)
        passing = Queries(passing_q, passing_d_out, passing_out, passing_lse)
        tiles = call_tiles.tiles_of_rank(call, len(q), call.cp.rank, by_key, step.source)
        dq, [(dk, dv)] = call.backend.backward(
            passing,
            [Piece(k, v, tiles)],
            dq=None,
            scale=call.scale,
            dtype=dtype,
        )
        if d_kv:
            d_kv[0].add_(dk)
            d_kv[1].add_(dv)
        else:
            d_kv.extend((dk.to(dtype), dv.to(dtype)))
        return dq.to(dtype)

    # Queries are needed by the ranks whose keys they meet, the reverse of chunks of keys.
    [needed] = needed_chunks(call)
    if needed is not None:
        needed = needed.T
    route = route_of(call.cp, needed)
    # [B, Hq, S_local]
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1)
    # [2, B, Hq, S_local, D] and [2, B, Hq, S_local]
    chunk = [torch.stack([q, d_out]), torch.stack([lse, delta])]
    [dq] = circulate_with_gradients(call.cp, [route], [chunk], gradient_of)
    if reduced is not None:
        dq += dq_of_verticals
        verticals.add_gradients(call, d_kv, reduced.wait())
    return _outputs(dq, d_kv[0], d_kv[1], q.dtype)


def _out_with(d_out: Tensor, delta: Tensor) -> Tensor:
    """An out [B, Hq, S, D] whose product with d_out, summed over the head dim, is delta [B, Hq, S].

    Any such out gives the same gradients. This one is a multiple of d_out, and no longer than the
    true one: rounding it to d_out's dtype costs no more than rounding that.
    """
    dtype = delta.dtype
    # Of unit size, so that no square underflows.
    largest = d_out.abs().amax(-1, keepdim=True).to(dtype)
    # Where d_out is 0, so is delta.
    largest = torch.where(largest == 0, 1, largest)
    direction = d_out.to(dtype) / largest
    square = direction.square().sum(-1, keepdim=True).clamp(min=1)
    length = delta[..., None] / (largest * square)
    return (direction * length).to(d_out.dtype)
