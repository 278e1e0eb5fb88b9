"""Prices of verticals as if there were no slashes. shared.py names the kernel's arguments."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.shared import (
    LEVELS,
    OCTAVES_BETWEEN_LEVELS,
    SEEN_ONCE,
    VERTICAL_COST,
    by_group,
    keys_at,
    lse_at,
    masses,
    price_of,
    queries_at,
    ranges_at,
    sees_any,
    span_of,
    tile_arguments,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe

_LEVELS = tl.constexpr(LEVELS)
_OCTAVES = tl.constexpr(OCTAVES_BETWEEN_LEVELS)
_SEEN_ONCE = tl.constexpr(SEEN_ONCE)
_VERTICAL_COST = tl.constexpr(VERTICAL_COST)


def first_prices(
    free: Probe, keys: KeyBlocks, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prices of verticals as if there were no diagonals, and what diagonals are priced from.

    A price is the geometric mean of what the even and the odd rows of the probe would pay, and at
    least SEEN_ONCE of what all of them would.

    free: the probe; its rows see only what is not always selected. lse: fp32 [B, Hq, n, P],
    over all keys.
    Returns, in fp32, prices [B, Hq, n_local, b]; masses of tiles by group of rows [B, Hq, n_local,
    T, U]; and at each level the share of a block's mass that its verticals leave, and the price
    that a row pays for its verticals, [B, Hq, n_local, T, L] each.
    """
    q = free.q
    batch, heads = q.shape[:2]
    _, local, touching = keys.slot.shape
    new = dict(dtype=torch.float32, device=q.device)
    price = torch.empty(batch, heads, local, keys.block_size, **new)
    tile = torch.empty(batch, heads, local, touching, free.groups, **new)
    left = torch.empty(batch, heads, local, touching, LEVELS, **new)
    saved = torch.empty_like(left)
    _first_kernel[(local, batch * heads)](
        **tile_arguments(free, keys, lse),
        price=price,
        tile=tile,
        left=left,
        saved=saved,
    )
    return price, tile, left, saved


@triton.jit
def _first_kernel(
    q,
    k,
    start,
    stop,
    slot,
    blocks,
    lse,
    group_of_row,
    price,
    tile,
    left,
    saved,
    scale,
    heads,
    group,
    n,
    local,
    queries: tl.constexpr,
    dim,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The results of first_prices() for a block of keys.

    U2: U, rounded up to a power of two.
    """
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    i_kv = i_b * (heads // group) + i_bh % heads // group
    first_key = tl.load(blocks + i_c) * SIZE
    o_p = tl.arange(0, P)
    o_u = tl.arange(0, U2)
    o_l = tl.arange(0, _LEVELS)
    is_row = o_p < queries
    is_odd = o_p % 2 == 1
    level = tl.exp2(-1.0 - o_l * _OCTAVES)
    for i_t in tl.static_range(T):
        span, is_span = span_of(slot, i_b, i_c, i_t, local, T)
        at = (i_bh * local + i_c) * T + i_t
        # Few blocks of a packed sequence are in two spans.
        if i_t > 0 and not is_span:
            tl.store(tile + at * U + o_u, tl.zeros([U2], tl.float32), mask=o_u < U)
            tl.store(left + at * _LEVELS + o_l, tl.zeros([_LEVELS], tl.float32))
            tl.store(saved + at * _LEVELS + o_l, tl.zeros([_LEVELS], tl.float32))
        else:
            # Rows of the span in this slot: [D, P] and [P].
            row = (i_b * n + span) * queries + o_p
            q_row = (i_bh * n + span) * queries + o_p
            b_q = queries_at(q, q_row, is_row, dim, D, UPCAST)
            b_start, b_stop = ranges_at(start, stop, row, is_row, is_span)
            b_lse = lse_at(lse, q_row, is_row)
            sees = sees_any(b_start, b_stop, first_key, SIZE)
            even_rows = tl.sum(tl.where(sees & ~is_odd, 1.0, 0.0), 0)
            odd_rows = tl.sum(tl.where(sees & is_odd, 1.0, 0.0), 0)

            of_row = tl.zeros([P], tl.float32)
            mass = tl.zeros([], tl.float32)
            mass_below = tl.zeros([_LEVELS], tl.float32)
            count = tl.zeros([_LEVELS], tl.float32)
            for part in range(SIZE // PART):
                # [PART, P] -> [PART]
                o_k = part * PART + tl.arange(0, PART)
                b_k = keys_at(k, (i_kv * local + i_c) * SIZE + o_k, dim, D, UPCAST)
                b_mass = masses(b_k, b_q, b_start, b_stop, b_lse, first_key + o_k, scale)
                even = tl.sum(tl.where(is_odd[None, :], 0.0, b_mass), 1)
                odd = tl.sum(tl.where(is_odd[None, :], b_mass, 0.0), 1)
                vertical = even + odd
                # Their product might underflow.
                of_both = tl.sqrt(price_of(even, even_rows)) * tl.sqrt(price_of(odd, odd_rows))
                prices = tl.maximum(of_both, _SEEN_ONCE * price_of(vertical, even_rows + odd_rows))
                # A key is in one span at most: later ones only say what they see.
                key_at = (i_bh * local + i_c) * SIZE + o_k
                is_new = o_k >= 0 if i_t == 0 else vertical > 0
                tl.store(price + key_at, prices, mask=is_new)

                of_row += tl.sum(b_mass, 0)
                mass += tl.sum(vertical, 0)
                # [PART, L] -> [L]
                below = prices[:, None] < level[None, :]
                mass_below += tl.sum(tl.where(below, vertical[:, None], 0.0), 0)
                count += tl.sum(tl.where(below, 0.0, 1.0), 0)

            if U == queries:
                # Each row is a group.
                tl.store(tile + at * U + o_p, of_row, mask=is_row)
            else:
                of_group = by_group(of_row, group_of_row, row, is_row, U2)
                tl.store(tile + at * U + o_u, of_group, mask=o_u < U)
            tl.store(left + at * _LEVELS + o_l, mass_below / tl.maximum(mass, 1.18e-38))
            tl.store(saved + at * _LEVELS + o_l, count * level * _VERTICAL_COST)
