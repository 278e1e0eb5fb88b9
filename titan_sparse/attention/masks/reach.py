"""Who sees whom: by query, by block of queries, and by rank."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks import classification
from titan_sparse.attention.masks.base import MaskRanges


class Reach(NamedTuple):
    """Key positions that the queries of each block see. int32 [Bm, nq] each.

    first, last: seen by any query of the block, `last` not included.
    all_first, all_last: seen by every query of the block, `all_last` not included.
    Where there are no such keys, the range is empty.
    """

    first: Tensor
    last: Tensor
    all_first: Tensor
    all_last: Tensor


def block_reach(ranges: MaskRanges, q_positions: Tensor, block_size: int) -> Reach:
    """Reach of blocks of queries, from the global positions of their tokens, int [Sq]."""
    # [Bm, nq, block_size]
    start = ranges.start[:, q_positions].unflatten(1, (-1, block_size))
    stop = ranges.stop[:, q_positions].unflatten(1, (-1, block_size))
    sees_any = start < stop
    return Reach(
        first=torch.where(sees_any, start, torch.iinfo(torch.int32).max).amin(-1),
        last=torch.where(sees_any, stop, 0).amax(-1),
        all_first=start.amax(-1),
        all_last=torch.where(sees_any, stop, 0).amin(-1),
    )


def reached(reach: Reach, k_blocks: Tensor, block_size: int) -> Tensor:
    """bool [Bm, nq, nk]: some query of the block sees a key of the KV block. k_blocks: int [nk], global."""
    begin = k_blocks * block_size
    end = begin + block_size
    return (reach.first[..., None] < end) & (reach.last[..., None] > begin)


def seen_blocks(ranges: MaskRanges, table: Tensor, block_size: int) -> Tensor:
    """bool [W, blocks]: the mask lets some query of rank r see a key of block b, in any sequence.

    table: int64 [W, n], the query blocks that each rank owns.
    """
    if ranges.slices is not None:
        return classification.seen_blocks(ranges, table, block_size)
    blocks = ranges.start.shape[1] // block_size
    queries = token_positions(table.flatten(), block_size)
    start = _by_rank(ranges.start[:, queries], len(table))
    stop = _by_rank(ranges.stop[:, queries], len(table))
    sees_any = start < stop
    first = torch.where(sees_any, start // block_size, blocks)
    last = torch.where(sees_any, (stop + block_size - 1) // block_size, blocks)
    # A query adds 1 at the first block that it sees and takes it away behind the last one.
    changes = torch.zeros(len(table), blocks + 1, dtype=torch.int32, device=table.device)
    changes.scatter_add_(1, first, torch.full_like(first, 1, dtype=torch.int32))
    changes.scatter_add_(1, last, torch.full_like(last, -1, dtype=torch.int32))
    return changes[:, :blocks].cumsum(1) > 0


def _by_rank(of_queries: Tensor, ranks: int) -> Tensor:
    """[Bm, W * n], the queries of one rank after those of the other -> int64 [W, Bm * n]."""
    return of_queries.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(1).long()


def seen_chunks(ranges: MaskRanges, table: Tensor, block_size: int) -> Tensor:
    """bool [W, W]: the mask lets some query of rank r see a key of rank s.

    table: int64 [W, n], the layout's blocks of each rank.
    """
    return seen_blocks(ranges, table, block_size)[:, table].any(-1)


def queries_seeing(ranges: MaskRanges, keys: Tensor) -> tuple[Tensor, Tensor]:
    """First query that sees each key, and last + 1. int32, shaped like `keys`, int [B, ...].

    Both vectors of `ranges` are sorted, so these queries are contiguous. Not for masks with slices.
    """
    flat = keys.flatten(1).contiguous()
    first = _count_up_to(ranges.stop, flat)
    last = _count_up_to(ranges.start, flat)
    return first.view(keys.shape), last.view(keys.shape)


def _count_up_to(ends: Tensor, keys: Tensor) -> Tensor:
    """int32 [B, n]: how many of a sequence's sorted ends, int32 [Bm, S], are at most each key."""
    ends = ends.expand(len(keys), -1).contiguous()
    return torch.searchsorted(ends, keys, right=True, out_int32=True)


def seen_by(ranges: MaskRanges, queries: Tensor) -> Callable[[Tensor], Tensor]:
    """A function from keys int [m] to whether these queries see them, bool [Bm, n, m].

    queries: int [n], global positions, as the keys are.
    """
    if ranges.slices is not None:
        seen = _keys_seen_by(ranges, queries)
        return lambda keys: seen[..., keys]
    start = ranges.start[:, queries, None]
    stop = ranges.stop[:, queries, None]
    return lambda keys: (keys >= start) & (keys < stop)


def _keys_seen_by(ranges: MaskRanges, queries: Tensor) -> Tensor:
    """bool [Bm, n, S + 1] of a mask with slices: what each query sees. The last place means nothing."""
    # [Bm, 1, N] against [n, 1]
    q_start, q_stop, k_start, k_stop, low, high = ranges.slices.long()[:, None].unbind(-1)
    query = queries[:, None]
    seq_len = ranges.start.shape[1]
    start = torch.maximum(k_start, query + low)  # [Bm, n, N]
    stop = torch.minimum(k_stop, query + high + 1)
    any_key = (query >= q_start) & (query < q_stop) & (start < stop)
    # No two slices overlap: the ranges of a query begin and end at different keys, and a byte is
    # enough to count them. Flat, as a GPU has no deterministic scatter over more dims.
    shape = (len(ranges.slices), len(queries), seq_len + 1)
    changes = torch.zeros(shape, dtype=torch.int8, device=queries.device)
    row = torch.arange(shape[0] * shape[1], device=queries.device).view(shape[0], shape[1], 1)
    row = row * (seq_len + 1)
    steps = any_key.to(torch.int8).flatten()
    begin = row + start.where(any_key, seq_len)
    end = row + stop.where(any_key, seq_len)
    changes.view(-1).scatter_add_(0, begin.flatten(), steps)
    changes.view(-1).scatter_add_(0, end.flatten(), -steps)
    return changes.cumsum(-1, dtype=torch.int8) > 0
