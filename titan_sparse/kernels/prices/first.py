"""Prices of verticals as if there were no diagonals. shared.py names what the kernel takes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.inputs import (
    LEVELS,
    OCTAVES_BETWEEN_LEVELS,
    VERTICAL_COST,
)
from titan_sparse.kernels.prices.shared import (
    masses_of_half,
    price_of,
    store_rows,
    tile_arguments,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe

_LEVELS = tl.constexpr(LEVELS)
_OCTAVES = tl.constexpr(OCTAVES_BETWEEN_LEVELS)
_VERTICAL_COST = tl.constexpr(VERTICAL_COST)


def first_prices(
    free: Probe, keys: KeyBlocks, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prices of verticals as if there were no diagonals, and what diagonals are priced from.

    free: the probe; its rows see only what is not selected in any case. lse: fp32 [B, Hq, n, P],
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
    UPCAST: tl.constexpr,
):
    """The results of first_prices() for a block of keys.

    U2: U, rounded up to a power of two.
    """
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    o_l = tl.arange(0, _LEVELS)
    level = tl.exp2(-1.0 - o_l * _OCTAVES)
    # A key is in one span at most; over the others' slots it adds up zeros.
    b_price = tl.zeros([SIZE], tl.float32)
    for i_t in tl.static_range(T):
        at = (i_bh * local + i_c) * T + i_t
        # [SIZE], and how many rows see anything of the block.
        vertical = tl.zeros([SIZE], tl.float32)
        rows = tl.zeros([], tl.float32)
        for half in tl.static_range(2):
            b_mass, sees, known = masses_of_half(
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
                T,
                P,
                D,
                SIZE,
                UPCAST,
            )
            vertical += tl.sum(b_mass, 1)
            rows += tl.sum(tl.where(sees, 1.0, 0.0), 0)
            row = (i_b * n + known) * queries
            of_row = tl.sum(b_mass, 0)
            store_rows(tile, at * U, of_row, half, group_of_row, row, queries, U, U2, P)

        prices = price_of(vertical, rows)
        b_price += prices
        # [SIZE, L] -> [L]
        below = prices[:, None] < level[None, :]
        mass_below = tl.sum(tl.where(below, vertical[:, None], 0.0), 0)
        share = mass_below / tl.maximum(tl.sum(vertical, 0), 1.18e-38)
        count = tl.sum(tl.where(below, 0.0, 1.0), 0)
        tl.store(left + at * _LEVELS + o_l, share)
        tl.store(saved + at * _LEVELS + o_l, count * level * _VERTICAL_COST)
    o = (i_bh * local + i_c) * SIZE + tl.arange(0, SIZE)
    tl.store(price + o, b_price)
