"""Attention by the schedule all_gather: every rank receives all keys and values, head by head.

The next KV head is gathered while this one is computed, in one launch over all ranks' blocks. In
the backward the gradients of the last head are summed and scattered meanwhile. A backend that is
faster on dense rectangles than on tiles gets a rectangle for each rank's keys, as in a ring.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from titan_sparse.attention import recorder
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.context_parallel.dense import Rectangle, rectangle_of
from titan_sparse.attention.context_parallel.loop import Group, Step, Transport
from titan_sparse.kernels.block_sparse import Tiles
from titan_sparse.kernels.block_sparse.piece import mapped


class AllGather(Transport):
    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        self.call = call
        self.k = k
        self.v = v
        self.backward = backward
        self.dtype = call.sum_dtype(k)
        self.rectangles = _rectangles(call, q) if call.backend.DENSE_BY_CHUNK else []
        self.scattered: list[tuple[Pending, Pending]] = []

        # Made when the first heads meet verticals, and once for all heads.
        @functools.cache
        def of_verticals(by_key: bool) -> Tiles:
            return call.tiles_of_verticals(len(k), by_key)

        heads_of_group = q.shape[1] // k.shape[1]
        self.groups = []
        for first in range(0, q.shape[1], heads_of_group):
            heads = slice(first, first + heads_of_group)

            def vertical_tiles(by_key: bool, heads: slice = heads) -> Tiles:
                return _tiles_of_heads(of_verticals(by_key), heads)

            self.groups.append(Group(call, heads, len(self.rectangles) or 1, vertical_tiles))

    def steps(self) -> Iterator[Step]:
        # The first head is on its way while tables are made, once for all heads.
        following = self._start(0)
        if not self.rectangles:
            by_key = self.backward and self.call.backend.READS_BY_KEY
            with recorder.computing() if recorder.listening else contextlib.nullcontext():
                of_all = self.call.tiles_of_rank(len(self.k), None, by_key)
        for number, group in enumerate(self.groups):
            arriving = following
            if number + 1 < len(self.groups):
                following = self._start(number + 1)
            k, v = (_one_rank_after_the_other(pending) for pending in arriving)

            def tiles(_: bool, heads: slice = group.heads) -> Tiles:
                return _tiles_of_heads(of_all, heads)

            gradients = []
            if self.backward and self.rectangles:
                # Keys that no query here sees keep gradients of 0.
                gradients = [
                    torch.zeros(x.shape, dtype=self.dtype, device=x.device) for x in (k, v)
                ]
            for rectangle, keys in self.rectangles or [(None, slice(None))]:
                step = Step(number, k[:, :, keys], v[:, :, keys], tiles, rectangle)
                yield step
                for whole, gradient in zip(gradients, step.d_kv or ()):
                    whole[:, :, keys] = gradient
            if self.backward:
                self._scatter(*(gradients or step.d_kv))

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # [B, Hkv, S_local, D]
        dk = torch.cat([dk.wait() for dk, _ in self.scattered], dim=1)
        dv = torch.cat([dv.wait() for _, dv in self.scattered], dim=1)
        return dk.to(self.dtype), dv.to(self.dtype)

    def _start(self, head: int) -> list[Pending]:
        """Start to gather keys and values of a KV head of all ranks.

        Two buffers take turns: one is computed on while the next head arrives in the other.
        """
        started = []
        for name, x in (("k", self.k), ("v", self.v)):
            # [B, 1, S_local, D]
            x_head = x[:, head : head + 1]
            started.append(self.call.cp.start_all_gather(x_head, f"{name} {head % 2}"))
        return started

    def _scatter(self, dk: Tensor, dv: Tensor) -> None:
        """Start to bring the gradients [B, 1, ranks * S_local, D] of every rank's keys home.

        They are summed in cp.gradient_dtype, or in the dtype of the sums where that is None.
        """
        if self.scattered:
            # The previous head's gradients traveled while this one was computed. Waiting frees
            # the memory that they were sent from.
            for pending in self.scattered[-1]:
                pending.wait()
        sent_dtype = self.call.cp.gradient_dtype or self.dtype
        started = []
        for gradient in (dk, dv):
            # [B, 1, ranks, S_local, D] -> [ranks, B, 1, S_local, D]
            by_rank = gradient.unflatten(2, (self.call.cp.size, -1)).permute(2, 0, 1, 3, 4)
            by_rank = by_rank.to(sent_dtype).contiguous()
            started.append(self.call.cp.start_reduce_scatter(by_rank))
        self.scattered.append(tuple(started))


def _rectangles(call: AttentionCall, q: Tensor) -> list[tuple[Rectangle, slice]]:
    """The rectangle of each rank whose keys this rank's queries see, and where those keys are among
    those of all ranks. All queries see some of the first rank's."""
    found = []
    length = q.shape[2]
    for source in range(call.cp.size):
        rectangle = rectangle_of(call, q, source)
        if rectangle is not None:
            found.append((rectangle, slice(source * length, (source + 1) * length)))
    return found


def _one_rank_after_the_other(gathered: Pending) -> Tensor:
    """[ranks, B, 1, S_local, D] -> [B, 1, ranks * S_local, D]; no copy for a single sequence."""
    return gathered.wait().permute(1, 2, 0, 3, 4).flatten(2, 3)


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
