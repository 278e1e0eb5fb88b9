"""Attention over two disjoint sets of keys from the attentions over each, and sums: each in one
pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_naive(
    out: Tensor, lse: Tensor, out_piece: Tensor, lse_piece: Tensor
) -> tuple[Tensor, Tensor]:
    """The twin of merge(): weights by log-sum-exp, safe where lse is -inf."""
    total = torch.logaddexp(lse, lse_piece)
    # -inf - -inf would be NaN.
    finite = total.clamp(min=torch.finfo(total.dtype).min)
    weight = (lse - finite).exp()[..., None]
    weight_piece = (lse_piece - finite).exp()[..., None]
    return out * weight + out_piece * weight_piece, total


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
    inside_row = o_row < rows
    # [ROWS, DIM]
    inside = inside_row[:, None] & (o_dim < dim)[None, :]
    at = o_row[:, None] * dim + o_dim[None, :]
    a = tl.load(lse + o_row, mask=inside_row, other=float("-inf"))
    b = tl.load(lse_piece + o_row, mask=inside_row, other=float("-inf"))
    # Finite, so that rows which see nothing in either set get weights of 0, not NaN.
    top = tl.maximum(tl.maximum(a, b), -3.0e38)
    weight_a = tl.exp(a - top)
    weight_b = tl.exp(b - top)
    total = weight_a + weight_b
    scale = 1.0 / tl.maximum(total, 1.0e-30)
    x = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out_piece + at, mask=inside, other=0.0).to(tl.float32)
    z = x * (weight_a * scale)[:, None] + y * (weight_b * scale)[:, None]
    tl.store(merged + at, z.to(merged.dtype.element_ty), mask=inside)
    lse_at = merged_lse + o_row
    total_lse = tl.where(total > 0, top + tl.log(total), float("-inf"))
    tl.store(lse_at, total_lse, mask=inside_row)


def merge(
    out: Tensor,
    lse: Tensor,
    out_piece: Tensor,
    lse_piece: Tensor,
    dtype: torch.dtype,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from (out, lse) and (out_piece, lse_piece) over each.

    out: [B, H, S, D] of any floating dtype. lse: fp32 [B, H, S], natural log. Rows that see nothing
    in a set have out 0 and lse -inf there.
    Returns out in `dtype`, or in the contiguous memory `into`, and lse in fp32.
    """
    out = out.contiguous()
    lse = lse.contiguous()
    out_piece = out_piece.contiguous()
    lse_piece = lse_piece.contiguous()
    rows = lse.numel()
    dim = out.shape[-1]
    merged = torch.empty_like(out, dtype=dtype) if into is None else into
    merged_lse = torch.empty_like(lse)
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
    """total + piece, summed in fp32 and rounded once.

    Both have one shape, and any floating dtypes up to fp32. The sum is written to the contiguous
    memory `into`; else to total's own memory where it has `dtype`; else to new memory in `dtype`.
    """
    total = total.contiguous()
    piece = piece.contiguous()
    if into is not None:
        out = into
    elif total.dtype == dtype:
        out = total
    else:
        out = torch.empty_like(total, dtype=dtype)
    _add_kernel[(triton.cdiv(out.numel(), 4096),)](
        total, piece, out, out.numel(), BLOCK=4096, num_warps=8
    )
    return out
