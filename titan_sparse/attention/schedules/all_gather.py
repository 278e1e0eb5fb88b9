"""Attention by the schedule all_gather: all keys and values come to every rank, head by head.

The next KV head is gathered while this one is computed, in one launch over all ranks' blocks. In
the backward the gradients of the last head are summed and scattered meanwhile. Nothing is merged,
and only two heads' keys and values are held.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import timing
from titan_sparse.attention.backends.base import Piece, Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.merge import accumulation_dtype, results
from titan_sparse.attention.schedules import verticals
from titan_sparse.attention.tiles.tables import BlockLists, Tiles


class KVHead(NamedTuple):
    """A KV head of all ranks, and the query heads that share it.

    k, v: [B, 1, ranks * S_local, D], one rank after the other.
    """

    query_heads: slice
    k: Tensor
    v: Tensor


@timing.timed
def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the gathered verticals [2, B, Hq, C, D]."""
    call.count_plain_ring(k)
    gathered = verticals.gather(call, k, v)
    # The first head sets out now, to hide behind the making of tables.
    kv_heads = _gathered_heads(call, q, k, v)
    result = results(q, _query_heads(q, k), steps=1)
    has_verticals = gathered.result.shape[3] > 0
    tiles_of_verticals = None
    with timing.computing(0):
        tiles = call.tiles_of_all_ranks(len(q), transpose=False)
    outs, lses = [], []
    for step, head in enumerate(kv_heads):
        heads = head.query_heads
        vertical_kv = gathered.wait() if has_verticals else None
        with timing.computing(step):
            pieces = [Piece(head.k, head.v, _tiles_of_heads(tiles, heads))]
            if vertical_kv is not None:
                if tiles_of_verticals is None:
                    tiles_of_verticals = call.tiles_of_verticals(len(q), transpose=False)
                own_k, own_v = vertical_kv[:, :, heads]
                pieces.append(Piece(own_k, own_v, _tiles_of_heads(tiles_of_verticals, heads)))
            out, lse = call.backend.forward(
                q[:, heads], pieces, None, call.scale, q.dtype, result.parts[step]
            )
        outs.append(out)
        lses.append(lse)
    return result.joined(outs), torch.cat(lses, dim=1), gathered.wait()


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
    tiles = call.tiles_of_all_ranks(len(q), by_key)
    has_verticals = vertical_kv.shape[3] > 0
    tiles_of_verticals = call.tiles_of_verticals(len(q), by_key) if has_verticals else None
    dq, d_verticals = [], []
    dk_scattered: list[Pending] = []
    dv_scattered: list[Pending] = []
    for head, into in zip(kv_heads, result.parts, strict=True):
        heads = head.query_heads
        pieces = [Piece(head.k, head.v, _tiles_of_heads(tiles, heads))]
        if has_verticals:
            own_k, own_v = vertical_kv[:, :, heads]
            pieces.append(Piece(own_k, own_v, _tiles_of_heads(tiles_of_verticals, heads)))
        queries_of_head = Queries(*(x[:, heads] for x in queries))
        dq_of_head, gradients = call.backend.backward(
            queries_of_head, pieces, None, call.scale, dtype, into
        )
        dq.append(dq_of_head)
        if has_verticals:
            d_verticals.append(torch.stack(gradients[1]))
        if dk_scattered:
            # The last head's gradients had this one's work to hide behind: only now is their
            # memory free.
            dk_scattered[-1].wait()
            dv_scattered[-1].wait()
        dk, dv = gradients[0]
        dk_scattered.append(_start_scatter(call, dk, dtype))
        dv_scattered.append(_start_scatter(call, dv, dtype))
    reduced = None
    if has_verticals:
        reduced = verticals.reduce_gradients(call, torch.cat(d_verticals, dim=2))
    # [B, Hkv, S_local, D]
    dk = torch.cat([pending.wait() for pending in dk_scattered], dim=1).to(dtype)
    dv = torch.cat([pending.wait() for pending in dv_scattered], dim=1).to(dtype)
    if reduced is not None:
        verticals.add_gradients(call, (dk, dv), reduced.wait())
    return result.joined(dq), dk.to(q.dtype), dv.to(q.dtype)


def _gathered_heads(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Iterator[KVHead]:
    """KV head by KV head, of all ranks. The first one sets out at once, before anybody asks."""

    def start(head: int) -> tuple[Pending, Pending]:
        slot = head % 2
        return (
            call.cp.start_all_gather(k[:, head : head + 1], f"k {slot}"),
            call.cp.start_all_gather(v[:, head : head + 1], f"v {slot}"),
        )

    def arrive(pending: tuple[Pending, Pending]) -> Iterator[KVHead]:
        for number, heads in enumerate(_query_heads(q, k)):
            following = start(number + 1) if number + 1 < k.shape[1] else None
            k_head, v_head = pending
            yield KVHead(
                heads, _one_rank_after_the_other(k_head), _one_rank_after_the_other(v_head)
            )
            pending = following

    return arrive(start(0))


def _query_heads(q: Tensor, k: Tensor) -> list[slice]:
    """The query heads of each KV head."""
    group = q.shape[1] // k.shape[1]
    return [slice(first, first + group) for first in range(0, q.shape[1], group)]


def _one_rank_after_the_other(gathered: Pending) -> Tensor:
    """[ranks, B, 1, S_local, D] -> [B, 1, ranks * S_local, D]; no copy for a single sequence."""
    return gathered.wait().permute(1, 2, 0, 3, 4).flatten(2, 3)


def _start_scatter(call: AttentionCall, gradient: Tensor, dtype: torch.dtype) -> Pending:
    """Start to bring the gradient [B, 1, ranks * S_local, D] of every rank's keys home.

    It is summed in `dtype`, or in cp.gradient_dtype: [B, 1, S_local, D].
    """
    # [ranks, B, 1, S_local, D]
    by_rank = gradient.unflatten(2, (call.cp.size, -1)).permute(2, 0, 1, 3, 4)
    return call.cp.start_reduce_scatter(by_rank.to(call.cp.gradient_dtype or dtype).contiguous())


def _tiles_of_heads(tiles: Tiles, heads: slice) -> Tiles:
    """The tiles of some query heads. Tables of one head are those of all."""

    def of_heads(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[1] == 1 else x[:, heads]

    def lists_of_heads(lists: BlockLists | None) -> BlockLists | None:
        return None if lists is None else BlockLists(*(of_heads(x) for x in lists))

    chosen = tiles.chosen
    if chosen is not None:
        chosen = chosen._replace(words=of_heads(chosen.words))
    return tiles._replace(
        by_query=lists_of_heads(tiles.by_query),
        by_key=lists_of_heads(tiles.by_key),
        covered=of_heads(tiles.covered),
        k_positions=of_heads(tiles.k_positions),
        chosen=chosen,
    )
