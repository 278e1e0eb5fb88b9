"""Masses of the diagonals, their prices, and the diagonals in order of price."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.joint.incidence import COST_UNITS, ROUNDS, VERTICAL_COST
from titan_sparse.kernels.joint.shared import (
    Problem,
    diagonals_met,
    free_diagonals,
    free_units,
    slots_of_block,
    units_of_block,
    vertical_prices,
    without_always,
)

_COST_UNITS = tl.constexpr(COST_UNITS)


class PricedDiagonals(NamedTuple):
    """Diagonals, their prices and what they hold, of N rows.

    total: int64 [N, E], the diagonals' masses in units, all of them.
    whole: int64 [N, E], those without what is on in any case.
    held, ahead: int64 [N, E], zeros, for walk.py.
    vertical_mass: fp32 [N, S], masses of verticals in units, without what is on in any case.
    price: fp32 [N, E], at and below which a diagonal is cheaper than the verticals it replaces.
    place: int32 [N, E], which diagonal comes where in order of price.
    in_order: fp32 [N, E], the prices in that order.
    """

    total: Tensor
    whole: Tensor
    held: Tensor
    ahead: Tensor
    vertical_mass: Tensor
    price: Tensor
    place: Tensor
    in_order: Tensor


def price_diagonals(problem: Problem) -> PricedDiagonals:
    """The prices from which down diagonals replace verticals. 3 launches, one a round, a memset."""
    rows = problem.rows
    entries = problem.entries
    new_empty = problem.verticals.new_empty
    block = problem.block_arguments()

    # One memset clears all sums, [4 + 2 ROUNDS, N, E].
    sums = problem.verticals.new_zeros(4 + 2 * ROUNDS, rows, entries, dtype=torch.int64)
    total, whole, held, ahead = sums[:4].unbind()
    # [ROUNDS, N, E] each: a round reads the sums of the rounds before it, and adds up its own.
    replaced = sums[4:]
    saved = sums[4 + ROUNDS :]
    stride = rows * entries

    vertical_mass = new_empty(rows, problem.length)
    _whole_kernel[problem.block_grid](
        **block, total=total, whole=whole, vertical_mass=vertical_mass
    )
    for i in range(ROUNDS):
        _replaced_kernel[problem.block_grid](
            **block,
            whole=whole,
            replaced=replaced,
            saved=saved,
            stride=stride,
            ROUND=i,
            VERTICAL_COST=VERTICAL_COST,
        )
    price = new_empty(rows, entries)
    _price_kernel[(triton.cdiv(entries, 128), rows)](
        whole, replaced, saved, price, entries, stride, ROUNDS=ROUNDS, CHUNK=128
    )
    in_order = new_empty(rows, entries)
    place = new_empty(rows, entries, dtype=torch.int32)
    _order_kernel[(triton.cdiv(entries, 64), rows)](
        price,
        problem.sequence,
        problem.segment,
        problem.bounds,
        place,
        in_order,
        problem.length,
        entries,
        problem.n,
        ROWS=64,
        CHUNK=64,
    )
    return PricedDiagonals(total, whole, held, ahead, vertical_mass, price, place, in_order)


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
    """What a block's verticals add to PricedDiagonals.total and whole; and its vertical_mass."""
    i_c = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    # [U2, SIZE]
    every = units_of_block(verticals, i_row, i_c, blocks, scale, U, U2, SIZE)
    slots = slots_of_block(slot, i_b, i_c, blocks, T, SIZE)
    units = without_always(
        every, slots, diagonal, always, i_b, i_c, blocks, entries, T, U, U2, SIZE
    )
    for i_t in tl.static_range(T):
        entry, known = diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
        mine = (slots == i_t)[None, :]
        at = i_row * entries + entry
        b_total = tl.sum(tl.where(mine, every, 0), 1)
        b_whole = tl.sum(tl.where(mine, units, 0), 1)
        tl.atomic_add(total + at, b_total, mask=known, sem="relaxed")
        tl.atomic_add(whole + at, b_whole, mask=known, sem="relaxed")
    o = (i_row * blocks + i_c) * SIZE + tl.arange(0, SIZE)
    tl.store(vertical_mass + o, tl.sum(units, 0).to(tl.float32))


@triton.jit
def _price_after_rounds(whole, replaced, saved, at, stride, known, ROUNDS: tl.constexpr):
    """Prices after some rounds of Newton's method.

    From these prices down diagonals are cheaper than the verticals that they replace. The gain
    (D - P) - price (1 - Q) is concave in the price, and the search begins above.
    at: the diagonals' places in `whole`. stride: from one round's sums to the next's.
    """
    b_whole = tl.load(whole + at, mask=known, other=0)
    price = b_whole.to(tl.float32)
    for i in tl.static_range(ROUNDS):
        b_replaced = tl.load(replaced + i * stride + at, mask=known, other=0)
        b_saved = tl.load(saved + i * stride + at, mask=known, other=0)
        left = (b_whole - b_replaced).to(tl.float64)  # D - P
        cost = 1.0 - b_saved.to(tl.float64) * (1 / _COST_UNITS)  # 1 - Q
        # Where the verticals cost more than the diagonal the price stays.
        quotient = left / tl.where(cost > 0, cost, 1.0)
        price = tl.where(cost > 0, quotient, price.to(tl.float64)).to(tl.float32)
    return price


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
    """Mass and cost of the verticals that diagonals would replace at their prices of this round.

    replaced, saved: int64 [ROUNDS, N, E], in units and in 1 / COST_UNITS. stride: N E.
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
    prices = vertical_prices(vertical, VERTICAL_COST, SIZE)
    # A vertical's cost is shared out among its diagonals by the mass that they hold of it.
    cost = (VERTICAL_COST * _COST_UNITS / SIZE) / tl.maximum(vertical, 1).to(tl.float64)
    share = (units.to(tl.float64) * cost[None, :]).to(tl.int64)
    for i_t in tl.static_range(T):
        entry, known = diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
        at = i_row * entries + entry
        price = _price_after_rounds(whole, replaced, saved, at, stride, known, ROUND)
        pays = (slots == i_t)[None, :] & (prices[None, :] > price[:, None])
        at += ROUND * stride
        b_replaced = tl.sum(tl.where(pays, units, 0), 1)
        b_saved = tl.sum(tl.where(pays, share, 0), 1)
        tl.atomic_add(replaced + at, b_replaced, mask=known, sem="relaxed")
        tl.atomic_add(saved + at, b_saved, mask=known, sem="relaxed")


@triton.jit
def _price_kernel(
    whole, replaced, saved, price, entries, stride, ROUNDS: tl.constexpr, CHUNK: tl.constexpr
):
    """Prices of a chunk of a row's diagonals, after all rounds."""
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    known = o < entries
    at = tl.program_id(1).to(tl.int64) * entries + o
    b_price = _price_after_rounds(whole, replaced, saved, at, stride, known, ROUNDS)
    tl.store(price + at, b_price, mask=known)


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
    """Diagonals in order of price, in each span from the highest down, equal ones by position.

    A diagonal's rank is counted: it is the number of those before it.
    place, in_order: as in PricedDiagonals. Nothing is written where always-on ones are.
    """
    i_row = tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # [ROWS]: n or more for what is no diagonal of a span.
    at = i_b * (length + entries) + length + o
    span = tl.load(segment + at, mask=o < entries, other=2 * n) - n
    first, stop = free_diagonals(bounds, i_b, span, length, n, span < n)
    mine = (span < n) & (o >= first)
    price += i_row * entries
    b_price = tl.load(price + o, mask=mine, other=0.0)

    # The spans that these diagonals lie in are compared, a chunk at a time.
    rank = tl.zeros([ROWS], tl.int32)
    lowest = tl.min(tl.where(mine, first, entries), 0)
    highest = tl.max(tl.where(mine, stop, 0), 0)
    for start in range(lowest, highest, CHUNK):
        # [1, CHUNK]
        o_other = (start + tl.arange(0, CHUNK))[None, :]
        other = tl.load(price + o_other, mask=o_other < entries, other=0.0)
        # [ROWS, CHUNK]
        tied = other == b_price[:, None]
        before = (other > b_price[:, None]) | (tied & (o_other < o[:, None]))
        in_span = (o_other >= first[:, None]) & (o_other < stop[:, None])
        rank += tl.sum((before & in_span).to(tl.int32), 1)
    to = i_row * entries + first + rank
    tl.store(place + to, o, mask=mine)
    tl.store(in_order + to, b_price, mask=mine)
