"""Shared parts of the kernels that process a block of keys: masses, scores, and bins.

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
"""Pseudo-count of each candidate: extra rows assumed to put no mass on it. Few rows see the
last keys of a span, and a single one may give a key much mass by chance."""

HELD_OUT = 2 / 3
"""Weight of what half of the rows choose, tried on the other half. The rest is the weight of what
all rows choose, tried on themselves.

We want the mass that the choice by all rows loses on rows outside the probe. Say it is L + d,
where the best choice loses L. Half of the rows, tried on the others, lose about L + 2 d. All rows,
tried on themselves, lose about L - d. Two thirds of the one and one third of the other are L + d.
"""

SEEN_ONCE = 1 / 8
"""Factor on the score of a vertical whose mass was seen by only one half of the rows.

On a narrow slash each row looks at a different key. As verticals, those keys cost less than the
slash, but they do not help rows outside the probe.
"""

LEVELS = 16
OCTAVES_BETWEEN_LEVELS = 1.6
"""Levels are trial thresholds: scores 2**-1, 2**-2.6, ... 2**-25. The gain of a slash is computed
at each and interpolated between two."""

BINS = 256
BINS_PER_OCTAVE = 10
"""Bins in steps of 7 %. Bins 1 to 254 are scores of 2**-25.4 to 1."""
ALWAYS = BINS - 1
"""The bin of slashes that are always selected."""


class SpanTokens(NamedTuple):
    """The bounds of spans, int32 [B, n] each."""

    start: Tensor
    stop: Tensor


class FinalScores(NamedTuple):
    """The result of final_scores() for a rank's keys.

    bins: uint8 [B, Hq, n_local, b], of verticals.
    mass: fp32 [B, Hq, n_local, 3, b], mass of verticals: in the probe's even rows, in its odd rows,
        and in all, weighted by HELD_OUT, HELD_OUT, and 1 - HELD_OUT.
    mass_bins: uint8 [B, Hq, n_local, 3, b], the highest thresholds at which they hold it: bins of
        the scores by the odd rows, by the even rows, and by all.
    tile_mass: fp32 [B, Hq, n_local, T, U], mass of slashes by group of rows, weighted alike.
    """

    bins: Tensor
    mass: Tensor
    mass_bins: Tensor
    tile_mass: Tensor


def level_scores(like: Tensor) -> Tensor:
    """The scores of all levels, descending, [L] in the dtype of `like`."""
    level = torch.arange(LEVELS, dtype=like.dtype, device=like.device)
    return torch.exp2(-1 - OCTAVES_BETWEEN_LEVELS * level)


def bins_of(scores: Tensor) -> Tensor:
    """uint8 bins of scores, 0 for those below all bins; infinite scores are always selected."""
    bins = torch.floor(scores.log2() * BINS_PER_OCTAVE) + ALWAYS
    bins = bins.clamp(0, ALWAYS - 1)
    return torch.where(scores == torch.inf, ALWAYS, bins).to(torch.uint8)


_ALWAYS = tl.constexpr(ALWAYS)
_BINS_PER_OCTAVE = tl.constexpr(BINS_PER_OCTAVE)
_PSEUDO_ROWS = tl.constexpr(PSEUDO_ROWS)
_VERTICAL_COST = tl.constexpr(VERTICAL_COST)
_LOG2_E = tl.constexpr(math.log2(math.e))


def tile_options(free: Probe, keys: KeyBlocks) -> dict[str, int]:
    """The options of the probe's kernels, with PART keys at a time. With more keys, the values of
    all rows would not fit into registers."""
    options = probe_tile_options(free, keys)
    return options | dict(
        U=free.groups,
        U2=triton.next_power_of_2(free.groups),
        # tl.dot() needs 16 rows or more, also for half of the rows.
        P=max(32, options["P"]),
        PART=min(32, keys.block_size),
        # Each warp has all rows of some keys, so that no sum over rows goes through shared memory.
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
    """Bool [rows]: a row of rows_at() sees some of the block of keys that begins at first_key."""
    _, b_start, b_stop, _ = rows
    return (b_start < b_stop) & (b_start < first_key + SIZE) & (b_stop > first_key)


@triton.jit
def masses(b_k, rows, position, scale):
    """Masses [keys, rows] of keys at these positions, for rows_at().

    Keys come first, because most sums are over rows, and they cost least in this order.
    """
    b_q, b_start, b_stop, b_lse = rows
    b_s = tl.dot(b_k, b_q, input_precision="ieee") * (scale * _LOG2_E)
    seen = (position[:, None] >= b_start[None, :]) & (position[:, None] < b_stop[None, :])
    return tl.where(seen, tl.exp2(b_s - b_lse[None, :]), 0.0)


@triton.jit
def score_of(mass, rows):
    """Mass of a vertical in some rows over the cost of its pairs with them. rows: their number."""
    return mass / ((rows + _PSEUDO_ROWS) * _VERTICAL_COST)


@triton.jit
def bin_of(score):
    """int32 bins of scores, as bins_of(), but none is ALWAYS."""
    b_bin = tl.floor(tl.log2(score) * _BINS_PER_OCTAVE) + _ALWAYS
    return tl.minimum(tl.maximum(b_bin, 0.0), _ALWAYS - 1.0).to(tl.int32)


@triton.jit
def by_group(of_row, group_of_row, row, is_row, U2: tl.constexpr):
    """Sums [U2] of the rows' values of_row, by group of rows."""
    o_u = tl.arange(0, U2)
    b_group = tl.load(group_of_row + row, mask=is_row, other=-1)
    in_group = b_group[:, None] == o_u[None, :]
    return tl.sum(tl.where(in_group, of_row[:, None], 0.0), 0)
