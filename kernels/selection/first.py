"""Scores of verticals as if there were no slashes. shared.py names the kernel's arguments."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.kernel import keys_at, span_of
from titan_sparse.kernels.probe.rows import operand
from titan_sparse.kernels.selection.shared import (
    LEVELS,
    OCTAVES_BETWEEN_LEVELS,
    SEEN_ONCE,
    VERTICAL_COST,
    by_group,
    masses,
    rows_at,
    score_of,
    sees_any,
    tile_options,
)

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
    T, U]; and at each level the remaining share of a block's mass outside the selected verticals, and
    the savings per row when those verticals lie on a slash, [B, Hq, n_local, T, L] each.
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
