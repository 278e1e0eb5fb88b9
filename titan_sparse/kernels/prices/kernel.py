"""Prices of verticals and diagonals, from what a probe sees of every block of keys.

In the kernels i_b is a sequence, i_bh a query head of it, i_c a block of keys, i_t one of the spans
that touch the block, and `group` the query heads of a KV head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.inputs import (
    ALWAYS,
    CODES,
    CODES_PER_OCTAVE,
    LEVELS,
    PSEUDO_ROWS,
    VERTICAL_COST,
    octaves_between_levels,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.kernel import tile_options

_ALWAYS = tl.constexpr(ALWAYS)
_CODES = tl.constexpr(CODES)
_CODES_PER_OCTAVE = tl.constexpr(CODES_PER_OCTAVE)
_LEVELS = tl.constexpr(LEVELS)
_PSEUDO_ROWS = tl.constexpr(PSEUDO_ROWS)
_VERTICAL_COST = tl.constexpr(VERTICAL_COST)


def first_prices(
    free: Probe, keys: KeyBlocks, lse: Tensor, seq_len: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prices of verticals as if there were no diagonals, and what diagonals are priced from.

    free: the probe; its rows see only what is not selected in any case. lse: fp32 [B, Hq, n, P],
    over all keys. seq_len: of the whole sequence.
    Returns, in fp32, prices [B, Hq, n_local, b]; masses of tiles by group of rows [B, Hq, n_local,
    T, U]; and at each level the share of a block's mass that its verticals leave, and the price
    that a row pays for its verticals, [B, Hq, n_local, T, L] each.
    """
    q = free.q
    batch, heads = q.shape[:2]
    _, local, touching = keys.slot.shape
    new = dict(dtype=torch.float32, device=q.device)
    price = torch.empty(batch, heads, local, keys.block_size, **new)
    tile = torch.empty(batch, heads, local, touching, free.groups, **new)
    left = torch.empty(batch, heads, local, touching, LEVELS, **new)
    saved = torch.empty_like(left)
    _first_kernel[(local, batch * heads)](
        **_arguments(free, keys, lse),
        group_of_row=free.group.contiguous(),
        price=price,
        tile=tile,
        left=left,
        saved=saved,
        octaves=octaves_between_levels(seq_len),
        U=free.groups,
        U2=triton.next_power_of_2(free.groups),
    )
    return price, tile, left, saved


def _arguments(free: Probe, keys: KeyBlocks, lse: Tensor) -> dict:
    """What both kernels take that look at a block of keys."""
    q = free.q
    heads, n, queries, dim = q.shape[1:]
    return dict(
        q=q.contiguous(),
        k=keys.k.contiguous(),
        start=free.start.contiguous(),
        stop=free.stop.contiguous(),
        slot=keys.slot.contiguous(),
        blocks=keys.blocks,
        lse=lse.contiguous(),
        scale=free.scale,
        heads=heads,
        group=heads // keys.k.shape[1],
        n=n,
        local=keys.slot.shape[1],
        queries=queries,
        dim=dim,
        T=keys.slot.shape[2],
        **_tile_options(q, keys.block_size),
    )


def _tile_options(q: Tensor, block_size: int) -> dict:
    """As for the probe's kernels, but half of the rows at a time."""
    options = tile_options(q, block_size)
    queries = q.shape[3]
    # tl.dot() wants 16 or more.
    half = max(16, triton.next_power_of_2(queries) // 2)
    # Of a warp are all rows of some keys, so that no sum over rows goes through shared memory.
    return options | dict(P=half, num_warps=4)


@triton.jit
def _masses(
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
    half,
    heads,
    group,
    n,
    local,
    queries,
    dim,
    T: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Masses [SIZE, P] of a block of keys in half of the rows of the span in its slot i_t.

    Keys come first: sums over rows are what is wanted most, and cost least that way.
    Also which rows see anything of the block [P], and the span; 0 for none, which is safe to look
    up. half: 0 for even rows, 1 for odd ones.
    """
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_p = 2 * tl.arange(0, P) + half
    o_k = tl.arange(0, SIZE)
    o_d = tl.arange(0, D)
    m_p = o_p < queries
    m_d = o_d < dim
    span = tl.load(slot + (i_b * local + i_c) * T + i_t)
    known = tl.maximum(span, 0)

    # [D, P] and [SIZE, D]
    q_row = (i_bh * n + known) * queries + o_p
    q_at = q + q_row[None, :] * dim + o_d[:, None]
    b_q = tl.load(q_at, mask=m_p[None, :] & m_d[:, None], other=0.0)
    k_row = ((i_b * (heads // group) + i_h // group) * local + i_c) * SIZE + o_k
    b_k = tl.load(k + k_row[:, None] * dim + o_d[None, :], mask=m_d[None, :], other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
        b_k = b_k.to(tl.float32)
    b_s = tl.dot(b_k, b_q, input_precision="ieee") * scale

    # [P]; rows that see nothing have lse -inf, and get masses of 0, not NaN.
    row = (i_b * n + known) * queries + o_p
    b_start = tl.load(start + row, mask=m_p, other=0)
    b_stop = tl.load(stop + row, mask=m_p, other=0)
    b_stop = tl.where(span >= 0, b_stop, b_start)
    b_lse = tl.load(lse + q_row, mask=m_p, other=0.0)
    first_key = tl.load(blocks + i_c) * SIZE
    sees = (b_start < b_stop) & (b_start < first_key + SIZE) & (b_stop > first_key)
    position = first_key + o_k
    seen = (position[:, None] >= b_start[None, :]) & (position[:, None] < b_stop[None, :])
    b_mass = tl.exp(b_s - tl.maximum(b_lse, -3.0e38)[None, :])
    return tl.where(seen, b_mass, 0.0), sees, known


@triton.jit
def _price(mass, rows):
    """Mass of a pair for its cost; rows: how many see it."""
    return mass / (_VERTICAL_COST * (rows + _PSEUDO_ROWS))


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
    group_of_row,
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
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The results of first_prices() for a block of keys.

    octaves: between levels. U2: U, rounded up to a power of two.
    """
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    o_l = tl.arange(0, _LEVELS)
    o_u = tl.arange(0, U2)
    level = tl.exp2(-1.0 - octaves * o_l)
    # A key is in one span at most; over the others' slots it adds up zeros.
    b_price = tl.zeros([SIZE], tl.float32)
    for i_t in tl.static_range(T):
        at = (i_bh * local + i_c) * T + i_t
        # [SIZE], and how many rows see anything of the block.
        vertical = tl.zeros([SIZE], tl.float32)
        rows = tl.zeros([], tl.float32)
        of_groups = tl.zeros([U2], tl.float32)
        for half in tl.static_range(2):
            b_mass, sees, known = _masses(
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
                half,
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
            vertical += tl.sum(b_mass, 1)
            rows += tl.sum(tl.where(sees, 1.0, 0.0), 0)
            of_row = tl.sum(b_mass, 0)
            o_p = 2 * tl.arange(0, P) + half
            if U == queries:
                # Each row is a group.
                tl.store(tile + at * U + o_p, of_row, mask=o_p < queries)
            else:
                group_at = group_of_row + (i_b * n + known) * queries + o_p
                b_group = tl.load(group_at, mask=o_p < queries, other=-1)
                in_group = b_group[:, None] == o_u[None, :]
                of_groups += tl.sum(tl.where(in_group, of_row[:, None], 0.0), 0)
        if U != queries:
            tl.store(tile + at * U + o_u, of_groups, mask=o_u < U)

        prices = _price(vertical, rows)
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
    free: Probe, keys: KeyBlocks, lse: Tensor, first: Tensor, diagonal: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Prices of verticals beside the diagonals, and the mass that is held from each price down.

    A row's mass at a key counts for the diagonal, if that has the higher price, else for the
    vertical. The masses are of rows that did not choose: the probe's even rows are asked what its
    odd ones hold, and the other way round.
    first: of first_prices(). diagonal: fp32 [B, Hq, E], of diagonal_prices(). offset: int32 [B, n],
    where each span's diagonals begin.
    A row counts for all keys of a block of which it sees some.
    Returns codes of verticals, uint8 [B, Hq, n_local, b]; and by code, fp32 [B, Hq, n_local, T,
    CODES] each, the mass of a block's keys, and how many of them hold any beside the diagonals.
    """
    batch, heads = free.q.shape[:2]
    _, local, touching = keys.slot.shape
    codes = torch.empty(first.shape, dtype=torch.uint8, device=first.device)
    mass = first.new_empty(batch, heads, local, touching, CODES)
    count = torch.empty_like(mass)
    _final_kernel[(local, batch * heads)](
        **_arguments(free, keys, lse),
        row_block=free.row_block.contiguous(),
        first=first,
        diagonal=diagonal.contiguous(),
        offset=offset.contiguous(),
        codes=codes,
        mass=mass,
        count=count,
        entries=diagonal.shape[2],
    )
    return codes, mass, count


@triton.jit
def _by_code(codes, values):
    """Sums fp32 [16, 16] of values by code, which is 16 times the row plus the column.

    One product of matrices. Values are rounded to tf32 there, 1 part in 2,000.
    """
    o = tl.arange(0, 16)
    # [16, elements] and [elements, 16]
    in_row = tl.where(codes[None, :] // 16 == o[:, None], 1.0, 0.0)
    in_column = tl.where(codes[:, None] % 16 == o[None, :], values[:, None], 0.0)
    return tl.dot(in_row, in_column, input_precision="tf32")


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
    T: tl.constexpr,
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
    b_codes = tl.zeros([SIZE], tl.int32)
    for i_t in tl.static_range(T):
        even, even_sees, known = _masses(
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
        odd, odd_sees, known = _masses(
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
        code = _code(_price(even_mass + odd_mass, even_rows + odd_rows))
        # A key is in one span at most, and has code 0 for the others.
        b_codes = tl.maximum(b_codes, code)

        # Each half of the rows is asked what the other half chose: [SIZE, P].
        even_price = _price(even_mass, even_rows)
        odd_price = _price(odd_mass, odd_rows)
        even_held = tl.where(even_diagonal[None, :] < odd_price[:, None], even, 0.0)
        odd_held = tl.where(odd_diagonal[None, :] < even_price[:, None], odd, 0.0)

        # [16, 16]
        by_code = _by_code(_code(odd_price), tl.sum(even_held, 1))
        by_code += _by_code(_code(even_price), tl.sum(odd_held, 1))
        by_code += _by_code(_code(even_diagonal), tl.sum(even - even_held, 0))
        by_code += _by_code(_code(odd_diagonal), tl.sum(odd - odd_held, 0))
        can_choose = tl.where(even_mass + odd_mass > 0, 1.0, 0.0)
        o = tl.arange(0, 16)
        code_at = ((i_bh * local + i_c) * T + i_t) * _CODES + o[:, None] * 16 + o[None, :]
        tl.store(mass + code_at, by_code)
        tl.store(count + code_at, _by_code(code, can_choose))
    tl.store(codes + at, b_codes.to(tl.uint8))
