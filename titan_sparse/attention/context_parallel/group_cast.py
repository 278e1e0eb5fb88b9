"""Attention by the schedule group_cast: blocks of keys and values go only to ranks that need them.

They come in stages. A rank computes on its own blocks while the first stage comes, on the first
stage while the second comes, and so on. The backward fetches them again and sends their gradients
back, summed in each node on the way. Where it pays, half of the own blocks are left to the end to
hide the last gradients. group_cast_plan.py defines who sends what, and
group_cast_exchange.py sends it.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.group_cast_exchange import (
    BlockGradients,
    keys_and_values,
)
from titan_sparse.attention.context_parallel.group_cast_plan import (
    CastPlan,
    blocks_before_others,
    plan,
)
from titan_sparse.attention.context_parallel.loop import Group, Step, Transport
from titan_sparse.attention.context_parallel.needed_keys import needed_blocks
from titan_sparse.attention.masks.ranges import once_per_mask


class GroupCast(Transport):
    def __init__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, backward: bool):
        self.call = call
        self.k = k
        self.v = v
        self.backward = backward
        self.plan = _plan(call, call.cp.overlap_stages[backward])
        own = call.key_blocks()
        # Own blocks that are computed at once; the rest is left to the end.
        self.first = len(own)
        if backward:
            self.first = blocks_before_others(
                own=len(own),
                remote=sum(len(stage.k_blocks) for stage in self.plan.stages),
                heads=q.shape[1],
                kv_heads=k.shape[1],
                element_bytes=q.element_size(),
                nodes=call.cp.inter,
            )
            self.home = BlockGradients(call.cp, self.plan, k, call.sum_dtype(q))
        # Global blocks of the keys of each step, int64 [n].
        of_stages = [stage.k_blocks for stage in self.plan.stages]
        self.blocks = [own[: self.first], *of_stages, own[self.first :]]
        steps = sum(len(blocks) > 0 for blocks in self.blocks)
        self.groups = [Group(call, slice(None), steps)]

    def steps(self) -> Iterator[Step]:
        arriving = keys_and_values(self.call, self.plan, self.k, self.v, self.first)
        for number, (blocks, (k, v)) in enumerate(zip(self.blocks, arriving, strict=True)):
            d_kv = None
            name = (len(self.blocks), self.backward, number, len(blocks))
            if len(blocks) > 0:
                tiles = functools.partial(
                    self.call.tiles_of_blocks,
                    len(k),
                    k_blocks=blocks,
                    name=None if self.call.pattern.dynamic else name,
                )
                step = Step(0, k, v, tiles)
                yield step
                d_kv = step.d_kv
            if self.backward:
                self.home.add(number, d_kv)

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.home.finish(dtype)


def _plan(call: AttentionCall, stages: int) -> CastPlan:
    """This rank's plan on the data's device, the same for all layers if the pattern is static."""
    cp = call.cp

    def make() -> CastPlan:
        # int64 [W, n]: the blocks that each rank owns
        table = cp.table(call.mask).cpu()[:, : call.last]
        device = call.mask.start.device
        return plan(needed_blocks(call), table, cp.inter, cp.intra, cp.rank, stages, device)

    if call.pattern.dynamic:
        return make()
    key = ("group cast", cp.key, stages, call.first, call.last)
    return once_per_mask(call.mask, key, make)
