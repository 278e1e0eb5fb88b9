"""The plain-torch twins of the kernels, for any floating dtype. They have the same names."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels.prices.limits import MASS_UNITS, Counted, Elements, HeadLimits
from titan_sparse.kernels.prices.shared import (
    ALWAYS,
    CODES,
    HELD_OUT,
    LEVELS,
    OCTAVES_BETWEEN_LEVELS,
    PSEUDO_ROWS,
    SEEN_ONCE,
    VERTICAL_COST,
    FinalPrices,
    SpanTokens,
    codes_of,
    level_prices,
)
from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.naive import scores_of_blocks


def first_prices(
    free: Probe, keys: KeyBlocks, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The twin of prices.first_prices()."""
    prices = []
    tiles = []
    left = []
    saved = []
    # [P]
    is_odd = torch.arange(free.q.shape[3], device=free.q.device) % 2 == 1
    for chunk in _chunks(free, keys, lse):
        # [B, Hq, m, T, b]
        vertical = chunk.mass.sum(4)
        prices_of_halves = []
        for half in (~is_odd, is_odd):
            # [B, 1, m, T, 1]
            rows = chunk.sees[..., half].sum(-1)[:, None, ..., None]
            prices_of_halves.append(_per_pair(chunk.mass[..., half, :].sum(4), rows))
        even_price, odd_price = prices_of_halves
        # Their product might underflow.
        of_both = even_price.sqrt() * odd_price.sqrt()
        of_all = _per_pair(vertical, chunk.sees.sum(-1)[:, None, ..., None])
        price = torch.maximum(of_both, SEEN_ONCE * of_all)
        # A key is in one span at most, the others hold no mass of it.
        prices.append(price.sum(3))

        tiles.append(_by_group(chunk, chunk.mass.sum(-1), free))

        # [B, Hq, m, T, b, L]
        levels = level_prices(price)
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


def diagonal_gains(
    tiles: Tensor, left: Tensor, saved: Tensor, tile: Tensor, rows: Tensor
) -> Tensor:
    """The twin of prices.diagonal_gains()."""
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


def diagonal_prices(gains: Tensor, cost: Tensor, is_local: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of prices.diagonal_prices()."""
    levels = level_prices(gains)
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
    price = torch.exp2(-1 - OCTAVES_BETWEEN_LEVELS * level)
    price = torch.where(taken.any(-1), price[..., 0], 0.0)
    return price, codes_of(price).masked_fill(is_local[:, None], ALWAYS)


def final_prices(
    free: Probe, keys: KeyBlocks, lse: Tensor, first: Tensor, diagonal: Tensor, offset: Tensor
) -> FinalPrices:
    """The twin of prices.final_prices()."""
    batch, heads = first.shape[:2]
    last_entry = diagonal.shape[-1] - 1
    # [P]
    is_odd = torch.arange(free.q.shape[3], device=first.device) % 2 == 1

    chunks = []
    for chunk in _chunks(free, keys, lse):
        # [B, m, T, P] -> [B, Hq, m, T, P]: the price of the diagonal that each row meets.
        entry = offset[chunk.sequence, chunk.span][..., None] + chunk.back
        entry = entry.clamp(0, last_entry).flatten(1)
        on_diagonal = diagonal.gather(2, entry[:, None].expand(-1, heads, -1))
        on_diagonal = on_diagonal.view(batch, heads, *chunk.back.shape[1:])
        # [B, Hq, m, T, P, 1]
        on_diagonal = on_diagonal[..., None]
        # [B, Hq, m, 1, 1, b]
        first_price = first[:, :, chunk.first : chunk.last, None, None]
        # [B, Hq, m, T, P, b]: what the vertical pays for, and not the diagonal.
        is_left = chunk.sees[:, None, ..., None] & (on_diagonal < first_price)
        left = chunk.mass * is_left

        # Masses, rows and prices of the even rows, of the odd ones and of all: [B, Hq, m, T, 1, b].
        even_mass = left[..., ~is_odd, :].sum(4, keepdim=True)
        odd_mass = left[..., is_odd, :].sum(4, keepdim=True)
        even_rows = is_left[..., ~is_odd, :].sum(4, keepdim=True)
        odd_rows = is_left[..., is_odd, :].sum(4, keepdim=True)
        even_price = _per_pair(even_mass, even_rows)
        odd_price = _per_pair(odd_mass, odd_rows)
        price = _per_pair(even_mass + odd_mass, even_rows + odd_rows)

        # Each half of the rows is asked what the other half chose: [B, Hq, m, T, P, b].
        others_price = torch.where(is_odd[:, None], even_price, odd_price)
        by_vertical = HELD_OUT * chunk.mass * (on_diagonal < others_price)
        by_all = (1 - HELD_OUT) * chunk.mass * (on_diagonal < price)
        of_diagonals = (chunk.mass - by_vertical - by_all).sum(-1)

        # [B, Hq, m, T, 3, b]
        prices = torch.cat([odd_price, even_price, price], dim=4)
        of_even = by_vertical[..., ~is_odd, :].sum(4)
        of_odd = by_vertical[..., is_odd, :].sum(4)
        held = torch.stack([of_even, of_odd, by_all.sum(4)], dim=4)
        # A key is in one span at most, and has code 0 and no mass for the others.
        held_codes = codes_of(prices).amax(3)
        chunks.append(
            FinalPrices(
                codes=held_codes[..., 2, :],
                held=held.sum(3),
                held_codes=held_codes,
                tiles=_by_group(chunk, of_diagonals, free),
            )
        )
    return FinalPrices._make(torch.cat(parts, dim=2) for parts in zip(*chunks))


def mass_by_code(final: FinalPrices, keys: KeyBlocks, spans: SpanTokens) -> Tensor:
    """The twin of prices.mass_by_code()."""
    sequence = torch.arange(len(keys.slot), device=keys.slot.device)[:, None, None]
    span = keys.slot.clamp(min=0).long()
    # [B, n_local, T, 1]
    start = spans.start[sequence, span][..., None]
    stop = spans.stop[sequence, span][..., None]
    has_span = (keys.slot >= 0)[..., None]
    # [n_local, 1, b]
    in_block = torch.arange(keys.block_size, device=span.device)
    position = keys.blocks[:, None, None] * keys.block_size + in_block
    # [B, 1, n_local, T, b]: whether a key is in the span of a slot.
    in_span = has_span & (position >= start) & (position < stop)
    in_span = in_span[:, None]

    # [B, Hq, n_local, T, b]
    codes = final.codes[:, :, :, None].expand(-1, -1, -1, in_span.shape[3], -1)
    is_counted = in_span & (codes > 0)
    count = _by_code(codes, is_counted.to(final.held.dtype))

    # [B, Hq, n_local, T, 3, b]
    held = final.held[:, :, :, None] * in_span[..., None, :]
    held_codes = final.held_codes[:, :, :, None].expand(held.shape)
    mass = _by_code(held_codes.flatten(4), held.flatten(4))
    return torch.stack([mass, count])


def diagonal_masses(tiles: Tensor, tile: Tensor) -> Tensor:
    """The twin of prices.diagonal_masses()."""
    # [B, Hq, n_local T U + 1]: what stands for none comes last.
    tiles = F.pad(tiles.flatten(2), (0, 1))
    number = torch.where(tile >= 0, tile, tiles.shape[2] - 1).long()
    # [B, U E] -> [B, Hq, U, E]
    masses = tiles.gather(2, number.flatten(1)[:, None].expand(-1, tiles.shape[1], -1))
    return masses.unflatten(2, tile.shape[1:]).sum(2)


def _by_group(chunk: "_Chunk", row_mass: Tensor, free: Probe) -> Tensor:
    """Sums of rows' masses [B, Hq, m, T, P] by group of rows, [B, Hq, m, T, U]."""
    # [B, m, T, P]
    group = free.group[chunk.sequence, chunk.span].long()
    # [B, 1, m, T, P, U]
    in_group = F.one_hot(group, free.groups)[:, None].to(row_mass.dtype)
    # [B, Hq, m, T, 1, P] @ [B, 1, m, T, P, U]
    sums = row_mass[..., None, :] @ in_group
    return sums.squeeze(-2)


def _per_pair(mass: Tensor, rows: Tensor) -> Tensor:
    """The price of a vertical: its mass in some rows, for the cost of its pairs with them."""
    return mass / (VERTICAL_COST * (rows + PSEUDO_ROWS))


def _by_code(codes: Tensor, values: Tensor) -> Tensor:
    """Sums [..., CODES] of values [..., elements] by code."""
    total = values.new_zeros(*values.shape[:-1], CODES)
    return total.scatter_add_(-1, codes.long(), values)


class _Chunk(NamedTuple):
    """What some blocks of keys, first .. last - 1, hold of the probe's mass.

    mass: [B, Hq, m, T, P, b], 0 for what a row does not see.
    sees: bool [B, m, T, P], whether a row sees anything of a block.
    span: int64 [B, m, T], 0 for none. sequence: int64 [B, 1, 1].
    back: int64 [B, m, T, P], how many blocks before the row's block the keys lie.
    """

    first: int
    last: int
    mass: Tensor
    sees: Tensor
    span: Tensor
    sequence: Tensor
    back: Tensor


def _chunks(free: Probe, keys: KeyBlocks, lse: Tensor) -> Iterator[_Chunk]:
    # [B, n, Hq, P], finite also for rows that see nothing: their masses are 0, not NaN.
    finite_lse = lse.clamp(min=torch.finfo(lse.dtype).min).transpose(1, 2)
    sequence = torch.arange(len(lse), device=lse.device)[:, None, None]
    for first, last, scores in scores_of_blocks(free, keys):
        span = keys.slot[:, first:last].clamp(min=0).long()
        # [B, m, T, Hq, P] -> [B, Hq, m, T, P]
        row_lse = finite_lse[sequence, span].permute(0, 3, 1, 2, 4)
        mass = (scores - row_lse[..., None]).exp()
        # What a row sees does not depend on the head.
        sees = (scores[:, 0] > -torch.inf).any(-1)
        block = keys.blocks[first:last].long()
        back = free.row_block[sequence, span].long() - block[:, None, None]
        yield _Chunk(first, last, mass, sees, span, sequence, back)


def _sums_by_code(values: Tensor, codes: Tensor, span: Tensor, n: int) -> Tensor:
    """Sums of values of diagonals by span and code, int64 [B, Hq, n, CODES].

    values: int64 [B, Hq, E]. codes: uint8 [B, Hq, E]. span: int64 [B, E], n for none.
    """
    batch, heads, _ = codes.shape
    place = span[:, None] * CODES + codes
    # The last span stands for none, and is cut off.
    total = values.new_zeros(batch, heads, (n + 1) * CODES)
    total.scatter_add_(2, place, values)
    return total.view(batch, heads, n + 1, CODES)[:, :, :n]


def add_diagonals(
    mass: Tensor, on_diagonals: Tensor, codes: Tensor, span: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """The twin of prices.add_diagonals(), in float64."""
    n = mass.shape[2]
    units = (on_diagonals.double() * MASS_UNITS).round().long()
    of_diagonals = _sums_by_code(units, codes, span, n)
    count = _sums_by_code((codes != ALWAYS).long(), codes, span, n)
    return mass.double() + of_diagonals.double() / MASS_UNITS, count


def price_limits(mass: Tensor, allowed: Tensor) -> Tensor:
    """The codes from which on up the elements hold all mass but what may be lost.

    They are the highest ones that do, int64 [B, Hq, n].
    mass: float64 [B, Hq, n, CODES]. allowed: of loss_allowed().
    """
    # [B, Hq, n, CODES]: what is lost if a code is the lowest one taken.
    lost = mass.cumsum(-1) - mass
    limit = (lost <= allowed[:, None, :, None]).sum(-1) - 1
    # Masses that are NaN are below nothing.
    return limit.clamp(min=0)


def limited(limit: Tensor, count: Tensor, least: int, most: Tensor | None) -> tuple[Tensor, Tensor]:
    """Limits that keep to bounds on the number of elements, and whether the cap raised one.

    limit: int64 [B, Hq, n], codes. count: [B, Hq, n, CODES], elements of each code, those that
    are always on left out. least: of each span; most: int64 [B, n], which wins.
    Elements of one code are taken together: fewer than `most` may be left.
    Returns int64 [B, Hq, n] and bool [B, Hq].
    """
    # [B, Hq, n, CODES]: how many are taken if a code is the lowest one.
    taken = count.flip(-1).cumsum(-1).flip(-1)
    if least:
        low_enough = (taken >= least).sum(-1) - 1
        limit = torch.minimum(limit, low_enough.clamp(min=0))
    if most is None:
        return limit, torch.zeros_like(limit[..., 0], dtype=torch.bool)
    high_enough = (taken > most[:, None, :, None]).sum(-1)
    capped = (high_enough > limit).any(-1)
    return torch.maximum(limit, high_enough), capped


def head_limits(
    mass: Tensor, allowed: Tensor, verticals: Counted, diagonals: Counted
) -> HeadLimits:
    """The twin of prices.head_limits()."""
    limit = price_limits(mass.double(), allowed)
    of_verticals, verticals_capped = limited(limit, *verticals)
    of_diagonals, diagonals_capped = limited(limit, *diagonals)
    capped = torch.stack([verticals_capped, diagonals_capped], dim=-1)
    return HeadLimits(of_verticals, of_diagonals, capped)


def taken(
    elements: Elements, vertical_limit: Tensor, diagonal_limit: Tensor
) -> tuple[Tensor, Tensor]:
    """The twin of prices.taken()."""
    codes = elements.verticals[:, :, elements.order].flatten(2)
    is_vertical = codes >= _by_span(vertical_limit.clamp(min=1), elements.span_of_token)
    is_vertical = is_vertical | elements.is_sink[:, None]
    is_diagonal = elements.diagonals >= _by_span(diagonal_limit, elements.span_of_entry)
    return is_vertical, is_diagonal


def _by_span(limit: Tensor, span: Tensor) -> Tensor:
    """Limits of each element's span int64 [B, L], int16 [B, Hq, L]; CODES for no span.

    limit: int [B, Hq, n].
    """
    # In few bytes, as there are as many results as verticals.
    limit = F.pad(limit.to(torch.int16), (0, 1), value=CODES)
    span = span[:, None].expand(-1, limit.shape[1], -1)
    return limit.gather(2, span)
