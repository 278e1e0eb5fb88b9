"""Sums of masses by code."""

import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.inputs import CODES, FinalPrices, SpanTokens
from titan_sparse.kernels.probe import KeyBlocks

_CODES = tl.constexpr(CODES)


def mass_by_code(final: FinalPrices, keys: KeyBlocks, spans: SpanTokens) -> Tensor:
    """What the verticals of each block hold by code, and how many there are of each code.

    Verticals of code 0 are not counted.
    Returns both, one after the other: fp32 [2, B, Hq, n_local, T, CODES], by the block's spans.
    """
    batch, heads, local, size = final.codes.shape
    touching = keys.slot.shape[2]
    by_code = final.held.new_empty(2, batch, heads, local, touching, CODES)
    _by_code_kernel[(local, batch * heads, touching)](
        final.codes,
        final.held,
        final.held_codes,
        keys.slot.contiguous(),
        keys.blocks,
        spans.start,
        spans.stop,
        *by_code,
        heads,
        spans.start.shape[1],
        local,
        T=touching,
        SIZE=size,
        num_warps=1,
    )
    return by_code


@triton.jit
def _sums(codes, values):
    """Sums fp32 [16, 16] of values by code, which is 16 times the row plus the column.

    One product of matrices. Values are rounded to tf32 there, 1 part in 2,000.
    """
    o = tl.arange(0, 16)
    # [16, elements] and [elements, 16]
    in_row = tl.where(codes[None, :] // 16 == o[:, None], 1.0, 0.0)
    in_column = tl.where(codes[:, None] % 16 == o[None, :], values[:, None], 0.0)
    return tl.dot(in_row, in_column, input_precision="tf32")


@triton.jit
def _by_code_kernel(
    codes,
    held,
    held_codes,
    slot,
    blocks,
    span_start,
    span_stop,
    mass,
    count,
    heads,
    n,
    local,
    T: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One block of keys, in the span of its slot i_t."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_t = tl.program_id(2)
    i_b = i_bh // heads
    o_k = tl.arange(0, SIZE)
    span = tl.load(slot + (i_b * local + i_c) * T + i_t)
    o = tl.arange(0, 16)
    code_at = ((i_bh * local + i_c) * T + i_t) * _CODES + o[:, None] * 16 + o[None, :]
    # Few blocks of a packed sequence are in two spans.
    if span < 0:
        tl.store(mass + code_at, tl.zeros([16, 16], tl.float32))
        tl.store(count + code_at, tl.zeros([16, 16], tl.float32))
    else:
        begin = tl.load(span_start + i_b * n + span)
        end = tl.load(span_stop + i_b * n + span)
        position = tl.load(blocks + i_c) * SIZE + o_k
        mine = (position >= begin) & (position < end)

        at = (i_bh * local + i_c) * SIZE + o_k
        code = tl.load(codes + at).to(tl.int32)
        is_counted = tl.where(mine & (code > 0), 1.0, 0.0)
        by_code = tl.zeros([16, 16], tl.float32)
        for i in tl.static_range(3):
            held_at = ((i_bh * local + i_c) * 3 + i) * SIZE + o_k
            values = tl.load(held + held_at, mask=mine, other=0.0)
            by_code += _sums(tl.load(held_codes + held_at).to(tl.int32), values)
        tl.store(mass + code_at, by_code)
        tl.store(count + code_at, _sums(code, is_counted))
