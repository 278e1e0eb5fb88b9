"""Sums over pieces of keys: attention over disjoint sets of keys, and the gradient of the queries.

A sum over pieces is kept in fp32 (fp64 for fp64). A first piece that arrives rounded stays rounded.
"""

import torch
from torch import Tensor

from titan_sparse.kernels import merge as merge_kernel


def merge(
    total: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of `total` and of one more piece, whose attention is out and lse.

    total: out [B, H, S, D] and natural-log lse [B, H, S] over other keys, or None for no keys.
    Returns out in `dtype` and lse in its own dtype. Without a total the piece is returned alone and
    is not widened: the next merge reads any dtype.
    """
    if total is None:
        return _first(out, dtype), lse
    total_out, total_lse = total
    if out.is_cuda and lse.dtype == torch.float32:
        return merge_kernel.merge(total_out, total_lse, out, lse, dtype)
    merged, merged_lse = merge_kernel.merge_naive(total_out, total_lse, out, lse)
    return merged.to(dtype), merged_lse


def add(total: Tensor | None, piece: Tensor, dtype: torch.dtype) -> Tensor:
    """total + piece, in `dtype`.

    A total that has `dtype` already may be overwritten with the sum. Without a total the piece is
    returned alone and is not widened.
    """
    if total is None:
        return _first(piece, dtype)
    if piece.is_cuda:
        return merge_kernel.add(total, piece, dtype)
    return merge_kernel.add_naive(total, piece, dtype)


def _first(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum of one piece: rounded to `dtype`, or as it is if that is wider."""
    if dtype.itemsize > piece.dtype.itemsize:
        return piece
    return piece.to(dtype)
