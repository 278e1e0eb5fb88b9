"""What the kernels share that look at a block of keys: its masses, and prices and codes of them.

In the kernels i_b is a sequence, i_bh a query head of it, i_c a block of keys, i_t one of the spans
that touch the block, and `group` the query heads of a KV head. P is the probe's rows, padded.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.inputs import (
    ALWAYS,
    CODES_PER_OCTAVE,
    PSEUDO_ROWS,
    VERTICAL_COST,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.kernel import tile_options

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
