"""Attention by the schedules that move chunks from rank to rank: ring and double_ring.

Block pairs follow the schedule, chunk by chunk. Verticals do not: they are gathered once and dealt
out over the steps, but for the first of the forward and the last of the backward, so that work
hides their exchanges. Partial results merge in fp32 by log-sum-exp. The backward of
every chunk takes the global out and lse, which makes the sum exact.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import call_tiles, recorder
from titan_sparse.attention.backends.base import Partial, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.schedule import (
    circulates_queries,
    head_groups,
    vertical_steps,
)
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
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the gathered verticals [2, B, Hq, C, D].

    The running sum over chunks is fp32 (fp64 for fp64), because errors of rounding at every step
    would add up. Only the last step rounds.
    """
    call.count_plain_ring(k)
    gathered = verticals.gather(call, k, v)
    groups = _head_groups(call, q, k)
    blocks_of_verticals = gathered.result.shape[3] // call.cp.block_size
    steps_with_verticals = []
    for group in groups:
        steps_with_verticals.append(
            vertical_steps(group.route.computes_by_step, blocks_of_verticals)
        )
    result, places = _places(q, groups)
    dtype = call.sum_dtype(q)
    totals: list[Partial | None] = [None] * len(groups)

    routes = [group.route for group in groups]
    for step in circulate(call.cp, routes, _kv_chunks(groups, k, v)):
        group = groups[step.group]
        if not group.route.computes[step.window][step.place]:
            continue
        with_verticals = steps_with_verticals[step.group]
        total = totals[step.group]
        into = next(places[step.group])
        q_group = q[:, group.heads]
        kv = _keys_and_values(step.chunk)
        vertical_kv = None
        if step.number in with_verticals:
            vertical_kv = gathered.wait()
        with recorder.computing():
            rectangle = None
            if vertical_kv is None:
                rectangle = rectangles.rectangle_of(call, q, step.source)
            if rectangle is not None:
                total = rectangles.forward(
                    call,
                    rectangle,
                    q_group,
                    kv,
                    total,
                    dtype,
                    into,
                )
            else:
                k_chunk, v_chunk = kv
                tiles = call_tiles.tiles_of_rank(group.call, len(q), step.source, transpose=False)
                pieces = [Piece(k_chunk, v_chunk, tiles)]
                if vertical_kv is not None:
                    vertical_piece = call_tiles.vertical_piece(
                        group.call,
                        vertical_kv[:, :, group.heads],
                        len(q),
                        transpose=False,
                        share=with_verticals.index(step.number),
                        shares=len(with_verticals),
                    )
                    pieces.append(vertical_piece)
                total = call.backend.forward(
                    q_group,
                    pieces,
                    total=total,
                    scale=call.scale,
                    dtype=dtype,
                    into=into,
                )
        totals[step.group] = total

    # [B, Hq, S_local, D] and [B, Hq, S_local]
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
    blocks_of_verticals = vertical_kv.shape[3] // call.cp.block_size
    shares_of_groups = []
    for group in groups:
        steps = vertical_steps(group.route.computes_by_step, blocks_of_verticals)
        shares_of_groups.append(len(steps))
    result, places = _places(q, groups)
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
        queries_of_group = Queries(
            q=queries.q[:, group.heads],
            d_out=queries.d_out[:, group.heads],
            out=queries.out[:, group.heads],
            lse=queries.lse[:, group.heads],
        )
        kv = _keys_and_values(step.chunk)
        dq_so_far = dq[step.group]
        into = next(places[step.group])
        rectangle = rectangles.rectangle_of(call, q, step.source)
        if rectangle is not None:
            dq[step.group], dk, dv = rectangles.backward(
                call,
                rectangle,
                queries_of_group,
                kv,
                dq_so_far,
                dtype,
                into,
            )
            return _stacked(dk, dv, dtype)
        k_chunk, v_chunk = kv
        tiles = call_tiles.tiles_of_rank(group.call, len(q), step.source, transpose=by_key)
        pieces = [Piece(k_chunk, v_chunk, tiles)]
        share = shares_done[step.group]
        shares = shares_of_groups[step.group]
        if share < shares:
            vertical_piece = call_tiles.vertical_piece(
                group.call,
                vertical_kv[:, :, group.heads],
                len(q),
                transpose=by_key,
                share=share,
                shares=shares,
            )
            pieces.append(vertical_piece)
        dq[step.group], gradients = call.backend.backward(
            queries_of_group,
            pieces,
            dq=dq_so_far,
            scale=call.scale,
            dtype=dtype,
            into=into,
        )
        if share < shares:
            verticals.put_share(
                d_verticals[:, :, group.heads],
                gradients[1],
                share=share,
                shares=shares,
                block_size=call.cp.block_size,
            )
            shares_done[step.group] += 1
            # Groups come in another order than steps do. The exchange begins when all of them have
            # met all verticals.
            if shares_done == shares_of_groups:
                reduced = verticals.reduce_gradients(call, d_verticals)
        dk, dv = gradients[0]
        return _stacked(dk, dv, dtype)

    routes = [group.route for group in groups]
    chunks = _kv_chunks(groups, k, v)
    d_kv_by_group = circulate_with_gradients(call.cp, routes, chunks, gradient_of)
    # [2, B, Hkv, S_local, D]
    d_kv = _joined(d_kv_by_group, dim=2)
    if reduced is not None:
        verticals.add_gradients(call, d_kv, reduced.wait())
    dq_of_all = result.joined(dq)
    return _outputs(dq_of_all, d_kv[0], d_kv[1], q.dtype)


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


def _places(q: Tensor, groups: list[HeadGroup]) -> tuple[Results, list[Iterator[Tensor | None]]]:
    """Memory for out or dq, and for each group where each of its steps writes its sum.

    Only the last step writes to that memory.
    """
    computing_steps = [sum(group.route.computes_by_step) for group in groups]
    heads = [group.heads for group in groups]
    result = results(q, heads, steps=max(computing_steps))
    places = []
    for steps, memory in zip(computing_steps, result.parts, strict=True):
        places.append(at_last(steps, memory))
    return result, places


def _kv_chunks(groups: list[HeadGroup], k: Tensor, v: Tensor) -> list[Chunk]:
    """Keys and values of each group as one tensor, which travels: [2, B, Hkv, S_local, D]."""
    chunks = []
    for group in groups:
        k_group = k[:, group.kv_heads]
        v_group = v[:, group.kv_heads]
        kv = torch.stack([k_group, v_group])
        chunks.append([kv])
    return chunks


def _keys_and_values(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """k and v [B, Hkv, S_local, D] of a chunk of _kv_chunks()."""
    [kv] = chunk
    return kv[0], kv[1]


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
        vertical_piece = call_tiles.vertical_piece(call, vertical_kv, len(q), transpose=by_key)
        dq_of_verticals, [(dk, dv)] = call.backend.backward(
            queries,
            [vertical_piece],
            dq=None,
            scale=call.scale,
            dtype=dtype,
        )
        d_verticals = _stacked(dk, dv, dtype)
        reduced = verticals.reduce_gradients(call, d_verticals)

    def gradient_of(step: Step) -> Tensor:
        """dq of the step's queries through this rank's keys."""
        (passing_q, passing_d_out), (passing_lse, passing_delta) = step.chunk
        passing_out = _out_with(passing_d_out, passing_delta)
        passing = Queries(passing_q, passing_d_out, passing_out, passing_lse)
        tiles = call_tiles.tiles_of_rank(
            call,
            len(q),
            source=call.cp.rank,
            transpose=by_key,
            query_rank=step.source,
        )
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
