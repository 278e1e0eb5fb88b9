"""The probe's rows among a rank's queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import dense_rows, slice_of

_ROWS = 16
"""Rows that a program copies."""


def held_rows_naive(q: Tensor, local: Tensor, mine: Tensor) -> Tensor:
    """The twin of held_rows()."""
    # [B, 1, R, 1]
    row = local[:, None, :, None]
    is_mine = mine[:, None, :, None]
    # [B, Hq, R, D]
    row = row.expand(-1, q.shape[1], -1, q.shape[-1])
    held = q.gather(2, row)
    return torch.where(is_mine, held, 0)


@triton.jit
def _rows_kernel(
    q,
    q_stride,
    local,
    mine,
    held,
    count,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """ROWS of one query head. count: R. D: HEAD_DIM rounded up to a power of two."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    o_dim = tl.arange(0, D)[None, :]
    inside = o < count
    row = tl.load(local + i_b * count + o, mask=inside, other=0)
    is_mine = tl.load(mine + i_b * count + o, mask=inside, other=0) != 0
    in_dim = o_dim < HEAD_DIM
    # [ROWS, D]
    q_at = slice_of(q, q_stride, i_b, i_h) + row[:, None] * q_stride[2] + o_dim
    b_q = tl.load(q_at, mask=is_mine[:, None] & in_dim, other=0.0)
    held_at = ((i_b * tl.num_programs(1) + i_h) * count + o)[:, None] * HEAD_DIM + o_dim
    tl.store(held + held_at, b_q, mask=inside[:, None] & in_dim)


def held_rows(q: Tensor, local: Tensor, mine: Tensor) -> Tensor:
    """These rows of q, and zeros for those that the rank does not hold: [B, Hq, R, D].

    q: [B, Hq, S_local, D], any floating dtype but fp64.
    local: int64 [B, R], where the rank holds each row; 0 where it does not. mine: bool [B, R].
    """
    q = dense_rows(q)
    batch, heads, _, dim = q.shape
    count = local.shape[1]
    held = q.new_empty(batch, heads, count, dim)
    _rows_kernel[(triton.cdiv(count, _ROWS), heads, batch)](
        q,
        q.stride()[:3],
        local,
        mine.view(torch.int8),
        held,
        count,
        ROWS=_ROWS,
        HEAD_DIM=dim,
        D=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return held
