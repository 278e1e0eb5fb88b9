"""Backward of block-sparse attention: dq query block by query block, dk and dv KV block by KV block, no atomics.

Both take the out and lse of the whole attention, over all pieces: with them the gradients of pieces add up exactly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import chosen_range
from .launch import key_splits, key_tile, options, query_tile
from .piece import (
    LOG2_E,
    Piece,
    bounds_in_slice,
    choices,
    dense_rows,
    hide_covered,
    hide_keys,
    list_row,
    load_rows,
    operand,
    output_like,
    query_positions,
    slice_numbers,
    slice_of,
    store_rows,
)

_DELTA_ROWS = 16  # divides every block, hence every number of queries


@triton.jit
def _delta_kernel(
    out, out_stride, d_out, d_out_stride, lse, delta, lse_2, q_len, heads,
    M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(d_out * out), and lse in base 2, finite where nothing is seen: no masked p becomes NaN."""
    first, head, batch = tl.program_id(0) * M, tl.program_id(1), tl.program_id(2)
    o = load_rows(slice_of(out, out_stride, batch, head), out_stride[2], first, M, HEAD_DIM, D)
    d = load_rows(
        slice_of(d_out, d_out_stride, batch, head), d_out_stride[2], first, M, HEAD_DIM, D
    )
    rows = (batch.to(tl.int64) * heads + head) * q_len + first + tl.arange(0, M)
    tl.store(delta + rows, tl.sum(o.to(tl.float32) * d.to(tl.float32), 1))
    natural = tl.load(lse + rows)
    tl.store(lse_2 + rows, tl.where(natural == float("-inf"), 0.0, natural * LOG2_E))


@triton.jit
def _walk_keys(
    dq, q_tile, d_tile, lse, delta, piece, batch, k, v, table, numbers, count, start, stop, query, positions, covered,
    words, origin, scale,
    BLOCK: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq / logit scale over the listed KV blocks, N keys at a time."""
    PER: tl.constexpr = BLOCK // N
    for step in range(count * PER):
        first = tl.load(table + step // PER) * BLOCK + step % PER * N
        k_tile = load_rows(k, piece.k_stride[2], first, N, HEAD_DIM, D)
        v_tile = load_rows(v, piece.v_stride[2], first, N, HEAD_DIM, D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if MASKED:
            scores = hide_keys(
                scores,
                piece,
                batch,
                positions,
                covered,
                first,
                numbers,
                step // PER,
                start,
                stop,
                query,
                words,
                origin,
                N,
            )
        p = tl.math.exp2(scores * scale - lse[:, None])
        dp = tl.dot(d_tile, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit
def _query_gradient(
    dq, q_tile, d_tile, lse, delta, piece, batch, head, heads, q_block, q_blocks, rows, start, stop, scale,
    BLOCK: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq through one piece: the full list without masking, then the partial list."""
    k = slice_of(piece.k, piece.k_stride, batch, head // piece.group)
    v = slice_of(piece.v, piece.v_stride, batch, head // piece.group)
    query = query_positions(piece, rows, start)
    positions, covered = (
        slice_of(piece.positions, piece.positions_stride, batch, head),
        piece.covered,
    )
    if piece.covered is not None:
        covered += ((batch.to(tl.int64) * heads + head) * q_blocks + q_block) * piece.words
    words, origin = piece.chosen, piece.origin
    if piece.chosen is not None:
        words, origin = choices(piece, batch, head, heads, q_blocks * BLOCK, rows)
    full_count, full, partial_count, partial = list_row(piece, batch, head, q_block)
    numbers = piece.partial_slice
    if piece.partial_slice is not None:
        numbers = slice_numbers(piece, batch, head, q_block)
    dq = _walk_keys(
        dq,
        q_tile,
        d_tile,
        lse,
        delta,
        piece,
        batch,
        k,
        v,
        full,
        None,
        full_count,
        start,
        stop,
        query,
        positions,
        covered,
        words,
        origin,
        scale,
        BLOCK,
        N,
        HEAD_DIM,
        D,
        False,
    )
    return _walk_keys(
        dq,
        q_tile,
        d_tile,
        lse,
        delta,
        piece,
        batch,
        k,
        v,
        partial,
        numbers,
        partial_count,
        start,
        stop,
        query,
        positions,
        covered,
        words,
        origin,
        scale,
        BLOCK,
        N,
        HEAD_DIM,
        D,
        True,
    )


@triton.jit
def _query_kernel(
    q, q_stride, d_out, d_out_stride, lse, delta, before, dq, piece, other, start, stop, q_len, heads, scale, logit_scale,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    TWO: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    # Under causal masks the last query blocks have the most to do: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
    first, q_block = tile * M, tile * M // BLOCK
    rows = first + tl.arange(0, M)
    row = (batch.to(tl.int64) * heads + head) * q_len
    seen_from = tl.load(start + batch.to(tl.int64) * q_len + rows)
    seen_until = tl.load(stop + batch.to(tl.int64) * q_len + rows)
    q_tile = load_rows(slice_of(q, q_stride, batch, head), q_stride[2], first, M, HEAD_DIM, D)
    d_tile = load_rows(
        slice_of(d_out, d_out_stride, batch, head), d_out_stride[2], first, M, HEAD_DIM, D
    )
    row_lse, row_delta = tl.load(lse + row + rows), tl.load(delta + row + rows)
    total = tl.zeros([M, D], tl.float32)
    total = _query_gradient(
        total,
        q_tile,
        d_tile,
        row_lse,
        row_delta,
        piece,
        batch,
        head,
        heads,
        q_block,
        q_len // BLOCK,
        rows,
        seen_from,
        seen_until,
        scale,
        BLOCK,
        N,
        HEAD_DIM,
        D,
    )
    if TWO:
        total = _query_gradient(
            total,
            q_tile,
            d_tile,
            row_lse,
            row_delta,
            other,
            batch,
            head,
            heads,
            q_block,
            q_len // BLOCK,
            rows,
            seen_from,
            seen_until,
            scale,
            BLOCK,
            N,
            HEAD_DIM,
            D,
        )
    total *= logit_scale
    if ADD:
        total += load_rows(before + row * HEAD_DIM, HEAD_DIM, first, M, HEAD_DIM, D).to(tl.float32)
    store_rows(dq + row * HEAD_DIM, total, first, M, HEAD_DIM, D)


@triton.jit
def _walk_queries(
    dk, dv, k_tile, v_tile, q, q_step, d_out, d_out_step, lse, delta, piece, batch, head, heads, q_len, table, numbers,
    begin, end, start, stop, position, first_position, covered, covered_step, keys, scale,
    BLOCK: tl.constexpr, M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk / logit scale and dv over the listed query blocks, M queries at a time; scores are [keys, queries]."""
    PER: tl.constexpr = BLOCK // M
    for step in range(begin * PER, end * PER):
        q_block = tl.load(table + step // PER)
        first = q_block * BLOCK + step % PER * M
        rows = first + tl.arange(0, M)
        q_tile = load_rows(q, q_step, first, M, HEAD_DIM, D)
        d_tile = load_rows(d_out, d_out_step, first, M, HEAD_DIM, D)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        if MASKED:
            visible = position
            if covered is not None:
                visible = hide_covered(
                    position, covered + q_block.to(tl.int64) * covered_step, keys
                )
            if numbers is not None:
                query = tl.load(piece.q_positions + rows)
                seen_from, seen_until = bounds_in_slice(
                    piece, batch, tl.load(numbers + step // PER), query
                )
            else:
                seen_from, seen_until = tl.load(start + rows), tl.load(stop + rows)
            if piece.chosen is not None:
                words, origin = choices(piece, batch, head, heads, q_len, rows)
                seen_from, seen_until = chosen_range(
                    seen_from,
                    seen_until,
                    words,
                    origin,
                    piece.chunk,
                    piece.chosen_words,
                    first_position,
                )
            seen = (visible[:, None] >= seen_from[None, :]) & (
                visible[:, None] < seen_until[None, :]
            )
            scores = tl.where(seen, scores, float("-inf"))
        p = tl.math.exp2(scores * scale - tl.load(lse + rows)[None, :])
        dv = tl.dot(p.to(d_tile.dtype), d_tile, dv, input_precision="ieee")
        dp = tl.dot(v_tile, tl.trans(d_tile), input_precision="ieee")
        ds = p * (dp - tl.load(delta + rows)[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _key_kernel(
    q, q_stride, d_out, d_out_stride, lse, delta, dk, dv, piece, start, stop, q_len, heads, batches, splits, scale,
    logit_scale,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk and dv of one KV tile over all query heads of its group, or over one part of their query lists."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    batch, split = tl.program_id(2) % batches, tl.program_id(2) // batches
    first, k_block = tile * N, tile * N // BLOCK
    keys = first + tl.arange(0, N)
    k_tile = load_rows(
        slice_of(piece.k, piece.k_stride, batch, kv_head), piece.k_stride[2], first, N, HEAD_DIM, D
    )
    v_tile = load_rows(
        slice_of(piece.v, piece.v_stride, batch, kv_head), piece.v_stride[2], first, N, HEAD_DIM, D
    )
    dk_sum, dv_sum = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    row_start, row_stop = start + batch.to(tl.int64) * q_len, stop + batch.to(tl.int64) * q_len
    for member in range(piece.group):
        head = kv_head * piece.group + member
        head_q, head_d = (
            slice_of(q, q_stride, batch, head),
            slice_of(d_out, d_out_stride, batch, head),
        )
        row = batch.to(tl.int64) * heads + head
        positions = slice_of(piece.positions, piece.positions_stride, batch, head)
        position, first_position = tl.load(positions + keys), tl.load(positions + first)
        covered = piece.covered
        if piece.covered is not None:
            covered += row * (q_len // BLOCK) * piece.words
        full_count, full, partial_count, partial = list_row(piece, batch, head, k_block)
        numbers = piece.partial_slice
        if piece.partial_slice is not None:
            numbers = slice_numbers(piece, batch, head, k_block)
        dk_sum, dv_sum = _walk_queries(
            dk_sum,
            dv_sum,
            k_tile,
            v_tile,
            head_q,
            q_stride[2],
            head_d,
            d_out_stride[2],
            lse + row * q_len,
            delta + row * q_len,
            piece,
            batch,
            head,
            heads,
            q_len,
            full,
            None,
            full_count * split // splits,
            full_count * (split + 1) // splits,
            row_start,
            row_stop,
            position,
            first_position,
            covered,
            piece.words,
            keys,
            scale,
            BLOCK,
            M,
            HEAD_DIM,
            D,
            False,
        )
        dk_sum, dv_sum = _walk_queries(
            dk_sum,
            dv_sum,
            k_tile,
            v_tile,
            head_q,
            q_stride[2],
            head_d,
            d_out_stride[2],
            lse + row * q_len,
            delta + row * q_len,
            piece,
            batch,
            head,
            heads,
            q_len,
            partial,
            numbers,
            partial_count * split // splits,
            partial_count * (split + 1) // splits,
            row_start,
            row_stop,
            position,
            first_position,
            covered,
            piece.words,
            keys,
            scale,
            BLOCK,
            M,
            HEAD_DIM,
            D,
            True,
        )
    kv_heads = tl.num_programs(1)
    at = ((split.to(tl.int64) * batches + batch) * kv_heads + kv_head) * piece.k_len * HEAD_DIM
    store_rows(dk + at, dk_sum * logit_scale, first, N, HEAD_DIM, D)
    store_rows(dv + at, dv_sum, first, N, HEAD_DIM, D)


def _prepare(d_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse in base 2 and delta, both fp32 [B, Hq, Sq]."""
    out, lse = dense_rows(out), lse.contiguous()
    batch, heads, q_len, dim = out.shape
    delta, lse_2 = (
        torch.empty(lse.shape, dtype=torch.float32, device=lse.device) for _ in range(2)
    )
    _delta_kernel[q_len // _DELTA_ROWS, heads, batch](
        out, out.stride()[:3], d_out, d_out.stride()[:3], lse, delta, lse_2, q_len, heads,
        M=_DELTA_ROWS, HEAD_DIM=dim, D=triton.next_power_of_2(dim), LOG2_E=LOG2_E,
    )  # fmt: skip
    return lse_2, delta


def _query_side(
    q: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    pieces: list[Piece],
    start: Tensor,
    stop: Tensor,
    block_size: int,
    scale: float,
    dtype: torch.dtype,
    before: Tensor | None,
    into: Tensor | None,
) -> Tensor:
    """dq through all pieces in one launch, and `before`, in `dtype`."""
    batch, heads, q_len, dim = q.shape
    dq = output_like(q, before, dtype, into)
    padded_dim = triton.next_power_of_2(dim)
    m, n = query_tile(dim, block_size, q.element_size())
    operands = [operand(piece, piece.by_query, heads) for piece in pieces]
    _query_kernel[q_len // m, heads, batch](
        q, q.stride()[:3], d_out, d_out.stride()[:3], lse, delta, dq if before is None else before, dq, operands[0],
        operands[1] if operands[1:] else None, start, stop, q_len, heads, scale * LOG2_E, scale,
        BLOCK=block_size, M=m, N=n, HEAD_DIM=dim, D=padded_dim, TWO=len(pieces) == 2,
        ADD=before is not None, **options(m, n, padded_dim, q.device),
    )  # fmt: skip
    return dq


def _key_side(
    q: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    piece: Piece,
    start: Tensor,
    stop: Tensor,
    block_size: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """dk and dv of one piece."""
    batch, heads, q_len, dim = q.shape
    padded_dim = triton.next_power_of_2(dim)
    m, n = key_tile(dim, block_size, q.element_size())
    _, kv_heads, k_len, _ = piece.k.shape
    splits = key_splits(k_len // n * kv_heads * batch)
    kept = dtype if splits == 1 else torch.float32
    dk, dv = (torch.empty(splits, *piece.k.shape, dtype=kept, device=q.device) for _ in range(2))
    _key_kernel[k_len // n, kv_heads, batch * splits](
        q, q.stride()[:3], d_out, d_out.stride()[:3], lse, delta, dk, dv, operand(piece, piece.by_key, heads),
        start, stop, q_len, heads, batch, splits, scale * LOG2_E, scale,
        BLOCK=block_size, M=m, N=n, HEAD_DIM=dim, D=padded_dim, **options(m, n, padded_dim, q.device),
    )  # fmt: skip
    return (dk[0], dv[0]) if splits == 1 else (dk.sum(0).to(dtype), dv.sum(0).to(dtype))


def backward(
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: list[Piece],
    start: Tensor,
    stop: Tensor,
    block_size: int,
    scale: float,
    dtypes: list[torch.dtype],
    dq: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Gradients through one piece or two, which need by_key.

    d_out, q, out: [B, Hq, Sq, D]; lse: natural log [B, Hq, Sq]; both of the whole attention. start, stop:
    int32 [B, Sq], contiguous. dtypes: of dq, then of the dk and dv of each piece. dq: contiguous, what was found
    through other keys, which is added; where it has dq's dtype, in its memory. into: contiguous memory for dq, whose dtype
    wins.
    Returns dq in q's shape, and (dk, dv) per piece in the shape of its k.
    """
    q, d_out = dense_rows(q), dense_rows(d_out)
    lse_2, delta = _prepare(d_out, out, lse)
    dq = _query_side(
        q, d_out, lse_2, delta, pieces, start, stop, block_size, scale, dtypes[0], dq, into
    )
    return dq, [
        _key_side(q, d_out, lse_2, delta, piece, start, stop, block_size, scale, dtype)
        for piece, dtype in zip(pieces, dtypes[1:], strict=True)
    ]
