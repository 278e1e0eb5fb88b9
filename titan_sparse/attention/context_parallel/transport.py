"""What a schedule moves, as the loop over steps sees it: steps, groups of heads, and gradients.

Each schedule is a Transport of its own (ring.py, all_gather.py, group_cast.py).
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.dense import Rectangle, packing_of
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

    def pieces(self, step: "Step", by_key: bool, vertical_kv: Tensor, share: int) -> list[Piece]:
        """The keys of a step by tiles, with a share of the verticals if there is one of this number."""
        pieces = [Piece(step.k, step.v, step.tiles(by_key))]
        shares = self.vertical_shares(vertical_kv)
        if not 0 <= share < shares:
            return pieces
        kv = vertical_kv[:, :, self.heads]
        if self.vertical_tiles is not None:
            return [*pieces, Piece(*kv, self.vertical_tiles(by_key))]
        batch = kv.shape[1]
        return [*pieces, self.call.vertical_piece(kv, batch, by_key, share, shares)]


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


class OneRank(Transport):
    """Attention on one rank: no transfers, one step over all keys."""

    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        tiles = functools.partial(call.tiles_of_rank, len(k), 0)
        self.step = Step(0, k, v, tiles, packing_of(call, q, k))
        self.groups = [Group(call, slice(None), steps=1)]

    def steps(self) -> Iterator[Step]:
        yield self.step

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.step.d_kv
