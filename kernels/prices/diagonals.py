"""Worth, prices and masses of slashes, from tiles of a block of keys and a group of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.shared import ALWAYS, LEVELS, OCTAVES_BETWEEN_LEVELS, code_of

_ALWAYS = tl.constexpr(ALWAYS)
_LEVELS = tl.constexpr(LEVELS)
_OCTAVES = tl.constexpr(OCTAVES_BETWEEN_LEVELS)


def diagonal_gains(
    tiles: Tensor, left: Tensor, saved: Tensor, tile: Tensor, rows: Tensor
) -> Tensor:
    """What each slash is worth in addition to the verticals that are taken at each level.

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
    options = dict(U=groups, GROUPS=min(triton.next_power_of_2(groups), 32), CHUNK=4, num_warps=2)
    _gain_kernel[(triton.cdiv(entries, 4), batch * heads)](
        tiles, left, saved, tile, rows, gains, heads, entries, local * touching, **options
    )
    return gains


@triton.jit
def _gain_kernel(
    tiles, left, saved, tile, rows, gains, heads, entries, blocks,
    U: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """blocks: n_local T. GROUPS: a power of two."""
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    o_u = tl.arange(0, GROUPS)
    o_l = tl.arange(0, _LEVELS)
    # [CHUNK, L]
    gain = tl.zeros([CHUNK, _LEVELS], tl.float32)
    for first in range(0, U, GROUPS):
        # [GROUPS, CHUNK]: many at a time, as each has to be looked for.
        u = first + o_u
        at = (i_b * U + u[:, None]) * entries + o[None, :]
        inside = (u < U)[:, None] & (o < entries)[None, :]
        number = tl.load(tile + at, mask=inside, other=-1)
        known = number >= 0
        row_count = tl.load(rows + at, mask=known, other=0).to(tl.float32)
        mass = tl.load(tiles + i_bh * blocks * U + number, mask=known, other=0.0)
        # [GROUPS, CHUNK, L]
        block = (i_bh * blocks + number // U) * _LEVELS
        level_at = block[:, :, None] + o_l[None, None, :]
        b_left = tl.load(left + level_at, mask=known[:, :, None], other=0.0)
        b_saved = tl.load(saved + level_at, mask=known[:, :, None], other=0.0)
        gain += tl.sum(mass[:, :, None] * b_left + row_count[:, :, None] * b_saved, 0)
    at = (i_bh * entries + o)[:, None] * _LEVELS + o_l[None, :]
    tl.store(gains + at, gain, mask=(o < entries)[:, None])


def diagonal_prices(gains: Tensor, cost: Tensor, is_local: Tensor) -> tuple[Tensor, Tensor]:
    """The price below which each diagonal is worth its cost, and its code.

    gains: fp32 [B, Hq, E, L], over all ranks. cost: fp32 [B, E], pairs of the probe's rows.
    is_local: bool [B, E], the diagonals whose code is ALWAYS.
    Returns fp32 and uint8 [B, Hq, E]; the price is 0 where there is none.
    """
    batch, heads, entries, _ = gains.shape
    price = gains.new_empty(batch, heads, entries)
    codes = gains.new_empty(batch, heads, entries, dtype=torch.uint8)
    is_local = is_local.view(torch.int8)
    _diagonal_kernel[(triton.cdiv(entries, 64), batch * heads)](
        gains, cost, is_local, price, codes, heads, entries, CHUNK=64, num_warps=2
    )
    return price, codes


@triton.jit
def _diagonal_kernel(gains, cost, is_local, price, codes, heads, entries, CHUNK: tl.constexpr):
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    i_bh = tl.program_id(1).to(tl.int64)
    inside = o < entries
    o_l = tl.arange(0, _LEVELS)
    level = tl.exp2(-1.0 - o_l * _OCTAVES)
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
    b_price = tl.where(first < _LEVELS, tl.exp2(-1.0 - passed * _OCTAVES), 0.0)
    tl.store(price + i_bh * entries + o, b_price, mask=inside)
    always = tl.load(is_local + (i_bh // heads) * entries + o, mask=inside, other=0) != 0
    b_code = tl.where(always, _ALWAYS, code_of(b_price))
    tl.store(codes + i_bh * entries + o, b_code.to(tl.uint8), mask=inside)


def diagonal_masses(tiles: Tensor, tile: Tensor) -> Tensor:
    """Sums of a rank's tiles over each diagonal, fp32 [B, Hq, E].

    tiles: fp32 [B, Hq, n_local, T, U]. tile: as for diagonal_gains().
    """
    batch, heads, local, touching, groups = tiles.shape
    entries = tile.shape[2]
    masses = tiles.new_empty(batch, heads, entries)
    options = dict(U=groups, GROUPS=min(triton.next_power_of_2(groups), 32), CHUNK=64, num_warps=4)
    _sum_kernel[(triton.cdiv(entries, 64), batch * heads)](
        tiles, tile, masses, heads, entries, local * touching * groups, **options
    )
    return masses


@triton.jit
def _sum_kernel(
    tiles, tile, masses, heads, entries, count,
    U: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """count: tiles of a head. GROUPS: a power of two."""
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    i_bh = tl.program_id(1).to(tl.int64)
    o_u = tl.arange(0, GROUPS)
    # [GROUPS, CHUNK]: many at a time, as each has to be looked for.
    mass = tl.zeros([GROUPS, CHUNK], tl.float32)
    for first in range(0, U, GROUPS):
        u = first + o_u
        at = ((i_bh // heads) * U + u[:, None]) * entries + o[None, :]
        inside = (u < U)[:, None] & (o < entries)[None, :]
        number = tl.load(tile + at, mask=inside, other=-1)
        mass += tl.load(tiles + i_bh * count + number, mask=number >= 0, other=0.0)
    tl.store(masses + i_bh * entries + o, tl.sum(mass, 0), mask=o < entries)
