"""The diagonals that are chosen: along their order of price until the target is reached."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.budget import Segments, smallest_cuts
from titan_sparse.kernels.budget.kernel import above_cut, key_of, target_of
from titan_sparse.kernels.joint.incidence import VERTICAL_COST
from titan_sparse.kernels.joint.prices import price_diagonals
from titan_sparse.kernels.joint.shared import (
    Problem,
    diagonals_met,
    free_diagonals,
    free_units,
    vertical_prices,
)

_CHUNK = 1024
"""Diagonals of a step of the walk."""


class ChosenDiagonals(NamedTuple):
    """Two choices of diagonals of N rows: with the one that crosses the target, and without it.

    spare: int64 [2, N, n], mass in units that may be missing, the same for both choices.
    on: int8 [2, N, E], the diagonals of each choice.
    count: int32 [2, N, n], how many these are, always-on ones left out.
    more: int8 [N, n], whether a cap kept some out.
    """

    spare: Tensor
    on: Tensor
    count: Tensor
    more: Tensor


def choose_diagonals(problem: Problem, recall: float) -> ChosenDiagonals:
    """The diagonals above the price at which `recall` of a span's mass is reached.

    Launches: those of price_diagonals() and smallest_cuts(), two, and a memset.
    """
    rows = problem.rows
    entries = problem.entries
    n = problem.n
    new_empty = problem.verticals.new_empty
    priced = price_diagonals(problem)

    # No more verticals count than the cap on them lets in.
    free_verticals = Segments(problem.sequence, problem.segment, problem.free_verticals)
    allowed = smallest_cuts(priced.vertical_mass, free_verticals, 1.0)
    _held_kernel[problem.block_grid](
        **problem.block_arguments(),
        segment=problem.segment,
        bounds=problem.bounds,
        price=priced.price,
        in_order=priced.in_order,
        cut=allowed.at,
        held=priced.held,
        ahead=priced.ahead,
        n=n,
        VERTICAL_COST=VERTICAL_COST,
        STEPS=entries.bit_length(),
    )
    chosen = ChosenDiagonals(
        spare=new_empty(2, rows, n, dtype=torch.int64),
        on=new_empty(2, rows, entries, dtype=torch.int8).zero_(),
        count=new_empty(2, rows, n, dtype=torch.int32),
        more=new_empty(rows, n, dtype=torch.int8),
    )
    _walk_kernel[(rows * n,)](
        problem.sequence,
        problem.bounds,
        priced.total,
        priced.whole,
        priced.held,
        priced.ahead,
        priced.place,
        chosen.spare,
        chosen.on,
        chosen.count,
        chosen.more,
        rows,
        problem.length,
        entries,
        n,
        round(recall * 2**53),
        CHUNK=_CHUNK,
    )
    return chosen


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
    """What verticals gain that pay before the diagonals that cover them, and are allowed (cut).

    It is added up twice. held: int64 [N, E], by the diagonals that cover them. ahead: int64 [N, E],
    by place in order of price: at the first diagonal whose price is not above the vertical's.
    STEPS: of a binary search among E diagonals.
    """
    i_c = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    # [U2, SIZE]
    units, slots, i_b = free_units(
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
    # [SIZE]
    vertical = tl.sum(units, 0)
    length = blocks * SIZE
    o = i_c * SIZE + tl.arange(0, SIZE)
    prices = vertical_prices(vertical, VERTICAL_COST, SIZE)
    span = tl.load(segment + i_b * (length + entries) + o)
    key = key_of(vertical.to(tl.float32))
    allowed = (span < n) & above_cut(key, o, cut + (i_row * n + span) * 3, span < n)
    gain = tl.zeros([SIZE], tl.int64)
    for i_t in tl.static_range(T):
        entry, known = diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
        at = i_row * entries + entry
        b_price = tl.load(price + at, mask=known, other=0.0)
        pays = (allowed & (slots == i_t))[None, :] & (prices[None, :] > b_price[:, None])
        b_held = tl.where(pays, units, 0)
        tl.atomic_add(held + at, tl.sum(b_held, 1), mask=known, sem="relaxed")
        gain += tl.sum(b_held, 0)

    # Each vertical searches its place among its span's diagonals, which descend in price.
    low, stop = free_diagonals(bounds, i_b, span, length, n, span < n)
    high = stop
    for _ in range(STEPS):
        middle = (low + high) // 2
        searched = low < high
        middle_price = tl.load(in_order + i_row * entries + middle, mask=searched, other=0.0)
        above = middle_price > prices
        low = tl.where(searched & above, middle + 1, low)
        high = tl.where(searched & ~above, middle, high)
    # What is behind the last diagonal comes before none.
    is_ahead = (gain > 0) & (low < stop)
    tl.atomic_add(ahead + i_row * entries + low, gain, mask=is_ahead, sem="relaxed")


@triton.jit
def _span_total(values, begin, stop, CHUNK: tl.constexpr):
    """Sum of int64 values from begin to stop."""
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(begin, stop, CHUNK):
        o = start + tl.arange(0, CHUNK)
        total += tl.load(values + o, mask=o < stop, other=0)
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
    """Along a span's diagonals in order of price until the target is reached.

    Stored are the fields of ChosenDiagonals: spare, on, count, more.
    """
    i = tl.program_id(0).to(tl.int64)
    i_row = i // n
    i_span = i % n
    i_b = tl.load(sequence + i_row).to(tl.int64)
    bound = bounds + (i_b * 2 * n + n + i_span) * 5
    begin = tl.load(bound) - length
    least = tl.load(bound + 2)
    most = tl.load(bound + 3)
    first, stop = free_diagonals(bounds, i_b, i_span, length, n, i_span < n)
    at = i_row * entries
    # The second choice lies this far behind the first.
    behind = rows * entries

    every = _span_total(total + at, begin, stop, CHUNK)
    b_spare = every - target_of(every, recall)
    tl.store(spare + i, b_spare)
    tl.store(spare + rows * n + i, b_spare)

    # What is always on, which is on in both choices.
    for start in range(begin, first, CHUNK):
        o = start + tl.arange(0, CHUNK)
        tl.store(on + at + o, tl.full([CHUNK], 1, tl.int8), mask=o < first)
        tl.store(on + behind + at + o, tl.full([CHUNK], 1, tl.int8), mask=o < first)

    needed = _span_total(whole + at, first, stop, CHUNK) - b_spare
    reached = tl.zeros([], tl.int64)
    with_last = tl.zeros([], tl.int32)
    without_last = tl.zeros([], tl.int32)
    left_out = tl.zeros([], tl.int32)
    for start in range(first, stop, CHUNK):
        o = start + tl.arange(0, CHUNK)
        inside = o < stop
        rank = o - first
        entry = tl.load(place + at + o, mask=inside, other=0)
        b_whole = tl.load(whole + at + entry, mask=inside, other=0)
        b_held = tl.load(held + at + entry, mask=inside, other=0)
        # What a diagonal adds to the verticals that it covers, and with it the verticals that come
        # between the diagonal before and this one.
        gain = b_whole - b_held
        both = gain + tl.load(ahead + at + o, mask=inside, other=0)
        after = reached + tl.cumsum(both, 0)

        # Diagonals are wanted while what comes before them does not reach the target.
        wanted = inside & (gain > 0) & (after - gain < needed)
        floor = inside & (rank < least)
        on_with_last = (wanted & (rank < most)) | floor
        on_without_last = (wanted & (rank < most) & (after < needed)) | floor
        tl.store(on + at + entry, on_with_last.to(tl.int8), mask=inside)
        tl.store(on + behind + at + entry, on_without_last.to(tl.int8), mask=inside)
        reached += tl.sum(both, 0)
        with_last += tl.sum(on_with_last.to(tl.int32), 0)
        without_last += tl.sum(on_without_last.to(tl.int32), 0)
        left_out += tl.sum((wanted & (rank >= most)).to(tl.int32), 0)
    tl.store(count + i, with_last)
    tl.store(count + rows * n + i, without_last)
    tl.store(more + i, (left_out > 0).to(tl.int8))
