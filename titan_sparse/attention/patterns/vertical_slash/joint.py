"""budget = "joint": verticals and slashes above a threshold, which reach the
recall in the least time.

The score of a candidate is its attention mass per pair of tokens, over the time of a pair. The
formulas are in titan_sparse/kernels/selection/README.md. Each head has its own threshold, at which
it reaches the recall.

Masses stay where their keys are. In addition to those of look() there are two collectives: the
gains of slashes are added up, and what each rank would choose is gathered, one byte a key.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.patterns.base import compact
from titan_sparse.attention.patterns.spans import Spans, lookup, share_of_cap, span_of_tokens
from titan_sparse.attention.patterns.vertical_slash.probe import (
    ProbeGeometry,
    by_kernels,
    look,
    slash_tiles,
)
from titan_sparse.kernels import selection as kernels
from titan_sparse.kernels.selection import PSEUDO_ROWS, CountBounds, SpanTokens, max_missed_mass
from titan_sparse.options.patterns import VerticalSlashOptions


class JointPlan(NamedTuple):
    """The inputs of scores and thresholds that depend on mask, rows, and layout."""

    options: VerticalSlashOptions
    geometry: ProbeGeometry
    """Its rows see only the keys whose mass counts in recall."""
    free_start: Tensor
    free_stop: Tensor
    """int32 [B, n, P], the keys that each row sees and that are not always selected."""
    is_sink: Tensor  # bool [B, S]
    span_tokens: SpanTokens
    spans_of_slots: Tensor  # fp32 [B, 1, n, n_local T], 1 where a local block's slot holds a span
    offset: Tensor  # int32 [B, n], where each span's slashes begin
    tile: Tensor  # int32 [B, U, E], the rank's tiles that make up each slash, -1 for none
    rows: Tensor  # int32 [B, U, E], how many of the probe's rows see each tile
    cost: Tensor  # fp32 [B, E], pairs of the probe's rows on each slash
    is_local: Tensor  # bool [B, E], the slashes that are always selected
    span_of_entry: Tensor  # int64 [B, E], n for none
    span_of_token: Tensor  # int64 [B, S], n for none
    max_missed: Tensor  # float64 [B, n], the mass of the rows that the selection may miss
    most_verticals: Tensor  # int64 [B, n], sinks not counted
    most_slashes: Tensor | None  # int64 [B, n], local slashes not counted; None for no cap


def make_plan(
    options: VerticalSlashOptions,
    spans: Spans,
    geometry: ProbeGeometry,
    seq_len: int,
    block_size: int,
) -> JointPlan:
    device = spans.start.device
    n = spans.start.shape[1]
    local = options.local_slashes

    slashes = slash_tiles(spans, geometry, seq_len, block_size)
    # [B, E]
    is_local = (slashes.span < n) & (slashes.distance < local)
    # [B, U, E]
    rows = slashes.rows.masked_fill(is_local[:, None], 0)
    tile = slashes.tile.masked_fill(rows == 0, -1)

    # [B, n]
    sink_stop = torch.minimum(spans.start + options.sinks, spans.stop)
    # [B, n, P]: a row's nearest slashes are all keys from some block's first on.
    first_local = (geometry.row_block - local + 1) * block_size
    behind_sinks = torch.maximum(geometry.start, sink_stop[..., None]).int()
    # [B, S]
    span_of_token = span_of_tokens(spans.start, spans.stop, seq_len)
    stop_of_token = lookup(sink_stop, span_of_token.clamp(max=n - 1))
    is_sink = (span_of_token < n) & (torch.arange(seq_len, device=device) < stop_of_token)

    # [B, 1, n_local T] and [n, 1]
    slots = geometry.slot.flatten(1)[:, None]
    numbers = torch.arange(n, device=device)[:, None]
    most_slashes = None
    if options.max_slashes:
        most_slashes = share_of_cap(options.max_slashes, options.min_slashes, spans)
    counted_start = geometry.start if options.count_sinks else behind_sinks
    return JointPlan(
        options=options,
        geometry=geometry._replace(start=counted_start),
        free_start=behind_sinks,
        free_stop=torch.minimum(geometry.stop, first_local).int(),
        is_sink=is_sink,
        span_tokens=SpanTokens(spans.start.int(), spans.stop.int()),
        spans_of_slots=(slots == numbers).float()[:, None],
        offset=spans.offset.int(),
        tile=tile.int().contiguous(),
        rows=rows.int().contiguous(),
        cost=(rows.sum(1) + PSEUDO_ROWS) * block_size,
        is_local=is_local,
        span_of_entry=slashes.span,
        span_of_token=span_of_token,
        max_missed=max_missed_mass(geometry.rows.group_rows.sum(-1), options.recall),
        most_verticals=share_of_cap(options.max_verticals, options.min_verticals, spans),
        most_slashes=most_slashes,
    )


def choose(
    q: Tensor, k: Tensor, plan: JointPlan, cp: ContextParallel, scale: float, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Verticals int32 [B, Hq, capacity], slashes bool [B, Hq, E], and capped bool [B, Hq, 2].

    Collective over cp. q, k: [B, Hq, S_local, D] and [B, Hkv, S_local, D], whole blocks.
    """
    batch, heads = q.shape[:2]
    seq_len = plan.span_of_token.shape[1]
    slash_bins, slash_count, bins, mass, count = _histograms(q, k, plan, cp, scale)
    bins, mass, count = _of_all_ranks(bins, mass, count, cp)
    module = kernels if by_kernels(k, cp.block_size) else kernels.naive
    bounds = [
        CountBounds(count, plan.options.min_verticals, plan.most_verticals),
        CountBounds(slash_count, plan.options.min_slashes, plan.most_slashes),
    ]
    chosen = module.head_thresholds(mass, plan.max_missed, *bounds)
    candidates = kernels.Candidates(
        verticals=bins,
        order=plan.geometry.order,
        is_sink=plan.is_sink,
        slashes=slash_bins,
        span_of_token=plan.span_of_token,
        span_of_entry=plan.span_of_entry,
    )
    is_vertical, slashes = module.select(candidates, chosen.verticals, chosen.slashes)
    verticals, _ = compact(is_vertical.flatten(0, 1), capacity, seq_len)
    return verticals.view(batch, heads, capacity), slashes, chosen.capped


def _histograms(
    q: Tensor, k: Tensor, plan: JointPlan, cp: ContextParallel, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bins of all slashes uint8 [B, Hq, E], and their number in each bin [B, Hq, n, BINS]; then
    bins uint8 [B, Hq, n_local, b] of this rank's verticals, the mass of verticals and slashes in
    each bin, and the number of verticals, [B, Hq, n, BINS]."""
    probe, keys, lse = look(q, k, plan.geometry, cp, scale)
    free = probe._replace(start=plan.free_start, stop=plan.free_stop)
    module = kernels if by_kernels(k, cp.block_size) else kernels.naive
    first, *of_tiles = module.first_scores(free, keys, lse)
    gains = cp.all_reduce(module.slash_gains(*of_tiles, plan.tile, plan.rows))
    of_slashes, slash_bins = module.slash_scores(gains, plan.cost, plan.is_local)
    final = module.final_scores(free, keys, lse, first, of_slashes, plan.offset)
    histogram = module.mass_histogram(final, keys, plan.span_tokens)
    slash_mass = module.slash_masses(final.tile_mass, plan.tile)

    # [B, 1, n, n_local T] @ [2, B, Hq, n_local T, BINS]
    of_spans = plan.spans_of_slots.to(histogram.dtype)
    of_verticals, count = of_spans @ histogram.flatten(3, 4)
    # Local slashes hold no mass here.
    mass, slash_count = module.add_slashes(
        of_verticals, slash_mass, slash_bins, plan.span_of_entry, plan.offset
    )
    return slash_bins, slash_count, final.bins, mass, count


def _of_all_ranks(
    bins: Tensor, mass: Tensor, count: Tensor, cp: ContextParallel
) -> tuple[Tensor, Tensor, Tensor]:
    """Bins [B, Hq, blocks, b], masses and counts of all ranks' keys: one gather.

    Blocks come one rank after the other.
    bins: uint8 [B, Hq, n_local, b]. mass, count: [B, Hq, n, BINS].
    """
    # No wider than they are known.
    mass = mass.to(count.dtype)
    if cp.size == 1:
        return bins, mass, count
    parts = [part.flatten().view(torch.uint8) for part in (bins, mass, count)]
    lengths = [len(part) for part in parts]
    # [ranks, bytes]
    gathered = cp.all_gather(torch.cat(parts))
    all_bins, all_mass, all_count = gathered.split(lengths, dim=1)
    # [ranks, B, Hq, n_local, b] -> [B, Hq, ranks n_local, b]
    all_bins = all_bins.reshape(cp.size, *bins.shape)
    all_bins = all_bins.permute(1, 2, 0, 3, 4).flatten(2, 3)
    all_mass = all_mass.contiguous().view(mass.dtype).view(cp.size, *mass.shape)
    all_count = all_count.contiguous().view(count.dtype).view(cp.size, *count.shape)
    return all_bins, all_mass.double().sum(0), all_count.sum(0)
