"""The loop over the steps of a schedule: the sums of a forward and of a backward.

The gathered verticals are dealt out over the steps, block by block. The first step of a forward and
the last one of a backward get none, so that work hides their exchanges.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_sparse.attention import call_tiles, recorder
from titan_sparse.attention.backends.base import Partial, Queries, Sum
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.merge import accumulation_dtype, results
from titan_sparse.attention.schedules import rectangles, verticals
from titan_sparse.attention.schedules.rectangles import Rectangle
from titan_sparse.kernels.block_sparse import Piece, Tiles


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

    def pieces(
        self, step: "Step", by_key: bool, vertical_kv: Tensor, share: int, shares: int
    ) -> list[Piece]:
        """The keys of a step by tiles, with a share of the verticals if there is one of this number."""
        pieces = [Piece(step.k, step.v, step.tiles(by_key))]
        if 0 <= share < shares:
            kv = vertical_kv[:, :, self.heads]
            if self.vertical_tiles is not None:
                pieces.append(Piece(*kv, self.vertical_tiles(by_key)))
            else:
                batch = kv.shape[1]
                pieces.append(
                    call_tiles.vertical_piece(self.call, kv, batch, by_key, share, shares)
                )
        return pieces


@dataclass
class Step:
    """What a group of query heads computes next, on keys and values [B, Hkv, n, D].

    tiles: makes the tiles; the argument says whether with Tiles.by_key. rectangle: what takes their
    place, if there is one. d_kv: dk and dv, which the loop of a backward leaves here.
    """

    group: int
    k: Tensor
    v: Tensor
    tiles: Callable[[bool], Tiles] | None
    rectangle: Rectangle | None = None
    d_kv: tuple[Tensor, Tensor] | None = None


class Transport(ABC):
    """Brings keys and values to the queries, and in a backward gradients home."""

    groups: list[Group]

    @abstractmethod
    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool): ...

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """The steps in their order; transfers run while the caller computes."""

    @abstractmethod
    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk and dv of this rank's keys, summed over ranks, after the last step of a backward.

        They are in `dtype`, or in the dtype of the sums if that is wider.
        """


def forward(
    call: AttentionCall, transport_type: type[Transport], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and gathered verticals [2, B, Hq, C, D]."""
    gathered = verticals.gather(call, k, v)
    transport = transport_type(call, q, k, v, backward=False)
    groups = transport.groups
    memory = results(q, [group.heads for group in groups], max(group.steps for group in groups))
    sums = []
    for group, into in zip(groups, memory.parts, strict=True):
        sums.append(ForwardSum(group, q, into, gathered))
    for step in transport.steps():
        sums[step.group].add(step)
    out = memory.joined([of_group.total.out for of_group in sums])
    lse = torch.cat([of_group.total.lse for of_group in sums], dim=1)
    return out, lse, gathered.wait()


def backward(
    call: AttentionCall,
    transport_type: type[Transport],
    queries: Queries,
    k: Tensor,
    v: Tensor,
    vertical_kv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    q = queries.q
    transport = transport_type(call, q, k, v, backward=True)
    groups = transport.groups
    memory = results(q, [group.heads for group in groups], max(group.steps for group in groups))
    # Their exchange begins when all groups have met all verticals.
    d_verticals = verticals.Gradients(call, vertical_kv)
    sums = []
    for group, into in zip(groups, memory.parts, strict=True):
        sums.append(BackwardSum(group, queries, into, d_verticals))
    for step in transport.steps():
        step.d_kv = sums[step.group].add(step)
    # If the verticals' gradients are still to be added, dk and dv are not rounded before that.
    has_verticals = d_verticals.reduced is not None
    dk, dv = transport.gradients(call.sum_dtype(q) if has_verticals else q.dtype)
    d_verticals.add_to((dk, dv))
    dq = memory.joined([of_group.dq for of_group in sums])
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class ForwardSum:
    """Attention summed over the steps, in fp32 (fp64 for fp64), because errors of rounding at every
    step would add up. Only the last step rounds.
    """

    def __init__(self, group: Group, q: Tensor, into: Tensor | None, gathered: Pending):
        """q: of all heads. into: memory for the result. gathered: keys and values of the verticals
        of all heads, on their way.
        """
        self.group = group
        self.q = q[:, group.heads]
        self.dtype = q.dtype if group.steps == 1 else accumulation_dtype(q.dtype)
        # The last step writes `into`, the others nowhere given.
        self.places = iter([None] * (group.steps - 1) + [into])
        self.gathered = gathered
        self.shares = group.vertical_shares(gathered.result)
        # The last steps meet the verticals.
        self.share = self.shares - group.steps
        self.total: Partial | None = None

    def add(self, step: Step) -> None:
        call = self.group.call
        total = Sum(self.dtype, self.total, next(self.places))
        if self.share >= 0:
            self.gathered.wait()
        with recorder.computing():
            if step.rectangle is not None:
                self.total = rectangles.forward(call, step.rectangle, self.q, step.k, step.v, total)
            else:
                pieces = self.group.pieces(
                    step, False, self.gathered.result, self.share, self.shares
                )
                self.total = call.backend.forward(self.q, pieces, call.scale, total)
        self.share += 1


class BackwardSum:
    """Gradients of the queries summed over the steps; those of keys are each step's own."""

    def __init__(
        self,
        group: Group,
        queries: Queries,
        into: Tensor | None,
        d_verticals: verticals.Gradients,
    ):
        """queries: of all heads. d_verticals: receives the verticals' gradients."""
        self.group = group
        self.queries = Queries._make(tensor[:, group.heads] for tensor in queries)
        # The last step writes `into`, the others nowhere given.
        self.places = iter([None] * (group.steps - 1) + [into])
        self.d_verticals = d_verticals
        self.shares = group.vertical_shares(d_verticals.vertical_kv)
        # The first steps meet the verticals.
        self.share = 0
        self.dq: Tensor | None = None
        d_verticals.missing += self.shares

    def add(self, step: Step) -> tuple[Tensor, Tensor]:
        """dk and dv of the next step."""
        call = self.group.call
        total = Sum(call.sum_dtype(step.k), self.dq, next(self.places))
        if step.rectangle is not None:
            self.dq, d_kv = rectangles.backward(
                call, step.rectangle, self.queries, step.k, step.v, total
            )
            return d_kv
        pieces = self.group.pieces(
            step,
            call.backend.READS_BY_KEY,
            self.d_verticals.vertical_kv,
            self.share,
            self.shares,
        )
        self.dq, gradients = call.backend.backward(self.queries, pieces, call.scale, total)
        for d_verticals in gradients[1:]:
            self.d_verticals.put(d_verticals, self.group.heads, self.share, self.shares)
        self.share += 1
        return gradients[0]
