"""What the kernels share that look at a block of keys: its masses, and prices and codes of them.

In the kernels i_b is a sequence, i_bh a query head of it, i_c a block of keys, i_t one of the spans
that touch the block. P is the probe's rows, padded.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.kernel import ranges_at
from titan_sparse.kernels.probe.kernel import tile_options as probe_tile_options

VERTICAL_COST = 2.0
"""Time of a pair of tokens in gathered verticals over that of a pair in blocks, forward and
backward.

At 131,072 tokens on an H200 (docs/benchmarks.md, where the time goes): 1.5 with Triton's kernels,
2.4 with flex's.
"""

PSEUDO_ROWS = 4.0
"""Pseudo-count of each element: extra rows assumed to put no mass on it. Few rows see the
last keys of a span, and a single one may give a key much mass by chance."""

HELD_OUT = 2 / 3
"""Weight of what half of the rows choose, tried on the other half. The rest is the weight of what
all rows choose, tried on themselves.

We want the mass that the choice by all rows loses on rows outside the probe. Say it is L + d,
where the best choice loses L. Half of the rows, tried on the others, lose about L + 2 d. All rows,
tried on themselves, lose about L - d. Two thirds of the one and one third of the other are L + d.
"""

SEEN_ONCE = 1 / 8
"""Factor on the price of a vertical whose mass was seen by only one half of the rows.

On a narrow slash each row looks at a different key. As verticals, those keys cost less than the
slash, but they do not help rows outside the probe.
"""

LEVELS = 16
OCTAVES_BETWEEN_LEVELS = 1.6
"""Levels are prices 2**-1, 2**-2.6, ... 2**-25. The gain of a diagonal is known at each, and
interpolated between two."""

CODES = 256
CODES_PER_OCTAVE = 10
"""Steps of 7 %. Codes 1 to 254 are prices of 2**-25.4 to 1."""
ALWAYS = CODES - 1
"""The code of what is always selected."""


class SpanTokens(NamedTuple):
    """Where spans begin and end, int32 [B, n] each."""

    start: Tensor
    stop: Tensor


class FinalPrices(NamedTuple):
    """What final_prices() returns, of a rank's keys.

    codes: uint8 [B, Hq, n_local, b], of verticals.
    held: fp32 [B, Hq, n_local, 3, b], mass that verticals hold: of the probe's even rows, of its
        odd rows, and of all. They weigh HELD_OUT, HELD_OUT and 1 - HELD_OUT.
    held_codes: uint8 [B, Hq, n_local, 3, b], from which code on down they do: that of the odd rows,
        that of the even rows, and that of all.
    tiles: fp32 [B, Hq, n_local, T, U], mass by group of rows that diagonals hold, weighed alike.
    """

    codes: Tensor
    held: Tensor
    held_codes: Tensor
    tiles: Tensor


def level_prices(like: Tensor) -> Tensor:
    """The prices of all levels, descending, [L] in the dtype of `like`."""
    level = torch.arange(LEVELS, dtype=like.dtype, device=like.device)
    return torch.exp2(-1 - OCTAVES_BETWEEN_LEVELS * level)


def codes_of(prices: Tensor) -> Tensor:
    """uint8 codes of prices, 0 for those below all codes; infinite prices are always on."""
    code = torch.floor(prices.log2() * CODES_PER_OCTAVE) + ALWAYS
    code = code.clamp(0, ALWAYS - 1)
    return torch.where(prices == torch.inf, ALWAYS, code).to(torch.uint8)


_ALWAYS = tl.constexpr(ALWAYS)
_CODES_PER_OCTAVE = tl.constexpr(CODES_PER_OCTAVE)
_PSEUDO_ROWS = tl.constexpr(PSEUDO_ROWS)
_VERTICAL_COST = tl.constexpr(VERTICAL_COST)
_LOG2_E = tl.constexpr(math.log2(math.e))


def tile_options(free: Probe, keys: KeyBlocks) -> dict[str, int]:
    """As for the probe's kernels, but PART keys at a time. With more, the rows' numbers would not
    fit into registers beside them."""
    options = probe_tile_options(free, keys)
    return options | dict(
        U=free.groups,
        U2=triton.next_power_of_2(free.groups),
        # tl.dot() wants 16 or more, of half of the rows too.
        P=max(32, options["P"]),
        PART=min(32, keys.block_size),
        # Of a warp are all rows of some keys, so that no sum over rows goes through shared memory.
        num_warps=2,
    )


@triton.jit
def rows_at(probe, lse, row, q_row, is_row, is_span, D: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of the probe: queries [D, rows], the keys that they see, and lse.

    row, q_row: numbers among the rows of a sequence's spans, and of a head's. is_row: which are no
    padding.
    The lse is of base 2; infinite for padding, so that its masses are 0, and finite for rows that
    see nothing, whose masses would be NaN.
    """
    o_d = tl.arange(0, D)
    q_at = probe.q + q_row[None, :] * probe.dim + o_d[:, None]
    b_q = tl.load(q_at, mask=is_row[None, :] & (o_d < probe.dim)[:, None], other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
    b_start, b_stop = ranges_at(probe, row, is_row, is_span)
    b_lse = tl.load(lse + q_row, mask=is_row, other=float("inf"))
    return b_q, b_start, b_stop, tl.maximum(b_lse, -1.0e38) * _LOG2_E


@triton.jit
def sees_any(rows, first_key, SIZE: tl.constexpr):
    """Which of rows_at() see anything of the block of keys that begins at first_key."""
    _, b_start, b_stop, _ = rows
    return (b_start < b_stop) & (b_start < first_key + SIZE) & (b_stop > first_key)


@triton.jit
def masses(b_k, rows, position, scale):
    """Masses [keys, rows] of keys at these positions, for rows_at().

    Keys come first: sums over rows are what is wanted most, and cost least that way.
    """
    b_q, b_start, b_stop, b_lse = rows
    b_s = tl.dot(b_k, b_q, input_precision="ieee") * (scale * _LOG2_E)
    seen = (position[:, None] >= b_start[None, :]) & (position[:, None] < b_stop[None, :])
    return tl.where(seen, tl.exp2(b_s - b_lse[None, :]), 0.0)


@triton.jit
def price_of(mass, rows):
    """Mass of a pair for its cost; rows: how many see it."""
    return mass / ((rows + _PSEUDO_ROWS) * _VERTICAL_COST)


@triton.jit
def code_of(price):
    """int32 codes of prices (inputs.codes_of); none is always on here."""
    code = tl.floor(tl.log2(price) * _CODES_PER_OCTAVE) + _ALWAYS
    return tl.minimum(tl.maximum(code, 0.0), _ALWAYS - 1.0).to(tl.int32)


@triton.jit
def by_group(of_row, group_of_row, row, is_row, U2: tl.constexpr):
    """Sums [U2] of what rows have, by group of rows."""
    o_u = tl.arange(0, U2)
    b_group = tl.load(group_of_row + row, mask=is_row, other=-1)
    in_group = b_group[:, None] == o_u[None, :]
    return tl.sum(tl.where(in_group, of_row[:, None], 0.0), 0)
