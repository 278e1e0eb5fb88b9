"""Forward of block-sparse attention: one fused pass of every query tile over one piece or two."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import forward_options, forward_tile
from .piece import (
    LOG2_E,
    Piece,
    choices,
    dense_rows,
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


@triton.jit
def _walk(
    acc, weight, top, q_tile, piece, batch, k, v, table, numbers, count, start, stop, query, positions, covered, words,
    origin, scale,
    BLOCK: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax (base 2) over the listed KV blocks, N keys at a time."""
    PER: tl.constexpr = BLOCK // N
    for step in range(count * PER):
        first = tl.load(table + step // PER) * BLOCK + step % PER * N
        k_tile = load_rows(k, piece.k_stride[2], first, N, HEAD_DIM, D)
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
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        # Only masked rows can have seen nothing yet; -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.math.exp2(scores * scale - base[:, None])
        rescale = tl.math.exp2(top - base)
        weight = weight * rescale + tl.sum(p, 1)
        v_tile = load_rows(v, piece.v_stride[2], first, N, HEAD_DIM, D)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, weight, top


@triton.jit
def _attend(
    acc, weight, top, q_tile, piece, batch, head, heads, q_block, q_blocks, rows, start, stop, scale,
    BLOCK: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One piece: the full list without masking, then the partial list."""
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
    acc, weight, top = _walk(
        acc,
        weight,
        top,
        q_tile,
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
    return _walk(
        acc,
        weight,
        top,
        q_tile,
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
def _forward_kernel(
    q, q_stride, before, out, lse, piece, other, start, stop, q_len, heads, scale,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    TWO: tl.constexpr, CONTINUE: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    # Under causal masks the last query blocks have the most to do: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
    first, q_block = tile * M, tile * M // BLOCK
    rows = first + tl.arange(0, M)
    seen_from = tl.load(start + batch.to(tl.int64) * q_len + rows)
    seen_until = tl.load(stop + batch.to(tl.int64) * q_len + rows)
    q_tile = load_rows(slice_of(q, q_stride, batch, head), q_stride[2], first, M, HEAD_DIM, D)
    row = (batch.to(tl.int64) * heads + head) * q_len
    if CONTINUE:
        # A finished softmax is one whose weights add up to 1 at top = lse.
        acc = load_rows(before + row * HEAD_DIM, HEAD_DIM, first, M, HEAD_DIM, D).to(tl.float32)
        top = tl.load(lse + row + rows) * LOG2_E
        weight = tl.where(top == float("-inf"), 0.0, 1.0)
    else:
        acc, weight = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
    acc, weight, top = _attend(
        acc,
        weight,
        top,
        q_tile,
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
        acc, weight, top = _attend(
            acc,
            weight,
            top,
            q_tile,
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
    weight_or_one = tl.where(weight == 0.0, 1.0, weight)
    store_rows(out + row * HEAD_DIM, acc / weight_or_one[:, None], first, M, HEAD_DIM, D)
    tl.store(lse + row + rows, (top + tl.math.log2(weight_or_one)) * 0.6931471805599453)


def forward(
    q: Tensor,
    pieces: list[Piece],
    start: Tensor,
    stop: Tensor,
    block_size: int,
    scale: float,
    dtype: torch.dtype | None = None,
    total: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D] over one piece or two, in one launch.

    start, stop: int32 [B, Sq], contiguous. scale: of the logits, above 0. dtype: of out, default q's.
    total: contiguous (out, lse) over other keys, which is continued; lse in its memory, and out too where dtype is its own,
    which is the default.
    into: contiguous memory for out, of any dtype, which wins.
    Returns out [B, Hq, Sq, D] and natural-log lse fp32 [B, Hq, Sq]; 0 and -inf for rows that see nothing.
    """
    q = dense_rows(q)
    batch, heads, q_len, dim = q.shape
    before, lse = total or (None, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
    out = output_like(q, before, dtype, into)
    padded_dim = triton.next_power_of_2(dim)
    m, n = forward_tile(
        dim, block_size, q.element_size(), all(piece.covered is not None for piece in pieces)
    )
    operands = [operand(piece, piece.by_query, heads) for piece in pieces]
    _forward_kernel[q_len // m, heads, batch](
        q, q.stride()[:3], out if before is None else before, out, lse, operands[0],
        operands[1] if operands[1:] else None, start, stop, q_len, heads, scale * LOG2_E,
        BLOCK=block_size, M=m, N=n, HEAD_DIM=dim, D=padded_dim, TWO=len(pieces) == 2, CONTINUE=total is not None,
        LOG2_E=LOG2_E,
        **forward_options(m, n, padded_dim, q.device, any(piece.chosen is not None for piece in pieces)),
    )  # fmt: skip
    return out, lse
