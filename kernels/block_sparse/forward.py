"""Forward of block-sparse attention: every query tile goes over one piece or two in one pass."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.launch import forward_tile, options
from titan_sparse.kernels.block_sparse.piece import (
    LOG2_E,
    Piece,
    hide_keys,
    lists_of,
    load_rows,
    look_up,
    operand,
    output_like,
    rows_of,
    slice_of,
    store_rows,
)


@triton.jit
def _attend(
    acc, weight, top, q_tile, scale,
    piece, batch, head, heads, q_block, q_blocks, rows, start, stop,
    BLOCK: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Online softmax (base 2) over one piece, N keys at a time: its full list without masking, then
    its partial list."""
    PER_BLOCK: tl.constexpr = BLOCK // N
    k = slice_of(piece.k, batch, head // piece.group)
    v = slice_of(piece.v, batch, head // piece.group)
    lists = lists_of(piece, batch, head, q_block)
    looked_up = look_up(piece, batch, head, heads, q_block, q_blocks, rows, BLOCK)
    for MASKED in tl.static_range(2):
        count, table, numbers = lists[MASKED]
        for step in range(count * PER_BLOCK):
            first = tl.load(table + step // PER_BLOCK) * BLOCK + step % PER_BLOCK * N
            # [N, D]
            k_tile = load_rows(k, piece.k.stride[2], first, N, HEAD_DIM, D)
            # [M, N]
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if MASKED:
                number = numbers + step // PER_BLOCK
                scores = hide_keys(scores, piece, batch, first, number, start, stop, looked_up, N)
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            # Only masked rows can have seen nothing so far; -inf - -inf would be NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
            p = tl.math.exp2(scores * scale - base[:, None])
            # What has been summed so far was relative to the old top.
            rescale = tl.math.exp2(top - base)
            weight = weight * rescale + tl.sum(p, 1)
            v_tile = load_rows(v, piece.v.stride[2], first, N, HEAD_DIM, D)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
            top = new_top
    return acc, weight, top


@triton.jit
def _forward_kernel(
    q, before, out, lse, pieces, start, stop, q_len, heads, scale,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    PIECES: tl.constexpr, CONTINUE: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """M queries of one head: out and lse over the pieces, and, if CONTINUE, over the keys of
    `before` and lse."""
    # Under causal masks the last query blocks have the most to do: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    first = tile * M
    q_block = tile * M // BLOCK
    rows = first + tl.arange(0, M)
    seen_from = tl.load(start + batch.to(tl.int64) * q_len + rows)
    seen_until = tl.load(stop + batch.to(tl.int64) * q_len + rows)
    # [M, D]
    q_tile = load_rows(slice_of(q, batch, head), q.stride[2], first, M, HEAD_DIM, D)
    row = (batch.to(tl.int64) * heads + head) * q_len

    if CONTINUE:
        # A finished softmax is one whose weights add up to 1 at top = lse.
        acc = load_rows(before + row * HEAD_DIM, HEAD_DIM, first, M, HEAD_DIM, D).to(tl.float32)
        top = tl.load(lse + row + rows) * LOG2_E
        weight = tl.where(top == float("-inf"), 0.0, 1.0)
    else:
        acc = tl.zeros([M, D], tl.float32)
        weight = tl.zeros([M], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)

    for i in tl.static_range(PIECES):
        acc, weight, top = _attend(
            acc, weight, top, q_tile, scale,
            pieces[i], batch, head, heads, q_block, q_len // BLOCK, rows, seen_from, seen_until,
            BLOCK, N, HEAD_DIM, D,
        )  # fmt: skip

    # Rows that saw nothing have weight 0: out 0, and lse -inf from top.
    weight_or_one = tl.where(weight == 0.0, 1.0, weight)
    store_rows(out + row * HEAD_DIM, acc / weight_or_one[:, None], first, M, HEAD_DIM, D)
    # ln 2 makes a natural logarithm of it.
    tl.store(lse + row + rows, (top + tl.math.log2(weight_or_one)) * 0.6931471805599453)


def forward(
    q: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    dtype: torch.dtype | None = None,
    total: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D] over one piece or two, in one launch.

    scale: of the logits, above 0.
    dtype: of out; by default total's, else q's.
    total: (out, lse) over other keys, from which the softmax goes on. Where these are contiguous,
    lse is written to its memory, and so is out if total's has `dtype`.
    into: contiguous memory for out; its dtype, whichever it is, wins.
    Returns out [B, Hq, Sq, D] and natural-log lse fp32 [B, Hq, Sq]. Rows that see nothing: 0 and
    -inf.
    """
    batch, heads, q_len, dim = q.shape
    if total is None:
        before = None
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    else:
        before, lse = (x.contiguous() for x in total)
    out = output_like(q, before, dtype, into)

    tiles = pieces[0].tiles
    verticals_only = all(piece.tiles.covered is not None for piece in pieces)
    tile = forward_tile(dim, tiles.block_size, q.element_size(), verticals_only)
    launch = options(tile, dim, q.device)
    if any(piece.tiles.chosen is not None for piece in pieces):
        # The bits of the choices are prefetched as well: with all stages head_dim 128 would need
        # 24 bytes more shared memory than there are.
        launch["num_stages"] = min(launch["num_stages"], 4)
    operands = tuple(operand(piece, piece.tiles.by_query, heads) for piece in pieces)
    _forward_kernel[q_len // tile[0], heads, batch](
        rows_of(q), out if before is None else before, out, lse, operands,
        tiles.start, tiles.stop, q_len, heads, scale * LOG2_E,
        BLOCK=tiles.block_size, PIECES=len(pieces), CONTINUE=before is not None, LOG2_E=LOG2_E,
        **launch,
    )  # fmt: skip
    return out, lse
