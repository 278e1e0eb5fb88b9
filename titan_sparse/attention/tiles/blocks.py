"""mask ∩ pattern for one (query rank, KV chunk): the block tables that a backend computes on."""

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.reach import Reach, block_reach, reached
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.vertical_slash.budget import compact
from titan_sparse.attention.tiles.tables import BlockLists, Tiles
from titan_sparse.kernels.bits import pack

_ROWS = 1 << 15
"""Lists that a launch of kernels.compact() makes: a CUDA grid has fewer than 65,536 rows."""


def _list(listed: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, H, n, m] -> counts int32 [B, H, n] and ascending numbers int32 [B, H, n, K].

    K is the largest count; on a GPU it is m, so that the host does not wait for the selection.
    """
    count = listed.sum(-1, dtype=torch.int32)
    if listed.is_cuda:
        rows = listed.flatten(0, 2)
        numbers = [compact(part, listed.shape[-1], 0) for part in rows.split(_ROWS)]
        return count, torch.cat(numbers).view(listed.shape)
    widest = max(int(count.max()), 1) if count.numel() else 1
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :widest]
    inside = torch.arange(widest, device=listed.device) < count[..., None]
    return count, torch.where(inside, order, 0).int().contiguous()


def list_width(most: int, blocks: int) -> int:
    """Width of lists of at most `most` out of `blocks`: widths that followed the data would compile kernels anew all
    the time, so they are powers of two, or all blocks where that is less."""
    return min(blocks, max(32, 1 << (most - 1).bit_length()))


def block_lists(full: Tensor, partial: Tensor) -> BlockLists:
    """Lists from bool tables [B, H, n, m] of full and of partial tiles; both lists come out equally wide."""
    (full_count, full), (partial_count, partial) = _list(full), _list(partial)
    width = max(full.shape[-1], partial.shape[-1])
    full, partial = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (full, partial))
    return BlockLists(full_count, full, partial_count, partial)


def block_tiles(
    rows: MaskRanges,
    index: BlockIndex,
    q_blocks: Tensor,
    k_blocks: Tensor,
    batch: int,
    transpose: bool,
) -> Tiles:
    """Tiles between this rank's query blocks and a chunk's KV blocks, both as global block numbers int [nq], [nk].

    With `transpose` by_key is made too. Sequences and heads that are alike share their lists' memory.
    """
    size = index.block_size
    q_positions, k_positions = token_positions(q_blocks, size), token_positions(k_blocks, size)
    reach = block_reach(rows, q_positions, size)
    begin = k_blocks * size
    whole = (reach.all_first[..., None] <= begin) & (reach.all_last[..., None] >= begin + size)
    listed = index.selects(q_blocks, k_blocks) & reached(reach, k_blocks, size)[:, None]
    full = listed & whole[:, None] & index.selects_for_all(q_blocks, k_blocks)
    partial = listed & ~full
    by_query, by_key = (
        block_lists(full, partial),
        block_lists(full.mT, partial.mT) if transpose else None,
    )
    return Tiles(
        *(for_all(x, batch, index.heads) for x in (by_query, by_key)),
        *query_ranges(rows, q_positions, batch),
        k_positions.int().view(1, 1, -1),
        None,
        size,
        index.chosen_chunks(q_positions),
    )


def for_all(lists: BlockLists | None, batch: int, heads: int) -> BlockLists | None:
    """Lists of B sequences and Hq heads from those of one, where they are alike; they share their memory."""
    return lists and BlockLists(
        *(x if x is None else x.expand(batch, heads, *x.shape[2:]) for x in lists)
    )


def with_room(tiles: Tiles, blocks: int) -> Tiles:
    """Tiles of as many KV blocks; those that are added are met by nobody. As given where there are as many already."""
    missing = blocks - tiles.k_positions.shape[-1] // tiles.block_size
    if missing <= 0:
        return tiles
    by_key = tiles.by_key and BlockLists(
        *(x if x is None else _with_rows(x, missing) for x in tiles.by_key)
    )
    nowhere = torch.iinfo(torch.int32).max
    positions = torch.nn.functional.pad(
        tiles.k_positions, (0, missing * tiles.block_size), value=nowhere
    )
    return tiles._replace(by_key=by_key, k_positions=positions)


def _with_rows(x: Tensor, missing: int) -> Tensor:
    """Zeros behind dim 2 of counts [B, Hq, n] or lists [B, Hq, n, K]."""
    return torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], dim=2)


def vertical_tiles(rows: MaskRanges, index: BlockIndex, q_blocks: Tensor, transpose: bool) -> Tiles:
    """Tiles between this rank's query blocks and the gathered verticals, which are cut into blocks as they come.

    A vertical inside a block that the query block meets anyway is marked as covered.
    """
    size, verticals = index.block_size, index.verticals
    q_positions = token_positions(q_blocks, size)
    reach = Reach(*(x[:, None, :, None] for x in block_reach(rows, q_positions, size)))
    runs = verticals.unflatten(-1, (-1, size))[:, :, None]
    covered = covered_verticals(index, index.selects(q_blocks, all_blocks(index)))
    reached = (reach.first <= runs[..., -1]) & (reach.last > runs[..., 0])
    whole = (reach.all_first <= runs[..., 0]) & (reach.all_last > runs[..., -1])
    whole = whole & ~covered.unflatten(-1, (-1, size)).any(-1)
    full, partial = reached & whole, reached & ~whole
    by_key = block_lists(full.mT, partial.mT) if transpose else None
    return Tiles(
        block_lists(full, partial),
        by_key,
        *query_ranges(rows, q_positions, len(verticals)),
        verticals,
        pack(covered),
        size,
    )


def query_ranges(rows: MaskRanges, q_positions: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """start and stop of this rank's queries, int32 [B, Sq]."""
    return tuple(x[:, q_positions].expand(batch, -1).contiguous() for x in (rows.start, rows.stop))


def covered_verticals(index: BlockIndex, selected: Tensor) -> Tensor:
    """bool [B, Hq, nq, C]: the vertical lies in a block that the query block computes whole.

    selected: bool, what index.selects() says of nq query blocks and all key blocks.
    """
    batch, heads, _ = index.verticals.shape
    block = (index.verticals.long() // index.block_size).clamp(max=selected.shape[-1] - 1)
    selected = selected.expand(batch, heads, -1, -1)
    return selected.gather(3, block[:, :, None].expand(-1, -1, selected.shape[2], -1))


def all_blocks(index: BlockIndex) -> Tensor:
    """int64 [blocks]: all blocks of the sequence."""
    return torch.arange(-(-index.seq_len // index.block_size), device=index.verticals.device)
