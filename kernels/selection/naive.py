"""The plain-torch twins of the kernels, for any floating dtype. They have the same names."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels.probe import KeyBlocks, Probe
from titan_sparse.kernels.probe.naive import scores_of_blocks
from titan_sparse.kernels.selection.shared import (
    ALWAYS,
    BINS,
    HELD_OUT,
    LEVELS,
    OCTAVES_BETWEEN_LEVELS,
    PSEUDO_ROWS,
    SEEN_ONCE,
    VERTICAL_COST,
    FinalScores,
    SpanTokens,
    bins_of,
    level_scores,
)
from titan_sparse.kernels.selection.thresholds import (
    MASS_UNITS,
    Candidates,
    CountBounds,
    Thresholds,
)


def first_scores(
    free: Probe, keys: KeyBlocks, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The twin of selection.first_scores()."""
    scores = []
    tile_mass = []
    remaining = []
    savings = []
    # [P]
    is_odd = torch.arange(free.q.shape[3], device=free.q.device) % 2 == 1
    for chunk in _chunks(free, keys, lse):
        # [B, Hq, m, T, b]
        vertical = chunk.mass.sum(4)
        scores_of_halves = []
        for half in (~is_odd, is_odd):
            # [B, 1, m, T, 1]
            rows = chunk.sees[..., half].sum(-1)[:, None, ..., None]
            scores_of_halves.append(_per_pair(chunk.mass[..., half, :].sum(4), rows))
        even_score, odd_score = scores_of_halves
        # Their product might underflow.
        of_both = even_score.sqrt() * odd_score.sqrt()
        of_all = _per_pair(vertical, chunk.sees.sum(-1)[:, None, ..., None])
        score = torch.maximum(of_both, SEEN_ONCE * of_all)
        # A key is in one span at most, the others hold no mass of it.
        scores.append(score.sum(3))

        tile_mass.append(_by_group(chunk, chunk.mass.sum(-1), free))

        # [B, Hq, m, T, b, L]
        levels = level_scores(score)
        below = score[..., None] < levels
        # [B, Hq, m, T, L]
        mass_below = (vertical[..., None] * below).sum(-2)
        mass = vertical.sum(-1, keepdim=True)
        remaining.append(mass_below / mass.clamp(min=torch.finfo(mass.dtype).tiny))
        savings.append((~below).sum(-2) * levels * VERTICAL_COST)
    return (
        torch.cat(scores, dim=2),
        torch.cat(tile_mass, dim=2),
        torch.cat(remaining, dim=2),
        torch.cat(savings, dim=2),
    )


def slash_gains(
    tile_mass: Tensor, remaining: Tensor, savings: Tensor, tile: Tensor, rows: Tensor
) -> Tensor:
    """The twin of selection.slash_gains()."""
    batch, heads, local, touching, groups = tile_mass.shape
    # [B, Hq, n_local T U + 1] and [B, Hq, n_local T + 1, L]: the last entry stands for no tile.
    tile_mass = F.pad(tile_mass.flatten(2), (0, 1))
    remaining = F.pad(remaining.flatten(2, 3), (0, 0, 0, 1))
    savings = F.pad(savings.flatten(2, 3), (0, 0, 0, 1))
    none = local * touching * groups

    gains = []
    for u in range(groups):
        # [B, E]
        known = tile[:, u] >= 0
        number = torch.where(known, tile[:, u], none).long()
        row_count = rows[:, u].where(known, 0).to(tile_mass.dtype)
        # [B, Hq, E] and [B, Hq, E, L]
        number = number[:, None].expand(-1, heads, -1)
        mass = tile_mass.gather(2, number)
        block = (number // groups)[..., None].expand(-1, -1, -1, LEVELS)
        gain = mass[..., None] * remaining.gather(2, block)
        gains.append(gain + row_count[:, None, :, None] * savings.gather(2, block))
    return torch.stack(gains).sum(0)


def slash_scores(gains: Tensor, cost: Tensor, is_local: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of selection.slash_scores()."""
    levels = level_scores(gains)
    # [B, Hq, E, L]: the gain over the cost at each level, in octaves. It grows as levels fall.
    ratio = gains / (levels * cost[:, None, :, None].to(gains.dtype))
    octaves = ratio.clamp(min=1e-20).log2()
    is_worth = octaves >= 0
    first = is_worth.int().argmax(-1, keepdim=True)
    before = (first - 1).clamp(min=0)

    # [B, Hq, E, 1]: where the ratio passes 1 between the two levels.
    above = octaves.gather(-1, first)
    below = octaves.gather(-1, before)
    part = torch.where(first > 0, -below / (above - below).clamp(min=1e-6), 1.0)
    level = before + part.clamp(0, 1) * (first - before)
    score = torch.exp2(-1 - OCTAVES_BETWEEN_LEVELS * level)
    score = torch.where(is_worth.any(-1), score[..., 0], 0.0)
    return score, bins_of(score).masked_fill(is_local[:, None], ALWAYS)


def final_scores(
    free: Probe, keys: KeyBlocks, lse: Tensor, first: Tensor, of_slashes: Tensor, offset: Tensor
) -> FinalScores:
    """The twin of selection.final_scores()."""
    batch, heads = first.shape[:2]
    last_entry = of_slashes.shape[-1] - 1
    # [P]
    is_odd = torch.arange(free.q.shape[3], device=first.device) % 2 == 1

    chunks = []
    for chunk in _chunks(free, keys, lse):
        # [B, m, T, P] -> [B, Hq, m, T, P]: the score of the slash that each row meets.
        entry = offset[chunk.sequence, chunk.span][..., None] + chunk.back
        entry = entry.clamp(0, last_entry).flatten(1)
        on_slash = of_slashes.gather(2, entry[:, None].expand(-1, heads, -1))
        on_slash = on_slash.view(batch, heads, *chunk.back.shape[1:])
        # [B, Hq, m, T, P, 1]
        on_slash = on_slash[..., None]
        # [B, Hq, m, 1, 1, b]
        first_score = first[:, :, chunk.first : chunk.last, None, None]
        # [B, Hq, m, T, P, b]: the pairs that count for the vertical, and not for the slash.
        on_vertical = chunk.sees[:, None, ..., None] & (on_slash < first_score)
        vertical_mass = chunk.mass * on_vertical

        # Masses, rows and scores of the even rows, of the odd ones and of all: [B, Hq, m, T, 1, b].
        even_mass = vertical_mass[..., ~is_odd, :].sum(4, keepdim=True)
        odd_mass = vertical_mass[..., is_odd, :].sum(4, keepdim=True)
        even_rows = on_vertical[..., ~is_odd, :].sum(4, keepdim=True)
        odd_rows = on_vertical[..., is_odd, :].sum(4, keepdim=True)
        even_score = _per_pair(even_mass, even_rows)
        odd_score = _per_pair(odd_mass, odd_rows)
        score = _per_pair(even_mass + odd_mass, even_rows + odd_rows)

        # Each half of the rows is scored by the other half: [B, Hq, m, T, P, b].
        others_score = torch.where(is_odd[:, None], even_score, odd_score)
        by_vertical = HELD_OUT * chunk.mass * (on_slash < others_score)
        by_all = (1 - HELD_OUT) * chunk.mass * (on_slash < score)
        slash_mass = (chunk.mass - by_vertical - by_all).sum(-1)

        # [B, Hq, m, T, 3, b]
        scores = torch.cat([odd_score, even_score, score], dim=4)
        of_even = by_vertical[..., ~is_odd, :].sum(4)
        of_odd = by_vertical[..., is_odd, :].sum(4)
        mass = torch.stack([of_even, of_odd, by_all.sum(4)], dim=4)
        # A key is in one span at most. For the other spans it has bin 0 and no mass.
        mass_bins = bins_of(scores).amax(3)
        chunks.append(
            FinalScores(
                bins=mass_bins[..., 2, :],
                mass=mass.sum(3),
                mass_bins=mass_bins,
                tile_mass=_by_group(chunk, slash_mass, free),
            )
        )
    return FinalScores._make(torch.cat(parts, dim=2) for parts in zip(*chunks))


def mass_histogram(final: FinalScores, keys: KeyBlocks, spans: SpanTokens) -> Tensor:
    """The twin of selection.mass_histogram()."""
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
    bins = final.bins[:, :, :, None].expand(-1, -1, -1, in_span.shape[3], -1)
    is_counted = in_span & (bins > 0)
    count = _histogram(bins, is_counted.to(final.mass.dtype))

    # [B, Hq, n_local, T, 3, b]
    values = final.mass[:, :, :, None] * in_span[..., None, :]
    mass_bins = final.mass_bins[:, :, :, None].expand(values.shape)
    mass = _histogram(mass_bins.flatten(4), values.flatten(4))
    return torch.stack([mass, count])


def slash_masses(tile_mass: Tensor, tile: Tensor) -> Tensor:
    """The twin of selection.slash_masses()."""
    # [B, Hq, n_local T U + 1]: the last entry stands for no tile.
    tile_mass = F.pad(tile_mass.flatten(2), (0, 1))
    number = torch.where(tile >= 0, tile, tile_mass.shape[2] - 1).long()
    # [B, U E] -> [B, Hq, U, E]
    number = number.flatten(1)[:, None].expand(-1, tile_mass.shape[1], -1)
    masses = tile_mass.gather(2, number)
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
    """The score of a vertical: its mass in some rows over the cost of its pairs with them."""
    return mass / (VERTICAL_COST * (rows + PSEUDO_ROWS))


def _histogram(bins: Tensor, values: Tensor) -> Tensor:
    """Sums [..., BINS] of values [..., candidates] by bin."""
    total = values.new_zeros(*values.shape[:-1], BINS)
    return total.scatter_add_(-1, bins.long(), values)


class _Chunk(NamedTuple):
    """The probe's mass on some blocks of keys, first .. last - 1.

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
    for first, last, logits in scores_of_blocks(free, keys):
        span = keys.slot[:, first:last].clamp(min=0).long()
        # [B, m, T, Hq, P] -> [B, Hq, m, T, P]
        row_lse = finite_lse[sequence, span].permute(0, 3, 1, 2, 4)
        mass = (logits - row_lse[..., None]).exp()
        # What a row sees does not depend on the head.
        sees = (logits[:, 0] > -torch.inf).any(-1)
        block = keys.blocks[first:last].long()
        back = free.row_block[sequence, span].long() - block[:, None, None]
        yield _Chunk(first, last, mass, sees, span, sequence, back)


def _sums_by_bin(values: Tensor, bins: Tensor, span: Tensor, n: int) -> Tensor:
    """Sums of values of slashes by span and bin, int64 [B, Hq, n, BINS].

    values: int64 [B, Hq, E]. bins: uint8 [B, Hq, E]. span: int64 [B, E], n for none.
    """
    batch, heads, _ = bins.shape
    place = span[:, None] * BINS + bins
    # The last span stands for none, and is cut off.
    total = values.new_zeros(batch, heads, (n + 1) * BINS)
    total.scatter_add_(2, place, values)
    return total.view(batch, heads, n + 1, BINS)[:, :, :n]


def add_slashes(
    mass: Tensor, slash_mass: Tensor, bins: Tensor, span: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """The twin of selection.add_slashes(), in float64."""
    n = mass.shape[2]
    units = (slash_mass.double() * MASS_UNITS).round().long()
    of_slashes = _sums_by_bin(units, bins, span, n)
    count = _sums_by_bin((bins != ALWAYS).long(), bins, span, n)
    return mass.double() + of_slashes.double() / MASS_UNITS, count


def recall_thresholds(mass: Tensor, max_missed: Tensor) -> Tensor:
    """The highest bins below which the candidates hold at most the mass that may be missed.

    int64 [B, Hq, n].
    mass: float64 [B, Hq, n, BINS]. max_missed: of max_missed_mass().
    """
    # [B, Hq, n, BINS]: the mass that each bin misses as the threshold.
    missed = mass.cumsum(-1) - mass
    threshold = (missed <= max_missed[:, None, :, None]).sum(-1) - 1
    # Masses that are NaN are below nothing.
    return threshold.clamp(min=0)


def bounded(
    threshold: Tensor, count: Tensor, least: int, most: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Thresholds that keep to bounds on the number of candidates, and whether the cap raised one.

    threshold: int64 [B, Hq, n], bins. count: [B, Hq, n, BINS], candidates in each bin, without
    those that are always selected. least: of each span; most: int64 [B, n], which wins.
    Candidates of one bin are selected together, so fewer than `most` may be selected.
    Returns int64 [B, Hq, n] and bool [B, Hq].
    """
    # [B, Hq, n, BINS]: how many each bin selects as the threshold.
    selected = count.flip(-1).cumsum(-1).flip(-1)
    if least:
        low_enough = (selected >= least).sum(-1) - 1
        threshold = torch.minimum(threshold, low_enough.clamp(min=0))
    if most is None:
        return threshold, torch.zeros_like(threshold[..., 0], dtype=torch.bool)
    high_enough = (selected > most[:, None, :, None]).sum(-1)
    capped = (high_enough > threshold).any(-1)
    return torch.maximum(threshold, high_enough), capped


def head_thresholds(
    mass: Tensor, max_missed: Tensor, verticals: CountBounds, slashes: CountBounds
) -> Thresholds:
    """The twin of selection.head_thresholds()."""
    threshold = recall_thresholds(mass.double(), max_missed)
    of_verticals, verticals_capped = bounded(threshold, *verticals)
    of_slashes, slashes_capped = bounded(threshold, *slashes)
    capped = torch.stack([verticals_capped, slashes_capped], dim=-1)
    return Thresholds(of_verticals, of_slashes, capped)


def select(
    candidates: Candidates, vertical_threshold: Tensor, slash_threshold: Tensor
) -> tuple[Tensor, Tensor]:
    """The twin of selection.select()."""
    bins = candidates.verticals[:, :, candidates.order].flatten(2)
    is_vertical = bins >= _by_span(vertical_threshold.clamp(min=1), candidates.span_of_token)
    is_vertical = is_vertical | candidates.is_sink[:, None]
    is_slash = candidates.slashes >= _by_span(slash_threshold, candidates.span_of_entry)
    return is_vertical, is_slash


def _by_span(threshold: Tensor, span: Tensor) -> Tensor:
    """The threshold of each candidate's span int64 [B, L], as int16 [B, Hq, L]; BINS for no span.

    threshold: int [B, Hq, n].
    """
    # In few bytes, as there are as many results as verticals.
    threshold = F.pad(threshold.to(torch.int16), (0, 1), value=BINS)
    span = span[:, None].expand(-1, threshold.shape[1], -1)
    return threshold.gather(2, span)
