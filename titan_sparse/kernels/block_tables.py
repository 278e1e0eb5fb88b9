"""Block lists of a set of block diagonals, made on the GPU without a dense block mask and without waiting for the host.

A query block a and a KV block c meet if the diagonal a - c is on in one of the (at most two) spans that a touches, or
if c lies in a's dense range. A tile that the mask empties is left out; one that it leaves whole is listed apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 128


@triton.jit
def _selected(slashes, a, c, offset0, first0, offset1, first1, dense_from, valid):
    """Whether blocks a and c (vectors or scalars, broadcast) are computed whole; slashes points at one head's list."""
    delta = a - c
    past = valid & (delta >= 0)
    on0 = tl.load(slashes + offset0 + delta, mask=past & (offset0 >= 0) & (c >= first0), other=0)
    on1 = tl.load(slashes + offset1 + delta, mask=past & (offset1 >= 0) & (c >= first1), other=0)
    return past & ((c >= dense_from) | (on0 != 0) | (on1 != 0))


@triton.jit
def _append(table, count, flags, numbers, capacity):
    """Write the numbers whose flag is set behind the `count` entries already in table; returns the new count."""
    place = count + tl.cumsum(flags.to(tl.int32), 0) - 1
    tl.store(table + place, numbers, mask=flags & (place < capacity))
    return count + tl.sum(flags.to(tl.int32), 0)


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
    i_row, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    slashes += i_bh * entries
    spans += i_b * nq * 5
    reach += i_b * nq * 4
    rows, others = (nk, nq) if BY_KEY else (nq, nk)
    full += (i_bh * rows + i_row) * capacity
    partial += (i_bh * rows + i_row) * capacity
    n_full, n_partial = 0, 0
    for start in range(0, others, CHUNK):
        o_other = start + tl.arange(0, CHUNK)
        valid = o_other < others
        if BY_KEY:
            i_q, a = o_other, tl.load(q_blocks + o_other, mask=valid, other=0)
            c = tl.load(k_blocks + i_row) + tl.zeros_like(a)
        else:
            i_q = i_row + tl.zeros_like(o_other)
            c = tl.load(k_blocks + o_other, mask=valid, other=0)
            a = tl.load(q_blocks + i_row) + tl.zeros_like(c)
        s = spans + i_q * 5
        selected = _selected(
            slashes,
            a,
            c,
            tl.load(s, mask=valid, other=-1),
            tl.load(s + 1, mask=valid, other=0),
            tl.load(s + 2, mask=valid, other=-1),
            tl.load(s + 3, mask=valid, other=0),
            tl.load(s + 4, mask=valid, other=0),
            valid,
        )
        r = reach + i_q * 4
        begin = c * size
        seen = (
            selected
            & (tl.load(r, mask=valid, other=0) < begin + size)
            & (tl.load(r + 1, mask=valid, other=0) > begin)
        )
        whole = (tl.load(r + 2, mask=valid, other=0) <= begin) & (
            tl.load(r + 3, mask=valid, other=0) >= begin + size
        )
        n_full = _append(full, n_full, seen & whole, o_other, capacity)
        n_partial = _append(partial, n_partial, seen & (whole == 0), o_other, capacity)
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
    """full_count, full, partial_count, partial: int32 [B, H, n], [B, H, n, capacity], for query or (by_key) KV blocks.

    slashes: bool [B, H, E]. spans: int32 [B, nq, 5]: for both spans that a query block touches where its diagonals begin
    in slashes (-1: no span) and its first block, then the first block of the dense range. reach: int32 [B, nq, 4]: keys
    seen by any query of the block from..to, by all from..to. q_blocks [nq], k_blocks [nk]: int32 global numbers.
    More than `capacity` entries of a row are cut off: the caller knows a bound.
    """
    batch, heads, entries = slashes.shape
    nq, nk = len(q_blocks), len(k_blocks)
    n = nk if by_key else nq
    counts, tables = _new_lists(batch, heads, n, capacity, slashes.device)
    chunk = min(_CHUNK, triton.next_power_of_2(nq if by_key else nk))
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
        CHUNK=chunk,
        num_warps=4,
    )
    return counts[0], tables[0], counts[1], tables[1]


def _new_lists(
    batch: int, heads: int, n: int, capacity: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Memory for counts int32 [2, B, H, n] and lists int32 [2, B, H, n, capacity], of full and of partial tiles."""
    return (
        torch.empty(2, batch, heads, n, dtype=torch.int32, device=device),
        torch.empty(2, batch, heads, n, capacity, dtype=torch.int32, device=device),
    )


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
    i_tile, i_q, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b = i_bh // heads
    o_vertical = i_tile * SIZE + tl.arange(0, SIZE)
    inside = o_vertical < count
    position = tl.load(verticals + i_bh * count + o_vertical, mask=inside, other=0)
    s, r = spans + (i_b * nq + i_q) * 5, reach + (i_b * nq + i_q) * 4
    zero = tl.zeros_like(position)
    b_covered = _selected(
        slashes + i_bh * entries,
        tl.load(q_blocks + i_q) + zero,
        position // size,
        tl.load(s) + zero,
        tl.load(s + 1) + zero,
        tl.load(s + 2) + zero,
        tl.load(s + 3) + zero,
        tl.load(s + 4) + zero,
        inside,
    )
    bits = tl.sum(
        tl.reshape(b_covered.to(tl.int32), [SIZE // 16, 16]) << tl.arange(0, 16)[None, :], 1
    ).to(tl.int16)
    tl.store(
        covered + (i_bh * nq + i_q) * halves + i_tile * (SIZE // 16) + tl.arange(0, SIZE // 16),
        bits,
    )
    first, last = tl.min(position, 0), tl.max(position, 0)
    reached = (tl.load(r) <= last) & (tl.load(r + 1) > first)
    whole = (
        (tl.load(r + 2) <= first)
        & (tl.load(r + 3) > last)
        & (tl.sum(b_covered.to(tl.int32), 0) == 0)
    )
    tiles = tl.num_programs(0)
    tl.store(
        kind + (i_bh * nq + i_q) * tiles + i_tile,
        tl.where(reached, tl.where(whole, 2, 1), 0).to(tl.int8),
    )


def covered_verticals(
    slashes: Tensor, spans: Tensor, reach: Tensor, q_blocks: Tensor, verticals: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """covered: int32 [B, H, nq, ceil(C / 32)], a bit for each vertical that lies in a block which the query block computes
    whole (bits.py); kind: int8
    [B, H, nq, C / size] of each tile of verticals, 0 not seen, 1 partly, 2 wholly seen and not covered.

    verticals: int32 [B, H, C], ascending, C a multiple of size. The rest as in slash_lists().
    """
    (batch, heads, count), verticals = verticals.shape, verticals.contiguous()
    covered = torch.empty(
        batch, heads, len(q_blocks), -(-count // 32), dtype=torch.int32, device=verticals.device
    )
    kind = torch.empty(
        batch, heads, len(q_blocks), count // size, dtype=torch.int8, device=verticals.device
    )
    _verticals_kernel[(count // size, len(q_blocks), batch * heads)](
        slashes.view(torch.uint8),
        spans,
        reach,
        q_blocks,
        verticals,
        covered.view(torch.int16),
        kind,
        heads,
        slashes.shape[-1],
        len(q_blocks),
        count,
        size,
        2 * covered.shape[-1],
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
    i_row, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind += i_bh * rows * others + i_row * row_stride
    full += (i_bh * rows + i_row) * others
    partial += (i_bh * rows + i_row) * others
    n_full, n_partial = 0, 0
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
    """full_count, full, partial_count, partial: int32 [B, H, n], [B, H, n, m] of the kinds of covered_verticals(): for each
    query block the tiles of verticals, or (by_key) for each tile of verticals the query blocks; ascending, filled up with 0.

    kind: int8 [B, H, nq, tiles], contiguous.
    """
    batch, heads, nq, tiles = kind.shape
    rows, others, row_stride, stride = (tiles, nq, 1, tiles) if by_key else (nq, tiles, tiles, 1)
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
    kind = kind.mT if by_key else kind
    return *_ascending(kind == 2), *_ascending(kind == 1)


def _ascending(listed: Tensor) -> tuple[Tensor, Tensor]:
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    count = listed.sum(-1, dtype=torch.int32)
    inside = torch.arange(listed.shape[-1], device=listed.device) < count[..., None]
    return count, torch.where(inside, order, 0).int()
