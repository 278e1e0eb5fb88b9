"""Attention over two disjoint sets of keys from the attentions over each, gradients of queries from their parts, and where the
results of several groups of heads are written.

A sum over pieces is kept in fp32 (fp64), and no pass over it only widens or rounds: a first piece that comes rounded stays so,
and the last one is written `into` the result.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.kernels import merge as merge_kernel


def merge(
    total: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `total` and of one piece more; out in `dtype` or in the memory `into`, lse as it comes. Without a total
    the piece alone, which is not widened: what it is merged with next reads any dtype."""
    if total is None:
        return _alone(out, dtype, into), lse
    if out.is_cuda and lse.dtype == torch.float32:
        return merge_kernel.merge(*total, out, lse, dtype, into)
    merged, merged_lse = merge_kernel.merge_naive(*total, out, lse)
    return merged.to(dtype) if into is None else into.copy_(merged), merged_lse


def add(
    total: Tensor | None, piece: Tensor, dtype: torch.dtype, into: Tensor | None = None
) -> Tensor:
    """total + piece in the memory `into` or in `dtype`, then in total's memory where it has that dtype; without a total the
    piece, which is not widened."""
    if total is None:
        return _alone(piece, dtype, into)
    if piece.is_cuda:
        return merge_kernel.add(total, piece, dtype, into)
    found = merge_kernel.add_naive(total, piece, dtype)
    return found if into is None else into.copy_(found)


def _alone(x: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    if into is not None:
        return into.copy_(x)
    return x.to(dtype) if dtype.itemsize <= x.dtype.itemsize else x


class Results(NamedTuple):
    """Memory for a result, in its dtype, by groups of heads; `whole` holds all where that lies in a row.

    parts: contiguous [B, heads, S, D] of each group, or None, where what a backend returns is the result."""

    whole: Tensor | None
    parts: list[Tensor | None]

    def joined(self, found: Sequence[Tensor]) -> Tensor:
        """The whole of what was found, group by group."""
        if len(found) == 1:
            return found[0]
        return torch.cat(tuple(found), dim=1) if self.whole is None else self.whole


def results(q: Tensor, heads: Sequence[slice], steps: int) -> Results:
    """For a result like q [B, H, S, D] of groups of heads, each of which comes from a sum over so many pieces."""
    if len(heads) == steps == 1:
        return Results(None, [None])
    if len(q) > 1 and len(heads) > 1:
        return Results(
            None,
            [torch.empty_like(q[:, part], memory_format=torch.contiguous_format) for part in heads],
        )
    whole = q.new_empty(q.shape)
    return Results(whole, [whole[:, part] for part in heads])


def at_last(steps: int, into: Tensor | None) -> Iterator[Tensor | None]:
    """Of each step where its sum is written: nowhere in particular, but the last one's `into` the result."""
    return iter([None] * (steps - 1) + [into])
