"""Prices of verticals and diagonals, from what a probe sees of every block of keys.

In the kernels i_b is a sequence, i_bh a query head of it, i_c a block of keys, i_t one of the spans
that touch the block, and `group` the query heads of a KV head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.budget.kernel import units_of
from titan_sparse.kernels.prices.inputs import (
    ALWAYS,
    CODES,
    CODES_PER_OCTAVE,
    LEVELS,
    MASS_UNITS,
    PSEUDO_ROWS,
    VERTICAL_COST,
    AlwaysOn,
    octaves_between_levels,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.kernel import scores_of_block, store_tiles, tile_options

_ALWAYS = tl.constexpr(ALWAYS)
_CODES = tl.constexpr(CODES)
_CODES_PER_OCTAVE = tl.constexpr(CODES_PER_OCTAVE)
_LEVELS = tl.constexpr(LEVELS)
_MASS_UNITS = tl.constexpr(MASS_UNITS)
_PSEUDO_ROWS = tl.constexpr(PSEUDO_ROWS)
_VERTICAL_COST = tl.constexpr(VERTICAL_COST)


def first_prices(
    probe: Probe, keys: KeyBlocks, lse: Tensor, always: AlwaysOn, seq_len: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prices of verticals as if there were no diagonals, and what diagonals are priced from.

    lse: fp32 [B, Hq, n, P], over all keys. seq_len: of the whole sequence.
    Returns, in fp32, prices [B, Hq, n_local, b]; masses of tiles by group of rows [B, Hq, n_local,
    T, U]; and at each level the share of a block's mass that its verticals leave, and the price
    that a row pays for its verticals, [B, Hq, n_local, T, L] each. Nothing of it counts what is
    always on.
    """
    q = probe.q
    batch, heads, n, queries, dim = q.shape
    _, local, touching = keys.slot.shape
    new = dict(dtype=torch.float32, device=q.device)
    price = torch.empty(batch, heads, local, keys.block_size, **new)
    tile = torch.empty(batch, heads, local, touching, probe.groups, **new)
    left = torch.empty(batch, heads, local, touching, LEVELS, **new)
    saved = torch.empty_like(left)
    _first_kernel[(local, batch * heads)](
        q.contiguous(),
        keys.k.contiguous(),
        probe.start.contiguous(),
        probe.stop.contiguous(),
        keys.slot.contiguous(),
        keys.blocks,
        lse.contiguous(),
        probe.row_block.contiguous(),
        probe.group.contiguous(),
        always.behind_sinks.contiguous(),
        price,
        tile,
        left,
        saved,
        probe.scale,
        octaves_between_levels(seq_len),
        heads,
        heads // keys.k.shape[1],
        n,
        local,
        queries,
        dim,
        NEAREST=always.local,
        T=touching,
        U=probe.groups,
        **tile_options(q, keys.block_size),
    )
    return price, tile, left, saved


@triton.jit
def _free_masses(
    b_s,
    lse,
    row_block,
    behind_sinks,
    blocks,
    i_b,
    i_bh,
    i_c,
    known,
    n,
    queries,
    NEAREST: tl.constexpr,
    P: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Masses [P, SIZE] of what is not on in any case, whether they are, and blocks back [P]."""
    o_p = tl.arange(0, P)
    o_k = tl.arange(0, SIZE)
    # [P]; rows that see nothing have lse -inf, and get masses of 0, not NaN.
    b_lse = tl.load(lse + (i_bh * n + known) * queries + o_p, mask=o_p < queries, other=0.0)
    row = (i_b * n + known) * queries + o_p
    block = tl.load(blocks + i_c)
    back = tl.load(row_block + row, mask=o_p < queries, other=-1) - block
    first_free = tl.load(behind_sinks + i_b * n + known)

    # [P, SIZE]
    seen = b_s > float("-inf")
    position = block * SIZE + o_k
    free = seen & (back >= NEAREST)[:, None] & (position >= first_free)[None, :]
    b_mass = tl.exp(b_s - tl.maximum(b_lse, -3.0e38)[:, None])
    return tl.where(free, b_mass, 0.0), free, back


@triton.jit
def _price(mass, rows):
    """Mass of a pair for its cost; rows: how many see it, an integer."""
    return mass / (_VERTICAL_COST * (rows.to(tl.float32) + _PSEUDO_ROWS))


@triton.jit
def _code(price):
    """int32 codes of prices (inputs.codes_of); none is always on here."""
    code = tl.floor(tl.log2(price) * _CODES_PER_OCTAVE) + _ALWAYS
    return tl.minimum(tl.maximum(code, 0.0), _ALWAYS - 1.0).to(tl.int32)


@triton.jit
def _first_kernel(
    q,
    k,
    start,
    stop,
    slot,
    blocks,
    lse,
    row_block,
    group_of_row,
    behind_sinks,
    price,
    tile,
    left,
    saved,
    scale,
    octaves,
    heads,
    group,
    n,
    local,
    queries: tl.constexpr,
    dim,
    NEAREST: tl.constexpr,
    T: tl.constexpr,
    U: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The results of first_prices() for a block of keys. octaves: between levels."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_p = tl.arange(0, P)
    o_l = tl.arange(0, _LEVELS)
    level = tl.exp2(-1.0 - octaves * o_l)
    # A key is in one span at most; over the others' slots it adds up zeros.
    b_price = tl.zeros([SIZE], tl.float32)
    for i_t in tl.static_range(T):
        b_s, known = scores_of_block(
            q,
            k,
            start,
            stop,
            slot,
            blocks,
            scale,
            i_b,
            i_h,
            i_c,
            i_t,
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
        b_mass, free, _ = _free_masses(
            b_s,
            lse,
            row_block,
            behind_sinks,
            blocks,
            i_b,
            i_bh,
            i_c,
            known,
            n,
            queries,
            NEAREST,
            P,
            SIZE,
        )
        at = (i_bh * local + i_c) * T + i_t
        group_at = group_of_row + (i_b * n + known) * queries + o_p
        b_group = tl.load(group_at, mask=o_p < queries, other=-1)
        store_tiles(tile, at * U, tl.sum(b_mass, 1), b_group, queries, U, P)

        # [SIZE]
        vertical = tl.sum(b_mass, 0)
        prices = _price(vertical, tl.sum(free.to(tl.int32), 0))
        b_price += prices
        # [SIZE, L] -> [L]
        below = prices[:, None] < level[None, :]
        mass_below = tl.sum(tl.where(below, vertical[:, None], 0.0), 0)
        share = mass_below / tl.maximum(tl.sum(vertical, 0), 1.18e-38)
        count = tl.sum(tl.where(below, 0.0, 1.0), 0)
        tl.store(left + at * _LEVELS + o_l, share)
        tl.store(saved + at * _LEVELS + o_l, count * level * _VERTICAL_COST)
    o = (i_bh * local + i_c) * SIZE + tl.arange(0, SIZE)
    tl.store(price + o, b_price)


def diagonal_gains(
    tiles: Tensor, left: Tensor, saved: Tensor, tile: Tensor, rows: Tensor
) -> Tensor:
    """What each diagonal is worth beside the verticals that are taken at each level.

    That is the mass that they leave of it, and what it saves of their cost. A block's verticals are
    taken to hold the same share of each row's mass.
    tiles, left, saved: of first_prices(). tile: int32 [B, U, E], the tiles that make up each
    diagonal among a rank's n_local T U, -1 for none or another rank's. rows: int32 [B, U, E], how
    many of the probe's rows see each of them.
    Returns fp32 [B, Hq, E, L], this rank's part of the sum.
    """
    batch, heads, local, touching, groups = tiles.shape
    entries = tile.shape[2]
    gains = tiles.new_empty(batch, heads, entries, LEVELS)
    chunk = 32
    _gain_kernel[(triton.cdiv(entries, chunk), batch * heads)](
        tiles,
        left,
        saved,
        tile,
        rows,
        gains,
        heads,
        entries,
        local * touching,
        U=groups,
        CHUNK=chunk,
        num_warps=2,
    )
    return gains


@triton.jit
def _gain_kernel(
    tiles,
    left,
    saved,
    tile,
    rows,
    gains,
    heads,
    entries,
    blocks,
    U: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """blocks: n_local T."""
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    o_l = tl.arange(0, _LEVELS)
    inside = o < entries
    # [CHUNK, L]
    gain = tl.zeros([CHUNK, _LEVELS], tl.float32)
    for u in range(U):
        at = (i_b * U + u) * entries + o
        number = tl.load(tile + at, mask=inside, other=-1)
        known = number >= 0
        row_count = tl.load(rows + at, mask=known, other=0).to(tl.float32)
        mass = tl.load(tiles + i_bh * blocks * U + number, mask=known, other=0.0)
        block = (i_bh * blocks + number // U) * _LEVELS
        level_at = block[:, None] + o_l[None, :]
        b_left = tl.load(left + level_at, mask=known[:, None], other=0.0)
        b_saved = tl.load(saved + level_at, mask=known[:, None], other=0.0)
        gain += mass[:, None] * b_left + row_count[:, None] * b_saved
    at = (i_bh * entries + o)[:, None] * _LEVELS + o_l[None, :]
    tl.store(gains + at, gain, mask=inside[:, None])


def diagonal_prices(gains: Tensor, cost: Tensor, seq_len: int) -> Tensor:
    """The price below which each diagonal is worth its cost, fp32 [B, Hq, E]; 0 for none.

    gains: fp32 [B, Hq, E, L], over all ranks. cost: fp32 [B, E], pairs of the probe's rows.
    """
    batch, heads, entries, _ = gains.shape
    price = gains.new_empty(batch, heads, entries)
    chunk = 64
    _diagonal_kernel[(triton.cdiv(entries, chunk), batch * heads)](
        gains,
        cost,
        price,
        octaves_between_levels(seq_len),
        heads,
        entries,
        CHUNK=chunk,
        num_warps=2,
    )
    return price


@triton.jit
def _diagonal_kernel(gains, cost, price, octaves, heads, entries, CHUNK: tl.constexpr):
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    i_bh = tl.program_id(1).to(tl.int64)
    inside = o < entries
    o_l = tl.arange(0, _LEVELS)
    level = tl.exp2(-1.0 - octaves * o_l)
    # [CHUNK, L]: how often a diagonal is worth its price, in octaves. It grows as prices fall.
    at = (i_bh * entries + o)[:, None] * _LEVELS + o_l[None, :]
    gain = tl.load(gains + at, mask=inside[:, None], other=0.0)
    b_cost = tl.load(cost + (i_bh // heads) * entries + o, mask=inside, other=1.0)
    worth = tl.log2(tl.maximum(gain / (level[None, :] * b_cost[:, None]), 1e-20))

    # [CHUNK]: it passes 0 between two levels.
    first = tl.min(tl.where(worth >= 0, o_l[None, :], _LEVELS), 1)
    above = tl.sum(tl.where(o_l[None, :] == first[:, None], worth, 0.0), 1)
    below = tl.sum(tl.where(o_l[None, :] == (first - 1)[:, None], worth, 0.0), 1)
    part = -below / tl.maximum(above - below, 1e-6)
    part = tl.minimum(tl.maximum(part, 0.0), 1.0)
    passed = tl.where(first > 0, first - 1 + part, 0.0)
    b_price = tl.where(first < _LEVELS, tl.exp2(-1.0 - octaves * passed), 0.0)
    tl.store(price + i_bh * entries + o, b_price, mask=inside)


def final_prices(
    probe: Probe,
    keys: KeyBlocks,
    lse: Tensor,
    always: AlwaysOn,
    first: Tensor,
    diagonal: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prices of verticals beside the diagonals, and the mass that is held from each price down.

    A row's mass at a key counts for the diagonal, if that has the higher price, else for the
    vertical. The masses are of rows that did not choose: the probe's even rows are asked what its
    odd ones hold, and the other way round.
    first: of first_prices(). diagonal: [B, Hq, E], of diagonal_prices(). offset: int32 [B, n],
    where each span's diagonals begin.
    Returns codes of verticals, uint8 [B, Hq, n_local, b]; of each span the mass by code, int64
    [B, Hq, n, CODES], in 1 / MASS_UNITS, without what is always on; and how many verticals have
    each code, int32 [B, Hq, n, CODES], sinks left out. All are of this rank's keys.
    """
    q = probe.q
    batch, heads, n, queries, dim = q.shape
    _, local, touching = keys.slot.shape
    codes = torch.empty(first.shape, dtype=torch.uint8, device=q.device)
    mass = torch.zeros(batch, heads, n, CODES, dtype=torch.int64, device=q.device)
    count = torch.zeros(batch, heads, n, CODES, dtype=torch.int32, device=q.device)
    _final_kernel[(local, batch * heads)](
        q.contiguous(),
        keys.k.contiguous(),
        probe.start.contiguous(),
        probe.stop.contiguous(),
        keys.slot.contiguous(),
        keys.blocks,
        lse.contiguous(),
        probe.row_block.contiguous(),
        always.start.contiguous(),
        always.behind_sinks.contiguous(),
        always.stop.contiguous(),
        first,
        diagonal.contiguous(),
        offset.contiguous(),
        codes,
        mass,
        count,
        probe.scale,
        heads,
        heads // keys.k.shape[1],
        n,
        local,
        queries,
        dim,
        diagonal.shape[2],
        NEAREST=always.local,
        T=touching,
        **tile_options(q, keys.block_size),
    )
    return codes, mass, count


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
    span_start,
    behind_sinks,
    span_stop,
    first,
    diagonal,
    offset,
    codes,
    mass,
    count,
    scale,
    heads,
    group,
    n,
    local,
    queries,
    dim,
    entries,
    NEAREST: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The results of final_prices() for a block of keys."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_p = tl.arange(0, P)
    o_k = tl.arange(0, SIZE)
    position = tl.load(blocks + i_c) * SIZE + o_k
    at = (i_bh * local + i_c) * SIZE + o_k
    b_first = tl.load(first + at)
    is_odd = (o_p % 2 == 1)[:, None]
    b_codes = tl.zeros([SIZE], tl.int32)
    for i_t in tl.static_range(T):
        b_s, known = scores_of_block(
            q,
            k,
            start,
            stop,
            slot,
            blocks,
            scale,
            i_b,
            i_h,
            i_c,
            i_t,
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
        b_mass, free, back = _free_masses(
            b_s,
            lse,
            row_block,
            behind_sinks,
            blocks,
            i_b,
            i_bh,
            i_c,
            known,
            n,
            queries,
            NEAREST,
            P,
            SIZE,
        )
        # [P]: the price of the diagonal that each row meets.
        entry = tl.load(offset + i_b * n + known) + back
        entry = tl.minimum(tl.maximum(entry, 0), entries - 1)
        on_diagonal = tl.load(diagonal + i_bh * entries + entry)
        # [P, SIZE]: what the vertical pays for, and not the diagonal.
        is_left = free & (on_diagonal[:, None] < b_first[None, :])
        left = tl.where(is_left, b_mass, 0.0)

        # [SIZE]: of the even rows, the odd ones and all.
        even_mass = tl.sum(tl.where(is_odd, 0.0, left), 0)
        odd_mass = tl.sum(tl.where(is_odd, left, 0.0), 0)
        even_rows = tl.sum((is_left & ~is_odd).to(tl.int32), 0)
        odd_rows = tl.sum((is_left & is_odd).to(tl.int32), 0)
        code = _code(_price(even_mass + odd_mass, even_rows + odd_rows))
        even_price = _price(even_mass, even_rows)
        odd_price = _price(odd_mass, odd_rows)

        # Each half of the rows is asked what the other half chose: [P, SIZE].
        others = tl.where(is_odd, even_price[None, :], odd_price[None, :])
        by_vertical = tl.where(on_diagonal[:, None] < others, b_mass, 0.0)
        of_even = units_of(tl.sum(tl.where(is_odd, 0.0, by_vertical), 0), _MASS_UNITS)
        of_odd = units_of(tl.sum(tl.where(is_odd, by_vertical, 0.0), 0), _MASS_UNITS)
        of_diagonals = units_of(tl.sum(b_mass - by_vertical, 1), _MASS_UNITS)
        total = mass + (i_bh * n + known) * _CODES
        tl.atomic_add(total + _code(odd_price), of_even, mask=of_even > 0, sem="relaxed")
        tl.atomic_add(total + _code(even_price), of_odd, mask=of_odd > 0, sem="relaxed")
        of_row = total + _code(on_diagonal)
        tl.atomic_add(of_row, of_diagonals, mask=of_diagonals > 0, sem="relaxed")

        # Each key in the slot of its span.
        span = tl.load(slot + (i_b * local + i_c) * T + i_t)
        begin = tl.load(span_start + i_b * n + known)
        first_free = tl.load(behind_sinks + i_b * n + known)
        end = tl.load(span_stop + i_b * n + known)
        end = tl.where(span >= 0, end, begin)
        in_span = (position >= begin) & (position < end)
        can_choose = in_span & (position >= first_free)
        counted = count + (i_bh * n + known) * _CODES + code
        ones = tl.full([SIZE], 1, tl.int32)
        tl.atomic_add(counted, ones, mask=can_choose, sem="relaxed")
        code = tl.where(can_choose, code, tl.where(in_span, _ALWAYS, 0))
        b_codes = tl.maximum(b_codes, code)
    tl.store(codes + at, b_codes.to(tl.uint8))
