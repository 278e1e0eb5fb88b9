"""What the kernels share that look at a block of keys: its masses, and prices and codes of them.

In the kernels i_b is a sequence, i_bh a query head of it, i_c a block of keys, i_t one of the spans
that touch the block, and `group` the query heads of a KV head. P is half of the probe's rows.
"""

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
    """As for the probe's kernels, but half of the rows at a time."""
    options = tile_options(q, block_size)
    queries = q.shape[3]
    # tl.dot() wants 16 or more.
    half = max(16, triton.next_power_of_2(queries) // 2)
    # Of a warp are all rows of some keys, so that no sum over rows goes through shared memory.
    return options | dict(P=half, num_warps=4)


@triton.jit
def masses_of_half(
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
def price_of(mass, rows):
    """Mass of a pair for its cost; rows: how many see it."""
    return mass / (_VERTICAL_COST * (rows + _PSEUDO_ROWS))


@triton.jit
def code_of(price):
    """int32 codes of prices (inputs.codes_of); none is always on here."""
    code = tl.floor(tl.log2(price) * _CODES_PER_OCTAVE) + _ALWAYS
    return tl.minimum(tl.maximum(code, 0.0), _ALWAYS - 1.0).to(tl.int32)


@triton.jit
def store_rows(
    tile,
    at,
    of_row,
    half,
    group_of_row,
    row,
    queries,
    U: tl.constexpr,
    U2: tl.constexpr,
    P: tl.constexpr,
):
    """Add sums of half of the rows [P] to tile[at .. at + U - 1], by group of rows.

    The even half comes first, and overwrites what is there.
    row: of the span's first row among all spans.
    """
    o_p = 2 * tl.arange(0, P) + half
    if U == queries:
        # Each row is a group.
        tl.store(tile + at + o_p, of_row, mask=o_p < queries)
    else:
        o_u = tl.arange(0, U2)
        b_group = tl.load(group_of_row + row + o_p, mask=o_p < queries, other=-1)
        in_group = b_group[:, None] == o_u[None, :]
        of_group = tl.sum(tl.where(in_group, of_row[:, None], 0.0), 0)
        if half == 1:
            of_group += tl.load(tile + at + o_u, mask=o_u < U, other=0.0)
        tl.store(tile + at + o_u, of_group, mask=o_u < U)
