"""Scores of verticals: as if there were no slashes, and in addition to them. shared.py names the
kernels' arguments."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.kernel import keys_at, operand, span_of
from titan_sparse.kernels.selection.shared import (
    BINS,
    HELD_OUT,
    LEVELS,
    OCTAVES_BETWEEN_LEVELS,
    SEEN_ONCE,
    VERTICAL_COST,
    FinalScores,
    SpanTokens,
    bin_of,
    by_group,
    masses,
    rows_at,
    score_of,
    sees_any,
    tile_options,
)

_BINS = tl.constexpr(BINS)
_HELD_OUT = tl.constexpr(HELD_OUT)
_IN_SAMPLE = tl.constexpr(1 - HELD_OUT)
_LEVELS = tl.constexpr(LEVELS)
_OCTAVES = tl.constexpr(OCTAVES_BETWEEN_LEVELS)
_SEEN_ONCE = tl.constexpr(SEEN_ONCE)
_VERTICAL_COST = tl.constexpr(VERTICAL_COST)


def first_scores(
    free: Probe, keys: KeyBlocks, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of verticals as if there were no slashes, and the inputs of slash_gains().

    A score is the geometric mean of the scores by the even and by the odd rows of the probe, and at
    least SEEN_ONCE times the score by all rows (equations 2 and 3 in README.md).

    free: the probe, whose rows see only keys that are not always selected. lse: fp32 [B, Hq, n, P],
    over all keys.
    Returns, in fp32, scores [B, Hq, n_local, b]; masses of tiles by group of rows [B, Hq, n_local,
    T, U]; and at each level the remaining share of a block's mass outside the selected verticals,
    and the savings per row when those verticals lie on a slash, [B, Hq, n_local, T, L] each.
    """
    batch, heads = free.q.shape[:2]
    _, local, touching = keys.slot.shape
    score = lse.new_empty(batch, heads, local, keys.block_size)
    tile_mass = lse.new_empty(batch, heads, local, touching, free.groups)
    remaining = lse.new_empty(batch, heads, local, touching, LEVELS)
    savings = torch.empty_like(remaining)
    results = (score, tile_mass, remaining, savings)
    options = tile_options(free, keys)
    _first_kernel[(local, batch * heads)](
        operand(free, keys), lse.contiguous(), *results, **options
    )
    return results


@triton.jit
def _first_kernel(
    probe, lse, score, tile_mass, remaining, savings, queries: tl.constexpr,
    T: tl.constexpr, U: tl.constexpr, U2: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    SIZE: tl.constexpr, PART: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The results of first_scores() for a block of keys.

    U2: U, rounded up to a power of two.
    """
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // probe.heads
    i_kv = i_b * (probe.heads // probe.group) + i_bh % probe.heads // probe.group
    first_key = tl.load(probe.blocks + i_c) * SIZE
    o_p = tl.arange(0, P)
    o_u = tl.arange(0, U2)
    o_l = tl.arange(0, _LEVELS)
    is_row = o_p < queries
    is_odd = o_p % 2 == 1
    level = tl.exp2(-1.0 - o_l * _OCTAVES)
    for i_t in tl.static_range(T):
        span, is_span = span_of(probe, i_b, i_c, i_t, T)
        at = (i_bh * probe.local + i_c) * T + i_t
        # Few blocks of a packed sequence are in two spans.
        if i_t > 0 and not is_span:
            tl.store(tile_mass + at * U + o_u, tl.zeros([U2], tl.float32), mask=o_u < U)
            tl.store(remaining + at * _LEVELS + o_l, tl.zeros([_LEVELS], tl.float32))
            tl.store(savings + at * _LEVELS + o_l, tl.zeros([_LEVELS], tl.float32))
        else:
            # Rows of the span in this slot: [D, P] and [P].
            row = (i_b * probe.n + span) * queries + o_p
            q_row = (i_bh * probe.n + span) * queries + o_p
            rows = rows_at(probe, lse, row, q_row, is_row, is_span, D, UPCAST)
            sees = sees_any(rows, first_key, SIZE)
            even_rows = tl.sum(tl.where(sees & ~is_odd, 1.0, 0.0), 0)
            odd_rows = tl.sum(tl.where(sees & is_odd, 1.0, 0.0), 0)

            of_row = tl.zeros([P], tl.float32)
            mass = tl.zeros([], tl.float32)
            mass_below = tl.zeros([_LEVELS], tl.float32)
            count = tl.zeros([_LEVELS], tl.float32)
            for part in range(SIZE // PART):
                # [PART, P] -> [PART]
                o_k = part * PART + tl.arange(0, PART)
                k_row = (i_kv * probe.local + i_c) * SIZE + o_k
                b_k = keys_at(probe.k, k_row, probe.dim, D, UPCAST)
                b_mass = masses(b_k, rows, first_key + o_k, probe.scale)
                even = tl.sum(tl.where(is_odd[None, :], 0.0, b_mass), 1)
                odd = tl.sum(tl.where(is_odd[None, :], b_mass, 0.0), 1)
                vertical = even + odd
                # Their product might underflow.
                of_both = tl.sqrt(score_of(even, even_rows)) * tl.sqrt(score_of(odd, odd_rows))
                of_either = score_of(vertical, even_rows + odd_rows) * _SEEN_ONCE
                scores = tl.maximum(of_both, of_either)
                # A key is in one span at most: later spans store only the keys that they see.
                key_at = (i_bh * probe.local + i_c) * SIZE + o_k
                is_new = o_k >= 0 if i_t == 0 else vertical > 0
                tl.store(score + key_at, scores, mask=is_new)

                of_row += tl.sum(b_mass, 0)
                mass += tl.sum(vertical, 0)
                # [PART, L] -> [L]
                below = scores[:, None] < level[None, :]
                mass_below += tl.sum(tl.where(below, vertical[:, None], 0.0), 0)
                count += tl.sum(tl.where(below, 0.0, 1.0), 0)

            if U == queries:
                # Each row is a group.
                tl.store(tile_mass + at * U + o_p, of_row, mask=is_row)
            else:
                of_group = by_group(of_row, probe.group_of_row, row, is_row, U2)
                tl.store(tile_mass + at * U + o_u, of_group, mask=o_u < U)
            tl.store(remaining + at * _LEVELS + o_l, mass_below / tl.maximum(mass, 1.18e-38))
            tl.store(savings + at * _LEVELS + o_l, count * level * _VERTICAL_COST)


def final_scores(
    free: Probe, keys: KeyBlocks, lse: Tensor, first: Tensor, of_slashes: Tensor, offset: Tensor
) -> FinalScores:
    """Scores of verticals in addition to the slashes, and the masses of both.

    A row's mass at a key counts for the slash if that has the higher score, and else for the
    vertical (equations 6 and 7 in README.md). Most of the weight is on held-out rows: the scores by
    the probe's even rows are tested on the odd rows, and the reverse. The rest is on all rows with
    their own scores (HELD_OUT). A row counts for all keys of a block of which it sees some.
    first: of first_scores(). of_slashes: fp32 [B, Hq, E], of slash_scores(). offset: int32 [B, n],
    where each span's slashes begin.
    """
    batch, heads, local, block_size = first.shape
    touching = keys.slot.shape[2]
    final = FinalScores(
        bins=torch.empty_like(first, dtype=torch.uint8),
        mass=first.new_empty(batch, heads, local, 3, block_size),
        mass_bins=first.new_empty(batch, heads, local, 3, block_size, dtype=torch.uint8),
        tile_mass=first.new_empty(batch, heads, local, touching, free.groups),
    )
    inputs = (lse.contiguous(), first, of_slashes.contiguous(), offset.contiguous())
    _final_kernel[(local, batch * heads)](
        operand(free, keys), *inputs, of_slashes.shape[2], final, **tile_options(free, keys)
    )
    return final


@triton.jit
def _slash_scores_of_rows(of_slashes, first_entry, row_block, row, is_row, block, entries):
    """Scores of the slashes on which rows meet a block of keys.

    of_slashes: scores of this head. first_entry: entry of the span's first slash.
    """
    back = tl.load(row_block + row, mask=is_row, other=0) - block
    entry = tl.minimum(tl.maximum(first_entry + back, 0), entries - 1)
    return tl.load(of_slashes + entry)


@triton.jit
def _vertical_mass(masses, on_slash, score):
    """The masses [keys, rows] of pairs on which the vertical has a higher score than the slash."""
    return tl.where(on_slash[None, :] < score[:, None], masses, 0.0)


@triton.jit
def _final_kernel(
    probe, lse, first, of_slashes, offset, entries, final, queries: tl.constexpr,
    T: tl.constexpr, U: tl.constexpr, U2: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    SIZE: tl.constexpr, PART: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The results of final_scores() for a block of keys."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // probe.heads
    i_kv = i_b * (probe.heads // probe.group) + i_bh % probe.heads // probe.group
    block = tl.load(probe.blocks + i_c)
    first_key = block * SIZE
    o_u = tl.arange(0, U2)
    o_even = 2 * tl.arange(0, P // 2)
    is_even = o_even < queries
    is_odd = o_even + 1 < queries
    for i_t in tl.static_range(T):
        span, is_span = span_of(probe, i_b, i_c, i_t, T)
        at = ((i_bh * probe.local + i_c) * T + i_t) * U
        # Few blocks of a packed sequence are in two spans.
        if i_t > 0 and not is_span:
            tl.store(final.tile_mass + at + o_u, tl.zeros([U2], tl.float32), mask=o_u < U)
        else:
            # Rows of the span in this slot, even ones and odd ones: [D, P / 2] and [P / 2].
            row = (i_b * probe.n + span) * queries + o_even
            q_row = (i_bh * probe.n + span) * queries + o_even
            even = rows_at(probe, lse, row, q_row, is_even, is_span, D, UPCAST)
            odd = rows_at(probe, lse, row + 1, q_row + 1, is_odd, is_span, D, UPCAST)
            even_sees = sees_any(even, first_key, SIZE)
            odd_sees = sees_any(odd, first_key, SIZE)

            # [P / 2]: scores of the slashes on which the rows meet the block. A row that sees
            # nothing of the block counts for no vertical.
            head = of_slashes + i_bh * entries
            first_entry = tl.load(offset + i_b * probe.n + span)
            row_block = probe.row_block
            even_slash = _slash_scores_of_rows(
                head, first_entry, row_block, row, is_even, block, entries
            )
            odd_slash = _slash_scores_of_rows(
                head, first_entry, row_block, row + 1, is_odd, block, entries
            )
            even_slash = tl.where(even_sees, even_slash, float("inf"))
            odd_slash = tl.where(odd_sees, odd_slash, float("inf"))

            of_even = tl.zeros([P // 2], tl.float32)
            of_odd = tl.zeros([P // 2], tl.float32)
            for part in range(SIZE // PART):
                # [PART, P / 2]
                o_k = part * PART + tl.arange(0, PART)
                position = first_key + o_k
                k_row = (i_kv * probe.local + i_c) * SIZE + o_k
                b_k = keys_at(probe.k, k_row, probe.dim, D, UPCAST)
                even_mass = masses(b_k, even, position, probe.scale)
                odd_mass = masses(b_k, odd, position, probe.scale)

                # The pairs that count for the vertical, and not for the slash.
                key_at = (i_bh * probe.local + i_c) * SIZE + o_k
                b_first = tl.load(first + key_at)
                on_even = even_slash[None, :] < b_first[:, None]
                on_odd = odd_slash[None, :] < b_first[:, None]
                # [PART]
                even_vertical = tl.sum(tl.where(on_even, even_mass, 0.0), 1)
                odd_vertical = tl.sum(tl.where(on_odd, odd_mass, 0.0), 1)
                even_rows = tl.sum(tl.where(on_even, 1.0, 0.0), 1)
                odd_rows = tl.sum(tl.where(on_odd, 1.0, 0.0), 1)
                score = score_of(even_vertical + odd_vertical, even_rows + odd_rows)
                even_score = score_of(even_vertical, even_rows)
                odd_score = score_of(odd_vertical, odd_rows)

                # [PART, P / 2]: each half of the rows by the scores of the other half, and by those
                # of all rows.
                even_tested = _vertical_mass(even_mass, even_slash, odd_score)
                odd_tested = _vertical_mass(odd_mass, odd_slash, even_score)
                even_all = _vertical_mass(even_mass, even_slash, score)
                odd_all = _vertical_mass(odd_mass, odd_slash, score)
                of_even += tl.sum(even_mass - even_tested * _HELD_OUT - even_all * _IN_SAMPLE, 0)
                of_odd += tl.sum(odd_mass - odd_tested * _HELD_OUT - odd_all * _IN_SAMPLE, 0)

                # A key is in one span at most: later spans store only the keys that they see.
                is_new = o_k >= 0 if i_t == 0 else tl.sum(even_mass, 1) + tl.sum(odd_mass, 1) > 0
                b_bin = bin_of(score).to(tl.uint8)
                tl.store(final.bins + key_at, b_bin, mask=is_new)
                mass_at = (i_bh * probe.local + i_c) * 3 * SIZE + o_k
                mass_of_all = tl.sum(even_all, 1) + tl.sum(odd_all, 1)
                tl.store(final.mass + mass_at, tl.sum(even_tested, 1) * _HELD_OUT, mask=is_new)
                tl.store(
                    final.mass + mass_at + SIZE, tl.sum(odd_tested, 1) * _HELD_OUT, mask=is_new
                )
                tl.store(final.mass + mass_at + 2 * SIZE, mass_of_all * _IN_SAMPLE, mask=is_new)
                tl.store(final.mass_bins + mass_at, bin_of(odd_score).to(tl.uint8), mask=is_new)
                tl.store(
                    final.mass_bins + mass_at + SIZE, bin_of(even_score).to(tl.uint8), mask=is_new
                )
                tl.store(final.mass_bins + mass_at + 2 * SIZE, b_bin, mask=is_new)

            if U == queries:
                # Each row is a group.
                tl.store(final.tile_mass + at + o_even, of_even, mask=is_even)
                tl.store(final.tile_mass + at + o_even + 1, of_odd, mask=is_odd)
            else:
                of_group = by_group(of_even, probe.group_of_row, row, is_even, U2)
                of_group += by_group(of_odd, probe.group_of_row, row + 1, is_odd, U2)
                tl.store(final.tile_mass + at + o_u, of_group, mask=o_u < U)


def mass_histogram(final: FinalScores, keys: KeyBlocks, spans: SpanTokens) -> Tensor:
    """Histograms of the verticals of each block over the bins: their mass and their number.

    Verticals of bin 0 are not counted.
    Returns both, one after the other: fp32 [2, B, Hq, n_local, T, BINS], by the block's spans.
    """
    batch, heads, local, size = final.bins.shape
    touching = keys.slot.shape[2]
    histogram = final.mass.new_empty(2, batch, heads, local, touching, BINS)
    inputs = (final, keys.slot.contiguous(), keys.blocks, spans)
    sizes = (heads, spans.start.shape[1], local)
    _histogram_kernel[(local, batch * heads, touching)](
        *inputs, *histogram, *sizes, T=touching, SIZE=size, num_warps=1
    )
    return histogram


@triton.jit
def _sums(bins, values):
    """Sums fp32 [16, 16] of values by bin, which is 16 times the row plus the column.

    One product of matrices. Values are rounded to tf32 there, 1 part in 2,000.
    """
    o = tl.arange(0, 16)
    # [16, candidates] and [candidates, 16]
    in_row = tl.where(bins[None, :] // 16 == o[:, None], 1.0, 0.0)
    in_column = tl.where(bins[:, None] % 16 == o[None, :], values[:, None], 0.0)
    return tl.dot(in_row, in_column, input_precision="tf32")


@triton.jit
def _histogram_kernel(
    final, slot, blocks, spans, mass, count, heads, n, local,
    T: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One block of keys, in the span of its slot i_t."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_t = tl.program_id(2)
    i_b = i_bh // heads
    o_k = tl.arange(0, SIZE)
    span = tl.load(slot + (i_b * local + i_c) * T + i_t)
    o = tl.arange(0, 16)
    bin_at = ((i_bh * local + i_c) * T + i_t) * _BINS + o[:, None] * 16 + o[None, :]
    # Few blocks of a packed sequence are in two spans.
    if span < 0:
        tl.store(mass + bin_at, tl.zeros([16, 16], tl.float32))
        tl.store(count + bin_at, tl.zeros([16, 16], tl.float32))
    else:
        begin = tl.load(spans.start + i_b * n + span)
        end = tl.load(spans.stop + i_b * n + span)
        position = tl.load(blocks + i_c) * SIZE + o_k
        mine = (position >= begin) & (position < end)

        at = (i_bh * local + i_c) * SIZE + o_k
        b_bin = tl.load(final.bins + at).to(tl.int32)
        is_counted = tl.where(mine & (b_bin > 0), 1.0, 0.0)
        histogram = tl.zeros([16, 16], tl.float32)
        for i in tl.static_range(3):
            mass_at = ((i_bh * local + i_c) * 3 + i) * SIZE + o_k
            values = tl.load(final.mass + mass_at, mask=mine, other=0.0)
            histogram += _sums(tl.load(final.mass_bins + mass_at).to(tl.int32), values)
        tl.store(mass + bin_at, histogram)
        tl.store(count + bin_at, _sums(b_bin, is_counted))
