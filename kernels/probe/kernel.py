"""The attention of a probe, some of a span's queries, on every block of keys.

In the kernels i_b is a sequence, i_h a query head, i_bh both, i_c a block of keys, i_t one of the
spans that touch the block, and `group` the query heads of a KV head. P and D are the probe's
queries and the head dimension, rounded up to a power of two; SIZE is the block size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import INTERPRETED, rows_of, slice_of

_ROWS = 16
"""Rows that a program copies."""


class Probe(NamedTuple):
    """P queries of each of n spans; a span shorter than P has rows that see nothing.

    q: [B, Hq, n, P, D] in its own dtype.
    start, stop: int32 [B, n, P], the keys that each row sees.
    row_block: int32 [B, n, P], the block of queries that each row lies in.
    group: int32 [B, n, P], which of `groups` groups each row belongs to. The rows of a group lie in
        one block. Where there are P groups, row i is group i.
    groups: U.
    scale: of the scores.
    """

    q: Tensor
    start: Tensor
    stop: Tensor
    row_block: Tensor
    group: Tensor
    groups: int
    scale: float


class KeyBlocks(NamedTuple):
    """The blocks of keys that a rank holds.

    k: [B, Hkv, n_local * block_size, D].
    blocks: int32 [n_local], their global numbers.
    slot: int32 [B, n_local, T], the spans that touch them, -1 for none.
    block_size: tokens of a block.
    """

    k: Tensor
    blocks: Tensor
    slot: Tensor
    block_size: int


class ProbeOperand(NamedTuple):
    """A Probe and its KeyBlocks as kernels get them, all contiguous.

    heads: query heads. group: query heads of a KV head. n: spans. local: blocks of keys.
    """

    q: Tensor
    k: Tensor
    start: Tensor
    stop: Tensor
    slot: Tensor
    blocks: Tensor
    row_block: Tensor
    group_of_row: Tensor
    scale: float
    heads: int
    group: int
    n: int
    local: int
    dim: int


def operand(probe: Probe, keys: KeyBlocks) -> ProbeOperand:
    """The inputs of kernels that process blocks of keys."""
    heads, n, _, dim = probe.q.shape[1:]
    return ProbeOperand(
        q=probe.q.contiguous(),
        k=keys.k.contiguous(),
        start=probe.start.contiguous(),
        stop=probe.stop.contiguous(),
        slot=keys.slot.contiguous(),
        blocks=keys.blocks,
        row_block=probe.row_block.contiguous(),
        group_of_row=probe.group.contiguous(),
        scale=probe.scale,
        heads=heads,
        group=heads // keys.k.shape[1],
        n=n,
        local=keys.slot.shape[1],
        dim=dim,
    )


@triton.jit
def _rows_kernel(
    q, local, mine, held, count,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """ROWS of one query head. count: R. D: HEAD_DIM rounded up to a power of two."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    o_dim = tl.arange(0, D)[None, :]
    inside = o < count
    row = tl.load(local + i_b * count + o, mask=inside, other=0)
    is_mine = tl.load(mine + i_b * count + o, mask=inside, other=0) != 0
    in_dim = o_dim < HEAD_DIM
    # [ROWS, D]
    q_at = slice_of(q, i_b, i_h) + row[:, None] * q.stride[2] + o_dim
    b_q = tl.load(q_at, mask=is_mine[:, None] & in_dim, other=0.0)
    held_at = ((i_b * tl.num_programs(1) + i_h) * count + o)[:, None] * HEAD_DIM + o_dim
    tl.store(held + held_at, b_q, mask=inside[:, None] & in_dim)


def held_rows(q: Tensor, local: Tensor, mine: Tensor) -> Tensor:
    """These rows of q, and zeros for those that the rank does not hold: [B, Hq, R, D].

    q: [B, Hq, S_local, D], any floating dtype but fp64.
    local: int64 [B, R], where the rank holds each row; 0 where it does not. mine: bool [B, R].
    """
    batch, heads, _, dim = q.shape
    count = local.shape[1]
    held = q.new_empty(batch, heads, count, dim)
    mine = mine.view(torch.int8)
    options = dict(ROWS=_ROWS, HEAD_DIM=dim, D=triton.next_power_of_2(dim), num_warps=4)
    _rows_kernel[(triton.cdiv(count, _ROWS), heads, batch)](
        rows_of(q), local, mine, held, count, **options
    )
    return held


@triton.jit
def keys_at(k, k_row, dim, D: tl.constexpr, UPCAST: tl.constexpr):
    """Keys [keys, D] of these rows of k."""
    o_d = tl.arange(0, D)
    b_k = tl.load(k + k_row[:, None] * dim + o_d[None, :], mask=(o_d < dim)[None, :], other=0.0)
    if UPCAST:
        b_k = b_k.to(tl.float32)
    return b_k


@triton.jit
def ranges_at(probe, row, is_row, is_span):
    """The first key that each of these rows sees, and the one behind the last; empty for padding,
    and if there is no span."""
    b_start = tl.load(probe.start + row, mask=is_row, other=0)
    b_stop = tl.load(probe.stop + row, mask=is_row, other=0)
    return b_start, tl.where(is_span, b_stop, b_start)


@triton.jit
def span_of(probe, i_b, i_c, i_t, T: tl.constexpr):
    """The span in slot i_t of a block of keys, and whether there is one; 0 for none, which is safe
    to look up."""
    span = tl.load(probe.slot + (i_b * probe.local + i_c) * T + i_t)
    return tl.maximum(span, 0), span >= 0


@triton.jit
def _scores_of_block(
    probe, i_bh, i_c, i_t, queries,
    T: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores [P, SIZE] of a block of keys for the span in its slot i_t, and the span.

    -inf where nothing is seen. If there is no span, everything is -inf and the span is 0.
    """
    i_b = i_bh // probe.heads
    i_kv = i_b * (probe.heads // probe.group) + i_bh % probe.heads // probe.group
    o_p = tl.arange(0, P)
    o_k = tl.arange(0, SIZE)
    o_d = tl.arange(0, D)
    m_p = o_p < queries
    span, is_span = span_of(probe, i_b, i_c, i_t, T)

    # [P, D]
    q_row = (i_bh * probe.n + span) * queries + o_p
    q_at = probe.q + q_row[:, None] * probe.dim + o_d[None, :]
    b_q = tl.load(q_at, mask=m_p[:, None] & (o_d < probe.dim)[None, :], other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
    # [SIZE, D]
    b_k = keys_at(probe.k, (i_kv * probe.local + i_c) * SIZE + o_k, probe.dim, D, UPCAST)
    # [P, SIZE]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * probe.scale

    # [P], from where to where each query sees, and [SIZE].
    b_start, b_stop = ranges_at(probe, (i_b * probe.n + span) * queries + o_p, m_p, is_span)
    position = tl.load(probe.blocks + i_c) * SIZE + o_k
    seen = (position[None, :] >= b_start[:, None]) & (position[None, :] < b_stop[:, None])
    return tl.where(seen, b_s, float("-inf")), span


@triton.jit
def _lse_kernel(
    probe, lse, queries: tl.constexpr,
    T: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Log of the softmax sums of a block of keys, for one span that touches it."""
    i_c = tl.program_id(0)
    i_t = tl.program_id(1)
    i_bh = tl.program_id(2).to(tl.int64)
    o_p = tl.arange(0, P)
    row = ((i_bh * probe.local + i_c) * T + i_t) * queries + o_p
    slot_at = (i_bh // probe.heads * probe.local + i_c) * T + i_t
    # Few blocks of a packed sequence are in two spans.
    if T > 1 and tl.load(probe.slot + slot_at) < 0:
        tl.store(lse + row, tl.full([P], float("-inf"), tl.float32), mask=o_p < queries)
    else:
        b_s, _ = _scores_of_block(probe, i_bh, i_c, i_t, queries, T, P, D, SIZE, UPCAST)
        # [P]; finite also for rows that see nothing: their sums are 0, not NaN.
        top = tl.maximum(tl.max(b_s, 1), -3.0e38)
        total = tl.sum(tl.exp(b_s - top[:, None]), 1)
        value = tl.where(total > 0, top + tl.log(total), float("-inf"))
        tl.store(lse + row, value, mask=o_p < queries)


@triton.jit
def _span_kernel(
    block_lse, slot, run, lse, heads, n, local, queries,
    T: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Log of the softmax sums of a span, for ROWS of the probe's queries.

    Looks at BLOCKS of the span's blocks at a time, and keeps the largest value seen so far.
    """
    o_p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_span = tl.program_id(1)
    i_bh = tl.program_id(2).to(tl.int64)
    i_b = i_bh // heads
    first = tl.load(run + (i_b * n + i_span) * 2)
    last = tl.load(run + (i_b * n + i_span) * 2 + 1)
    # [ROWS]
    top = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(first, last, BLOCKS):
        o_c = start + tl.arange(0, BLOCKS)
        for i_t in tl.static_range(T):
            # [BLOCKS]: a block's other slot belongs to another span.
            b_slot = tl.load(slot + (i_b * local + o_c) * T + i_t, mask=o_c < last, other=-1)
            touches = b_slot == i_span
            # [BLOCKS, ROWS]
            at = ((i_bh * local + o_c) * T + i_t)[:, None] * queries + o_p[None, :]
            inside = touches[:, None] & (o_p < queries)[None, :]
            b_lse = tl.load(block_lse + at, mask=inside, other=float("-inf"))
            higher = tl.maximum(top, tl.max(b_lse, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(b_lse - higher[None, :]), 0)
            top = higher
    value = tl.where(total > 0, top + tl.log(total), float("-inf"))
    tl.store(lse + (i_bh * n + i_span) * queries + o_p, value, mask=o_p < queries)


@triton.jit
def _mass_kernel(
    probe, lse, vertical, tile, queries: tl.constexpr,
    T: tl.constexpr, U: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Masses of a block of keys, by vertical and by tile.

    vertical: fp32 [B, Hq, n_local, SIZE]. tile: fp32 [B, Hq, n_local, T, U].
    """
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // probe.heads
    o_p = tl.arange(0, P)
    is_row = o_p < queries
    # A vertical is in one span at most; over the others' slots it adds up zeros.
    b_vertical = tl.zeros([SIZE], tl.float32)
    for i_t in tl.static_range(T):
        b_s, span = _scores_of_block(probe, i_bh, i_c, i_t, queries, T, P, D, SIZE, UPCAST)
        # [P, SIZE]; rows that see nothing have lse -inf, and get masses of 0, not NaN.
        b_lse = tl.load(lse + (i_bh * probe.n + span) * queries + o_p, mask=is_row, other=0.0)
        b_mass = tl.exp(b_s - tl.maximum(b_lse, -3.0e38)[:, None])
        of_row = tl.sum(b_mass, 1)
        at = tile + ((i_bh * probe.local + i_c) * T + i_t) * U
        if U == queries:
            # Each row is a group.
            tl.store(at + o_p, of_row, mask=is_row)
        else:
            group_at = probe.group_of_row + (i_b * probe.n + span) * queries + o_p
            b_group = tl.load(group_at, mask=is_row, other=-1)
            for u in tl.static_range(U):
                tl.store(at + u, tl.sum(tl.where(b_group == u, of_row, 0.0), 0))
        b_vertical += tl.sum(b_mass, 0)
    o = (i_bh * probe.local + i_c) * SIZE + tl.arange(0, SIZE)
    tl.store(vertical + o, b_vertical)


def tile_options(probe: Probe, keys: KeyBlocks) -> dict[str, int]:
    """Sizes of a program's tile, and the warps that it gets."""
    queries, dim = probe.q.shape[3:]
    # tl.dot() wants 16 or more. The interpreter multiplies in fp32.
    return dict(
        queries=queries,
        T=keys.slot.shape[2],
        P=max(16, triton.next_power_of_2(queries)),
        D=max(16, triton.next_power_of_2(dim)),
        SIZE=keys.block_size,
        UPCAST=INTERPRETED,
        num_warps=8 if keys.block_size >= 128 else 4,
    )


def block_lse(probe: Probe, keys: KeyBlocks) -> Tensor:
    """Log of each probe row's softmax sum over each block, fp32 [B, Hq, n_local, T, P].

    -inf where nothing is seen. q and k may have any floating dtype but fp64.
    """
    batch, heads, _, queries, _ = probe.q.shape
    _, local, touching = keys.slot.shape
    lse = probe.q.new_empty(batch, heads, local, touching, queries, dtype=torch.float32)
    _lse_kernel[(local, touching, batch * heads)](
        operand(probe, keys), lse, **tile_options(probe, keys)
    )
    return lse


def span_lse(block_lse: Tensor, slot: Tensor, run: Tensor) -> Tensor:
    """Log of each probe row's softmax sum over the blocks of its span, fp32 [B, Hq, n, P].

    -inf where nothing is seen.
    block_lse: of block_lse(). slot: of KeyBlocks. run: int32 [B, n, 2], the first block that
    touches a span and the one behind the last.
    """
    batch, heads, local, touching, queries = block_lse.shape
    n = run.shape[1]
    lse = block_lse.new_empty(batch, heads, n, queries)
    options = dict(T=touching, ROWS=32, BLOCKS=64, num_warps=4)
    _span_kernel[(triton.cdiv(queries, 32), n, batch * heads)](
        block_lse.contiguous(), slot, run, lse, heads, n, local, queries, **options
    )
    return lse


def block_masses(probe: Probe, keys: KeyBlocks, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax masses that the probe gives to each block, by vertical and by tile.

    lse: fp32 [B, Hq, n, P], over all keys.
    Returns the masses by vertical, fp32 [B, Hq, n_local, block_size], and by tile and group of
    rows, fp32 [B, Hq, n_local, T, U].
    """
    batch, heads = probe.q.shape[:2]
    _, local, touching = keys.slot.shape
    vertical = lse.new_empty(batch, heads, local, keys.block_size)
    tile = lse.new_empty(batch, heads, local, touching, probe.groups)
    options = tile_options(probe, keys) | dict(U=probe.groups)
    operands = operand(probe, keys)
    _mass_kernel[(local, batch * heads)](operands, lse.contiguous(), vertical, tile, **options)
    return vertical, tile
