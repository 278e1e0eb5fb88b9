"""Attention by the schedules that move chunks from rank to rank: ring and double_ring."""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import Queries, Sum
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel import verticals
from titan_sparse.attention.context_parallel.dense import rectangle_of
from titan_sparse.attention.context_parallel.loop import Group, Step, Transport
from titan_sparse.attention.context_parallel.needed_keys import needed_chunks
from titan_sparse.attention.context_parallel.ring_transfers import (
    RingGradients,
    circulate,
    route_of,
)
from titan_sparse.attention.context_parallel.schedules import circulates_queries, head_groups
from titan_sparse.kernels.block_sparse import Piece


class Ring(Transport):
    """Moves the keys and values of each group of heads as one tensor [2, B, Hkv, S_local, D].

    All heads are one group, but up to four in a double ring. With several groups, the first chunk
    from another node is computed while the next is on its way, and its gradient leaves while the
    next is computed. With all heads at once a rank of two nodes waits for one transfer with half of
    its work still to do.
    """

    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        self.call = call
        self.q = q
        self.backward = backward
        self.dtype = call.sum_dtype(q)
        count = head_groups(k.shape[1], len(call.cp.windows))
        heads = _equal_slices(q.shape[1], count)
        kv_heads = _equal_slices(k.shape[1], count)
        self.route = route_of(call.cp, needed_chunks(call))
        self.groups = []
        self.chunks = []
        self.homes = []
        for number in range(count):
            # The heads of a single group are not taken out of the index.
            group_call = call if count == 1 else call.of_heads(heads[number])
            self.groups.append(Group(group_call, heads[number], self.route.computing_steps))
            self.chunks.append([torch.stack([k[:, kv_heads[number]], v[:, kv_heads[number]]])])
            self.homes.append(RingGradients(call.cp, self.route, number))

    def steps(self) -> Iterator[Step]:
        homes = self.homes if self.backward else None
        for at in circulate(self.call.cp, self.route, self.chunks, homes):
            call = self.groups[at.group].call
            tiles = functools.partial(call.tiles_of_rank, len(self.q), at.source)
            rectangle = rectangle_of(self.call, self.q, at.source)
            step = Step(at.group, *at.chunk[0], tiles, rectangle)
            yield step
            if self.backward:
                at.gradient = _stacked(*step.d_kv, self.dtype)

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        by_group = [home.finish() for home in self.homes]
        # [2, B, Hkv, S_local, D]; a single group is not copied.
        d_kv = by_group[0] if len(by_group) == 1 else torch.cat(by_group, dim=2)
        if dtype == self.q.dtype:
            return _apart(d_kv, dtype)
        dk, dv = d_kv
        return dk, dv

    @staticmethod
    def backward_otherwise(
        call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """With queries traveling instead of keys, where that sends less."""
        if not _circulates_queries(call, queries.q, k):
            return None
        return _backward_with_queries_circulating(call, queries, k, v, vertical_kv)


def _equal_slices(heads: int, count: int) -> list[slice]:
    """`count` slices of equal length: `_equal_slices(4, 2)` is those of heads 0, 1 and of 2, 3."""
    length = heads // count
    return [slice(first, first + length) for first in range(0, heads, length)]


def _stacked(dk: Tensor, dv: Tensor, dtype: torch.dtype) -> Tensor:
    """dk and dv in `dtype`: [2, B, Hkv, S_local, D]."""
    stacked = dk.new_empty(2, *dk.shape, dtype=dtype)
    stacked[0].copy_(dk)
    stacked[1].copy_(dv)
    return stacked


def _apart(d_kv: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dk and dv in `dtype`, each in its own memory: outputs of an op must not share it."""
    dk, dv = d_kv
    return dk.to(dtype, copy=True), dv.to(dtype, copy=True)


def _circulates_queries(call: AttentionCall, q: Tensor, k: Tensor) -> bool:
    """True if queries travel in the backward instead of keys and values."""
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
    """The backward in which keys stay and queries travel.

    With them travel d_out, lse, the product of out and d_out, and dq (BurstEngine, section 3.2).
    """
    q, d_out, out, lse = queries
    dtype = call.sum_dtype(q)
    by_key = call.backend.READS_BY_KEY

    reduced = None
    if vertical_kv.shape[3] > 0:
        # Verticals do not travel: every rank has them. Their gradients hide behind the ring.
        piece = call.vertical_piece(vertical_kv, len(q), by_key)
        dq_of_verticals, [d_verticals] = call.backend.backward(
            queries, [piece], call.scale, Sum(dtype)
        )
        reduced = call.cp.start_all_reduce(_stacked(*d_verticals, dtype))

    # Queries are needed by the ranks whose keys they meet, the reverse of chunks of keys.
    route = route_of(call.cp, needed_chunks(call).T)
    # [B, Hq, S_local]
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1)
    # [2, B, Hq, S_local, D] and [2, B, Hq, S_local]
    chunk = [torch.stack([q, d_out]), torch.stack([lse, delta])]
    home = RingGradients(call.cp, route, 0)
    d_kv = None
    for at in circulate(call.cp, route, [chunk], [home]):
        (passing_q, passing_d_out), (passing_lse, passing_delta) = at.chunk
        passing_out = _out_with(passing_d_out, passing_delta)
        passing = Queries(passing_q, passing_d_out, passing_out, passing_lse)
        tiles = call.tiles_of_rank(len(q), call.cp.rank, by_key, at.source)
        dq, [d_kv_here] = call.backend.backward(
            passing, [Piece(k, v, tiles)], call.scale, Sum(dtype)
        )
        at.gradient = dq.to(dtype)
        if d_kv is None:
            d_kv = [gradient.to(dtype) for gradient in d_kv_here]
        else:
            for total, gradient in zip(d_kv, d_kv_here, strict=True):
                total.add_(gradient)
    dq = home.finish()
    if reduced is not None:
        dq += dq_of_verticals
        verticals.add_gradients(call, d_kv, reduced.wait())
    return dq.to(q.dtype), *_apart(d_kv, q.dtype)


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
