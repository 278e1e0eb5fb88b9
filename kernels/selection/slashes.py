"""Gains, scores, and masses of slashes, summed over tiles of a block of keys
and a group of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.selection.shared import ALWAYS, LEVELS, OCTAVES_BETWEEN_LEVELS, bin_of

_ALWAYS = tl.constexpr(ALWAYS)
_LEVELS = tl.constexpr(LEVELS)
_OCTAVES = tl.constexpr(OCTAVES_BETWEEN_LEVELS)


def slash_gains(
    tile_mass: Tensor, remaining: Tensor, savings: Tensor, tile: Tensor, rows: Tensor
) -> Tensor:
    """The gain of each slash at each level, in addition to the verticals selected at that level.

    It is the mass outside these verticals, plus the cost that they save on the slash (equation 4 in
    README.md). A block's verticals are assumed to hold the same share of each row's mass.
    tile_mass, remaining, savings: of first_scores(). tile: int32 [B, U, E], the tiles that make up
    each slash among a rank's n_local T U, -1 for none or another rank's. rows: int32 [B, U, E], the
    number of the probe's rows that see each of them.
    Returns fp32 [B, Hq, E, L], this rank's part of the sum.
    """
    batch, heads, local, touching, groups = tile_mass.shape
    entries = tile.shape[2]
    gains = tile_mass.new_empty(batch, heads, entries, LEVELS)
    options = dict(U=groups, GROUPS=min(triton.next_power_of_2(groups), 32), CHUNK=4, num_warps=2)
    inputs = (tile_mass, remaining, savings, tile, rows)
    _gain_kernel[(triton.cdiv(entries, 4), batch * heads)](
        *inputs, gains, heads, entries, local * touching, **options
    )
    return gains


@triton.jit
def _gain_kernel(
    tile_mass, remaining, savings, tile, rows, gains, heads, entries, blocks,
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
        mass = tl.load(tile_mass + i_bh * blocks * U + number, mask=known, other=0.0)
        # [GROUPS, CHUNK, L]
        block = (i_bh * blocks + number // U) * _LEVELS
        level_at = block[:, :, None] + o_l[None, None, :]
        b_remaining = tl.load(remaining + level_at, mask=known[:, :, None], other=0.0)
        b_savings = tl.load(savings + level_at, mask=known[:, :, None], other=0.0)
        gain += tl.sum(mass[:, :, None] * b_remaining + row_count[:, :, None] * b_savings, 0)
    at = (i_bh * entries + o)[:, None] * _LEVELS + o_l[None, :]
    tl.store(gains + at, gain, mask=(o < entries)[:, None])


def slash_scores(gains: Tensor, cost: Tensor, is_local: Tensor) -> tuple[Tensor, Tensor]:
    """The score of each slash, the highest threshold at which it is worth its cost, and its bin.

    gains: fp32 [B, Hq, E, L], over all ranks. cost: fp32 [B, E], pairs of the probe's rows.
    is_local: bool [B, E], the slashes whose bin is ALWAYS.
    Returns fp32 and uint8 [B, Hq, E]; the score is 0 for a slash that is not worth its cost at any
    level.
    """
    batch, heads, entries, _ = gains.shape
    score = gains.new_empty(batch, heads, entries)
    bins = gains.new_empty(batch, heads, entries, dtype=torch.uint8)
    is_local = is_local.view(torch.int8)
    _score_kernel[(triton.cdiv(entries, 64), batch * heads)](
        gains, cost, is_local, score, bins, heads, entries, CHUNK=64, num_warps=2
    )
    return score, bins


@triton.jit
def _score_kernel(gains, cost, is_local, score, bins, heads, entries, CHUNK: tl.constexpr):
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    i_bh = tl.program_id(1).to(tl.int64)
    inside = o < entries
    o_l = tl.arange(0, _LEVELS)
    level = tl.exp2(-1.0 - o_l * _OCTAVES)
    # [CHUNK, L]: the gain over the cost, in octaves. It grows as levels fall.
    at = (i_bh * entries + o)[:, None] * _LEVELS + o_l[None, :]
    gain = tl.load(gains + at, mask=inside[:, None], other=0.0)
    b_cost = tl.load(cost + (i_bh // heads) * entries + o, mask=inside, other=1.0)
    ratio = tl.log2(tl.maximum(gain / (level[None, :] * b_cost[:, None]), 1e-20))

    # [CHUNK]: the ratio passes 1 between two levels.
    first = tl.min(tl.where(ratio >= 0, o_l[None, :], _LEVELS), 1)
    above = tl.sum(tl.where(o_l[None, :] == first[:, None], ratio, 0.0), 1)
    below = tl.sum(tl.where(o_l[None, :] == (first - 1)[:, None], ratio, 0.0), 1)
    part = -below / tl.maximum(above - below, 1e-6)
    part = tl.minimum(tl.maximum(part, 0.0), 1.0)
    passed = tl.where(first > 0, first - 1 + part, 0.0)
    b_score = tl.where(first < _LEVELS, tl.exp2(-1.0 - passed * _OCTAVES), 0.0)
    tl.store(score + i_bh * entries + o, b_score, mask=inside)
    always = tl.load(is_local + (i_bh // heads) * entries + o, mask=inside, other=0) != 0
    b_bin = tl.where(always, _ALWAYS, bin_of(b_score))
    tl.store(bins + i_bh * entries + o, b_bin.to(tl.uint8), mask=inside)


def slash_masses(tile_mass: Tensor, tile: Tensor) -> Tensor:
    """Sums of a rank's tiles over each slash, fp32 [B, Hq, E].

    tile_mass: fp32 [B, Hq, n_local, T, U]. tile: as for slash_gains().
    """
    batch, heads, local, touching, groups = tile_mass.shape
    entries = tile.shape[2]
    masses = tile_mass.new_empty(batch, heads, entries)
    options = dict(U=groups, GROUPS=min(triton.next_power_of_2(groups), 32), CHUNK=64, num_warps=4)
    _sum_kernel[(triton.cdiv(entries, 64), batch * heads)](
        tile_mass, tile, masses, heads, entries, local * touching * groups, **options
    )
    return masses


@triton.jit
def _sum_kernel(
    tile_mass, tile, masses, heads, entries, count,
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
        mass += tl.load(tile_mass + i_bh * count + number, mask=number >= 0, other=0.0)
    tl.store(masses + i_bh * entries + o, tl.sum(mass, 0), mask=o < entries)
