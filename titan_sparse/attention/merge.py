"""Attention over two disjoint sets of keys from the attentions over each."""

import torch
from torch import Tensor

from titan_sparse.kernels import merge as merge_kernel


def merge(total: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) of `total` and of one piece more; out in `dtype`, lse as it comes. Without a total, the piece alone."""
    if total is None:
        return out.to(dtype), lse
    if out.is_cuda and lse.dtype == torch.float32:
        return merge_kernel.merge(*total, out, lse, dtype)
    merged, merged_lse = merge_kernel.merge_naive(*total, out, lse)
    return merged.to(dtype), merged_lse

