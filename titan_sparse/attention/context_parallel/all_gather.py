"""Attention by the schedule all_gather: every rank receives all keys and values,
some heads at a time.

The next KV heads are gathered while these are computed, in one launch over all ranks' blocks. In
the backward the gradients of the last heads are summed and scattered meanwhile. A backend that is
faster on dense rectangles than on tiles gets a rectangle for each rank's keys, as in a ring.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from titan_sparse.attention import recorder
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.context_parallel.dense import Rectangle, rectangle_of
from titan_sparse.attention.context_parallel.loop import Group, Step, Transport
from titan_sparse.attention.context_parallel.schedules import heads_gathered
from titan_sparse.kernels.block_sparse import Tiles
from titan_sparse.kernels.block_sparse.piece import mapped


class AllGather(Transport):
    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        super().__init__(call, q, k, v, backward)
        self.dtype = call.sum_dtype(k)
        self.rectangles = _rectangles(call, q.shape[2]) if call.backend.DENSE_BY_CHUNK else []
        self.scattered: list[list[Pending]] = []
        # Made once for all heads, those of verticals when the first heads meet them.
        self.tiles = functools.cache(functools.partial(call.tiles_of_rank, None))
        vertical_tiles = functools.cache(call.tiles_of_verticals)

        kv_heads = k.shape[1]
        head_bytes = 2 * call.cp.size * k[:, :1].nbytes
        at_once = heads_gathered(kv_heads, head_bytes)
        # What comes rank by rank is put head by head, which is a copy unless it is one head. With a
        # copy, keys and values may as well travel together.
        self.together = at_once > 1 or len(k) > 1
        self.kv_heads = [slice(i, i + at_once) for i in range(0, kv_heads, at_once)]
        queries_a_head = q.shape[1] // kv_heads
        self.groups = []
        for of_group in self.kv_heads:
            heads = slice(of_group.start * queries_a_head, of_group.stop * queries_a_head)
            of_verticals = functools.partial(_tiles_of_heads, vertical_tiles, heads)
            self.groups.append(Group(call, heads, len(self.rectangles) or 1, of_verticals))

    def steps(self) -> Iterator[Step]:
        # The first heads are on their way while tables are made, once for all heads.
        following = self._start(0)
        if not self.rectangles:
            with recorder.computing() if recorder.listeners.recording else contextlib.nullcontext():
                self.tiles(self.backward and self.call.backend.READS_BY_KEY)
        for number, group in enumerate(self.groups):
            arriving = following
            if number + 1 < len(self.groups):
                following = self._start(number + 1)
            k, v = _pair(_one_rank_after_the_other(pending.wait()) for pending in arriving)
            tiles = functools.partial(_tiles_of_heads, self.tiles, group.heads)
            d_kv = []
            if self.backward and self.rectangles:
                # Keys that no query here sees keep gradients of 0.
                d_kv = [torch.zeros_like(x, dtype=self.dtype) for x in (k, v)]
            for rectangle, keys in self.rectangles or [(None, slice(None))]:
                step = Step(number, k[:, :, keys], v[:, :, keys], tiles, rectangle)
                yield step
                for whole, part in zip(d_kv, step.d_kv if d_kv else ()):
                    whole[:, :, keys] = part
            if self.backward:
                self._scatter(d_kv or step.d_kv)

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        pairs = [_pair(x.wait() for x in of_group) for of_group in self.scattered]
        # [B, Hkv, S_local, D]
        dk, dv = (torch.cat(of_groups, dim=1) for of_groups in zip(*pairs))
        return dk.to(self.dtype), dv.to(self.dtype)

    def _start(self, group: int) -> list[Pending]:
        """Start to gather keys and values of a group's KV heads of all ranks.

        Two buffers take turns: one is computed on while the next heads arrive in the other.
        """
        # [B, h, S_local, D]
        k, v = (x[:, self.kv_heads[group]] for x in (self.k, self.v))
        sent = {"kv": torch.stack([k, v])} if self.together else {"k": k, "v": v}
        start = self.call.cp.start_all_gather
        return [start(x, f"{name} {group % 2}") for name, x in sent.items()]

    def _scatter(self, d_kv: Iterable[Tensor]) -> None:
        """Start to bring the gradients [B, h, ranks * S_local, D] of every rank's keys home.

        They are summed in cp.gradient_dtype, or in the dtype of the sums where that is None.
        """
        if self.scattered:
            # The previous heads' gradients traveled while these were computed. Waiting frees the
            # memory that they were sent from.
            for pending in self.scattered[-1]:
                pending.wait()
        sent_dtype = self.call.cp.gradient_dtype or self.dtype
        # [B, h, ranks, S_local, D] -> [ranks, B, h, S_local, D]
        by_rank = [x.unflatten(2, (self.call.cp.size, -1)).movedim(2, 0) for x in d_kv]
        if self.together:
            # [ranks, 2, B, h, S_local, D]
            by_rank = [torch.stack(by_rank, dim=1)]
        start = self.call.cp.start_reduce_scatter
        self.scattered.append([start(x.to(sent_dtype).contiguous()) for x in by_rank])


def _rectangles(call: AttentionCall, length: int) -> list[tuple[Rectangle | None, slice]]:
    """The rectangle of each rank whose keys this rank's queries see, and where those keys are among
    those of all ranks. All queries see some of the first rank's. length: tokens of a rank."""
    found: list[tuple[Rectangle | None, slice]] = []
    for source in range(call.cp.size):
        rectangle = rectangle_of(call, length, source)
        if rectangle is not None:
            found.append((rectangle, slice(source * length, (source + 1) * length)))
    return found


def _one_rank_after_the_other(gathered: Tensor) -> Tensor:
    """[ranks, ..., S_local, D] -> [..., ranks * S_local, D]; no copy for one
    head of one sequence."""
    return gathered.movedim(0, -3).flatten(-3, -2)


def _pair(parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values, or their gradients, from both or from one tensor that holds them."""
    first, *rest = parts
    k, v = (first, *rest) if rest else first
    return k, v


def _tiles_of_heads(make: Callable[[bool], Tiles], heads: slice, by_key: bool) -> Tiles:
    """make(by_key), for some of the query heads."""

    def take(table: Tensor) -> Tensor:
        """Some heads of a table [B, Hq or 1, ...]. A table with one head holds for all of them."""
        return table if table.shape[1] == 1 else table[:, heads]

    tiles = make(by_key)
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
