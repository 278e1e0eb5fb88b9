"""The cheapest union of verticals and block diagonals whose mass reaches the recall target, verticals not sorted.

The plain-torch twin, titan_sparse/attention/patterns/joint.py, says what is chosen and calls these on a GPU. A program
of the first kernels looks at one block of verticals: it adds what they hold to the sums of the diagonals that they meet.
Diagonals are few. They are put in order of price, each vertical finds its place among them, and a walk along that order
finds where the target is reached. Columns beside the diagonals found are chosen by kernels/budget.py.

All sums are of integers, so that no order of additions shows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.budget import above_cut, key_of, smallest_cuts, target_of, units_of

_CHUNK = 1024
_COST_UNITS = tl.constexpr(2.0**32)


class Geometry(NamedTuple):
    """What lies where, for every layer the same: the fields of Segments and those of Incidence that are read here.

    N rows of masses of B sequences, K blocks of b tokens, T spans at a block, U blocks back, n spans, E diagonals,
    S = K b verticals. sequence: int32 [N]. segment: int32 [B, S + E], d for a vertical of span d, n + d for a diagonal, 2 n
    for none. bounds: int32 [B, 2 n, 5]. diagonal: int64 [B, K, T, U]. slot: int64 [B, K, b]. always: bool [B, S + E].
    free_verticals: int32 [B, n, 5].
    """

    sequence: Tensor
    segment: Tensor
    bounds: Tensor
    diagonal: Tensor
    slot: Tensor
    always: Tensor
    free_verticals: Tensor


@triton.jit
def _units_of_block(
    verticals, i_row, i_c, blocks, scale, U: tl.constexpr, U2: tl.constexpr, SIZE: tl.constexpr
):
    """Masses of a block's verticals in units, int64 [U2, SIZE]."""
    o_u, o = tl.arange(0, U2), tl.arange(0, SIZE)
    at = ((i_row * blocks + i_c) * U + o_u)[:, None] * SIZE + o[None, :]
    return units_of(tl.load(verticals + at, mask=(o_u < U)[:, None], other=0.0), scale)


@triton.jit
def _slots(slot, i_b, i_c, blocks, T: tl.constexpr, SIZE: tl.constexpr):
    """Which of the block's spans holds a vertical, [SIZE]."""
    if T == 1:
        return tl.zeros([SIZE], tl.int64)
    else:
        return tl.load(slot + (i_b * blocks + i_c) * SIZE + tl.arange(0, SIZE))


@triton.jit
def _diagonals_met(
    diagonal, i_b, i_c, i_t, blocks, entries, T: tl.constexpr, U: tl.constexpr, U2: tl.constexpr
):
    """The diagonals, [U2], that the block's verticals of its span i_t meet; and whether there are any."""
    o_u = tl.arange(0, U2)
    entry = tl.load(
        diagonal + ((i_b * blocks + i_c) * T + i_t) * U + o_u, mask=o_u < U, other=entries
    )
    return entry, entry < entries


@triton.jit
def _without_always(
    units,
    slots,
    diagonal,
    always,
    i_b,
    i_c,
    blocks,
    entries,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The same units, 0 for what is on in any case."""
    always += i_b * (blocks * SIZE + entries)
    for i_t in tl.static_range(T):
        entry, known = _diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
        on = tl.load(always + blocks * SIZE + entry, mask=known, other=0) != 0
        units = tl.where(on[:, None] & (slots == i_t)[None, :], 0, units)
    on = tl.load(always + i_c * SIZE + tl.arange(0, SIZE)) != 0
    return tl.where(on[None, :], 0, units)


@triton.jit
def _free_units(
    verticals,
    sequence,
    diagonal,
    slot,
    always,
    i_row,
    i_c,
    blocks,
    entries,
    scale,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A block's masses in units, 0 for what is on in any case; its verticals' slots, and its sequence."""
    i_b = tl.load(sequence + i_row).to(tl.int64)
    units = _units_of_block(verticals, i_row, i_c, blocks, scale, U, U2, SIZE)
    slots = _slots(slot, i_b, i_c, blocks, T, SIZE)
    return (
        _without_always(units, slots, diagonal, always, i_b, i_c, blocks, entries, T, U, U2, SIZE),
        slots,
        i_b,
    )


@triton.jit
def _vertical_prices(vertical, VERTICAL_COST: tl.constexpr, SIZE: tl.constexpr):
    return (vertical.to(tl.float64) * (SIZE / VERTICAL_COST)).to(tl.float32)


@triton.jit
def _price(whole, replaced, saved, at, stride, known, ROUNDS: tl.constexpr):
    """Prices from which down diagonals are cheaper than the verticals that they replace, after rounds of Newton's."""
    b_whole = tl.load(whole + at, mask=known, other=0)
    price = b_whole.to(tl.float32)
    for i in tl.static_range(ROUNDS):
        left = (b_whole - tl.load(replaced + i * stride + at, mask=known, other=0)).to(tl.float64)
        cost = 1.0 - tl.load(saved + i * stride + at, mask=known, other=0).to(tl.float64) * (
            1 / _COST_UNITS
        )
        price = tl.where(cost > 0, left / tl.where(cost > 0, cost, 1.0), price.to(tl.float64)).to(
            tl.float32
        )
    return price


@triton.jit
def _whole_kernel(
    verticals,
    sequence,
    diagonal,
    slot,
    always,
    total,
    whole,
    vertical_mass,
    blocks,
    entries,
    scale,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Diagonals' masses, all of them and without what is on in any case; and such masses of verticals."""
    i_c, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    every = _units_of_block(verticals, i_row, i_c, blocks, scale, U, U2, SIZE)
    slots = _slots(slot, i_b, i_c, blocks, T, SIZE)
    units = _without_always(
        every, slots, diagonal, always, i_b, i_c, blocks, entries, T, U, U2, SIZE
    )
    for i_t in tl.static_range(T):
        entry, known = _diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
        mine = (slots == i_t)[None, :]
        tl.atomic_add(
            total + i_row * entries + entry,
            tl.sum(tl.where(mine, every, 0), 1),
            mask=known,
            sem="relaxed",
        )
        tl.atomic_add(
            whole + i_row * entries + entry,
            tl.sum(tl.where(mine, units, 0), 1),
            mask=known,
            sem="relaxed",
        )
    tl.store(
        vertical_mass + (i_row * blocks + i_c) * SIZE + tl.arange(0, SIZE),
        tl.sum(units, 0).to(tl.float32),
    )


@triton.jit
def _replaced_kernel(
    verticals,
    sequence,
    diagonal,
    slot,
    always,
    whole,
    replaced,
    saved,
    blocks,
    entries,
    stride,
    scale,
    ROUND: tl.constexpr,
    VERTICAL_COST: tl.constexpr,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Mass and cost of the verticals that diagonals would replace at their prices of this round."""
    i_c, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    units, slots, i_b = _free_units(
        verticals,
        sequence,
        diagonal,
        slot,
        always,
        i_row,
        i_c,
        blocks,
        entries,
        scale,
        T,
        U,
        U2,
        SIZE,
    )
    vertical = tl.sum(units, 0)
    prices = _vertical_prices(vertical, VERTICAL_COST, SIZE)
    cost = (VERTICAL_COST * _COST_UNITS / SIZE) / tl.maximum(vertical, 1).to(tl.float64)
    share = (units.to(tl.float64) * cost[None, :]).to(tl.int64)
    for i_t in tl.static_range(T):
        entry, known = _diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
        at = i_row * entries + entry
        price = _price(whole, replaced, saved, at, stride, known, ROUND)
        pays = (slots == i_t)[None, :] & (prices[None, :] > price[:, None])
        at += ROUND * stride
        tl.atomic_add(replaced + at, tl.sum(tl.where(pays, units, 0), 1), mask=known, sem="relaxed")
        tl.atomic_add(saved + at, tl.sum(tl.where(pays, share, 0), 1), mask=known, sem="relaxed")


@triton.jit
def _price_kernel(
    whole, replaced, saved, price, entries, stride, ROUNDS: tl.constexpr, CHUNK: tl.constexpr
):
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    at = tl.program_id(1).to(tl.int64) * entries + o
    tl.store(
        price + at,
        _price(whole, replaced, saved, at, stride, o < entries, ROUNDS),
        mask=o < entries,
    )


@triton.jit
def _free_diagonals(bounds, i_b, span, length, n, mask):
    """From where to where a span's diagonals that are not always on lie among all E."""
    bound = bounds + (i_b * 2 * n + n + span) * 5
    begin, stop = (
        tl.load(bound, mask=mask, other=0) - length,
        tl.load(bound + 1, mask=mask, other=0) - length,
    )
    return tl.minimum(begin + tl.load(bound + 4, mask=mask, other=0), stop), stop


@triton.jit
def _order_kernel(
    price,
    sequence,
    segment,
    bounds,
    place,
    in_order,
    length,
    entries,
    n,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Diagonals in order of price, in each span from the highest down, equal ones by position: rank by counting.

    place: int32 [N, E], which diagonal comes where. in_order: fp32 [N, E], prices so. Nothing where always-on ones are.
    """
    i_row = tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    span = (
        tl.load(segment + i_b * (length + entries) + length + o, mask=o < entries, other=2 * n) - n
    )
    first, stop = _free_diagonals(bounds, i_b, span, length, n, span < n)
    mine = (span < n) & (o >= first)
    price += i_row * entries
    b_price, rank = tl.load(price + o, mask=mine, other=0.0), tl.zeros([ROWS], tl.int32)
    for start in range(
        tl.min(tl.where(mine, first, entries), 0), tl.max(tl.where(mine, stop, 0), 0), CHUNK
    ):
        o_other = (start + tl.arange(0, CHUNK))[None, :]
        other = tl.load(price + o_other, mask=o_other < entries, other=0.0)
        before = (other > b_price[:, None]) | ((other == b_price[:, None]) & (o_other < o[:, None]))
        rank += tl.sum(
            (before & (o_other >= first[:, None]) & (o_other < stop[:, None])).to(tl.int32), 1
        )
    tl.store(place + i_row * entries + first + rank, o, mask=mine)
    tl.store(in_order + i_row * entries + first + rank, b_price, mask=mine)


@triton.jit
def _held_kernel(
    verticals,
    sequence,
    diagonal,
    slot,
    always,
    segment,
    bounds,
    price,
    in_order,
    cut,
    held,
    ahead,
    blocks,
    entries,
    n,
    scale,
    VERTICAL_COST: tl.constexpr,
    STEPS: tl.constexpr,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """What verticals gain that pay before the diagonals that cover them and are among the most allowed (cut): held, by
    these diagonals, and ahead, by the first diagonal in order whose price is not above the vertical's."""
    i_c, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    units, slots, i_b = _free_units(
        verticals,
        sequence,
        diagonal,
        slot,
        always,
        i_row,
        i_c,
        blocks,
        entries,
        scale,
        T,
        U,
        U2,
        SIZE,
    )
    vertical, length, o = tl.sum(units, 0), blocks * SIZE, i_c * SIZE + tl.arange(0, SIZE)
    prices = _vertical_prices(vertical, VERTICAL_COST, SIZE)
    span = tl.load(segment + i_b * (length + entries) + o)
    allowed = (span < n) & above_cut(
        key_of(vertical.to(tl.float32)), o, cut + (i_row * n + span) * 3, span < n
    )
    gain = tl.zeros([SIZE], tl.int64)
    for i_t in tl.static_range(T):
        entry, known = _diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
        b_price = tl.load(price + i_row * entries + entry, mask=known, other=0.0)
        pays = (allowed & (slots == i_t))[None, :] & (prices[None, :] > b_price[:, None])
        b_held = tl.where(pays, units, 0)
        tl.atomic_add(held + i_row * entries + entry, tl.sum(b_held, 1), mask=known, sem="relaxed")
        gain += tl.sum(b_held, 0)
    low, stop = _free_diagonals(bounds, i_b, span, length, n, span < n)
    high = stop
    for _ in range(STEPS):
        middle, searched = (low + high) // 2, low < high
        above = tl.load(in_order + i_row * entries + middle, mask=searched, other=0.0) > prices
        low, high = (
            tl.where(searched & above, middle + 1, low),
            tl.where(searched & ~above, middle, high),
        )
    tl.atomic_add(
        ahead + i_row * entries + low, gain, mask=(gain > 0) & (low < stop), sem="relaxed"
    )


@triton.jit
def _span_total(x, begin, stop, CHUNK: tl.constexpr):
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(begin, stop, CHUNK):
        o = start + tl.arange(0, CHUNK)
        total += tl.load(x + o, mask=o < stop, other=0)
    return tl.sum(total, 0)


@triton.jit
def _walk_kernel(
    sequence,
    bounds,
    total,
    whole,
    held,
    ahead,
    place,
    spare,
    on,
    count,
    more,
    rows,
    length,
    entries,
    n,
    recall,
    CHUNK: tl.constexpr,
):
    """Along a span's diagonals in order of price until the target is reached. What is stored: see _Diagonals."""
    i = tl.program_id(0).to(tl.int64)
    i_row, i_span, i_b = i // n, i % n, tl.load(sequence + i // n).to(tl.int64)
    bound = bounds + (i_b * 2 * n + n + i_span) * 5
    begin, least, most = tl.load(bound) - length, tl.load(bound + 2), tl.load(bound + 3)
    first, stop = _free_diagonals(bounds, i_b, i_span, length, n, i_span < n)
    at, behind = i_row * entries, rows * entries
    every = _span_total(total + at, begin, stop, CHUNK)
    b_spare = every - target_of(every, recall)
    tl.store(spare + i, b_spare)
    tl.store(spare + rows * n + i, b_spare)
    for start in range(begin, first, CHUNK):
        o = start + tl.arange(0, CHUNK)
        tl.store(on + at + o, tl.full([CHUNK], 1, tl.int8), mask=o < first)
        tl.store(on + behind + at + o, tl.full([CHUNK], 1, tl.int8), mask=o < first)
    needed, reached = _span_total(whole + at, first, stop, CHUNK) - b_spare, tl.zeros([], tl.int64)
    with_last, without, out = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(first, stop, CHUNK):
        o = start + tl.arange(0, CHUNK)
        entry = tl.load(place + at + o, mask=o < stop, other=0)
        gain = tl.load(whole + at + entry, mask=o < stop, other=0) - tl.load(
            held + at + entry, mask=o < stop, other=0
        )
        both = gain + tl.load(ahead + at + o, mask=o < stop, other=0)
        after, rank = reached + tl.cumsum(both, 0), o - first
        wanted, floor = (
            (o < stop) & (gain > 0) & (after - gain < needed),
            (o < stop) & (rank < least),
        )
        on_with, on_without = (
            (wanted & (rank < most)) | floor,
            (wanted & (rank < most) & (after < needed)) | floor,
        )
        tl.store(on + at + entry, on_with.to(tl.int8), mask=o < stop)
        tl.store(on + behind + at + entry, on_without.to(tl.int8), mask=o < stop)
        reached += tl.sum(both, 0)
        with_last += tl.sum(on_with.to(tl.int32), 0)
        without += tl.sum(on_without.to(tl.int32), 0)
        out += tl.sum((wanted & (rank >= most)).to(tl.int32), 0)
    tl.store(count + i, with_last)
    tl.store(count + rows * n + i, without)
    tl.store(more + i, (out > 0).to(tl.int8))


@triton.jit
def _rest_kernel(
    verticals,
    sequence,
    diagonal,
    slot,
    always,
    on,
    rest,
    rows,
    blocks,
    entries,
    scale,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Masses of verticals that neither choice of diagonals holds, fp32 [2, N, S]."""
    i_c, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    units, slots, i_b = _free_units(
        verticals,
        sequence,
        diagonal,
        slot,
        always,
        i_row,
        i_c,
        blocks,
        entries,
        scale,
        T,
        U,
        U2,
        SIZE,
    )
    for i in tl.static_range(2):
        left = units
        for i_t in tl.static_range(T):
            entry, known = _diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
            b_on = tl.load(on + (i * rows + i_row) * entries + entry, mask=known, other=0) != 0
            left = tl.where(b_on[:, None] & (slots == i_t)[None, :], 0, left)
        at = ((i * rows + i_row) * blocks + i_c) * SIZE + tl.arange(0, SIZE)
        tl.store(rest + at, tl.sum(left, 0).to(tl.float32))


@triton.jit
def _mark_kernel(
    rest,
    on,
    sequence,
    segment,
    always,
    cut,
    short,
    count,
    selected,
    rows,
    length,
    entries,
    n,
    size,
    VERTICAL_COST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Of each span the cheaper of the two choices that reaches its target, the first if both do at the same cost."""
    i_row = tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    segment += i_b * (length + entries)
    b_segment = tl.load(segment + o, mask=o < length + entries, other=2 * n)
    known, is_vertical = b_segment < 2 * n, o < length
    first = i_row * n + b_segment % n
    second = first + rows * n
    verticals = tl.load(cut + second * 3 + 2, mask=known, other=0) - tl.load(
        cut + first * 3 + 2, mask=known, other=0
    )
    diagonals = tl.load(count + second, mask=known, other=0) - tl.load(
        count + first, mask=known, other=0
    )
    cheaper = verticals.to(tl.float64) * VERTICAL_COST + (diagonals * size).to(tl.float64) < 0
    cheaper = cheaper & (tl.load(short + second, mask=known, other=1) == 0)
    row, at = tl.where(cheaper, i_row + rows, i_row), tl.where(cheaper, second, first)
    key = key_of(tl.load(rest + row * length + o, mask=known & is_vertical, other=0.0))
    on_vertical = above_cut(key, o, cut + at * 3, known & is_vertical)
    on_diagonal = tl.load(on + row * entries + o - length, mask=known & (o >= length), other=0) != 0
    b_always = tl.load(always + i_b * (length + entries) + o, mask=known, other=0) != 0
    b_on = known & (b_always | (is_vertical & on_vertical) | on_diagonal)
    tl.store(selected + i_row * (length + entries) + o, b_on.to(tl.int8), mask=o < length + entries)


class _Diagonals(NamedTuple):
    """spare: int64 [2, N, n], mass that may be missing, twice. on: int8 [2, N, E], the diagonals with the one that
    crosses the target and without. count: int32 [2, N, n], of these, always-on ones left out. more: int8 [N, n],
    whether a cap kept some out.
    """

    spare: Tensor
    on: Tensor
    count: Tensor
    more: Tensor


def smallest_union(
    verticals: Tensor, of: Geometry, recall: float, scale: float, vertical_cost: float, rounds: int
) -> tuple[Tensor, Tensor]:
    """For each span of each row, verticals and diagonals of least cost that hold `recall` of its mass together.

    verticals: fp32 [N, K, U, b], b a power of 2, masses by block back. scale: units in a mass of 1, so that a span holds no
    more than 2**53. vertical_cost: of a pair of tokens in verticals, that of one in blocks being 1. rounds: of Newton's method.
    Returns selected bool [N, S + E] and capped bool [N, 2 n]: whether the most verticals, the most diagonals kept a span
    below its target.

    Launches: 7 here and one a round, 7 in each of two calls of smallest_cuts() (short spans: 9 or 17), and 7 of torch:
    memory to clear, `sequence` twice, capped. Memory: 13 bytes a vertical and row, and the histograms.
    """
    verticals, of = verticals.contiguous(), Geometry(*(x.contiguous() for x in of))
    rows, blocks, back, size = verticals.shape
    length, n = blocks * size, of.free_verticals.shape[1]
    entries = of.segment.shape[1] - length
    masses = (verticals, of.sequence, of.diagonal, of.slot, of.always.view(torch.int8))
    block = dict(
        blocks=blocks,
        entries=entries,
        scale=scale,
        T=of.diagonal.shape[2],
        U=back,
        U2=triton.next_power_of_2(back),
        SIZE=size,
    )
    block["num_warps"] = min(max(block["U2"] * size // 256, 1), 8)
    found = _diagonals(masses, of, block, recall, vertical_cost, rounds)
    rest = verticals.new_empty(2 * rows, length)
    _rest_kernel[(blocks, rows)](*masses, found.on, rest, rows, **block)
    cut = smallest_cuts(
        rest, of.sequence.repeat(2), of.segment, of.free_verticals, 1.0, spare=found.spare
    )
    selected = torch.empty(rows, length + entries, dtype=torch.bool, device=verticals.device)
    _mark_kernel[(triton.cdiv(length + entries, _CHUNK), rows)](
        rest,
        found.on,
        of.sequence,
        of.segment,
        masses[-1],
        cut.at,
        cut.capped.view(torch.int8),
        found.count,
        selected.view(torch.int8),
        rows,
        length,
        entries,
        n,
        size,
        VERTICAL_COST=vertical_cost,
        CHUNK=_CHUNK,
    )
    short = cut.capped[:rows]
    return selected, torch.cat([short, short & found.more.view(torch.bool)], dim=1)


def _diagonals(
    masses: tuple, of: Geometry, block: dict, recall: float, vertical_cost: float, rounds: int
) -> _Diagonals:
    """masses: first arguments of kernels that look at blocks of verticals; block: their last ones."""
    (rows, blocks), entries, n = masses[0].shape[:2], block["entries"], of.free_verticals.shape[1]
    length, grid, new = blocks * block["SIZE"], (blocks, rows), masses[0].new_empty
    sums = masses[0].new_zeros(4 + 2 * rounds, rows, entries, dtype=torch.int64)
    total, whole, held, ahead = sums[:4].unbind()
    newton, stride = (whole, sums[4:], sums[4 + rounds :]), rows * entries
    vertical_mass = new(rows, length)
    _whole_kernel[grid](*masses, total, whole, vertical_mass, **block)
    for i in range(rounds):
        _replaced_kernel[grid](
            *masses, *newton, stride=stride, ROUND=i, VERTICAL_COST=vertical_cost, **block
        )
    price, in_order, place = (
        new(rows, entries, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.int32)
    )
    _price_kernel[(triton.cdiv(entries, 128), rows)](
        *newton, price, entries, stride, ROUNDS=rounds, CHUNK=128
    )
    _order_kernel[(triton.cdiv(entries, 64), rows)](
        price,
        of.sequence,
        of.segment,
        of.bounds,
        place,
        in_order,
        length,
        entries,
        n,
        ROWS=64,
        CHUNK=64,
    )
    allowed = smallest_cuts(vertical_mass, of.sequence, of.segment, of.free_verticals, 1.0)
    _held_kernel[grid](
        *masses,
        of.segment,
        of.bounds,
        price,
        in_order,
        allowed.at,
        held,
        ahead,
        n=n,
        VERTICAL_COST=vertical_cost,
        STEPS=entries.bit_length(),
        **block,
    )
    found = _Diagonals(
        new(2, rows, n, dtype=torch.int64),
        new(2, rows, entries, dtype=torch.int8).zero_(),
        new(2, rows, n, dtype=torch.int32),
        new(rows, n, dtype=torch.int8),
    )
    _walk_kernel[(rows * n,)](
        of.sequence,
        of.bounds,
        total,
        whole,
        held,
        ahead,
        place,
        *found,
        rows,
        length,
        entries,
        n,
        round(recall * 2**53),
        CHUNK=_CHUNK,
    )
    return found
