"""What the kernels share that look at a block of keys: its masses, and prices and codes of them.

In the kernels i_b is a sequence, i_bh a query head of it, i_c a block of keys, i_t one of the spans
that touch the block, and `group` the query heads of a KV head. P is the probe's rows, padded.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.kernel import tile_options

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


def tile_arguments(free: Probe, keys: KeyBlocks, lse: Tensor) -> dict:
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
        group_of_row=free.group.contiguous(),
        heads=heads,
        group=heads // keys.k.shape[1],
        n=n,
        local=keys.slot.shape[1],
        queries=queries,
        dim=dim,
        T=keys.slot.shape[2],
        U=free.groups,
        U2=triton.next_power_of_2(free.groups),
        **_tile_options(q, keys.block_size),
    )


def _tile_options(q: Tensor, block_size: int) -> dict:
    """As for the probe's kernels, but PART keys at a time. With more, the rows' numbers would not
    fit into registers beside them."""
    options = tile_options(q, block_size)
    # tl.dot() wants 16 or more, of half of the rows too.
    rows = max(32, options["P"])
    # Of a warp are all rows of some keys, so that no sum over rows goes through shared memory.
    return options | dict(P=rows, PART=min(32, block_size), num_warps=2)


@triton.jit
def span_of(slot, i_b, i_c, i_t, local, T: tl.constexpr):
    """The span in slot i_t of a block of keys, and whether there is one; 0 for none, which is safe
    to look up."""
    span = tl.load(slot + (i_b * local + i_c) * T + i_t)
    return tl.maximum(span, 0), span >= 0


@triton.jit
def queries_at(q, q_row, is_row, dim, D: tl.constexpr, UPCAST: tl.constexpr):
    """Queries [D, rows] of these rows of q. is_row: which are no padding."""
    o_d = tl.arange(0, D)
    q_at = q + q_row[None, :] * dim + o_d[:, None]
    b_q = tl.load(q_at, mask=is_row[None, :] & (o_d < dim)[:, None], other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
    return b_q


@triton.jit
def ranges_at(start, stop, row, is_row, is_span):
    """The first key that each of these rows sees, and the one behind the last; empty for padding,
    and if there is no span."""
    b_start = tl.load(start + row, mask=is_row, other=0)
    b_stop = tl.load(stop + row, mask=is_row, other=0)
    return b_start, tl.where(is_span, b_stop, b_start)


@triton.jit
def lse_at(lse, q_row, is_row):
    """Base-2 lse of these rows; infinite for padding, so that its masses are 0. Finite for rows that see
    nothing, whose masses would be NaN."""
    b_lse = tl.load(lse + q_row, mask=is_row, other=float("inf"))
    return tl.maximum(b_lse, -1.0e38) * _LOG2_E


@triton.jit
def keys_at(k, k_row, dim, D: tl.constexpr, UPCAST: tl.constexpr):
    """Keys [keys, D] of these rows of k."""
    o_d = tl.arange(0, D)
    b_k = tl.load(k + k_row[:, None] * dim + o_d[None, :], mask=(o_d < dim)[None, :], other=0.0)
    if UPCAST:
        b_k = b_k.to(tl.float32)
    return b_k


@triton.jit
def sees_any(b_start, b_stop, first_key, SIZE: tl.constexpr):
    """Which rows see anything of the block of keys that begins at first_key."""
    return (b_start < b_stop) & (b_start < first_key + SIZE) & (b_stop > first_key)


@triton.jit
def masses(b_k, b_q, b_start, b_stop, b_lse, position, scale):
    """Masses [keys, rows] of keys at these positions.

    Keys come first: sums over rows are what is wanted most, and cost least that way.
    """
    b_s = tl.dot(b_k, b_q, input_precision="ieee") * (scale * _LOG2_E)
    seen = (position[:, None] >= b_start[None, :]) & (position[:, None] < b_stop[None, :])
    return tl.where(seen, tl.exp2(b_s - b_lse[None, :]), 0.0)


@triton.jit
def price_of(mass, rows):
    """Mass of a pair for its cost; rows: how many see it."""
    return mass / (_VERTICAL_COST * (rows + _PSEUDO_ROWS))


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
