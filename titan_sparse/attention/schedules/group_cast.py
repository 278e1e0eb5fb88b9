"""Attention by the schedule group_cast: blocks of keys and values go only to ranks that need them.

They come in stages. A rank computes on its own blocks while the first stage comes, on the first
stage while the second comes, and so on. The backward fetches them again and sends their gradients
back, summed in each node on the way. Where it pays, half of the own blocks are left to the end to
hide the last gradients. context_parallel/group_cast_plan.py defines who sends what.
"""

from collections.abc import Iterator

from torch import Tensor

from titan_sparse.attention import call_tiles, recorder
from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.group_cast_plan import (
    Plan,
    blocks_before_others,
    plan,
)
from titan_sparse.attention.context_parallel.schedule import vertical_steps
from titan_sparse.attention.masks.base import once_per_mask
from titan_sparse.attention.merge import at_last, results
from titan_sparse.attention.schedules import verticals
from titan_sparse.attention.schedules.block_exchange import GradientsHome, keys_and_values
from titan_sparse.attention.schedules.needs import needed_blocks
from titan_sparse.kernels.block_sparse import Piece


@recorder.timed
def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and gathered verticals [2, B, Hq, C, D]."""
    call.count_plain_ring(k)
    gathered = verticals.gather(call, k, v)
    exchanges = _plan(call, call.cp.overlap_stages[0])
    own = call.key_blocks()
    # Step 0 is on the own blocks; none of them is left to the end.
    blocks_by_step = _blocks_by_step(own, exchanges, first=len(own))
    with_verticals = _steps_with_verticals(call, blocks_by_step, gathered.result)
    places = _places(blocks_by_step, q)
    dtype = call.sum_dtype(q)
    total = None
    arriving = keys_and_values(call, exchanges, k, v, first=len(own))
    for step, (blocks, kv) in enumerate(zip(blocks_by_step, arriving, strict=True)):
        if len(blocks) == 0:
            continue
        vertical_kv = None
        if step in with_verticals:
            vertical_kv = gathered.wait()
        with recorder.computing():
            name = (len(blocks_by_step), "forward", step)
            pieces = [_piece(call, blocks, kv, name, transpose=False)]
            if vertical_kv is not None:
                vertical_piece = call_tiles.vertical_piece(
                    call,
                    vertical_kv,
                    len(q),
                    transpose=False,
                    share=with_verticals.index(step),
                    shares=len(with_verticals),
                )
                pieces.append(vertical_piece)
            total = call.backend.forward(
                q,
                pieces,
                total,
                call.scale,
                dtype,
                next(places),
            )
    return total.out, total.lse, gathered.wait()


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
    with_verticals = _steps_with_verticals(call, blocks_by_step, vertical_kv, backward=True)
    shares = len(with_verticals)
    places = _places(blocks_by_step, q)
    dtype = call.sum_dtype(q)
    by_key = call.backend.READS_BY_KEY
    home = GradientsHome(call.cp, exchanges, k, dtype)
    d_verticals = verticals.new_gradients(vertical_kv)
    dq = None
    reduced = None
    arriving = keys_and_values(call, exchanges, k, v, first)
    for step, (blocks, kv) in enumerate(zip(blocks_by_step, arriving, strict=True)):
        d_kv = None
        if len(blocks) > 0:
            name = (len(blocks_by_step), "backward", step)
            pieces = [_piece(call, blocks, kv, name, by_key)]
            if step in with_verticals:
                share = with_verticals.index(step)
                vertical_piece = call_tiles.vertical_piece(
                    call,
                    vertical_kv,
                    len(q),
                    transpose=by_key,
                    share=share,
                    shares=shares,
                )
                pieces.append(vertical_piece)
            dq, gradients = call.backend.backward(
                queries,
                pieces,
                dq,
                call.scale,
                dtype,
                next(places),
            )
            d_kv = gradients[0]
            if step in with_verticals:
                verticals.put_share(
                    d_verticals,
                    gradients[1],
                    share=share,
                    shares=shares,
                    block_size=call.cp.block_size,
                )
                # The last share is done: the sum over ranks travels behind the steps that remain.
                if share + 1 == shares:
                    reduced = verticals.reduce_gradients(call, d_verticals)
        if step == 0:
            home.begin(d_kv)
        elif step <= len(exchanges.stages):
            d_kv_of_stage = _without_room(d_kv, blocks, call.cp.block_size)
            home.send(step - 1, d_kv_of_stage)
    # The verticals' gradients are still to be added, so dk and dv are not rounded before that.
    result_dtype = q.dtype if reduced is None else dtype
    dk, dv = home.finish(d_kv, result_dtype)
    if reduced is not None:
        verticals.add_gradients(call, (dk, dv), reduced.wait())
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


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


def _piece(
    call: AttentionCall,
    blocks: Tensor,
    kv: tuple[Tensor, Tensor],
    name: tuple,
    transpose: bool,
) -> Piece:
    """A step's keys and values with their tiles. name: identifies this step's blocks."""
    k, v = kv
    tiles = call_tiles.tiles_of_blocks(
        call,
        len(k),
        transpose,
        k_blocks=blocks,
        name=name,
        capacity=k.shape[2] // call.cp.block_size,
    )
    return Piece(k, v, tiles)


def _without_room(
    d_kv: tuple[Tensor, Tensor] | None, blocks: Tensor, block_size: int
) -> tuple[Tensor, Tensor] | None:
    """dk and dv of the blocks alone, without the memory that lies unused behind them."""
    if d_kv is None:
        return None
    dk, dv = d_kv
    tokens = len(blocks) * block_size
    return dk[:, :, :tokens], dv[:, :, :tokens]


def _places(blocks_by_step: list[Tensor], q: Tensor) -> Iterator[Tensor | None]:
    """Where each step that computes writes its sum; the last one writes to memory in q's dtype."""
    computing_steps = sum(len(blocks) > 0 for blocks in blocks_by_step)
    all_heads = slice(None)
    result = results(q, [all_heads], steps=computing_steps)
    [memory] = result.parts
    return at_last(computing_steps, memory)


def _steps_with_verticals(
    call: AttentionCall,
    blocks_by_step: list[Tensor],
    vertical_kv: Tensor,
    backward: bool = False,
) -> list[int]:
    """The steps that meet a share of the verticals; an empty list without verticals.

    vertical_kv: [2, B, Hq, C, D].
    """
    computes = []
    for blocks in blocks_by_step:
        computes.append(len(blocks) > 0)
    blocks_of_verticals = vertical_kv.shape[3] // call.cp.block_size
    return vertical_steps(computes, blocks_of_verticals, backward)
