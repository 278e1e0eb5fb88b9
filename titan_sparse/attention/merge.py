"""Sums over pieces of keys: attention over disjoint sets of keys, the gradient of the queries, and
the memory that a result is written to.

A sum over pieces is kept in fp32 (fp64 for fp64). No pass over memory only widens or rounds it: a
first piece that arrives rounded stays rounded, and the last sum is written straight `into` the
result.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.kernels import merge as merge_kernel


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: fp64 for fp64, fp32 for everything else."""
    return torch.promote_types(dtype, torch.float32)


def merge(
    total: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of `total` and of one more piece, whose attention is out and lse.

    total: out [B, H, S, D] and natural-log lse [B, H, S] over other keys, or None for no keys.
    Returns out in the memory `into`, or in `dtype`, and lse in its own dtype. Without a total the
    piece is returned alone and is not widened: the next merge reads any dtype.
    """
    if total is None:
        return _first(out, dtype, into), lse
    total_out, total_lse = total
    if out.is_cuda and lse.dtype == torch.float32:
        return merge_kernel.merge(total_out, total_lse, out, lse, dtype, into)
    merged, merged_lse = merge_kernel.merge_naive(total_out, total_lse, out, lse)
    if into is None:
        return merged.to(dtype), merged_lse
    return into.copy_(merged), merged_lse


def add(
    total: Tensor | None, piece: Tensor, dtype: torch.dtype, into: Tensor | None = None
) -> Tensor:
    """total + piece, in the memory `into` or in `dtype`.

    A total that has `dtype` already may be overwritten with the sum. Without a total the piece is
    returned alone and is not widened.
    """
    if total is None:
        return _first(piece, dtype, into)
    if piece.is_cuda:
        return merge_kernel.add(total, piece, dtype, into)
    summed = merge_kernel.add_naive(total, piece, dtype)
    if into is None:
        return summed
    return into.copy_(summed)


def _first(piece: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """A sum of one piece: written `into`, or rounded to `dtype`, or as it is if that is wider."""
    if into is not None:
        return into.copy_(piece)
    if dtype.itemsize > piece.dtype.itemsize:
        return piece
    return piece.to(dtype)


class Results(NamedTuple):
    """Memory for a result, in the result's dtype, by groups of heads.

    whole: one tensor for all heads; None if the groups do not share one tensor.
    parts: contiguous [B, heads, S, D] for each group; None where the backend's own output is the
    result.
    """

    whole: Tensor | None
    parts: list[Tensor | None]

    def joined(self, by_group: Sequence[Tensor]) -> Tensor:
        if len(by_group) == 1:
            return by_group[0]
        if self.whole is not None:
            # The groups have been written to their places in it.
            return self.whole
        return torch.cat(tuple(by_group), dim=1)


def results(q: Tensor, heads: Sequence[slice], steps: int) -> Results:
    """Memory for a result like q [B, H, S, D].

    heads: the groups of heads that are computed separately. steps: how many pieces are summed for each.
    """
    if len(heads) == 1 and steps == 1:
        # Nothing is summed or joined: the backend's own output is the result.
        return Results(whole=None, parts=[None])
    if len(heads) > 1 and len(q) > 1:
        # With several sequences the heads of one group are not contiguous in the whole.
        parts = [q.new_empty(q[:, group].shape) for group in heads]
        return Results(whole=None, parts=parts)
    whole = q.new_empty(q.shape)
    return Results(whole, [whole[:, group] for group in heads])
