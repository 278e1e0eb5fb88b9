"""The keys that each query, block of queries, or rank sees, and the number of pairs."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, token_positions
from titan_sparse.attention.masks.slice_geometry import area
from titan_sparse.attention.masks.slice_tiles import tiles_between


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
    # [Bm, Sq] -> [Bm, nq, block_size]
    start = ranges.start[:, q_positions].unflatten(1, (-1, block_size))
    stop = ranges.stop[:, q_positions].unflatten(1, (-1, block_size))
    sees_any = start < stop
    # A query that sees nothing must not widen what any query sees, ...
    start_if_any = torch.where(sees_any, start, torch.iinfo(torch.int32).max)
    # ... and must empty what every query sees.
    stop_if_any = torch.where(sees_any, stop, 0)
    return Reach(
        first=start_if_any.amin(-1),
        last=stop_if_any.amax(-1),
        all_first=start.amax(-1),
        all_last=stop_if_any.amin(-1),
    )


def reached(reach: Reach, k_blocks: Tensor, block_size: int) -> Tensor:
    """bool [Bm, nq, nk]: some query of the block sees a key of the KV block.

    k_blocks: int [nk], global. Between the first and the last key that a block of queries sees, a
    mask may leave a KV block unseen; it counts as reached.
    """
    begin = k_blocks * block_size
    end = begin + block_size
    # [Bm, nq, 1] against [nk]
    first = reach.first[..., None]
    last = reach.last[..., None]
    return (first < end) & (last > begin)


def seen_whole(reach: Reach, k_blocks: Tensor, block_size: int) -> Tensor:
    """bool [Bm, nq, nk]: every query of the block sees every key of the KV block.

    k_blocks: int [nk], global.
    """
    begin = k_blocks * block_size
    end = begin + block_size
    # [Bm, nq, 1] against [nk]
    all_first = reach.all_first[..., None]
    all_last = reach.all_last[..., None]
    return (all_first <= begin) & (all_last >= end)


def seen_blocks(ranges: MaskRanges, table: Tensor, block_size: int) -> Tensor:
    """bool [W, blocks]: the mask lets some query of rank r see a key of block b, in any sequence.

    table: int64 [W, n], the query blocks that each rank owns.
    """
    k_blocks = torch.arange(ranges.start.shape[1] // block_size, device=table.device)
    seen = []
    for q_blocks in table:
        pairs = tile_weights(ranges, q_blocks, k_blocks, block_size).pairs
        seen.append((pairs > 0).flatten(0, 1).any(0))
    return torch.stack(seen)


def seen_chunks(ranges: MaskRanges, table: Tensor, block_size: int) -> Tensor:
    """bool [W, W]: the mask lets some query of rank r see a key of rank s.

    table: int64 [W, n], the layout's blocks of each rank.
    """
    # [W, blocks] -> [W, W, n]
    seen = seen_blocks(ranges, table, block_size)
    seen_by_owner = seen[:, table]
    return seen_by_owner.any(-1)


def queries_seeing(ranges: MaskRanges, keys: Tensor) -> tuple[Tensor, Tensor]:
    """First query that sees each key, and last + 1. int32, shaped like `keys`, int [B, ...].

    Both vectors of `ranges` are sorted, so these queries are contiguous. Not for masks with slices.
    """
    # [B, n]
    flat = keys.flatten(1).contiguous()
    # The first query whose range ends behind the key, and the first whose range begins behind it.
    found = []
    for ends in (ranges.stop, ranges.start):
        # searchsorted() does not broadcast: [Bm, S] -> [B, S].
        ends = ends.expand(len(keys), -1).contiguous()
        found.append(torch.searchsorted(ends, flat, right=True, out_int32=True).view(keys.shape))
    first, last = found
    return first, last


def visible_pairs(ranges: MaskRanges) -> Tensor:
    """Pairs that the mask allows, float64 [Bm]."""
    if ranges.slices is not None:
        # [Bm, N]
        pairs = area(ranges.slices)
        return pairs.sum(-1).double()
    # [Bm, S]
    pairs = ranges.stop - ranges.start
    return pairs.sum(-1, dtype=torch.float64)


class TileWeights(NamedTuple):
    """The pairs that a mask sees in each tile. int32 [Bm, nq, nk] each.

    whole: 1 if it is seen whole, else 0.
    partial: how many slices see it in part. For a mask without slices, 1 if it is seen in part.
    pairs: visible pairs of tokens.
    """

    whole: Tensor
    partial: Tensor
    pairs: Tensor


def tile_weights(ranges: MaskRanges, q_blocks: Tensor, k_blocks: Tensor, size: int) -> TileWeights:
    """The pairs that the mask sees in each tile of these global blocks, int64 [nq] and [nk], of
    `size` tokens."""
    if ranges.slices is not None:
        tiles = tiles_between(ranges, q_blocks, k_blocks, size)
        cuts = (tiles.sequence, tiles.q, tiles.k)
        whole = tiles.whole.int()
        partial = torch.zeros_like(whole)
        partial.index_put_(cuts, partial.new_ones(()), accumulate=True)
        pairs = whole * size * size
        pairs.index_put_(cuts, tiles.pairs.int(), accumulate=True)
        return TileWeights(whole, partial, pairs)
    reach = block_reach(ranges, token_positions(q_blocks, size), size)
    whole = seen_whole(reach, k_blocks, size)
    partial = reached(reach, k_blocks, size) & ~whole
    # [nq, size]
    positions = token_positions(q_blocks, size).view(-1, size)
    begin = k_blocks.int() * size
    # What a block sees below the end of a key block, and not below its begin.
    below_end, below_begin = (
        _sum_of_smaller(ranges.stop[:, positions], edge)
        - _sum_of_smaller(ranges.start[:, positions], edge)
        for edge in (begin + size, begin)
    )
    return TileWeights(whole.int(), partial.int(), below_end - below_begin)


def _sum_of_smaller(ends: Tensor, limits: Tensor) -> Tensor:
    """Sums of min(end, limit) over the last dim of `ends`, int32 [Bm, nq, size] and nondecreasing there,
    for each limit int32 [nk]: int32 [Bm, nq, nk]."""
    ends = ends.contiguous()
    # [Bm, nq, size + 1]: sums of the first ends.
    sums = torch.nn.functional.pad(ends.cumsum(-1, dtype=torch.int32), (1, 0))
    limits = limits.expand(*ends.shape[:2], -1).contiguous()
    # [Bm, nq, nk]: how many ends are below the limit.
    count = torch.searchsorted(ends, limits)
    return sums.gather(-1, count) + limits * (ends.shape[-1] - count).int()


def pairs_by_block(ranges: MaskRanges, q_blocks: Tensor, size: int) -> Tensor:
    """Pairs that the mask allows between each query block int64 [nq] and every key block, int32
    [Bm, nq, blocks]."""
    blocks = -(-ranges.start.shape[1] // size)
    k_blocks = torch.arange(blocks, device=ranges.start.device)
    return tile_weights(ranges, q_blocks, k_blocks, size).pairs
