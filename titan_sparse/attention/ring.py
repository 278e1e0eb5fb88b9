"""Attention by the schedules that move chunks from rank to rank: local, ring and double_ring, forward and backward.

Block pairs follow the schedule, chunk by chunk. Columns do not: they are gathered once and dealt out over the steps, but
for the first of the forward and the last of the backward, so that their exchanges have work to hide behind. Pieces
are merged in fp32 by log-sum-exp; the backward of every piece takes the global out and lse, which makes the sum exact.
"""

import torch
from torch import Tensor

from titan_sparse.attention import timing, transport
from titan_sparse.attention.columns import add_columns, column_part, gather_columns, join_columns, reduce_columns
from titan_sparse.attention.needs import needed_chunks
from titan_sparse.attention.run import Run
from titan_sparse.attention.schedule import column_steps


@timing.timed
def forward(run: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the gathered columns' KV [2, B, Hq, C, D].

    With several ranks the running sum over chunks is fp32 (fp64 for fp64): rounding it at every step would add up.
    """
    run.count_plain_ring(k)
    columns = gather_columns(run, k, v)
    if run.is_plain(q):
        return *run.backend.forward_causal(q, k, v, run.scale), columns.wait()
    total, dtype, batch = None, run.sum_dtype(q), len(q)
    route = transport.route(run.cp, needed_chunks(run))
    with_columns = column_steps(sum(route.compute, []), columns.result.shape[3] // run.cp.block_size)
    for step, (o, t, source, chunk) in enumerate(transport.circulate(run.cp, route, _kv_chunk(run, k, v))):
        if not route.compute[o][t]:
            continue
        column_kv = columns.wait() if step in with_columns else None
        with timing.computing(step):
            piece = (q, *_kv(chunk), run.tiles(batch, False, source))
            if column_kv is not None:
                gathered = column_part(run, column_kv, with_columns.index(step), len(with_columns))
                total = run.backend.forward_with_columns(*piece, *gathered, run.scale, dtype, total)
            else:
                total = run.backend.forward(*piece, run.scale, dtype, total)
    return *total, columns.wait()


def backward(run: Run, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             column_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    run.count_plain_ring(k, backward=True)
    if run.is_plain(q):
        return run.backend.backward_causal(d_out, q, k, v, out, lse, run.scale)
    if run.cp.size > 1 and _circulates_queries(run, q, k):
        return _backward_by_queries(run, d_out, q, k, v, out, lse, column_kv)
    dq, columns, d_parts, dtype = None, None, [], run.sum_dtype(q)
    route = transport.route(run.cp, needed_chunks(run))
    parts = len(column_steps(sum(route.compute, []), column_kv.shape[3] // run.cp.block_size))

    def piece(source: int, chunk: transport.Chunk) -> Tensor | list[Tensor]:
        nonlocal dq, columns
        inputs = (d_out, q, *_kv(chunk), out, lse, run.tiles(len(q), run.backend.READS_BY_KEY, source))
        if len(d_parts) < parts:
            gathered = column_part(run, column_kv, len(d_parts), parts, run.backend.READS_BY_KEY)
            dq, dk, dv, *d_columns = run.backend.backward_with_columns(*inputs, *gathered, run.scale, dtype, dq)
            d_parts.append(d_columns)
            if len(d_parts) == parts:
                columns = reduce_columns(run, [join_columns(x, run.cp.block_size) for x in zip(*d_parts)])
        else:
            dq, dk, dv = run.backend.backward(*inputs, run.scale, dtype, dq)
        return [dk, dv] if run.cp.size == 1 else torch.stack([dk, dv])

    if run.cp.size == 1:
        d_kv = piece(run.cp.rank, [k, v])
    else:
        d_kv = transport.circulate_with_gradients(run.cp, route, _kv_chunk(run, k, v), piece)
    if columns is not None:
        add_columns(run, d_kv, columns.wait())
    return _separate(run, dq, d_kv, q.dtype)


def _separate(run: Run, dq: Tensor, d_kv: list[Tensor] | Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """In `dtype`, and no two in one piece of memory, which the outputs of an op may not be."""
    return dq.to(dtype), *(x.to(dtype, copy=run.cp.size > 1) for x in d_kv)


def _kv_chunk(run: Run, k: Tensor, v: Tensor) -> transport.Chunk:
    """K and V as what travels: one tensor, or as they are where nothing does."""
    return [k, v] if run.cp.size == 1 else [torch.stack([k, v])]


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


def _backward_by_queries(run: Run, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                         column_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As backward(): each rank adds up dk and dv of its own keys while the others' queries pass, and their dq with them."""
    dtype, by_key, d_kv = run.sum_dtype(q), run.backend.READS_BY_KEY, []

    def piece(source: int, chunk: transport.Chunk) -> Tensor:
        (q, d_out, out), lse = chunk
        tiles = run.tiles(len(q), by_key, run.cp.rank, source)
        dq, *d_piece = run.backend.backward(d_out, q, k, v, out, lse, tiles, run.scale, dtype)
        d_kv[:] = [a.add_(b) for a, b in zip(d_kv, d_piece)] if d_kv else d_piece
        return dq

    columns, dq_columns = None, None
    if column_kv.shape[3]:
        dq_columns, *d_columns = run.backend.backward(
            d_out, q, *column_kv, out, lse, run.column_tiles(len(q), by_key), run.scale, dtype)
        columns = reduce_columns(run, d_columns)
    needed = needed_chunks(run)
    route = transport.route(run.cp, None if needed is None else needed.T)
    dq = transport.circulate_with_gradients(run.cp, route, [torch.stack([q, d_out, out.to(q.dtype)]), lse], piece)
    if columns is not None:
        dq += dq_columns
        add_columns(run, d_kv, columns.wait())
    return _separate(run, dq, d_kv, q.dtype)
