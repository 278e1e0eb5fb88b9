"""Attention over two disjoint sets of keys from the attentions over each, and gradients of queries from their parts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_sparse.kernels import merge as merge_kernel


def merge(total: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) of `total` and of one piece more; out in `dtype`, lse as it comes. Without a total the piece alone, which
    is not widened: that would add nothing, and what it is merged with next reads any dtype."""
    if total is None:
        return narrowed(out, dtype), lse
    if out.is_cuda and lse.dtype == torch.float32:
        return merge_kernel.merge(*total, out, lse, dtype)
    merged, merged_lse = merge_kernel.merge_naive(*total, out, lse)
    return merged.to(dtype), merged_lse


def add(total: Tensor | None, piece: Tensor, dtype: torch.dtype) -> Tensor:
    """total + piece in `dtype`, in total's memory where that is its own; without a total the piece, which is not widened."""
    if total is None:
        return narrowed(piece, dtype)
    return (merge_kernel.add if piece.is_cuda and dtype != torch.float64 else merge_kernel.add_naive)(total, piece, dtype)


def sum_dtypes(computes: list[bool], dtype: torch.dtype, last: torch.dtype) -> Iterator[torch.dtype]:
    """Of a sum over steps, after each that computes: `dtype`, and at the end `last`, so that no pass over it only rounds."""
    return iter([dtype] * (sum(computes) - 1) + [last])


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype` if that is no wider than its own."""
    return x.to(dtype) if dtype.itemsize <= x.dtype.itemsize else x
