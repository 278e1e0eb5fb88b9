"""mask ∩ pattern for one (query rank, KV chunk), in plain torch.

The result is the tables of blocks that a backend computes on.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, token_positions
from titan_sparse.attention.masks.reach import Reach, block_reach, reached, seen_whole
from titan_sparse.attention.patterns.base import BlockIndex, compact
from titan_sparse.kernels.bits import pack
from titan_sparse.kernels.block_sparse import BlockLists, Tiles

_ROWS = 1 << 15
"""Lists that a launch of kernels.compact() makes: a CUDA grid has fewer than 65,536 rows."""


def block_tiles(
    ranges: MaskRanges,
    index: BlockIndex,
    q_blocks: Tensor,
    k_blocks: Tensor,
    batch: int,
    transpose: bool,
) -> Tiles:
    """Tiles between this rank's query blocks and a chunk's KV blocks.

    q_blocks, k_blocks: global block numbers, int [nq] and [nk].
    With `transpose` by_key is made too. Sequences and heads that are alike share their lists'
    memory.
    """
    size = index.block_size
    q_positions = token_positions(q_blocks, size)
    k_positions = token_positions(k_blocks, size)

    # [Bm, nq, nk]
    reach = block_reach(ranges, q_positions, size)
    whole = seen_whole(reach, k_blocks, size)

    # [B or 1, Hq or 1, nq, nk]
    listed = index.selects(q_blocks, k_blocks) & reached(reach, k_blocks, size)[:, None]
    full = listed & whole[:, None] & index.selects_for_all(q_blocks, k_blocks)
    partial = listed & ~full
    by_query = for_all(block_lists(full, partial), batch, index.heads)
    by_key = None
    if transpose:
        by_key = for_all(block_lists(full.mT, partial.mT), batch, index.heads)
    start, stop = query_ranges(ranges, q_positions, batch)
    return Tiles(
        by_query=by_query,
        by_key=by_key,
        start=start,
        stop=stop,
        k_positions=k_positions.int().view(1, 1, -1),
        covered=None,
        block_size=size,
        chosen=index.chosen_chunks(q_positions),
    )


def vertical_tiles(
    ranges: MaskRanges, index: BlockIndex, q_blocks: Tensor, transpose: bool
) -> Tiles:
    """Tiles between this rank's query blocks and the gathered verticals.

    Verticals are cut into blocks in the order in which they come.
    A vertical inside a block that the query block meets anyway is marked as covered.
    """
    size = index.block_size
    verticals = index.verticals
    q_positions = token_positions(q_blocks, size)
    reach = block_reach(ranges, q_positions, size)
    reach = Reach._make(edge[:, None, :, None] for edge in reach)  # [Bm, 1, nq, 1]

    # [B, Hq, 1, n]: verticals ascend, so the first and the last one of a block bound it.
    vertical_blocks = verticals.unflatten(-1, (-1, size))[:, :, None]
    first = vertical_blocks[..., 0]
    last = vertical_blocks[..., -1]

    # [B, Hq, nq, C], and the rest [B, Hq, nq, n].
    covered = index.covers(q_blocks, verticals)
    any_covered = covered.unflatten(-1, (-1, size)).any(-1)
    any_seen = (reach.first <= last) & (reach.last > first)
    all_seen = (reach.all_first <= first) & (reach.all_last > last)
    whole = all_seen & ~any_covered
    full = any_seen & whole
    partial = any_seen & ~whole
    start, stop = query_ranges(ranges, q_positions, len(verticals))
    return Tiles(
        by_query=block_lists(full, partial),
        by_key=block_lists(full.mT, partial.mT) if transpose else None,
        start=start,
        stop=stop,
        k_positions=verticals,
        covered=pack(covered),
        block_size=size,
    )


def block_lists(full: Tensor, partial: Tensor) -> BlockLists:
    """Lists from bool tables [B, H, n, m] of full and of partial tiles.

    Both lists come out equally wide.
    """
    # counts [B, H, n], numbers [B, H, n, K of each]
    full_count, full = _list(full)
    partial_count, partial = _list(partial)

    # [B, H, n, K]
    width = max(full.shape[-1], partial.shape[-1])
    full = F.pad(full, (0, width - full.shape[-1]))
    partial = F.pad(partial, (0, width - partial.shape[-1]))
    return BlockLists(full_count, full, partial_count, partial)


def _list(listed: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, H, n, m] -> counts int32 [B, H, n] and ascending numbers int32 [B, H, n, K].

    K is the largest count; on a GPU it is m, so that the host does not wait for the selection.
    """
    # [B, H, n]
    count = listed.sum(-1, dtype=torch.int32)
    width = listed.shape[-1]
    if not listed.is_cuda:
        width = max(int(count.max()), 1) if count.numel() else 1
    # [rows, m] at a time.
    numbers = [compact(rows, width, 0) for rows in listed.flatten(0, 2).split(_ROWS)]
    return count, torch.cat(numbers).view(*listed.shape[:3], width)


def list_width(most: int, blocks: int) -> int:
    """Width of lists of at most `most` out of `blocks`.

    A power of two, or all blocks where that is less.
    Widths that depend on the data would recompile kernels again and again.
    """
    # At least 32, so that short lists do not come in many widths either.
    power_of_two = 1 << (most - 1).bit_length()
    return min(blocks, max(32, power_of_two))


def mapped(lists: BlockLists | None, change: Callable[[Tensor], Tensor]) -> BlockLists | None:
    """change() of each tensor of the lists."""
    if lists is None:
        return None
    return BlockLists._make(None if field is None else change(field) for field in lists)


def for_all(lists: BlockLists | None, batch: int, heads: int) -> BlockLists | None:
    """Lists of B sequences and Hq heads from those of one, where they are alike.

    They share their memory.
    """
    return mapped(lists, lambda field: field.expand((batch, heads, *field.shape[2:])))


def with_room(tiles: Tiles, blocks: int) -> Tiles:
    """Tiles of as many KV blocks; no query meets those that are added.

    The tiles as given where there are as many already.
    """
    missing = blocks - tiles.k_positions.shape[-1] // tiles.block_size
    if missing <= 0:
        return tiles

    def longer(field: Tensor) -> Tensor:
        """Zeros behind dim 2 of counts [B, Hq, n] or lists [B, Hq, n, K]."""
        later_dims = field.dim() - 3
        return F.pad(field, (0, 0) * later_dims + (0, missing))

    # No query sees so late a position.
    nowhere = torch.iinfo(torch.int32).max
    added = (0, missing * tiles.block_size)
    positions = F.pad(tiles.k_positions, added, value=nowhere)
    return tiles._replace(by_key=mapped(tiles.by_key, longer), k_positions=positions)


def query_ranges(ranges: MaskRanges, q_positions: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """start and stop of this rank's queries, int32 [B, Sq]."""
    # [Bm, Sq]
    start = ranges.start[:, q_positions]
    stop = ranges.stop[:, q_positions]
    # [B, Sq]
    start = start.expand(batch, -1).contiguous()
    stop = stop.expand(batch, -1).contiguous()
    return start, stop


def all_blocks(index: BlockIndex) -> Tensor:
    """int64 [blocks]: all blocks of the sequence."""
    # The last block may be cut short.
    blocks = -(-index.seq_len // index.block_size)
    return torch.arange(blocks, device=index.verticals.device)
