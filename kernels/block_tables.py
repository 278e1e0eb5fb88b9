"""Block lists of a set of slashes (block diagonals), made on the GPU.

They take no dense block mask, and the host does not wait for them.

A query block a and a KV block c meet if the diagonal a - c is on in one of the (at most two) spans
that a touches, or if c lies in a's dense range. A tile that the mask empties is left out; one that
it leaves whole is listed separately.

Lists are filled up with 0. The twins take any pattern's index and any mask: block_tiles() and
vertical_tiles() of titan_sparse/attention/tiles.py.

In the kernels i_bh is a sequence and head, i_b the sequence, i_q a query block's place in q_blocks.
`spans` are five numbers a query block, `reach` four, as slash_lists() documents them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import BlockLists

_CHUNK = 128
"""Tiles of a row that a program looks at together."""


def takes_blocks(block_size: int) -> bool:
    """True if the kernels here, and those of the selection, take blocks of so many tokens."""
    return block_size >= 16 and block_size & (block_size - 1) == 0


@triton.jit
def _selected(slashes, a, c, span, valid):
    """True if blocks a and c (vectors, as the rest) are computed whole.

    slashes: pointer to one head's list. span: a's five numbers of `spans`.
    """
    offset0, first0, offset1, first1, dense_from = span
    delta = a - c
    past = valid & (delta >= 0)
    in_span0 = past & (offset0 >= 0) & (c >= first0)
    in_span1 = past & (offset1 >= 0) & (c >= first1)
    on0 = tl.load(slashes + offset0 + delta, mask=in_span0, other=0)
    on1 = tl.load(slashes + offset1 + delta, mask=in_span1, other=0)
    return past & ((c >= dense_from) | (on0 != 0) | (on1 != 0))


@triton.jit
def _append(table, count, flags, numbers, capacity):
    """Write the numbers whose flag is set behind the `count` entries already in the table.

    Returns the new count, which may be above the capacity.
    """
    listed = flags.to(tl.int32)
    place = count + tl.cumsum(listed, 0) - 1
    tl.store(table + place, numbers, mask=flags & (place < capacity))
    return count + tl.sum(listed, 0)


@triton.jit
def _fill(table, count, capacity, CHUNK: tl.constexpr):
    """Zeros behind the `count` entries of the table."""
    for start in range(0, capacity, CHUNK):
        place = start + tl.arange(0, CHUNK)
        tl.store(table + place, tl.zeros_like(place), mask=(place >= count) & (place < capacity))


@triton.jit
def _lists_kernel(
    slashes, spans, reach, q_blocks, k_blocks, by_query, by_key, heads, entries, nq, nk, capacity,
    key_capacity, size,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The full and the partial tiles of one row: of a query block, or from row nq on of a KV block.

    by_query, by_key: BlockLists; any, where no rows are of KV blocks.
    """
    i_bh = tl.program_id(1).to(tl.int64)
    i_row = tl.program_id(0)
    i_b = i_bh // heads
    slashes += i_bh * entries
    spans += i_b * nq * 5
    reach += i_b * nq * 4
    is_key = i_row >= nq
    i_row = tl.where(is_key, i_row - nq, i_row)
    others = tl.where(is_key, nq, nk)
    width = tl.where(is_key, key_capacity, capacity)
    # Among those of its side.
    row = i_bh * tl.where(is_key, nk, nq) + i_row
    full = tl.where(is_key, by_key.full, by_query.full) + row * width
    partial = tl.where(is_key, by_key.partial, by_query.partial) + row * width
    n_full = 0
    n_partial = 0
    for start in range(0, others, CHUNK):
        # [CHUNK]: query block a and KV block c of each tile.
        o_other = start + tl.arange(0, CHUNK)
        valid = o_other < others
        i_q = tl.where(is_key, o_other, i_row)
        i_k = tl.where(is_key, i_row, o_other)
        a = tl.load(q_blocks + i_q, mask=valid, other=0)
        c = tl.load(k_blocks + i_k, mask=valid, other=0)
        span = spans + i_q * 5
        of_block = (
            tl.load(span, mask=valid, other=-1),
            tl.load(span + 1, mask=valid, other=0),
            tl.load(span + 2, mask=valid, other=-1),
            tl.load(span + 3, mask=valid, other=0),
            tl.load(span + 4, mask=valid, other=0),
        )
        selected = _selected(slashes, a, c, of_block, valid)

        # What the mask leaves of the tile.
        seen = reach + i_q * 4
        any_first = tl.load(seen, mask=valid, other=0)
        any_last = tl.load(seen + 1, mask=valid, other=0)
        all_first = tl.load(seen + 2, mask=valid, other=0)
        all_last = tl.load(seen + 3, mask=valid, other=0)
        begin = c * size
        end = begin + size
        listed = selected & (any_first < end) & (any_last > begin)
        whole = (all_first <= begin) & (all_last >= end)
        n_full = _append(full, n_full, listed & whole, o_other, width)
        n_partial = _append(partial, n_partial, listed & (whole == 0), o_other, width)
    _fill(full, n_full, width, CHUNK)
    _fill(partial, n_partial, width, CHUNK)
    full_count = tl.where(is_key, by_key.full_count, by_query.full_count)
    partial_count = tl.where(is_key, by_key.partial_count, by_query.partial_count)
    tl.store(full_count + row, tl.minimum(n_full, width))
    tl.store(partial_count + row, tl.minimum(n_partial, width))


def slash_lists(
    slashes: Tensor,
    spans: Tensor,
    reach: Tensor,
    q_blocks: Tensor,
    k_blocks: Tensor,
    size: int,
    capacity: int,
    key_capacity: int | None,
) -> list[BlockLists]:
    """Lists for each query block, then for each KV block too if key_capacity is given.

    slashes: bool [B, H, E], which slashes are selected.
    spans: int32 [B, nq, 5], for both spans that a query block touches where its diagonals begin in
        slashes (-1: no span) and its first block, then the first block of the dense range.
    reach: int32 [B, nq, 4], keys seen by any query of the block from..to, by all from..to.
    q_blocks, k_blocks: int32 [nq] and [nk], global numbers.
    size: tokens of a block.
    capacity, key_capacity: entries of a query block and of a KV block; more are cut off, and the
        caller knows a bound.
    """
    batch, heads, entries = slashes.shape
    nq = len(q_blocks)
    nk = len(k_blocks)
    rows = nq
    lists = [_new_lists(slashes, nq, capacity)]
    if key_capacity is not None:
        rows += nk
        lists.append(_new_lists(slashes, nk, key_capacity))
    options = dict(CHUNK=min(_CHUNK, triton.next_power_of_2(max(nq, nk))), num_warps=4)
    _lists_kernel[(rows, batch * heads)](
        slashes.view(torch.uint8), spans, reach, q_blocks, k_blocks, lists[0], lists[-1],
        heads, entries, nq, nk, capacity, key_capacity or 0, size, **options,
    )  # fmt: skip
    return lists


def _new_lists(slashes: Tensor, n: int, m: int) -> BlockLists:
    """Memory for lists of n blocks and of m entries a block, for each head of slashes [B, H, E]."""
    batch, heads, _ = slashes.shape
    full_count, partial_count = slashes.new_empty(2, batch, heads, n, dtype=torch.int32).unbind()
    full, partial = slashes.new_empty(2, batch, heads, n, m, dtype=torch.int32).unbind()
    return BlockLists(full_count, full, partial_count, partial)


@triton.jit
def _verticals_kernel(
    slashes, spans, reach, q_blocks, verticals, covered, met, full_count, full, partial_count,
    partial, heads, entries, nq, count, tiles, halves,
    SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The verticals that a query block covers, and its full and its partial tiles of them.

    halves: int16 words of a query block in `covered`; a tile of 16 verticals fills one of them.
    met: [2, B, H, tiles, nq], whether a tile is full, and whether it is partial; None if it is not
    needed.
    """
    i_q = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    row = i_bh * nq + i_q
    slashes += i_bh * entries
    verticals += i_bh * count
    full += row * tiles
    partial += row * tiles
    span = spans + (i_b * nq + i_q) * 5
    seen = reach + (i_b * nq + i_q) * 4
    # [SIZE], as _selected() takes them
    zero = tl.zeros([SIZE], tl.int32)
    a = zero + tl.load(q_blocks + i_q)
    offset0 = zero + tl.load(span)
    first0 = zero + tl.load(span + 1)
    offset1 = zero + tl.load(span + 2)
    first1 = zero + tl.load(span + 3)
    of_block = (offset0, first0, offset1, first1, zero + tl.load(span + 4))
    any_first = tl.load(seen)
    any_last = tl.load(seen + 1)
    all_first = tl.load(seen + 2)
    all_last = tl.load(seen + 3)
    n_full = 0
    n_partial = 0
    for i_tile in range(tiles):
        # [SIZE]
        o_vertical = i_tile * SIZE + tl.arange(0, SIZE)
        inside = o_vertical < count
        position = tl.load(verticals + o_vertical, mask=inside, other=0)
        b_covered = _selected(slashes, a, position // SIZE, of_block, inside).to(tl.int32)
        # [SIZE / 16, 16] -> [SIZE / 16]
        by_word = tl.reshape(b_covered, [SIZE // 16, 16])
        bits = tl.sum(by_word << tl.arange(0, 16)[None, :], 1).to(tl.int16)
        o_word = i_tile * (SIZE // 16) + tl.arange(0, SIZE // 16)
        tl.store(covered + row * halves + o_word, bits)

        # Verticals ascend, so that the first and the last one bound the tile.
        first = tl.min(position, 0)
        last = tl.max(position, 0)
        reached = (any_first <= last) & (any_last > first)
        all_seen = (all_first <= first) & (all_last > last)
        whole = all_seen & (tl.sum(b_covered, 0) == 0)
        is_full = reached & whole
        is_partial = reached & (whole == 0)
        tl.store(full + n_full, i_tile, mask=is_full)
        tl.store(partial + n_partial, i_tile, mask=is_partial)
        n_full += is_full.to(tl.int32)
        n_partial += is_partial.to(tl.int32)
        if met is not None:
            plane = tl.num_programs(1).to(tl.int64) * tiles * nq
            o_met = (i_bh * tiles + i_tile) * nq + i_q
            tl.store(met + o_met, is_full.to(tl.int8))
            tl.store(met + plane + o_met, is_partial.to(tl.int8))
    _fill(full, n_full, tiles, CHUNK)
    _fill(partial, n_partial, tiles, CHUNK)
    tl.store(full_count + row, n_full)
    tl.store(partial_count + row, n_partial)


def vertical_lists(
    slashes: Tensor,
    spans: Tensor,
    reach: Tensor,
    q_blocks: Tensor,
    verticals: Tensor,
    size: int,
    wants_met: bool,
) -> tuple[Tensor, BlockLists, Tensor | None]:
    """The verticals that query blocks cover, and how they meet tiles of `size` verticals.

    verticals: int32 [B, H, C], ascending, C a multiple of size. The rest as in slash_lists().
    Returns
    covered: int32 [B, H, nq, ceil(C / 32)], a bit (compact.py) for each vertical that lies in a block
        which the query block computes whole.
    The tiles of each query block, in lists as wide as there are tiles. A tile is full where all of
        it is seen and nothing covered.
    If wants_met, bool [2, B, H, tiles, nq]: where a tile is full, and where it is partial.
    """
    batch, heads, count = verticals.shape
    device = verticals.device
    nq = len(q_blocks)
    tiles = count // size
    words = -(-count // 32)
    covered = torch.empty(batch, heads, nq, words, dtype=torch.int32, device=device)
    met = None
    if wants_met:
        met = torch.empty(2, batch, heads, tiles, nq, dtype=torch.bool, device=device)
    by_query = _new_lists(slashes, nq, tiles)
    inputs = (slashes.view(torch.uint8), spans, reach, q_blocks, verticals.contiguous())
    met_bytes = None if met is None else met.view(torch.int8)
    results = (covered.view(torch.int16), met_bytes, *by_query[:4])
    sizes = (heads, slashes.shape[-1], nq, count, tiles, 2 * words)
    options = dict(SIZE=size, CHUNK=min(_CHUNK, triton.next_power_of_2(tiles)), num_warps=1)
    _verticals_kernel[(nq, batch * heads)](*inputs, *results, *sizes, **options)
    return covered, by_query, met
