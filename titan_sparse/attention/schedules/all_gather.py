"""Attention by the schedule all_gather: every rank receives all keys and values, head by head.

The next KV head is gathered while this one is computed, in one launch over all ranks' blocks. In
the backward the gradients of the last head are summed and scattered meanwhile. Only two heads' keys
and values are held, and nothing is merged but rectangles.

A backend that is faster on dense rectangles than on tiles gets a rectangle for each rank's keys, as
in a ring.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import call_tiles, recorder
from titan_sparse.attention.backends.base import Partial, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.merge import accumulation_dtype, at_last, results
from titan_sparse.attention.schedules import rectangles, verticals
from titan_sparse.attention.tiles.blocks import mapped
from titan_sparse.kernels.block_sparse import Piece, Tiles


class KVHead(NamedTuple):
    """A KV head of all ranks, and the query heads that share it.

    k, v: [B, 1, ranks * S_local, D], one rank after the other.
    """

    query_heads: slice
    k: Tensor
    v: Tensor


@recorder.timed
def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and gathered verticals [2, B, Hq, C, D]."""
    call.count_plain_ring(k)
    gathered = verticals.gather(call, k, v)
    # The first head starts on its way now, to hide behind the making of tables.
    kv_heads = _gathered_heads(call, q, k, v)
    result = results(q, _query_heads(q, k), steps=1)
    has_verticals = gathered.result.shape[3] > 0
    tiles_of_verticals = None
    steps = _rectangles(call, q)
    if not steps:
        with recorder.computing():
            tiles = call_tiles.tiles_of_rank(call, len(q), None, False)
    totals: list[Partial] = []
    for head, into in zip(kv_heads, result.parts, strict=True):
        heads = head.query_heads
        if has_verticals:
            gathered.wait()
        with recorder.computing():
            if steps:
                total = _dense_forward(call, steps, q[:, heads], head, into)
            else:
                if has_verticals and tiles_of_verticals is None:
                    tiles_of_verticals = call_tiles.tiles_of_verticals(call, len(q), False)
                pieces = _pieces(head, tiles, gathered.result, tiles_of_verticals)
                # One launch sees all keys: nothing is merged, and out may be rounded right away.
                total = call.backend.forward(q[:, heads], pieces, None, call.scale, q.dtype, into)
        totals.append(total)
    # [B, Hq, S_local, D] and [B, Hq, S_local]
    out = result.joined([total.out for total in totals])
    lse = torch.cat([total.lse for total in totals], dim=1)
    return out, lse, gathered.wait()


def backward(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    q = queries.q
    call.count_plain_ring(k, backward=True)
    by_key = call.backend.READS_BY_KEY
    dtype = accumulation_dtype(q.dtype)
    kv_heads = _gathered_heads(call, q, k, v)
    result = results(q, _query_heads(q, k), steps=1)
    steps = _rectangles(call, q)
    if not steps:
        tiles = call_tiles.tiles_of_rank(call, len(q), None, by_key)
    d_verticals = verticals.Gradients(call, vertical_kv)
    tiles_of_verticals = None
    if vertical_kv.shape[3] > 0:
        tiles_of_verticals = call_tiles.tiles_of_verticals(call, len(q), by_key)
        d_verticals.missing = k.shape[1]
    dq = []
    dk_scattered: list[Pending] = []
    dv_scattered: list[Pending] = []
    for head, into in zip(kv_heads, result.parts, strict=True):
        heads = head.query_heads
        queries_of_head = Queries._make(tensor[:, heads] for tensor in queries)
        if steps:
            dq_of_head, gradients = _dense_backward(call, steps, queries_of_head, head, into)
        else:
            pieces = _pieces(head, tiles, vertical_kv, tiles_of_verticals)
            dq_of_head, gradients = call.backend.backward(
                queries_of_head, pieces, None, call.scale, dtype, into
            )
        dq.append(dq_of_head)
        if dk_scattered:
            # The previous head's gradients traveled while this one was computed. Waiting frees
            # the memory that they were sent from.
            dk_scattered[-1].wait()
            dv_scattered[-1].wait()
        dk, dv = gradients[0]
        dk_scattered.append(_start_scatter(call, dk, dtype))
        dv_scattered.append(_start_scatter(call, dv, dtype))
        if tiles_of_verticals is not None:
            d_verticals.put(gradients[1], heads, share=0, shares=1)
    # [B, Hkv, S_local, D]
    dk = torch.cat([pending.wait() for pending in dk_scattered], dim=1).to(dtype)
    dv = torch.cat([pending.wait() for pending in dv_scattered], dim=1).to(dtype)
    d_verticals.add_to((dk, dv))
    return result.joined(dq), dk.to(q.dtype), dv.to(q.dtype)


Steps = list[tuple[rectangles.Rectangle, slice]]


def _rectangles(call: AttentionCall, q: Tensor) -> Steps:
    """The rectangle of each rank whose keys this rank's queries see, and where those keys are in a
    KVHead; an empty list where tiles are faster. All queries see some of the first rank's."""
    found = []
    if not call.backend.DENSE_BY_CHUNK:
        return found
    length = q.shape[2]
    for source in range(call.cp.size):
        rectangle = rectangles.rectangle_of(call, q, source)
        if rectangle is not None:
            found.append((rectangle, slice(source * length, (source + 1) * length)))
    return found


def _dense_forward(
    call: AttentionCall, steps: Steps, q: Tensor, head: KVHead, into: Tensor | None
) -> Partial:
    """out and lse of the query heads of one KV head, merged in fp32 and written `into` at last."""
    dtype = call.sum_dtype(q)
    total = None
    for (rectangle, keys), place in zip(steps, at_last(len(steps), into), strict=True):
        k = head.k[:, :, keys]
        v = head.v[:, :, keys]
        total = rectangles.forward(call, rectangle, q, k, v, total, dtype, place)
    return total


def _dense_backward(
    call: AttentionCall, steps: Steps, queries: Queries, head: KVHead, into: Tensor | None
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """dq of the query heads of one KV head, and dk and dv of all ranks' keys, as a backend's."""
    dtype = call.sum_dtype(queries.q)
    # Keys that no query here sees keep gradients of 0.
    dk = torch.zeros(head.k.shape, dtype=dtype, device=head.k.device)
    dv = torch.zeros(head.v.shape, dtype=dtype, device=head.v.device)
    dq = None
    for (rectangle, keys), place in zip(steps, at_last(len(steps), into), strict=True):
        k = head.k[:, :, keys]
        v = head.v[:, :, keys]
        dq, dk_here, dv_here = rectangles.backward(call, rectangle, queries, k, v, dq, dtype, place)
        dk[:, :, keys] = dk_here
        dv[:, :, keys] = dv_here
    return dq, [(dk, dv)]


def _gathered_heads(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Iterator[KVHead]:
    """The KV heads of all ranks, one after the other.

    The transfer of the first one starts here, before the caller asks for it.
    """
    kv_heads = k.shape[1]

    def start(head: int) -> tuple[Pending, Pending]:
        # Two buffers take turns: one is computed on while the next head arrives in the other.
        slot = head % 2
        # [B, 1, S_local, D]
        k_head = k[:, head : head + 1]
        v_head = v[:, head : head + 1]
        k_pending = call.cp.start_all_gather(k_head, f"k {slot}")
        v_pending = call.cp.start_all_gather(v_head, f"v {slot}")
        return k_pending, v_pending

    def arrive(pending: tuple[Pending, Pending]) -> Iterator[KVHead]:
        for number, query_heads in enumerate(_query_heads(q, k)):
            following = None
            if number + 1 < kv_heads:
                following = start(number + 1)
            k_pending, v_pending = pending
            yield KVHead(
                query_heads=query_heads,
                k=_one_rank_after_the_other(k_pending),
                v=_one_rank_after_the_other(v_pending),
            )
            pending = following

    first_head = start(0)
    return arrive(first_head)


def _query_heads(q: Tensor, k: Tensor) -> list[slice]:
    query_heads = q.shape[1]
    kv_heads = k.shape[1]
    group_size = query_heads // kv_heads
    slices = []
    for first in range(0, query_heads, group_size):
        slices.append(slice(first, first + group_size))
    return slices


def _one_rank_after_the_other(gathered: Pending) -> Tensor:
    """[ranks, B, 1, S_local, D] -> [B, 1, ranks * S_local, D]; no copy for a single sequence."""
    by_rank = gathered.wait()
    # [B, 1, ranks, S_local, D]
    by_batch = by_rank.permute(1, 2, 0, 3, 4)
    return by_batch.flatten(2, 3)


def _pieces(
    head: KVHead, tiles: Tiles, vertical_kv: Tensor, tiles_of_verticals: Tiles | None
) -> list[Piece]:
    heads = head.query_heads
    pieces = [Piece(head.k, head.v, _tiles_of_heads(tiles, heads))]
    if tiles_of_verticals is not None:
        vertical_k, vertical_v = vertical_kv[:, :, heads]
        vertical_tiles = _tiles_of_heads(tiles_of_verticals, heads)
        pieces.append(Piece(vertical_k, vertical_v, vertical_tiles))
    return pieces


def _start_scatter(call: AttentionCall, gradient: Tensor, dtype: torch.dtype) -> Pending:
    """Start to bring the gradient [B, 1, ranks * S_local, D] of every rank's keys home.

    The result is the sum over ranks for this rank's keys, [B, 1, S_local, D]. It is summed in
    cp.gradient_dtype, or in `dtype` where that is None.
    """
    sent_dtype = call.cp.gradient_dtype or dtype
    # [B, 1, ranks, S_local, D] -> [ranks, B, 1, S_local, D]
    by_rank = gradient.unflatten(2, (call.cp.size, -1))
    by_rank = by_rank.permute(2, 0, 1, 3, 4)
    by_rank = by_rank.to(sent_dtype)
    return call.cp.start_reduce_scatter(by_rank.contiguous())


def _tiles_of_heads(tiles: Tiles, heads: slice) -> Tiles:
    def take(table: Tensor) -> Tensor:
        """Some heads of a table [B, Hq or 1, ...]. A table with one head holds for all of them."""
        return table if table.shape[1] == 1 else table[:, heads]

    chosen = tiles.chosen
    if chosen is not None:
        chosen = chosen._replace(words=take(chosen.words))
    return tiles._replace(
        by_query=mapped(tiles.by_query, take),
        by_key=mapped(tiles.by_key, take),
        covered=None if tiles.covered is None else take(tiles.covered),
        k_positions=take(tiles.k_positions),
        chosen=chosen,
    )
