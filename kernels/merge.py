"""Merges of attention over two disjoint sets of keys, and sums; each in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_naive(
    out: Tensor, lse: Tensor, out_piece: Tensor, lse_piece: Tensor
) -> tuple[Tensor, Tensor]:
    """The twin of merge() in plain torch: weights by log-sum-exp, safe where lse is -inf.

    Shapes as in merge(). Returns out and lse in the dtypes that torch promotes to.
    """
    total_lse = torch.logaddexp(lse, lse_piece)
    # -inf - -inf would be NaN.
    lowest = torch.finfo(total_lse.dtype).min
    finite = total_lse.clamp(min=lowest)
    # [B, H, S, 1]
    weight = (lse - finite).exp()[..., None]
    weight_piece = (lse_piece - finite).exp()[..., None]
    merged = out * weight + out_piece * weight_piece
    return merged, total_lse


@triton.jit
def _merge_kernel(
    out, lse, out_piece, lse_piece, merged, merged_lse, rows, dim,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    o_row = first_row + tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM)
    inside_row = o_row < rows
    inside_dim = o_dim < dim
    # [ROWS, DIM]
    inside = inside_row[:, None] & inside_dim[None, :]
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
    # [ROWS, 1]
    scale_a = (weight_a * scale)[:, None]
    scale_b = (weight_b * scale)[:, None]
    z = x * scale_a + y * scale_b
    tl.store(merged + at, z.to(merged.dtype.element_ty), mask=inside)
    total_lse = tl.where(total > 0, top + tl.log(total), float("-inf"))
    tl.store(merged_lse + o_row, total_lse, mask=inside_row)


def merge(
    out: Tensor,
    lse: Tensor,
    out_piece: Tensor,
    lse_piece: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from (out, lse) and (out_piece, lse_piece) over each.

    out: [B, H, S, D] of any floating dtype. lse: fp32 [B, H, S], natural log. Rows that see nothing
    in a set have out 0 and lse -inf there.
    Returns out in `dtype`, and lse in fp32.
    """
    parts = [x.contiguous() for x in (out, lse, out_piece, lse_piece)]
    rows = lse.numel()
    dim = out.shape[-1]
    merged = torch.empty_like(parts[0], dtype=dtype)
    merged_lse = torch.empty_like(parts[1])
    options = dict(ROWS=32, DIM=triton.next_power_of_2(dim), num_warps=4)
    _merge_kernel[(triton.cdiv(rows, 32),)](*parts, merged, merged_lse, rows, dim, **options)
    return merged, merged_lse


def add_naive(total: Tensor, piece: Tensor, dtype: torch.dtype) -> Tensor:
    """The twin of add() in plain torch, summed in fp64."""
    summed = total.double() + piece.double()
    # Rounded once.
    return summed.to(dtype)


@triton.jit
def _add_kernel(total, piece, out, n, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < n
    # Summed in fp32, whatever the dtypes; the store rounds once.
    x = tl.load(total + at, mask=inside, other=0.0)
    y = tl.load(piece + at, mask=inside, other=0.0)
    summed = x.to(tl.float32) + y.to(tl.float32)
    tl.store(out + at, summed.to(out.dtype.element_ty), mask=inside)


def add(total: Tensor, piece: Tensor, dtype: torch.dtype) -> Tensor:
    """total + piece, summed in fp32 and rounded once.

    Both have one shape, and any floating dtypes up to fp32. The sum is written to
    total's own memory where it has `dtype`, else to new memory.
    """
    total = total.contiguous()
    piece = piece.contiguous()
    out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    n = out.numel()
    _add_kernel[(triton.cdiv(n, 4096),)](total, piece, out, n, BLOCK=4096, num_warps=8)
    return out
