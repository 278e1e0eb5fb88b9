"""Attention over two disjoint sets of keys from the attentions over each, and sums, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_naive(
    out: Tensor, lse: Tensor, out_piece: Tensor, lse_piece: Tensor
) -> tuple[Tensor, Tensor]:
    """The twin of merge(): log-sum-exp weights, -inf safe."""
    total = torch.logaddexp(lse, lse_piece)
    finite = total.clamp(min=torch.finfo(total.dtype).min)
    return out * (lse - finite).exp()[..., None] + out_piece * (lse_piece - finite).exp()[
        ..., None
    ], total


@triton.jit
def _merge_kernel(
    out,
    lse,
    out_piece,
    lse_piece,
    merged,
    merged_lse,
    rows,
    dim,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM)
    inside = o_row < rows
    m = inside[:, None] & (o_dim < dim)[None, :]
    at = o_row[:, None] * dim + o_dim[None, :]
    a = tl.load(lse + o_row, mask=inside, other=float("-inf"))
    b = tl.load(lse_piece + o_row, mask=inside, other=float("-inf"))
    top = tl.maximum(tl.maximum(a, b), -3.0e38)
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = weight_a + weight_b
    scale = 1.0 / tl.maximum(total, 1.0e-30)
    x = tl.load(out + at, mask=m, other=0.0).to(tl.float32)
    y = tl.load(out_piece + at, mask=m, other=0.0).to(tl.float32)
    z = x * (weight_a * scale)[:, None] + y * (weight_b * scale)[:, None]
    tl.store(merged + at, z.to(merged.dtype.element_ty), mask=m)
    tl.store(
        merged_lse + o_row, tl.where(total > 0, top + tl.log(total), float("-inf")), mask=inside
    )


def merge(
    out: Tensor,
    lse: Tensor,
    out_piece: Tensor,
    lse_piece: Tensor,
    dtype: torch.dtype,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, H, S, D] of any floating dtype, lse fp32 [B, H, S] natural log; returns out in `dtype`, or in the contiguous
    memory `into`, and lse fp32.

    Rows that see nothing in a set have out 0 and lse -inf there.
    """
    out, lse, out_piece, lse_piece = (x.contiguous() for x in (out, lse, out_piece, lse_piece))
    rows, dim = lse.numel(), out.shape[-1]
    merged, merged_lse = (
        torch.empty_like(out, dtype=dtype) if into is None else into,
        torch.empty_like(lse),
    )
    _merge_kernel[(triton.cdiv(rows, 32),)](
        out,
        lse,
        out_piece,
        lse_piece,
        merged,
        merged_lse,
        rows,
        dim,
        ROWS=32,
        DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return merged, merged_lse


def add_naive(total: Tensor, piece: Tensor, dtype: torch.dtype) -> Tensor:
    """The twin of add()."""
    return (total.double() + piece.double()).to(dtype)


@triton.jit
def _add_kernel(total, piece, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(total + at, mask=at < n, other=0.0).to(tl.float32)
    y = tl.load(piece + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, (x + y).to(out.dtype.element_ty), mask=at < n)


def add(total: Tensor, piece: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """total + piece, alike in shape and of any floating dtypes up to fp32, summed in fp32 and rounded once, to `dtype`;
    in total's memory where that is its dtype, or in the contiguous memory `into`."""
    total, piece = total.contiguous(), piece.contiguous()
    out = into
    if out is None:
        out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    _add_kernel[(triton.cdiv(out.numel(), 4096),)](
        total, piece, out, out.numel(), BLOCK=4096, num_warps=8
    )
    return out
