"""budget = "joint" and "layer": verticals and diagonals above a price, which reach the recall.

The price of an element is the attention mass of one more pair of tokens, for the pair's time
(titan_sparse/kernels/prices). With "joint" each head has a limit of its own, at which it reaches
the recall. With "layer" all heads and documents share one, at which their mean reaches it: no
choice of verticals and diagonals holds that much in less time.

Masses stay where their keys are. Besides those of look() there are two collectives: the gains of
diagonals are added up, and what each rank would choose is gathered, one byte a key.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.patterns.spans import Spans, lookup, span_of_tokens
from titan_sparse.attention.patterns.vertical_slash.budget import compact
from titan_sparse.attention.patterns.vertical_slash.probe import (
    Geometry,
    by_kernels,
    diagonals_of_entries,
    look,
)
from titan_sparse.attention.patterns.vertical_slash.rows import ProbedRows
from titan_sparse.kernels import prices as kernels
from titan_sparse.kernels.prices import ALWAYS, CODES, PSEUDO_ROWS, SpanTokens

_MASS_UNITS = 2.0**40
"""Masses of diagonals are added up as integers. These many are a mass of 1."""


class Limits(NamedTuple):
    """What a budget must keep to, sinks and local diagonals not counted.

    recall: share of the mass to reach.
    shared: whether all heads and spans of a sequence have one price.
    least_verticals, least_diagonals: of a head in a span.
    most_verticals, most_diagonals: int64 [B, n]; None for no cap.
    """

    recall: float
    shared: bool
    least_verticals: int
    least_diagonals: int
    most_verticals: Tensor
    most_diagonals: Tensor | None


class Priced(NamedTuple):
    """What prices need to know besides the Geometry, the same for every layer.

    counted_start: int32 [B, n, P], the first key of each row whose mass counts in recall.
    free_start, free_stop: int32 [B, n, P], the keys that each row sees and that are not on in any
        case.
    is_sink: bool [B, S].
    span_tokens: where spans begin and end.
    spans_of_slots: float64 [B, n, n_local T], 1 where a local block's slot holds a span, else 0.
    offset: int32 [B, n], where each span's diagonals begin.
    tile, rows: int32 [B, U, E], the rank's tiles that make up each diagonal, -1 for none, and how
        many of the probe's rows see each.
    cost: fp32 [B, E], pairs of the probe's rows on each diagonal.
    is_local: bool [B, E], the diagonals that are always on.
    span_of_entry, span_of_token: int64 [B, E] and [B, S], n for none.
    probed: int64 [B, n], rows that the probe has of each span.
    weight: float64 [B, n], rows of the sequence that each of them stands for.
    """

    counted_start: Tensor
    free_start: Tensor
    free_stop: Tensor
    is_sink: Tensor
    span_tokens: SpanTokens
    spans_of_slots: Tensor
    offset: Tensor
    tile: Tensor
    rows: Tensor
    cost: Tensor
    is_local: Tensor
    span_of_entry: Tensor
    span_of_token: Tensor
    probed: Tensor
    weight: Tensor


def priced_geometry(
    spans: Spans,
    geometry: Geometry,
    seq_len: int,
    block_size: int,
    sinks: int,
    local: int,
    count_sinks: bool = True,
) -> Priced:
    """The Priced of a probe's Geometry.

    sinks, local: tokens of each span, and nearest diagonals, that are always on. count_sinks:
    whether the sinks' mass counts.
    """
    device = spans.start.device
    n = spans.start.shape[1]
    blocks = seq_len // block_size

    # [B, E]
    span, distance = diagonals_of_entries(spans, blocks, block_size)
    is_local = (span < n) & (distance < local)
    # [B, U, E]
    block, rows = _blocks_and_rows(spans, geometry.rows, span, distance)
    rows = rows.masked_fill(is_local[:, None], 0)
    tile = _tiles_of_blocks(geometry, block, span, blocks)
    tile = tile.masked_fill(rows == 0, -1)

    # [B, n]
    sink_stop = torch.minimum(spans.start + sinks, spans.stop)
    # [B, n, P]: a row's nearest diagonals are all keys from some block's first on.
    first_local = (geometry.row_block - local + 1) * block_size
    behind_sinks = torch.maximum(geometry.start, sink_stop[..., None]).int()
    # [B, S]
    span_of_token = span_of_tokens(spans.start, spans.stop, seq_len)
    stop_of_token = lookup(sink_stop, span_of_token.clamp(max=n - 1))
    is_sink = (span_of_token < n) & (torch.arange(seq_len, device=device) < stop_of_token)

    # [B, 1, n_local T] and [n, 1]
    slots = geometry.slot.flatten(1)[:, None]
    numbers = torch.arange(n, device=device)[:, None]
    # [B, n]
    probed = geometry.rows.group_rows.sum(-1)
    length = spans.stop - spans.start
    return Priced(
        counted_start=geometry.start if count_sinks else behind_sinks,
        free_start=behind_sinks,
        free_stop=torch.minimum(geometry.stop, first_local).int(),
        is_sink=is_sink,
        span_tokens=SpanTokens(spans.start.int(), spans.stop.int()),
        spans_of_slots=(slots == numbers).double(),
        offset=spans.offset.int(),
        tile=tile.int().contiguous(),
        rows=rows.int().contiguous(),
        cost=(rows.sum(1) + PSEUDO_ROWS) * block_size,
        is_local=is_local,
        span_of_entry=span,
        span_of_token=span_of_token,
        probed=probed,
        weight=length / probed.clamp(min=1).double(),
    )


def _blocks_and_rows(
    spans: Spans, rows: ProbedRows, span: Tensor, distance: Tensor
) -> tuple[Tensor, Tensor]:
    """The block of keys that each group of rows meets on a diagonal, and how many rows do.

    span, distance: int64 [B, E], of diagonals_of_entries(). Returns int64 [B, U, E] each, with no
    rows where there is no such block.
    """
    n, groups = rows.group_rows.shape[1:]
    known = span.clamp(max=n - 1)
    # [B, U, E]
    by_group = known[:, None].expand(-1, groups, -1)
    block = rows.group_block.mT.gather(2, by_group) - distance[:, None]
    count = rows.group_rows.mT.gather(2, by_group)
    # [B, 1, E]
    first_block = lookup(spans.first_block, known)[:, None]
    is_used = (span < n)[:, None]
    return block, count.where(is_used & (block >= first_block), 0)


def _tiles_of_blocks(geometry: Geometry, block: Tensor, span: Tensor, blocks: int) -> Tensor:
    """int64 [B, U, E]: this rank's tile of a block, a span and a group, negative for none.

    Tiles are numbered (local block, span touching it, group of rows).
    block: int64 [B, U, E]. span: int64 [B, E]. blocks: K, of the sequence.
    """
    device = block.device
    n_local, touching = geometry.slot.shape[1:]
    n, groups = geometry.rows.group_rows.shape[1:]
    # [K]
    local_number = torch.full((blocks,), -1, device=device)
    local_number[geometry.blocks.long()] = torch.arange(n_local, device=device)
    # [B, U, E]
    number = local_number[block.clamp(0, blocks - 1)]
    # Spans that touch a block are consecutive, so that the span's place among them is a difference.
    first_slot = lookup(geometry.slot[..., 0].long(), number.clamp(min=0))
    slot = span.clamp(max=n - 1)[:, None] - first_slot
    group = torch.arange(groups, device=device)[:, None]
    tile = (number * touching + slot) * groups + group
    return tile.where(number >= 0, -1)


def choose_priced(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    priced: Priced,
    limits: Limits,
    cp: ContextParallel,
    scale: float,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verticals int32 [B, Hq, capacity], diagonals bool [B, Hq, E], and capped bool [B, Hq, 2].

    Collective over cp. q, k: [B, Hq, S_local, D] and [B, Hkv, S_local, D], whole blocks.
    """
    batch, heads = q.shape[:2]
    seq_len = priced.span_of_token.shape[1]
    diagonal_codes, *of_verticals = _codes(q, k, geometry, priced, cp, scale)
    codes, mass, count = _of_all_ranks(*of_verticals, geometry.order, cp)

    limit = price_limits(mass, priced.probed, priced.weight, limits.recall, limits.shared)
    vertical_limit, verticals_capped = limited(
        limit, count, limits.least_verticals, limits.most_verticals
    )
    diagonal_limit = limit
    slashes_capped = torch.zeros_like(verticals_capped)
    if limits.most_diagonals is not None or limits.least_diagonals:
        counted = (~priced.is_local)[:, None].expand_as(diagonal_codes).long()
        diagonal_count = _sums_by_code(
            counted, diagonal_codes, priced.span_of_entry, limit.shape[2]
        )
        diagonal_limit, slashes_capped = limited(
            limit, diagonal_count, limits.least_diagonals, limits.most_diagonals
        )

    # [B, Hq, S] and [B, Hq, E]. Verticals of code 0 are not counted, so no cap would hold them. They
    # are not missed: where the limit is 0, all diagonals are on.
    vertical_limit = vertical_limit.clamp(min=1)
    is_vertical = codes >= _by_span(vertical_limit, priced.span_of_token)
    is_vertical = is_vertical | priced.is_sink[:, None]
    slashes = diagonal_codes >= _by_span(diagonal_limit, priced.span_of_entry)
    verticals = compact(is_vertical.flatten(0, 1), capacity, seq_len)
    capped = torch.stack([verticals_capped, slashes_capped], dim=-1)
    return verticals.view(batch, heads, capacity), slashes, capped


def _codes(
    q: Tensor, k: Tensor, geometry: Geometry, priced: Priced, cp: ContextParallel, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of all diagonals; and of this rank's keys codes, masses and counts.

    Codes are uint8, [B, Hq, E] and [B, Hq, n_local, b]. Masses that are held from each code down
    (float64) and counts of verticals are [B, Hq, n, CODES].
    """
    counted = geometry._replace(start=priced.counted_start)
    probe, keys, lse = look(q, k, counted, cp, scale)
    free = probe._replace(start=priced.free_start, stop=priced.free_stop)
    tile = priced.tile
    if by_kernels(keys):
        first, *of_tiles = kernels.first_prices(free, keys, lse)
        gains = cp.all_reduce(kernels.diagonal_gains(*of_tiles, tile, priced.rows))
        diagonal = kernels.diagonal_prices(gains, priced.cost)
        final = kernels.final_prices(free, keys, lse, first, diagonal, priced.offset)
        mass, count = kernels.mass_by_code(final, keys, priced.span_tokens)
        on_diagonals = kernels.diagonal_masses(final.tiles, tile)
    else:
        first, *of_tiles = kernels.first_prices_naive(free, keys, lse)
        gains = cp.all_reduce(kernels.diagonal_gains_naive(*of_tiles, tile, priced.rows))
        diagonal = kernels.diagonal_prices_naive(gains, priced.cost)
        final = kernels.final_prices_naive(free, keys, lse, first, diagonal, priced.offset)
        mass, count = kernels.mass_by_code_naive(final, keys, priced.span_tokens)
        on_diagonals = kernels.diagonal_masses_naive(final.tiles, tile)
    diagonal_codes = kernels.codes_of(diagonal).masked_fill(priced.is_local[:, None], ALWAYS)

    # [B, 1, n, n_local T] @ [B, Hq, n_local T, CODES]
    of_spans = priced.spans_of_slots[:, None].to(mass.dtype)
    count = of_spans @ count.flatten(2, 3)
    of_verticals = (of_spans @ mass.flatten(2, 3)).double()

    # [B, Hq, E]: integers, so that no order of additions shows. Local diagonals hold no mass here.
    units = (on_diagonals.double() * _MASS_UNITS).round().long()
    n = of_spans.shape[2]
    of_diagonals = _sums_by_code(units, diagonal_codes, priced.span_of_entry, n)
    of_diagonals = of_diagonals.double() / _MASS_UNITS
    return diagonal_codes, final.codes, of_verticals + of_diagonals, count


def _of_all_ranks(
    codes: Tensor, mass: Tensor, count: Tensor, order: Tensor, cp: ContextParallel
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [B, Hq, S] in global order, masses and counts of all ranks' keys: one gather.

    codes: uint8 [B, Hq, n_local, b]. mass, count: [B, Hq, n, CODES].
    """
    # No wider than they are known.
    mass = mass.to(count.dtype)
    if cp.size == 1:
        return codes[:, :, order].flatten(2), mass.double(), count
    parts = [part.flatten().view(torch.int32) for part in (codes, mass, count)]
    lengths = [len(part) for part in parts]
    # [ranks, elements]
    gathered = cp.all_gather(torch.cat(parts))
    all_codes, all_mass, all_count = gathered.split(lengths, dim=1)
    # [ranks, B, Hq, n_local, b] -> [B, Hq, ranks n_local, b]
    all_codes = all_codes.contiguous().view(torch.uint8).view(cp.size, *codes.shape)
    all_codes = all_codes.permute(1, 2, 0, 3, 4).flatten(2, 3)
    all_mass = all_mass.contiguous().view(mass.dtype).view(cp.size, *mass.shape)
    all_count = all_count.contiguous().view(count.dtype).view(cp.size, *count.shape)
    return all_codes[:, :, order].flatten(2), all_mass.double().sum(0), all_count.sum(0)


def price_limits(
    mass: Tensor, probed: Tensor, weight: Tensor, recall: float, shared: bool
) -> Tensor:
    """The codes from which on up the elements hold `recall` of the mass, int64 [B, Hq, n].

    They are the highest ones that do.
    mass: float64 [B, Hq, n, CODES]. probed, weight: of Priced.
    shared: for the mean over the rows of all heads and spans. All have one code, or the one above:
    the first heads give up its elements, as far as the recall allows.
    """
    heads = mass.shape[1]
    if recall == 1:
        # Everything, not only what the probe's rows give mass to.
        return torch.zeros_like(mass[..., 0], dtype=torch.int64)
    # [B, Hq, n, CODES]: what is lost if a code is the lowest one taken.
    lost = mass.cumsum(-1) - mass
    # [B, Hq, n]
    may_be_lost = probed[:, None].expand(-1, heads, -1) * (1 - recall)
    if not shared:
        limit = (lost <= may_be_lost[..., None]).sum(-1) - 1
        # Masses that are NaN are below nothing.
        return limit.clamp(min=0)

    # [B, CODES] and [B, 1]
    lost_by_all = (lost * weight[:, None, :, None]).sum((1, 2))
    allowed = (may_be_lost * weight[:, None]).sum((1, 2))[:, None]
    limit = (lost_by_all <= allowed).sum(-1, keepdim=True) - 1
    limit = limit.clamp(min=0)
    spare = allowed - lost_by_all.gather(-1, limit)

    # [B, Hq, n]: what a head and span would lose more with the code above.
    at_limit = limit[:, :, None, None].expand(-1, heads, mass.shape[2], 1)
    more = mass.gather(-1, at_limit)[..., 0] * weight[:, None]
    # [B, Hq n], in the order of heads.
    more_so_far = more.flatten(1).cumsum(-1)
    gives_up = (more_so_far <= spare) & (limit < CODES - 1)
    return (limit + gives_up).view(mass.shape[:3])


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


def _by_span(limit: Tensor, span: Tensor) -> Tensor:
    """Limits of each element's span int64 [B, L], int16 [B, Hq, L]; CODES for no span.

    limit: int64 [B, Hq, n].
    """
    # In few bytes, as there are as many results as verticals.
    limit = F.pad(limit.to(torch.int16), (0, 1), value=CODES)
    span = span[:, None].expand(-1, limit.shape[1], -1)
    return limit.gather(2, span)
