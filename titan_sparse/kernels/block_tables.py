"""Block lists of a set of block diagonals, made on the GPU.

They take no dense block mask, and the host does not wait for them.

A query block a and a KV block c meet if the diagonal a - c is on in one of the (at most two) spans
that a touches, or if c lies in a's dense range. A tile that the mask empties is left out; one that
it leaves whole is listed apart.

kind_lists_naive() is here. The twins of slash_lists() and covered_verticals() take any pattern's
index and any mask: block_tiles() and vertical_tiles() of titan_sparse/attention/tiles/blocks.py.

In the kernels i_bh is a sequence and head, i_b the sequence, i_q a query block's place in q_blocks.
`spans` are five numbers a query block, `reach` four, as slash_lists() documents them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 128
"""Tiles of a row that a program looks at together."""


@triton.jit
def _selected(slashes, a, c, offset0, first0, offset1, first1, dense_from, valid):
    """Whether blocks a and c (vectors or scalars, broadcast) are computed whole.

    slashes: pointer to one head's list. The rest: a's five numbers of `spans`.
    """
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
    slashes,
    spans,
    reach,
    q_blocks,
    k_blocks,
    full_count,
    full,
    partial_count,
    partial,
    heads,
    entries,
    nq,
    nk,
    capacity,
    size,
    BY_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The full and the partial tiles of one row: of a query block, or (BY_KEY) of a KV block."""
    i_row = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    slashes += i_bh * entries
    spans += i_b * nq * 5
    reach += i_b * nq * 4
    if BY_KEY:
        rows = nk
        others = nq
    else:
        rows = nq
        others = nk
    full += (i_bh * rows + i_row) * capacity
    partial += (i_bh * rows + i_row) * capacity
    n_full = 0
    n_partial = 0
    for start in range(0, others, CHUNK):
        # [CHUNK]: query block a and KV block c of each tile.
        o_other = start + tl.arange(0, CHUNK)
        valid = o_other < others
        if BY_KEY:
            i_q = o_other
            a = tl.load(q_blocks + o_other, mask=valid, other=0)
            c = tl.load(k_blocks + i_row) + tl.zeros_like(a)
        else:
            i_q = i_row + tl.zeros_like(o_other)
            c = tl.load(k_blocks + o_other, mask=valid, other=0)
            a = tl.load(q_blocks + i_row) + tl.zeros_like(c)
        span = spans + i_q * 5
        selected = _selected(
            slashes,
            a,
            c,
            tl.load(span, mask=valid, other=-1),
            tl.load(span + 1, mask=valid, other=0),
            tl.load(span + 2, mask=valid, other=-1),
            tl.load(span + 3, mask=valid, other=0),
            tl.load(span + 4, mask=valid, other=0),
            valid,
        )

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
        n_full = _append(full, n_full, listed & whole, o_other, capacity)
        n_partial = _append(partial, n_partial, listed & (whole == 0), o_other, capacity)
    _fill(full, n_full, capacity, CHUNK)
    _fill(partial, n_partial, capacity, CHUNK)
    tl.store(full_count + i_bh * rows + i_row, tl.minimum(n_full, capacity))
    tl.store(partial_count + i_bh * rows + i_row, tl.minimum(n_partial, capacity))


def slash_lists(
    slashes: Tensor,
    spans: Tensor,
    reach: Tensor,
    q_blocks: Tensor,
    k_blocks: Tensor,
    size: int,
    capacity: int,
    by_key: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """full_count, full, partial_count, partial for each of n query or (by_key) KV blocks.

    Counts are int32 [B, H, n], lists int32 [B, H, n, capacity], ascending, filled up with 0.

    slashes: bool [B, H, E], which block diagonals are on.
    spans: int32 [B, nq, 5], for both spans that a query block touches where its diagonals begin in
        slashes (-1: no span) and its first block, then the first block of the dense range.
    reach: int32 [B, nq, 4], keys seen by any query of the block from..to, by all from..to.
    q_blocks, k_blocks: int32 [nq] and [nk], global numbers.
    size: tokens of a block.
    capacity: more entries of a row are cut off; the caller knows a bound.
    """
    batch, heads, entries = slashes.shape
    nq = len(q_blocks)
    nk = len(k_blocks)
    n = nk if by_key else nq
    others = nq if by_key else nk
    counts, tables = _new_lists(batch, heads, n, capacity, slashes.device)
    _lists_kernel[(n, batch * heads)](
        slashes.view(torch.uint8),
        spans,
        reach,
        q_blocks,
        k_blocks,
        counts[0],
        tables[0],
        counts[1],
        tables[1],
        heads,
        entries,
        nq,
        nk,
        capacity,
        size,
        BY_KEY=by_key,
        CHUNK=min(_CHUNK, triton.next_power_of_2(others)),
        num_warps=4,
    )
    return counts[0], tables[0], counts[1], tables[1]


def _new_lists(
    batch: int, heads: int, n: int, capacity: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Memory for counts int32 [2, B, H, n] and lists int32 [2, B, H, n, capacity].

    Those of full tiles come first, those of partial tiles second.
    """
    counts = torch.empty(2, batch, heads, n, dtype=torch.int32, device=device)
    tables = torch.empty(2, batch, heads, n, capacity, dtype=torch.int32, device=device)
    return counts, tables


@triton.jit
def _verticals_kernel(
    slashes,
    spans,
    reach,
    q_blocks,
    verticals,
    covered,
    kind,
    heads,
    entries,
    nq,
    count,
    size,
    halves,
    SIZE: tl.constexpr,
):
    """Which verticals of a tile a query block covers, and the tile's kind.

    halves: int16 words of a query block in `covered`; a tile of 16 verticals fills one of them.
    """
    i_tile = tl.program_id(0)
    i_q = tl.program_id(1)
    i_bh = tl.program_id(2).to(tl.int64)
    i_b = i_bh // heads
    tiles = tl.num_programs(0)
    # [SIZE]
    o_vertical = i_tile * SIZE + tl.arange(0, SIZE)
    inside = o_vertical < count
    position = tl.load(verticals + i_bh * count + o_vertical, mask=inside, other=0)
    span = spans + (i_b * nq + i_q) * 5
    seen = reach + (i_b * nq + i_q) * 4
    zero = tl.zeros_like(position)
    b_covered = _selected(
        slashes + i_bh * entries,
        tl.load(q_blocks + i_q) + zero,
        position // size,
        tl.load(span) + zero,
        tl.load(span + 1) + zero,
        tl.load(span + 2) + zero,
        tl.load(span + 3) + zero,
        tl.load(span + 4) + zero,
        inside,
    ).to(tl.int32)
    # [SIZE / 16, 16] -> [SIZE / 16]
    by_word = tl.reshape(b_covered, [SIZE // 16, 16])
    bits = tl.sum(by_word << tl.arange(0, 16)[None, :], 1).to(tl.int16)
    o_word = i_tile * (SIZE // 16) + tl.arange(0, SIZE // 16)
    tl.store(covered + (i_bh * nq + i_q) * halves + o_word, bits)

    # Verticals ascend, so that the first and the last one bound the tile.
    first = tl.min(position, 0)
    last = tl.max(position, 0)
    reached = (tl.load(seen) <= last) & (tl.load(seen + 1) > first)
    all_seen = (tl.load(seen + 2) <= first) & (tl.load(seen + 3) > last)
    whole = all_seen & (tl.sum(b_covered, 0) == 0)
    b_kind = tl.where(reached, tl.where(whole, 2, 1), 0)
    tl.store(kind + (i_bh * nq + i_q) * tiles + i_tile, b_kind.to(tl.int8))


def covered_verticals(
    slashes: Tensor, spans: Tensor, reach: Tensor, q_blocks: Tensor, verticals: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """What query blocks cover of the verticals, and how they see tiles of `size` verticals.

    verticals: int32 [B, H, C], ascending, C a multiple of size. The rest as in slash_lists().
    Returns
    covered: int32 [B, H, nq, ceil(C / 32)], a bit (bits.py) for each vertical that lies in a block
        which the query block computes whole.
    kind: int8 [B, H, nq, C / size], of each tile of verticals: 0 not seen, 1 partly, 2 wholly seen
        and not covered.
    """
    batch, heads, count = verticals.shape
    verticals = verticals.contiguous()
    device = verticals.device
    nq = len(q_blocks)
    words = -(-count // 32)
    covered = torch.empty(batch, heads, nq, words, dtype=torch.int32, device=device)
    kind = torch.empty(batch, heads, nq, count // size, dtype=torch.int8, device=device)
    _verticals_kernel[(count // size, nq, batch * heads)](
        slashes.view(torch.uint8),
        spans,
        reach,
        q_blocks,
        verticals,
        covered.view(torch.int16),
        kind,
        heads,
        slashes.shape[-1],
        nq,
        count,
        size,
        2 * words,
        SIZE=size,
        num_warps=1,
    )
    return covered, kind


@triton.jit
def _kinds_kernel(
    kind,
    full_count,
    full,
    partial_count,
    partial,
    rows,
    others,
    row_stride,
    stride,
    CHUNK: tl.constexpr,
):
    """The full and the partial tiles of one row of a table of kinds.

    row_stride, stride: from one row to the next, and from one tile of a row to the next.
    """
    i_row = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    kind += i_bh * rows * others + i_row * row_stride
    full += (i_bh * rows + i_row) * others
    partial += (i_bh * rows + i_row) * others
    n_full = 0
    n_partial = 0
    for start in range(0, others, CHUNK):
        o_other = start + tl.arange(0, CHUNK)
        b_kind = tl.load(kind + o_other * stride, mask=o_other < others, other=0)
        n_full = _append(full, n_full, b_kind == 2, o_other, others)
        n_partial = _append(partial, n_partial, b_kind == 1, o_other, others)
    _fill(full, n_full, others, CHUNK)
    _fill(partial, n_partial, others, CHUNK)
    tl.store(full_count + i_bh * rows + i_row, n_full)
    tl.store(partial_count + i_bh * rows + i_row, n_partial)


def kind_lists(kind: Tensor, by_key: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """full_count, full, partial_count, partial: lists of the kinds of covered_verticals().

    For each query block they list the tiles of verticals, or (by_key) for each tile of verticals
    the query blocks. Counts are int32 [B, H, n], lists int32 [B, H, n, m], ascending, filled up
    with 0.

    kind: int8 [B, H, nq, tiles], contiguous.
    """
    batch, heads, nq, tiles = kind.shape
    if by_key:
        rows, others = tiles, nq
        row_stride, stride = 1, tiles
    else:
        rows, others = nq, tiles
        row_stride, stride = tiles, 1
    counts, tables = _new_lists(batch, heads, rows, others, kind.device)
    _kinds_kernel[(rows, batch * heads)](
        kind,
        counts[0],
        tables[0],
        counts[1],
        tables[1],
        rows,
        others,
        row_stride,
        stride,
        CHUNK=min(_CHUNK, triton.next_power_of_2(others)),
        num_warps=1,
    )
    return counts[0], tables[0], counts[1], tables[1]


def kind_lists_naive(kind: Tensor, by_key: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The twin of kind_lists()."""
    if by_key:
        kind = kind.mT
    full_count, full = _ascending(kind == 2)
    partial_count, partial = _ascending(kind == 1)
    return full_count, full, partial_count, partial


def _ascending(listed: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, H, n, m] -> counts int32 [B, H, n] and numbers int32 [B, H, n, m], filled with 0."""
    # A stable sort of the flags brings the listed numbers to the front, ascending.
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    count = listed.sum(-1, dtype=torch.int32)
    inside = torch.arange(listed.shape[-1], device=listed.device) < count[..., None]
    return count, torch.where(inside, order, 0).int()
