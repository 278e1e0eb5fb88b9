"""Attention by the schedules that move chunks from rank to rank: local, ring and double_ring, forward and backward.

Block pairs follow the schedule, chunk by chunk. Columns do not: they are gathered once and dealt out over the steps, but
for the first of the forward and the last of the backward, so that their exchanges have work to hide behind. Pieces
are merged in fp32 by log-sum-exp; the backward of every piece takes the global out and lse, which makes the sum exact.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import timing
from titan_sparse.attention.call import Run
from titan_sparse.attention.context_parallel.windows import head_groups, vertical_steps
from titan_sparse.attention.merge import Results, at_last, results
from titan_sparse.attention.schedules import rectangles, transport
from titan_sparse.attention.schedules import varlen as packed
from titan_sparse.attention.schedules.needs import needed_chunks
from titan_sparse.attention.schedules.verticals import (
    add_verticals,
    gather_verticals,
    new_gradients,
    put_part,
    reduce_verticals,
    vertical_part,
)


@timing.timed
def forward(run: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the gathered verticals' KV [2, B, Hq, C, D].

    With several ranks the running sum over chunks is fp32 (fp64 for fp64): rounding it at every step would add up. The last
    step rounds.
    """
    run.count_plain_ring(k)
    verticals = gather_verticals(run, k, v)
    if run.is_plain(q):
        return *run.backend.forward_causal(q, k, v, run.scale), verticals.wait()
    if documents := packed.packing(run, q):
        return *packed.forward(run, documents, q, k, v), verticals.wait()
    groups, dtype, batch = _head_groups(run, q, k), run.sum_dtype(q), len(q)
    totals = [None] * len(groups)
    route = transport.route(run.cp, needed_chunks(run))
    with_verticals = vertical_steps(
        sum(route.compute, []), verticals.result.shape[3] // run.cp.block_size
    )
    result, places = _places(q, groups, route)
    for number, o, t, source, chunk in transport.circulate(run.cp, route, _kv_chunks(groups, k, v)):
        if not route.compute[o][t]:
            continue
        group, heads, step = (
            groups[number].run,
            groups[number].heads,
            o * len(run.cp.windows[0]) + t,
        )
        into = next(places[number])
        vertical_kv = verticals.wait() if step in with_verticals else None
        with timing.computing(step):
            piece = (q[:, heads], *_kv(chunk))
            if vertical_kv is not None:
                part = vertical_part(
                    group, vertical_kv[:, :, heads], with_verticals.index(step), len(with_verticals)
                )
                gathered = (group.tiles(batch, False, source), *part)
                totals[number] = run.backend.forward_with_verticals(
                    *piece, *gathered, run.scale, dtype, totals[number], into
                )
            elif part := rectangles.rectangle(run, q, source):
                totals[number] = rectangles.forward(run, part, *piece, dtype, totals[number], into)
            else:
                tiles = group.tiles(batch, False, source)
                totals[number] = run.backend.forward(
                    *piece, tiles, run.scale, dtype, totals[number], into
                )
    outs, lses = zip(*totals)
    return result.joined(outs), _joined(lses, 1), verticals.wait()


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
    if run.is_plain(q):
        return run.backend.backward_causal(d_out, q, k, v, out, lse, run.scale)
    if documents := packed.packing(run, q):
        return packed.backward(run, documents, d_out, q, k, v, out, lse)
    if run.cp.size > 1 and _circulates_queries(run, q, k):
        return _backward_by_queries(run, d_out, q, k, v, out, lse, vertical_kv)
    groups, verticals, dtype, by_key = (
        _head_groups(run, q, k),
        None,
        run.sum_dtype(q),
        run.backend.READS_BY_KEY,
    )
    route = transport.route(run.cp, needed_chunks(run))
    parts = len(vertical_steps(sum(route.compute, []), vertical_kv.shape[3] // run.cp.block_size))
    result, places = _places(q, groups, route)
    dq, met, d_verticals = [None] * len(groups), [0] * len(groups), new_gradients(vertical_kv)

    def piece(number: int, source: int, chunk: transport.Chunk) -> Tensor | list[Tensor]:
        nonlocal verticals
        group, heads = groups[number].run, groups[number].heads
        inputs = (d_out[:, heads], q[:, heads], *_kv(chunk), out[:, heads], lse[:, heads])
        part, into = rectangles.rectangle(run, q, source), next(places[number])
        tiles = None if part else group.tiles(len(q), by_key, source)
        if part:
            dq[number], dk, dv = rectangles.backward(run, part, *inputs, dtype, dq[number], into)
        elif met[number] < parts:
            gathered = vertical_part(group, vertical_kv[:, :, heads], met[number], parts, by_key)
            dq[number], dk, dv, *found = run.backend.backward_with_verticals(
                *inputs, tiles, *gathered, run.scale, dtype, dq[number], into
            )
            put_part(d_verticals[:, :, heads], found, met[number], parts, run.cp.block_size)
            met[number] += 1
            # Groups come in another order than steps do: the exchange begins when all have met all verticals.
            if sum(met) == parts * len(groups):
                verticals = reduce_verticals(run, d_verticals)
        else:
            dq[number], dk, dv = run.backend.backward(
                *inputs, tiles, run.scale, dtype, dq[number], into
            )
        return [dk, dv] if run.cp.size == 1 else _stacked([dk, dv], dtype)

    if run.cp.size == 1:
        d_kv = piece(0, run.cp.rank, [k, v])
    else:
        d_kv = _joined(
            transport.circulate_with_gradients(run.cp, route, _kv_chunks(groups, k, v), piece), 2
        )
    if verticals is not None:
        add_verticals(run, d_kv, verticals.wait())
    return _separate(run, result.joined(dq), d_kv, q.dtype)


def _places(
    q: Tensor, groups: list["_HeadGroup"], route: transport.Route
) -> tuple[Results, list[Iterator[Tensor | None]]]:
    """Memory for out or dq, and of each group where the sum after each of its steps is written: the last one's in there."""
    steps = sum(map(sum, route.compute))
    result = results(q, [group.heads for group in groups], steps)
    return result, [at_last(steps, part) for part in result.parts]


def _stacked(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """torch.stack() of tensors alike, in `dtype`."""
    out = parts[0].new_empty(len(parts), *parts[0].shape, dtype=dtype)
    for place, part in zip(out, parts):
        place.copy_(part)
    return out


def _separate(
    run: Run, dq: Tensor, d_kv: list[Tensor] | Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """In `dtype`, and no two in one piece of memory, which the outputs of an op may not be."""
    return dq.to(dtype), *(x.to(dtype, copy=run.cp.size > 1) for x in d_kv)


class _HeadGroup(NamedTuple):
    """Some KV heads, the query heads that share them, and the call as far as it is theirs."""

    run: Run
    heads: slice
    kv_heads: slice


def _head_groups(run: Run, q: Tensor, k: Tensor) -> list[_HeadGroup]:
    """What travels on its own: all heads at once, but in a double ring up to four parts of the KV heads.

    The first part from another node is computed while the next is on its way, and its gradient leaves while the next is
    computed; with all heads at once a rank of two nodes waits for one transfer with half of its work still to do.
    """
    parts = head_groups(k.shape[1], len(run.cp.windows))
    if parts == 1:
        return [_HeadGroup(run, slice(None), slice(None))]
    heads, kv_heads = (_slices(x.shape[1], parts) for x in (q, k))
    return [
        _HeadGroup(run._replace(index=run.index.of_heads(own)), own, own_kv)
        for own, own_kv in zip(heads, kv_heads)
    ]


def _slices(size: int, parts: int) -> list[slice]:
    return [slice(start, start + size // parts) for start in range(0, size, size // parts)]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=dim)


def _kv_chunks(groups: list[_HeadGroup], k: Tensor, v: Tensor) -> list[transport.Chunk]:
    """K and V of each group as what travels: one tensor, or as they are where nothing does."""
    if groups[0].run.cp.size == 1:
        return [[k, v]]
    return [[torch.stack([k[:, group.kv_heads], v[:, group.kv_heads]])] for group in groups]


def _kv(chunk: transport.Chunk) -> tuple[Tensor, Tensor]:
    return tuple(chunk) if len(chunk) == 2 else tuple(chunk[0])


# Backward with the queries going round ------------------------------------------------------------------------------


def _circulates_queries(run: Run, q: Tensor, k: Tensor) -> bool:
    """Whether queries travel instead of keys and values: as told, or if that is fewer bytes a token.

    Keys and values with their fp32 gradients: Hkv D (2 e + 2 g), e bytes an element of the inputs and g of gradients on
    the wire. Queries, d_out and out with the gradient of the queries and lse: Hq D (3 e + g) + 4 Hq. In bf16 with fp32
    gradients that is 12 Hkv D against 10 Hq D: queries are cheaper when every head has keys of its own (MHA), and for all
    grouped-query models keys and values are (BurstEngine, section 3.2, sends out summed up with d_out: 8 Hq D).
    """
    if run.cp.backward_circulates != "auto":
        return run.cp.backward_circulates == "q"
    gradient = (run.cp.gradient_dtype or run.sum_dtype(q)).itemsize
    by_kv = k.shape[1] * k.shape[3] * 2 * (k.element_size() + gradient)
    return q.shape[1] * (q.shape[3] * (3 * q.element_size() + gradient) + 4) < by_kv


def _backward_by_queries(
    run: Run,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    vertical_kv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As backward(): each rank adds up dk and dv of its own keys while the others' queries pass, and their dq with them."""
    dtype, by_key, d_kv = run.sum_dtype(q), run.backend.READS_BY_KEY, []

    def piece(_: int, source: int, chunk: transport.Chunk) -> Tensor:
        (q, d_out, out), lse = chunk
        tiles = run.tiles(len(q), by_key, run.cp.rank, source)
        dq, *d_piece = run.backend.backward(d_out, q, k, v, out, lse, tiles, run.scale, dtype)
        d_kv[:] = (
            [a.add_(b) for a, b in zip(d_kv, d_piece)] if d_kv else [x.to(dtype) for x in d_piece]
        )
        return dq.to(dtype)

    verticals, dq_verticals = None, None
    if vertical_kv.shape[3]:
        dq_verticals, *d_verticals = run.backend.backward(
            d_out, q, *vertical_kv, out, lse, run.vertical_tiles(len(q), by_key), run.scale, dtype
        )
        verticals = reduce_verticals(run, _stacked(d_verticals, dtype))
    needed = needed_chunks(run)
    route = transport.route(run.cp, None if needed is None else needed.T)
    chunk = [torch.stack([q, d_out, out.to(q.dtype)]), lse]
    [dq] = transport.circulate_with_gradients(run.cp, route, [chunk], piece)
    if verticals is not None:
        dq += dq_verticals
        add_verticals(run, d_kv, verticals.wait())
    return _separate(run, dq, d_kv, q.dtype)
