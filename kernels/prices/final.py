"""Prices of verticals in addition to the slashes. shared.py names the kernel's arguments."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.shared import (
    CODES,
    HELD_OUT,
    FinalPrices,
    SpanTokens,
    by_group,
    code_of,
    masses,
    price_of,
    rows_at,
    sees_any,
    tile_options,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.kernel import keys_at, span_of
from titan_sparse.kernels.probe.rows import operand

_HELD_OUT = tl.constexpr(HELD_OUT)
_IN_SAMPLE = tl.constexpr(1 - HELD_OUT)


def final_prices(
    free: Probe, keys: KeyBlocks, lse: Tensor, first: Tensor, diagonal: Tensor, offset: Tensor
) -> FinalPrices:
    """Prices of verticals in addition to the slashes, and the mass held from each price down.

    A row's mass at a key counts for the diagonal, if that has the higher price, else for the
    vertical. Most of the weight is on held-out rows: the choice of the probe's even rows is tested on the
    odd ones, and the reverse. The rest is on all rows with their own choice (HELD_OUT). A row
    counts for all keys of a block of which it sees some.
    first: of first_prices(). diagonal: fp32 [B, Hq, E], of diagonal_prices(). offset: int32 [B, n],
    where each span's diagonals begin.
    """
    batch, heads, local, block_size = first.shape
    new = dict(dtype=torch.uint8, device=first.device)
    touching = keys.slot.shape[2]
    final = FinalPrices(
        codes=torch.empty(first.shape, **new),
        held=first.new_empty(batch, heads, local, 3, block_size),
        held_codes=torch.empty(batch, heads, local, 3, block_size, **new),
        tiles=first.new_empty(batch, heads, local, touching, free.groups),
    )
    inputs = (lse.contiguous(), first, diagonal.contiguous(), offset.contiguous())
    _final_kernel[(local, batch * heads)](
        operand(free, keys), *inputs, diagonal.shape[2], final, **tile_options(free, keys)
    )
    return final


@triton.jit
def _met_diagonal(diagonal, entry_of, row_block, row, is_row, block, entries):
    """Prices of the diagonals that rows meet in a block of keys.

    diagonal: of this head. entry_of: entry of the span's first diagonal.
    """
    back = tl.load(row_block + row, mask=is_row, other=0) - block
    entry = tl.minimum(tl.maximum(entry_of + back, 0), entries - 1)
    return tl.load(diagonal + entry)


@triton.jit
def _held(masses, met, price):
    """Those of the masses [keys, rows] that verticals hold at this price of each key."""
    return tl.where(met[None, :] < price[:, None], masses, 0.0)


@triton.jit
def _final_kernel(
    probe, lse, first, diagonal, offset, entries, final, queries: tl.constexpr,
    T: tl.constexpr, U: tl.constexpr, U2: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    SIZE: tl.constexpr, PART: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The results of final_prices() for a block of keys."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // probe.heads
    i_kv = i_b * (probe.heads // probe.group) + i_bh % probe.heads // probe.group
    block = tl.load(probe.blocks + i_c)
    first_key = block * SIZE
    o_u = tl.arange(0, U2)
    o_even = 2 * tl.arange(0, P // 2)
    is_even = o_even < queries
    is_odd = o_even + 1 < queries
    for i_t in tl.static_range(T):
        span, is_span = span_of(probe, i_b, i_c, i_t, T)
        at = ((i_bh * probe.local + i_c) * T + i_t) * U
        # Few blocks of a packed sequence are in two spans.
        if i_t > 0 and not is_span:
            tl.store(final.tiles + at + o_u, tl.zeros([U2], tl.float32), mask=o_u < U)
        else:
            # Rows of the span in this slot, even ones and odd ones: [D, P / 2] and [P / 2].
            row = (i_b * probe.n + span) * queries + o_even
            q_row = (i_bh * probe.n + span) * queries + o_even
            even = rows_at(probe, lse, row, q_row, is_even, is_span, D, UPCAST)
            odd = rows_at(probe, lse, row + 1, q_row + 1, is_odd, is_span, D, UPCAST)
            even_sees = sees_any(even, first_key, SIZE)
            odd_sees = sees_any(odd, first_key, SIZE)

            # [P / 2]: prices of the diagonals that the rows meet. No vertical is worth more to a row
            # that sees nothing of the block.
            head = diagonal + i_bh * entries
            entry_of = tl.load(offset + i_b * probe.n + span)
            row_block = probe.row_block
            even_met = _met_diagonal(head, entry_of, row_block, row, is_even, block, entries)
            odd_met = _met_diagonal(head, entry_of, row_block, row + 1, is_odd, block, entries)
            even_met = tl.where(even_sees, even_met, float("inf"))
            odd_met = tl.where(odd_sees, odd_met, float("inf"))

            of_even = tl.zeros([P // 2], tl.float32)
            of_odd = tl.zeros([P // 2], tl.float32)
            for part in range(SIZE // PART):
                # [PART, P / 2]
                o_k = part * PART + tl.arange(0, PART)
                position = first_key + o_k
                k_row = (i_kv * probe.local + i_c) * SIZE + o_k
                b_k = keys_at(probe.k, k_row, probe.dim, D, UPCAST)
                even_mass = masses(b_k, even, position, probe.scale)
                odd_mass = masses(b_k, odd, position, probe.scale)

                # What the vertical pays for, and not the diagonal.
                key_at = (i_bh * probe.local + i_c) * SIZE + o_k
                b_first = tl.load(first + key_at)
                even_left = even_met[None, :] < b_first[:, None]
                odd_left = odd_met[None, :] < b_first[:, None]
                # [PART]
                even_paid = tl.sum(tl.where(even_left, even_mass, 0.0), 1)
                odd_paid = tl.sum(tl.where(odd_left, odd_mass, 0.0), 1)
                even_rows = tl.sum(tl.where(even_left, 1.0, 0.0), 1)
                odd_rows = tl.sum(tl.where(odd_left, 1.0, 0.0), 1)
                price = price_of(even_paid + odd_paid, even_rows + odd_rows)
                even_price = price_of(even_paid, even_rows)
                odd_price = price_of(odd_paid, odd_rows)

                # [PART, P / 2]: each half of the rows is asked what the other half chose, and what all
                # did.
                even_held = _held(even_mass, even_met, odd_price)
                odd_held = _held(odd_mass, odd_met, even_price)
                even_all = _held(even_mass, even_met, price)
                odd_all = _held(odd_mass, odd_met, price)
                of_even += tl.sum(even_mass - even_held * _HELD_OUT - even_all * _IN_SAMPLE, 0)
                of_odd += tl.sum(odd_mass - odd_held * _HELD_OUT - odd_all * _IN_SAMPLE, 0)

                # A key is in one span at most: later ones only say what they see.
                is_new = o_k >= 0 if i_t == 0 else tl.sum(even_mass, 1) + tl.sum(odd_mass, 1) > 0
                code = code_of(price).to(tl.uint8)
                tl.store(final.codes + key_at, code, mask=is_new)
                held_at = (i_bh * probe.local + i_c) * 3 * SIZE + o_k
                all_held = tl.sum(even_all, 1) + tl.sum(odd_all, 1)
                tl.store(final.held + held_at, tl.sum(even_held, 1) * _HELD_OUT, mask=is_new)
                tl.store(final.held + held_at + SIZE, tl.sum(odd_held, 1) * _HELD_OUT, mask=is_new)
                tl.store(final.held + held_at + 2 * SIZE, all_held * _IN_SAMPLE, mask=is_new)
                tl.store(final.held_codes + held_at, code_of(odd_price).to(tl.uint8), mask=is_new)
                tl.store(
                    final.held_codes + held_at + SIZE, code_of(even_price).to(tl.uint8), mask=is_new
                )
                tl.store(final.held_codes + held_at + 2 * SIZE, code, mask=is_new)

            if U == queries:
                # Each row is a group.
                tl.store(final.tiles + at + o_even, of_even, mask=is_even)
                tl.store(final.tiles + at + o_even + 1, of_odd, mask=is_odd)
            else:
                of_group = by_group(of_even, probe.group_of_row, row, is_even, U2)
                of_group += by_group(of_odd, probe.group_of_row, row + 1, is_odd, U2)
                tl.store(final.tiles + at + o_u, of_group, mask=o_u < U)


_CODES = tl.constexpr(CODES)


def mass_by_code(final: FinalPrices, keys: KeyBlocks, spans: SpanTokens) -> Tensor:
    """What the verticals of each block hold by code, and how many there are of each code.

    Verticals of code 0 are not counted.
    Returns both, one after the other: fp32 [2, B, Hq, n_local, T, CODES], by the block's spans.
    """
    batch, heads, local, size = final.codes.shape
    touching = keys.slot.shape[2]
    by_code = final.held.new_empty(2, batch, heads, local, touching, CODES)
    inputs = (final, keys.slot.contiguous(), keys.blocks, spans)
    sizes = (heads, spans.start.shape[1], local)
    _by_code_kernel[(local, batch * heads, touching)](
        *inputs, *by_code, *sizes, T=touching, SIZE=size, num_warps=1
    )
    return by_code


@triton.jit
def _sums(codes, values):
    """Sums fp32 [16, 16] of values by code, which is 16 times the row plus the column.

    One product of matrices. Values are rounded to tf32 there, 1 part in 2,000.
    """
    o = tl.arange(0, 16)
    # [16, elements] and [elements, 16]
    in_row = tl.where(codes[None, :] // 16 == o[:, None], 1.0, 0.0)
    in_column = tl.where(codes[:, None] % 16 == o[None, :], values[:, None], 0.0)
    return tl.dot(in_row, in_column, input_precision="tf32")


@triton.jit
def _by_code_kernel(
    final, slot, blocks, spans, mass, count, heads, n, local,
    T: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One block of keys, in the span of its slot i_t."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_t = tl.program_id(2)
    i_b = i_bh // heads
    o_k = tl.arange(0, SIZE)
    span = tl.load(slot + (i_b * local + i_c) * T + i_t)
    o = tl.arange(0, 16)
    code_at = ((i_bh * local + i_c) * T + i_t) * _CODES + o[:, None] * 16 + o[None, :]
    # Few blocks of a packed sequence are in two spans.
    if span < 0:
        tl.store(mass + code_at, tl.zeros([16, 16], tl.float32))
        tl.store(count + code_at, tl.zeros([16, 16], tl.float32))
    else:
        begin = tl.load(spans.start + i_b * n + span)
        end = tl.load(spans.stop + i_b * n + span)
        position = tl.load(blocks + i_c) * SIZE + o_k
        mine = (position >= begin) & (position < end)

        at = (i_bh * local + i_c) * SIZE + o_k
        code = tl.load(final.codes + at).to(tl.int32)
        is_counted = tl.where(mine & (code > 0), 1.0, 0.0)
        by_code = tl.zeros([16, 16], tl.float32)
        for i in tl.static_range(3):
            held_at = ((i_bh * local + i_c) * 3 + i) * SIZE + o_k
            values = tl.load(final.held + held_at, mask=mine, other=0.0)
            by_code += _sums(tl.load(final.held_codes + held_at).to(tl.int32), values)
        tl.store(mass + code_at, by_code)
        tl.store(count + code_at, _sums(code, is_counted))
