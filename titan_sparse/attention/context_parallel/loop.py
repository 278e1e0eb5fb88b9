"""The loop over the steps of a schedule: the sums of a forward and of a backward.

A schedule is a Transport: it brings keys and values step by step. The gathered verticals are dealt
out over the steps, block by block. The first step of a forward and the last one of a backward get
none, so that work hides their exchanges.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titan_sparse.attention import recorder
from titan_sparse.attention.backends.base import Partial, Queries, Sum
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel import dense, verticals
from titan_sparse.attention.context_parallel.dense import Rectangle
from titan_sparse.kernels.block_sparse import Piece, Tiles
from titan_sparse.kernels.dtypes import accumulation_dtype


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the keys and values of the gathered
    verticals [2, B, Hq, C, D]."""
    vertical_kv = q.new_empty(2, *q.shape[:2], 0, q.shape[3])
    computation = call.computation()
    if computation is not None:
        return *computation.forward(q, k, v), vertical_kv
    if call.cp.size > 1:
        call.cp.count_plain_ring(k)
    arriving = None
    if call.index.has_verticals:
        arriving = verticals.gather(call, k, v)
        vertical_kv = arriving.result
    transport = call.transport(call, q, k, v, backward=False)
    groups = transport.groups
    # The results of several groups of heads are put together here.
    out = q.new_empty(q.shape) if len(groups) > 1 else None
    results: dict[int, Partial] = {}
    for step, group, number, is_last in _numbered(transport):
        q_here = q[:, group.heads]
        # In fp32 (fp64 for fp64), because errors of rounding at every step would add up.
        dtype = q.dtype if is_last else accumulation_dtype(q.dtype)
        total = Sum(dtype, results.get(step.group))
        # The last steps meet the verticals.
        share = number + group.vertical_shares(vertical_kv) - group.steps
        if share >= 0 and arriving is not None:
            arriving.wait()
        with recorder.computing() if recorder.listeners.recording else contextlib.nullcontext():
            if step.rectangle is not None:
                result = dense.forward(call, step.rectangle, q_here, step.k, step.v, total)
            else:
                pieces = group.pieces(step, False, vertical_kv, share)
                result = call.backend.forward(q_here, pieces, call.scale, total)
        if is_last and out is not None:
            out[:, group.heads] = result.out
            result = Partial(out[:, group.heads], result.lse)
        results[step.group] = result
    if out is None:
        out, lse = results[0]
    else:
        lse = torch.cat([results[number].lse for number in range(len(groups))], dim=1)
    if arriving is not None:
        arriving.wait()
    return out, lse, vertical_kv


def backward(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    computation = call.computation()
    if computation is not None:
        return computation.backward(queries, k, v)
    if call.cp.size > 1:
        call.cp.count_plain_ring(k, backward=True)
    gradients = call.transport.backward_otherwise(call, queries, k, v, vertical_kv)
    if gradients is not None:
        return gradients
    q = queries.q
    transport = call.transport(call, q, k, v, backward=True)
    groups = transport.groups
    dq_of_all = q.new_empty(q.shape) if len(groups) > 1 else None
    # Their exchange begins when all groups have met all verticals.
    shares = sum(group.vertical_shares(vertical_kv) for group in groups)
    d_verticals = verticals.Gradients(call, vertical_kv, missing=shares)
    dq_of_groups: dict[int, Tensor] = {}
    for step, group, number, is_last in _numbered(transport):
        here = Queries._make(tensor[:, group.heads] for tensor in queries)
        total = Sum(call.sum_dtype(q), dq_of_groups.get(step.group))
        if step.rectangle is not None:
            dq, step.d_kv = dense.backward(call, step.rectangle, here, step.k, step.v, total)
        else:
            # The first steps meet the verticals.
            pieces = group.pieces(step, call.backend.READS_BY_KEY, vertical_kv, share=number)
            dq, [step.d_kv, *of_verticals] = call.backend.backward(here, pieces, call.scale, total)
            for d_kv in of_verticals:
                d_verticals.put(d_kv, group.heads, number, group.vertical_shares(vertical_kv))
        if is_last and dq_of_all is not None:
            dq_of_all[:, group.heads] = dq
            dq = dq_of_all
        dq_of_groups[step.group] = dq
    # If the verticals' gradients are still to be added, dk and dv are not rounded before that.
    reduced = d_verticals.reduced
    dk, dv = transport.gradients(q.dtype if reduced is None else call.sum_dtype(q))
    if reduced is not None:
        verticals.add_gradients(call, (dk, dv), reduced.wait())
    return dq_of_groups[0].to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _numbered(transport: "Transport") -> Iterator[tuple["Step", "Group", int, bool]]:
    """Each step, its group, its number among the group's steps, and whether it is their last."""
    # By group, how many of its steps came before.
    done: Counter[int] = Counter()
    for step in transport.steps():
        group = transport.groups[step.group]
        number = done[step.group]
        done[step.group] += 1
        yield step, group, number, number + 1 == group.steps


@dataclass
class Group:
    """Query heads that are summed together, and the call for them.

    steps: how many steps this rank computes for them.
    vertical_tiles: makes their tiles of all verticals; the argument says whether with Tiles.by_key.
    None if the call makes them, for the verticals of a step.
    """

    call: AttentionCall
    heads: slice
    steps: int
    vertical_tiles: Callable[[bool], Tiles] | None = None

    def vertical_shares(self, vertical_kv: Tensor) -> int:
        """Over how many steps the verticals [2, B, Hq, C, D] of all heads are dealt out.

        One step is left out for the exchange to hide behind, unless there is no other.
        """
        blocks = vertical_kv.shape[3] // self.call.cp.block_size
        return min(max(self.steps - 1, 1), blocks)

    def pieces(self, step: "Step", by_key: bool, vertical_kv: Tensor, share: int) -> list[Piece]:
        """The keys of a step by tiles, with a share of the verticals if there
        is one of this number."""
        pieces = [Piece(step.k, step.v, step.tiles(by_key))]
        shares = self.vertical_shares(vertical_kv)
        if not 0 <= share < shares:
            return pieces
        k, v = kv = vertical_kv[:, :, self.heads]
        if self.vertical_tiles is not None:
            return [*pieces, Piece(k, v, self.vertical_tiles(by_key))]
        return [*pieces, self.call.vertical_piece(kv, by_key, share, shares)]


@dataclass
class Step:
    """The next computation of a group of query heads, on keys and values [B, Hkv, n, D].

    tiles: makes the tiles; the argument says whether with Tiles.by_key. rectangle: what takes their
    place, if there is one. d_kv: dk and dv, which the loop of a backward leaves here.
    """

    group: int
    k: Tensor
    v: Tensor
    tiles: Callable[[bool], Tiles]
    rectangle: Rectangle | None = None
    d_kv: tuple[Tensor, Tensor] = field(init=False)


class Transport(ABC):
    """Brings keys and values to the queries, and in a backward gradients home.

    Each schedule has its own (ring.py, all_gather.py, group_cast.py). ops.py has the table of them.
    """

    groups: list[Group]

    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        self.call = call
        self.q = q
        self.k = k
        self.v = v
        self.backward = backward

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """The steps in their order; transfers run while the caller computes."""

    @abstractmethod
    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk and dv of this rank's keys, summed over ranks, after the last step of a backward.

        They are in `dtype`, or in the dtype of the sums if that is wider.
        """

    @staticmethod
    def backward_otherwise(
        call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gradients of q, k and v, if something other than keys should travel; else None."""
        return None


class OneRank(Transport):
    """Attention on one rank: no transfers, one step over all keys."""

    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        super().__init__(call, q, k, v, backward)
        tiles = functools.partial(call.tiles_of_rank, 0)
        packing = dense.packing_of(call, k) if call.backend.SERVES_DENSE else None
        self.step = Step(0, k, v, tiles, packing)
        self.groups = [Group(call, slice(None), steps=1)]

    def steps(self) -> Iterator[Step]:
        yield self.step

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.step.d_kv
