"""Sums of dk and dv over the parts that the query lists of KV blocks were cut into."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 512
"""Elements that a program sums."""


def sum_splits_naive(
    dk_parts: Tensor, dv_parts: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The twin of sum_splits(), summed in fp64."""
    dk = dk_parts.double().sum(0)
    dv = dv_parts.double().sum(0)
    return dk.to(dtype), dv.to(dtype)


@triton.jit
def _sum_one(parts, total, at, n, splits, SPLITS: tl.constexpr):
    """The sum of parts [splits, n] at `at`, rounded once."""
    # [SPLITS, chunk]: all at a time. One after the other, each would be waited for.
    o_split = tl.arange(0, SPLITS)[:, None]
    part_at = o_split.to(tl.int64) * n + at[None, :]
    b_parts = tl.load(parts + part_at, mask=(o_split < splits) & (at < n)[None, :], other=0.0)
    b_sum = tl.sum(b_parts, 0)
    tl.store(total + at, b_sum.to(total.dtype.element_ty), mask=at < n)


@triton.jit
def _sum_kernel(dk_parts, dv_parts, dk, dv, n, splits, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of dk, or in the second row of programs of dv. SPLITS: a power of two."""
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(1) == 0:
        _sum_one(dk_parts, dk, at, n, splits, SPLITS)
    else:
        _sum_one(dv_parts, dv, at, n, splits, SPLITS)


def sum_splits(dk_parts: Tensor, dv_parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dk and dv in `dtype` from their parts, both in one launch, in a fixed order.

    dk_parts, dv_parts: fp32 [splits, B, Hkv, Sk, D], contiguous.
    """
    splits = len(dk_parts)
    dk = dk_parts.new_empty(dk_parts.shape[1:], dtype=dtype)
    dv = torch.empty_like(dk)
    n = dk.numel()
    _sum_kernel[(triton.cdiv(n, _CHUNK), 2)](
        dk_parts,
        dv_parts,
        dk,
        dv,
        n,
        splits,
        SPLITS=triton.next_power_of_2(splits),
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return dk, dv
