"""Attention by the schedule group_cast: blocks of keys and values go only to ranks that need them.

They come in stages. A rank computes on its own blocks while the first stage comes, on the first
stage while the second comes, and so on. The backward fetches them again and sends their gradients
back, summed in each node on the way. Where it pays, half of the own blocks are left to the end to
hide the last gradients. context_parallel/group_cast_plan.py defines who sends what.
"""

from torch import Tensor

from titan_sparse.attention import call_tiles, recorder
from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.group_cast_plan import (
    Plan,
    blocks_before_others,
    plan,
)
from titan_sparse.attention.masks.base import once_per_mask
from titan_sparse.attention.merge import results
from titan_sparse.attention.schedules import verticals
from titan_sparse.attention.schedules.block_exchange import GradientsHome, keys_and_values
from titan_sparse.attention.schedules.needs import needed_blocks
from titan_sparse.attention.schedules.steps import BackwardSum, ForwardSum, MakeTiles
from titan_sparse.kernels.block_sparse import Tiles


@recorder.timed
def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and gathered verticals [2, B, Hq, C, D]."""
    call.count_plain_ring(k)
    gathered = verticals.gather(call, k, v)
    exchanges = _plan(call, call.cp.overlap_stages[0])
    own = call.key_blocks()
    # Step 0 is on the own blocks; none of them is left to the end.
    blocks_by_step = _blocks_by_step(own, exchanges, first=len(own))
    steps, into = _computing_steps(blocks_by_step, q)
    forward_sum = ForwardSum(call, q, steps, into, gathered)
    arriving = keys_and_values(call, exchanges, k, v, first=len(own))
    for step, (blocks, kv) in enumerate(zip(blocks_by_step, arriving, strict=True)):
        if len(blocks) > 0:
            name = (len(blocks_by_step), "forward", step)
            forward_sum.add(*kv, _tiles_maker(call, blocks, kv[0], name))
    out, lse = forward_sum.total
    return out, lse, gathered.wait()


def backward(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    q = queries.q
    call.count_plain_ring(k, backward=True)
    exchanges = _plan(call, call.cp.overlap_stages[1])
    own = call.key_blocks()
    remote = sum(len(stage.k_blocks) for stage in exchanges.stages)
    # Own blocks that are computed at once; the rest is left to the end.
    first = blocks_before_others(
        own=len(own),
        remote=remote,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        element_bytes=q.element_size(),
        nodes=call.cp.inter,
    )
    blocks_by_step = _blocks_by_step(own, exchanges, first)
    dtype = call.sum_dtype(q)
    home = GradientsHome(call.cp, exchanges, k, dtype)
    d_verticals = verticals.Gradients(call, vertical_kv)
    steps, into = _computing_steps(blocks_by_step, q)
    backward_sum = BackwardSum(call, queries, steps, into, d_verticals)
    arriving = keys_and_values(call, exchanges, k, v, first)
    for step, (blocks, kv) in enumerate(zip(blocks_by_step, arriving, strict=True)):
        d_kv = None
        if len(blocks) > 0:
            name = (len(blocks_by_step), "backward", step)
            d_kv = backward_sum.add(*kv, _tiles_maker(call, blocks, kv[0], name))
        if step == 0:
            home.begin(d_kv)
        elif step <= len(exchanges.stages):
            if d_kv is not None:
                # Without the memory that lies unused behind the blocks.
                tokens = len(blocks) * call.cp.block_size
                d_kv = tuple(gradient[:, :, :tokens] for gradient in d_kv)
            home.send(step - 1, d_kv)
    # If the verticals' gradients are still to be added, dk and dv are not rounded before that.
    result_dtype = q.dtype if d_verticals.reduced is None else dtype
    dk, dv = home.finish(d_kv, result_dtype)
    d_verticals.add_to((dk, dv))
    return backward_sum.dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _plan(call: AttentionCall, stages: int) -> Plan:
    """This rank's plan on the data's device, the same for all layers if the pattern is static."""
    cp = call.cp

    def host_table() -> Tensor:
        return cp.table(call.mask).cpu()

    def make() -> Plan:
        # int64 [W, n]: the blocks that each rank owns
        table = once_per_mask(call.mask, ("table on the host", cp.key), host_table)
        table = table[:, : call.last]
        host_plan = plan(
            needed_blocks(call),
            table,
            cp.inter,
            cp.intra,
            cp.rank,
            stages,
        )
        device = call.mask.start.device
        return host_plan.to(device)

    if call.pattern.dynamic:
        return make()
    key = ("group cast", cp.key, stages, call.first, call.last)
    return once_per_mask(call.mask, key, make)


def _blocks_by_step(own: Tensor, exchanges: Plan, first: int) -> list[Tensor]:
    """Global blocks of the keys of each step, int64 [n].

    The first of this rank's own blocks, then those of each stage, then the rest of its own.
    """
    from_others = [stage.k_blocks for stage in exchanges.stages]
    return [own[:first], *from_others, own[first:]]


def _tiles_maker(call: AttentionCall, blocks: Tensor, k: Tensor, name: tuple) -> MakeTiles:
    """Makes the tiles of a step's keys k. name: identifies its blocks."""

    def make(transpose: bool) -> Tiles:
        capacity = k.shape[2] // call.cp.block_size
        return call_tiles.tiles_of_blocks(call, len(k), transpose, blocks, name, capacity)

    return make


def _computing_steps(blocks_by_step: list[Tensor], q: Tensor) -> tuple[int, Tensor | None]:
    """How many steps compute, and the memory in q's dtype that the last one writes its sum to."""
    steps = sum(len(blocks) > 0 for blocks in blocks_by_step)
    [into] = results(q, [slice(None)], steps).parts
    return steps, into
