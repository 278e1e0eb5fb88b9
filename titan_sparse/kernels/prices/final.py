"""Prices of verticals beside the diagonals. shared.py names what the kernel takes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.inputs import HELD_OUT, FinalPrices
from titan_sparse.kernels.prices.shared import (
    code_of,
    masses_of_half,
    price_of,
    store_rows,
    tile_arguments,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe

_HELD_OUT = tl.constexpr(HELD_OUT)


def final_prices(
    free: Probe, keys: KeyBlocks, lse: Tensor, first: Tensor, diagonal: Tensor, offset: Tensor
) -> FinalPrices:
    """Prices of verticals beside the diagonals, and the mass that is held from each price down.

    A row's mass at a key counts for the diagonal, if that has the higher price, else for the
    vertical. Most of it is of rows that did not choose: the probe's even rows are asked what its odd
    ones hold, and the other way round. Some is of all rows and their own choice (HELD_OUT). A row
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
    _final_kernel[(local, batch * heads)](
        **tile_arguments(free, keys, lse),
        **final._asdict(),
        row_block=free.row_block.contiguous(),
        first=first,
        diagonal=diagonal.contiguous(),
        offset=offset.contiguous(),
        entries=diagonal.shape[2],
    )
    return final


@triton.jit
def _met_diagonals(
    diagonal,
    row_block,
    offset,
    blocks,
    i_bh,
    i_c,
    known,
    half,
    heads,
    n,
    queries,
    entries,
    P: tl.constexpr,
):
    """Prices [P] of the diagonals that half of a span's rows meet in a block of keys."""
    i_b = i_bh // heads
    o_p = 2 * tl.arange(0, P) + half
    row = (i_b * n + known) * queries + o_p
    back = tl.load(row_block + row, mask=o_p < queries, other=0) - tl.load(blocks + i_c)
    entry = tl.load(offset + i_b * n + known) + back
    entry = tl.minimum(tl.maximum(entry, 0), entries - 1)
    return tl.load(diagonal + i_bh * entries + entry)


@triton.jit
def _final_kernel(
    q,
    k,
    start,
    stop,
    slot,
    blocks,
    lse,
    row_block,
    group_of_row,
    first,
    diagonal,
    offset,
    codes,
    held,
    held_codes,
    tiles,
    scale,
    heads,
    group,
    n,
    local,
    queries: tl.constexpr,
    dim,
    entries,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The results of final_prices() for a block of keys."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    at = (i_bh * local + i_c) * SIZE + tl.arange(0, SIZE)
    b_first = tl.load(first + at)
    # A key is in one span at most, and has code 0 and no mass for the others.
    b_codes = tl.zeros([SIZE], tl.int32)
    b_even = tl.zeros([SIZE], tl.float32)
    b_odd = tl.zeros([SIZE], tl.float32)
    b_all = tl.zeros([SIZE], tl.float32)
    even_codes = tl.zeros([SIZE], tl.int32)
    odd_codes = tl.zeros([SIZE], tl.int32)
    for i_t in tl.static_range(T):
        even, even_sees, known = masses_of_half(
            q,
            k,
            start,
            stop,
            slot,
            blocks,
            lse,
            scale,
            i_bh,
            i_c,
            i_t,
            0,
            heads,
            group,
            n,
            local,
            queries,
            dim,
            T,
            P,
            D,
            SIZE,
            UPCAST,
        )
        odd, odd_sees, known = masses_of_half(
            q,
            k,
            start,
            stop,
            slot,
            blocks,
            lse,
            scale,
            i_bh,
            i_c,
            i_t,
            1,
            heads,
            group,
            n,
            local,
            queries,
            dim,
            T,
            P,
            D,
            SIZE,
            UPCAST,
        )
        # [P]: prices of the diagonals that the rows meet.
        even_diagonal = _met_diagonals(
            diagonal,
            row_block,
            offset,
            blocks,
            i_bh,
            i_c,
            known,
            0,
            heads,
            n,
            queries,
            entries,
            P,
        )
        odd_diagonal = _met_diagonals(
            diagonal,
            row_block,
            offset,
            blocks,
            i_bh,
            i_c,
            known,
            1,
            heads,
            n,
            queries,
            entries,
            P,
        )

        # [SIZE]: what the vertical pays for, and not the diagonal.
        even_left = even_sees[None, :] & (even_diagonal[None, :] < b_first[:, None])
        odd_left = odd_sees[None, :] & (odd_diagonal[None, :] < b_first[:, None])
        even_mass = tl.sum(tl.where(even_left, even, 0.0), 1)
        odd_mass = tl.sum(tl.where(odd_left, odd, 0.0), 1)
        even_rows = tl.sum(tl.where(even_left, 1.0, 0.0), 1)
        odd_rows = tl.sum(tl.where(odd_left, 1.0, 0.0), 1)
        price = price_of(even_mass + odd_mass, even_rows + odd_rows)
        code = code_of(price)
        b_codes = tl.maximum(b_codes, code)

        # Each half of the rows is asked what the other half chose: [SIZE, P].
        even_price = price_of(even_mass, even_rows)
        odd_price = price_of(odd_mass, odd_rows)
        even_held = tl.where(even_diagonal[None, :] < odd_price[:, None], even, 0.0)
        odd_held = tl.where(odd_diagonal[None, :] < even_price[:, None], odd, 0.0)

        even_by_all = tl.where(even_diagonal[None, :] < price[:, None], even, 0.0)
        odd_by_all = tl.where(odd_diagonal[None, :] < price[:, None], odd, 0.0)
        b_even += tl.sum(even_held, 1) * _HELD_OUT
        b_odd += tl.sum(odd_held, 1) * _HELD_OUT
        b_all += (tl.sum(even_by_all, 1) + tl.sum(odd_by_all, 1)) * (1 - _HELD_OUT)
        even_codes = tl.maximum(even_codes, code_of(odd_price))
        odd_codes = tl.maximum(odd_codes, code_of(even_price))

        tile_at = ((i_bh * local + i_c) * T + i_t) * U
        row = ((i_bh // heads) * n + known) * queries
        even_held = even_held * _HELD_OUT + even_by_all * (1 - _HELD_OUT)
        odd_held = odd_held * _HELD_OUT + odd_by_all * (1 - _HELD_OUT)
        of_even = tl.sum(even - even_held, 0)
        of_odd = tl.sum(odd - odd_held, 0)
        store_rows(tiles, tile_at, of_even, 0, group_of_row, row, queries, U, U2, P)
        store_rows(tiles, tile_at, of_odd, 1, group_of_row, row, queries, U, U2, P)
    tl.store(codes + at, b_codes.to(tl.uint8))
    even_at = (i_bh * local + i_c) * 3 * SIZE + tl.arange(0, SIZE)
    tl.store(held + even_at, b_even)
    tl.store(held + even_at + SIZE, b_odd)
    tl.store(held + even_at + 2 * SIZE, b_all)
    tl.store(held_codes + even_at, even_codes.to(tl.uint8))
    tl.store(held_codes + even_at + SIZE, odd_codes.to(tl.uint8))
    tl.store(held_codes + even_at + 2 * SIZE, b_codes.to(tl.uint8))
