"""The plain-torch twins of kernel.py, for any floating dtype."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels.prices.inputs import (
    ALWAYS,
    CODES,
    LEVELS,
    MASS_UNITS,
    PSEUDO_ROWS,
    VERTICAL_COST,
    AlwaysOn,
    codes_of,
    level_prices,
    octaves_between_levels,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.naive import scores_of_blocks


def first_prices_naive(
    probe: Probe, keys: KeyBlocks, lse: Tensor, always: AlwaysOn, seq_len: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The twin of first_prices()."""
    prices = []
    tiles = []
    left = []
    saved = []
    for chunk in _chunks(probe, keys, lse, always):
        # [B, Hq, m, T, b] and [B, 1, m, T, b]
        vertical = chunk.mass.sum(4)
        rows = chunk.free.sum(3)[:, None]
        price = vertical / (VERTICAL_COST * (rows + PSEUDO_ROWS))
        # A key is in one span at most, the others hold no mass of it.
        prices.append(price.sum(3))

        # [B, Hq, m, T, 1, P] @ [B, 1, m, T, P, U] -> [B, Hq, m, T, U]
        row_mass = chunk.mass.sum(-1)[..., None, :]
        tiles.append((row_mass @ chunk.group.to(row_mass.dtype)).squeeze(-2))

        # [B, Hq, m, T, b, L]
        levels = level_prices(seq_len, price)
        below = price[..., None] < levels
        # [B, Hq, m, T, L]
        mass_below = (vertical[..., None] * below).sum(-2)
        mass = vertical.sum(-1, keepdim=True)
        left.append(mass_below / mass.clamp(min=torch.finfo(mass.dtype).tiny))
        saved.append((~below).sum(-2) * levels * VERTICAL_COST)
    return (
        torch.cat(prices, dim=2),
        torch.cat(tiles, dim=2),
        torch.cat(left, dim=2),
        torch.cat(saved, dim=2),
    )


def diagonal_gains_naive(
    tiles: Tensor, left: Tensor, saved: Tensor, tile: Tensor, rows: Tensor
) -> Tensor:
    """The twin of diagonal_gains()."""
    batch, heads, local, touching, groups = tiles.shape
    # [B, Hq, n_local T U + 1] and [B, Hq, n_local T + 1, L]: what stands for none comes last.
    tiles = F.pad(tiles.flatten(2), (0, 1))
    left = F.pad(left.flatten(2, 3), (0, 0, 0, 1))
    saved = F.pad(saved.flatten(2, 3), (0, 0, 0, 1))
    none = local * touching * groups

    gains = []
    for u in range(groups):
        # [B, E]
        known = tile[:, u] >= 0
        number = torch.where(known, tile[:, u], none).long()
        row_count = rows[:, u].where(known, 0).to(tiles.dtype)
        # [B, Hq, E] and [B, Hq, E, L]
        number = number[:, None].expand(-1, heads, -1)
        mass = tiles.gather(2, number)
        block = (number // groups)[..., None].expand(-1, -1, -1, LEVELS)
        gain = mass[..., None] * left.gather(2, block)
        gains.append(gain + row_count[:, None, :, None] * saved.gather(2, block))
    return torch.stack(gains).sum(0)


def diagonal_prices_naive(gains: Tensor, cost: Tensor, seq_len: int) -> Tensor:
    """The twin of diagonal_prices()."""
    levels = level_prices(seq_len, gains)
    # [B, Hq, E, L]: how often a diagonal is worth its price at each level, in octaves. It grows as
    # prices fall.
    worth = gains / (levels * cost[:, None, :, None].to(gains.dtype))
    octaves = worth.clamp(min=1e-20).log2()
    taken = octaves >= 0
    first = taken.int().argmax(-1, keepdim=True)
    before = (first - 1).clamp(min=0)

    # [B, Hq, E, 1]: where it passes 0 between the two levels.
    above = octaves.gather(-1, first)
    below = octaves.gather(-1, before)
    part = torch.where(first > 0, -below / (above - below).clamp(min=1e-6), 1.0)
    level = before + part.clamp(0, 1) * (first - before)
    price = torch.exp2(-1 - octaves_between_levels(seq_len) * level)
    return torch.where(taken.any(-1), price[..., 0], 0.0)


def final_prices_naive(
    probe: Probe,
    keys: KeyBlocks,
    lse: Tensor,
    always: AlwaysOn,
    first: Tensor,
    diagonal: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of final_prices()."""
    batch, heads, _, block_size = first.shape
    n = probe.q.shape[2]
    last_entry = diagonal.shape[-1] - 1
    # [P]
    is_odd = torch.arange(probe.q.shape[3], device=first.device) % 2 == 1

    codes = []
    mass = torch.zeros(batch, heads, n * CODES, dtype=torch.int64, device=first.device)
    count = torch.zeros_like(mass)
    for chunk in _chunks(probe, keys, lse, always):
        # [B, m, T, P] -> [B, Hq, m, T, P]: the price of the diagonal that each row meets.
        entry = offset[chunk.sequence, chunk.span][..., None] + chunk.back
        entry = entry.clamp(0, last_entry).flatten(1)
        on_diagonal = diagonal.gather(2, entry[:, None].expand(-1, heads, -1))
        on_diagonal = on_diagonal.view(batch, heads, *chunk.back.shape[1:])
        # [B, Hq, m, T, P, b]: what the vertical pays for, and not the diagonal.
        price = first[:, :, chunk.first : chunk.last, None, None]
        is_left = chunk.free[:, None] & (on_diagonal[..., None] < price)

        # Of the even rows, the odd ones and all: masses and rows [B, Hq, m, T, b].
        left = chunk.mass * is_left
        odd_mass = left[..., is_odd, :].sum(4)
        odd_rows = is_left[..., is_odd, :].sum(4)
        even_mass = left[..., ~is_odd, :].sum(4)
        even_rows = is_left[..., ~is_odd, :].sum(4)
        even_price = even_mass / (VERTICAL_COST * (even_rows + PSEUDO_ROWS))
        odd_price = odd_mass / (VERTICAL_COST * (odd_rows + PSEUDO_ROWS))
        rows = even_rows + odd_rows
        price = (even_mass + odd_mass) / (VERTICAL_COST * (rows + PSEUDO_ROWS))
        code = codes_of(price)

        # Each half of the rows is asked what the other half chose: [B, Hq, m, T, P, b].
        others = torch.where(is_odd[:, None], even_price[..., None, :], odd_price[..., None, :])
        by_vertical = chunk.mass * (on_diagonal[..., None] < others)
        of_even = by_vertical[..., ~is_odd, :].sum(4)
        of_odd = by_vertical[..., is_odd, :].sum(4)
        of_diagonals = (chunk.mass - by_vertical).sum(-1)
        span = chunk.span[:, None, :, :, None]
        _add(mass, span * CODES + codes_of(odd_price), _units(of_even))
        _add(mass, span * CODES + codes_of(even_price), _units(of_odd))
        _add(mass, span * CODES + codes_of(on_diagonal), _units(of_diagonals))

        # [B, 1, m, T, b]: each key in the slot of its span.
        can_choose = (chunk.in_span & ~chunk.is_sink)[:, None]
        _add(count, span * CODES + code, can_choose.expand_as(code).long())
        code = code.where(can_choose, 0)
        is_sink = (chunk.in_span & chunk.is_sink)[:, None]
        codes.append(code.masked_fill(is_sink, ALWAYS).amax(3))
    shape = (batch, heads, n, CODES)
    return torch.cat(codes, dim=2), mass.view(shape), count.view(shape).int()


def _units(mass: Tensor) -> Tensor:
    """int64; any mass above 0 weighs something."""
    return (mass.double() * MASS_UNITS).ceil().long()


def _add(total: Tensor, place: Tensor, values: Tensor) -> None:
    """total [B, Hq, places] += values [B, Hq, ...] at int [B, Hq, ...], in place."""
    place = place.expand_as(values).flatten(2)
    total.scatter_add_(2, place, values.flatten(2))


class _Chunk(NamedTuple):
    """What some blocks of keys, first .. last - 1, hold of the probe's mass.

    mass: [B, Hq, m, T, P, b], 0 for what is on in any case.
    free: bool [B, m, T, P, b], what a row sees that is not on in any case.
    in_span, is_sink: bool [B, m, T, b].
    span: int64 [B, m, T], 0 for none. sequence: int64 [B, 1, 1].
    back: int64 [B, m, T, P], how many blocks before the row's block the keys lie.
    group: bool [B, 1, m, T, P, U].
    """

    first: int
    last: int
    mass: Tensor
    free: Tensor
    in_span: Tensor
    is_sink: Tensor
    span: Tensor
    sequence: Tensor
    back: Tensor
    group: Tensor


def _chunks(probe: Probe, keys: KeyBlocks, lse: Tensor, always: AlwaysOn) -> Iterator[_Chunk]:
    batch = len(probe.q)
    # [B, n, Hq, P], finite also for rows that see nothing: their masses are 0, not NaN.
    finite_lse = lse.clamp(min=torch.finfo(lse.dtype).min).transpose(1, 2)
    sequence = torch.arange(batch, device=lse.device)[:, None, None]
    in_block = torch.arange(keys.block_size, device=lse.device)
    for first, last, scores in scores_of_blocks(probe, keys):
        touched = keys.slot[:, first:last] >= 0
        span = keys.slot[:, first:last].clamp(min=0).long()
        # [m, b]
        block = keys.blocks[first:last].long()
        position = block[:, None] * keys.block_size + in_block
        # [B, m, T, b]
        position = position[:, None]
        in_span = position >= always.start[sequence, span][..., None]
        in_span = in_span & (position < always.stop[sequence, span][..., None])
        in_span = in_span & touched[..., None]
        is_sink = position < always.behind_sinks[sequence, span][..., None]

        # [B, m, T, P]
        back = probe.row_block[sequence, span].long() - block[:, None, None]
        # [B, m, T, P, b]; what a row does not see does not depend on the head.
        seen = scores[:, 0] > -torch.inf
        free = seen & (back >= always.local)[..., None] & ~is_sink[..., None, :]

        # [B, m, T, Hq, P] -> [B, Hq, m, T, P]
        row_lse = finite_lse[sequence, span].permute(0, 3, 1, 2, 4)
        mass = (scores - row_lse[..., None]).exp() * free[:, None]
        row_group = probe.group[sequence, span].long()
        group = F.one_hot(row_group, probe.groups).bool()[:, None]
        yield _Chunk(first, last, mass, free, in_span, is_sink, span, sequence, back, group)
