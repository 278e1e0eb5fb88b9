"""Attention by the schedule all_gather: all keys and values come to every rank, one KV head at a time.

The next head is gathered while this one is computed, in one launch over all ranks' blocks; the gradients of the last head
are summed and scattered meanwhile. Nothing is merged, and only two heads' keys and values are held.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_sparse.attention import timing
from titan_sparse.attention.backends.eager import accumulation_dtype
from titan_sparse.attention.call import Run
from titan_sparse.attention.context_parallel.group import Pending
from titan_sparse.attention.merge import results
from titan_sparse.attention.schedules.verticals import (
    add_verticals,
    gather_verticals,
    reduce_verticals,
)
from titan_sparse.attention.tiles.blocks import BlockLists, Tiles


@timing.timed
def forward(run: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the gathered verticals' KV [2, B, Hq, C, D]."""
    run.count_plain_ring(k)
    verticals, by_head = gather_verticals(run, k, v), _heads(run, q, k, v)
    result = results(q, _query_heads(q, k), steps=1)
    with timing.computing(0):
        tiles, vertical_tiles, parts = run.tiles(len(q), False), None, []
    for step, (heads, k_head, v_head) in enumerate(by_head):
        vertical_kv = verticals.wait() if verticals.result.shape[3] else None
        with timing.computing(step):
            piece, end = (
                (q[:, heads], k_head, v_head, _of_heads(tiles, heads)),
                (run.scale, q.dtype, None, result.parts[step]),
            )
            if vertical_kv is not None:
                vertical_tiles = vertical_tiles or run.vertical_tiles(len(q))
                gathered = (*vertical_kv[:, :, heads], _of_heads(vertical_tiles, heads))
                parts.append(run.backend.forward_with_verticals(*piece, *gathered, *end))
            else:
                parts.append(run.backend.forward(*piece, *end))
    outs, lses = zip(*parts)
    return result.joined(outs), torch.cat(lses, dim=1), verticals.wait()


def backward(
    run: Run,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    vertical_kv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    run.count_plain_ring(k, backward=True)
    by_key, dtype, by_head = (
        run.backend.READS_BY_KEY,
        accumulation_dtype(q.dtype),
        _heads(run, q, k, v),
    )
    tiles = run.tiles(len(q), by_key)
    vertical_tiles = run.vertical_tiles(len(q), by_key) if vertical_kv.shape[3] else None
    dq, d_verticals, summed, result = [], [], [], results(q, _query_heads(q, k), steps=1)
    for (heads, k_head, v_head), into in zip(by_head, result.parts):
        inputs = (
            d_out[:, heads],
            q[:, heads],
            k_head,
            v_head,
            out[:, heads],
            lse[:, heads],
            _of_heads(tiles, heads),
        )
        if vertical_tiles is not None:
            gathered = (*vertical_kv[:, :, heads], _of_heads(vertical_tiles, heads))
            dq_part, dk, dv, *d_vertical = run.backend.backward_with_verticals(
                *inputs, *gathered, run.scale, dtype, None, into
            )
            d_verticals.append(torch.stack(d_vertical))
        else:
            dq_part, dk, dv = run.backend.backward(*inputs, run.scale, dtype, None, into)
        dq.append(dq_part)
        for pending in summed[-1] if summed else ():
            pending.wait()  # the last head's, which had this one's work to hide behind: only now is its memory free
        summed.append([_scatter(run, x, dtype) for x in (dk, dv)])
    verticals = reduce_verticals(run, torch.cat(d_verticals, dim=2)) if d_verticals else None
    d_kv = [torch.cat([x.wait() for x in parts], dim=1).to(dtype) for parts in zip(*summed)]
    if verticals is not None:
        add_verticals(run, d_kv, verticals.wait())
    return result.joined(dq), *(x.to(q.dtype) for x in d_kv)


def _heads(run: Run, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """KV head by KV head: its query heads, and its keys and values of all ranks [B, 1, ranks * S_local, D]. The first head
    sets out at once, to hide behind what the caller does before it asks for it."""
    start = lambda head: [
        run.cp.start_all_gather(x[:, head : head + 1], f"{name} {head % 2}")
        for name, x in (("k", k), ("v", v))
    ]

    def arrive(pending: list[Pending]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for head, heads in enumerate(_query_heads(q, k)):
            following = start(head + 1) if head + 1 < k.shape[1] else None
            yield heads, *(_one_after_the_other(x) for x in pending)
            pending = following

    return arrive(start(0))


def _query_heads(q: Tensor, k: Tensor) -> list[slice]:
    """Of each KV head."""
    group = q.shape[1] // k.shape[1]
    return [slice(first, first + group) for first in range(0, q.shape[1], group)]


def _one_after_the_other(gathered: Pending) -> Tensor:
    """[ranks, B, 1, S_local, D] -> [B, 1, ranks * S_local, D]; no copy for a single sequence."""
    return gathered.wait().permute(1, 2, 0, 3, 4).flatten(2, 3)


def _scatter(run: Run, x: Tensor, dtype: torch.dtype) -> Pending:
    """Start to bring the gradient [B, 1, ranks * S_local, D] of every rank's keys home, summed in dtype unless the wire has
    another: [B, 1, S_local, D]."""
    parts = x.unflatten(2, (run.cp.size, -1)).permute(2, 0, 1, 3, 4)
    return run.cp.start_reduce_scatter(parts.to(run.cp.gradient_dtype or dtype).contiguous())


def _of_heads(tiles: Tiles, heads: slice) -> Tiles:
    """The tiles of some query heads."""
    part = lambda x: x if x is None or x.shape[1] == 1 else x[:, heads]
    lists = lambda x: x and BlockLists(*(part(y) for y in x))
    return tiles._replace(
        by_query=lists(tiles.by_query),
        by_key=lists(tiles.by_key),
        covered=part(tiles.covered),
        k_positions=part(tiles.k_positions),
        chosen=tiles.chosen and tiles.chosen._replace(words=part(tiles.chosen.words)),
    )
