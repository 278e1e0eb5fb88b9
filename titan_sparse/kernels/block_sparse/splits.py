"""Sums of dk and dv over the parts that the query lists of KV blocks were cut into."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048
"""Elements that a program sums."""


def sum_splits_naive(
    dk_parts: Tensor, dv_parts: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The twin of sum_splits(), summed in fp64."""
    dk = dk_parts.double().sum(0)
    dv = dv_parts.double().sum(0)
    return dk.to(dtype), dv.to(dtype)


@triton.jit
def _sum_one(parts, total, at, inside, n, splits):
    """The sum of parts [splits, n] at `at`, rounded once."""
    b_sum = tl.zeros(at.shape, tl.float32)
    for split in range(splits):
        begin = tl.cast(split, tl.int64) * n
        b_sum += tl.load(parts + begin + at, mask=inside, other=0.0)
    tl.store(total + at, b_sum.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(dk_parts, dv_parts, dk, dv, n, splits, CHUNK: tl.constexpr):
    """A chunk of dk, or in the second row of programs of dv."""
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = at < n
    if tl.program_id(1) == 0:
        _sum_one(dk_parts, dk, at, inside, n, splits)
    else:
        _sum_one(dv_parts, dv, at, inside, n, splits)


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
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return dk, dv
