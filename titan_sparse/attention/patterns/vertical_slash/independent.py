"""budget = "independent": verticals alone reach the recall, and slashes alone reach it too.

MTraining, appendix B.1. Each rank gets all keys' masses for its share of the heads, and chooses for
them; then the choices are gathered. This takes two collectives in addition to those of look().
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.patterns.base import compact
from titan_sparse.attention.patterns.spans import (
    Spans,
    share_of_cap,
    span_of_tokens,
    spans_of_blocks,
)
from titan_sparse.attention.patterns.vertical_slash.probe import (
    ProbeGeometry,
    by_kernels,
    look,
    slash_tiles,
)
from titan_sparse.kernels import probe as kernels
from titan_sparse.options.patterns import VerticalSlashOptions


class Segments(NamedTuple):
    """The candidates of a choice: n runs of neighbors among the L elements of each of B sequences.

    There are N rows of masses.
    """

    sequence: Tensor  # int32 [N], the sequence of each row
    segment: Tensor  # int32 [B, L], the segment of each element, n for none
    bounds: Tensor
    """int32 [B, n, 5]: the segment's first position, the one behind its last, the least and the
    most elements chosen, and how many of its first elements are always on. Of the two bounds on the
    count the most wins. Elements that are always on are chosen in addition."""


def smallest_sets(
    mass: Tensor, segments: Segments, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each segment of each row, the fewest elements that hold `recall` of its mass.

    MTraining, appendix B.1 i.
    mass: float [N, L], not negative, at most most_mass (1 or more) in a segment. The element that
    crosses the target is included. Equal masses are taken in order of position, so that every rank
    and world size chooses the same.
    Returns selected bool [N, L] and capped bool [N, n]: whether the most kept a segment below its
    target.

    Masses are summed as integers, so that the order of additions does not matter. Their units are
    most_mass * 2**-61, or up to twice as much. Each mass is rounded up, so that any mass above 0
    counts and recall 1 takes all.
    """
    n = segments.bounds.shape[1]
    # [N, L]
    row_segment = segments.segment.long()[segments.sequence]
    # [N, n + 1, 5]: the last segment is that of elements without one.
    bounds = F.pad(segments.bounds.long(), (0, 0, 0, 1))
    bounds = bounds[segments.sequence]

    # By mass, then stably by segment: each segment's elements lie together, the largest first. All
    # [N, L].
    by_mass = mass.sort(dim=-1, descending=True, stable=True).indices
    by_segment = row_segment.gather(1, by_mass).sort(dim=-1, stable=True)
    order = by_mass.gather(1, by_segment.indices)
    segment = by_segment.values

    # [N, L]: where each element's segment begins and ends in this order.
    first = torch.searchsorted(segment, segment)
    last = torch.searchsorted(segment, segment, right=True) - 1
    rank = torch.arange(mass.shape[1], device=mass.device) - first

    # [N, L]: the mass in front of each element, and the target. The sum over all of a row may
    # overflow, but not the differences inside of a segment.
    scale = 2.0 ** (61 - math.ceil(math.log2(most_mass)))
    units = (mass.gather(1, order).double() * scale).ceil().long()
    up_to = units.cumsum(-1)
    base = (up_to - units).gather(1, first)
    before = up_to - units - base
    total = up_to.gather(1, last) - base
    target = total
    if recall < 1:
        # fp64 rounds large totals, so that the share may come out above the total.
        target = (total.double() * recall).ceil().long().minimum(total)
    wanted = (before < target) & (units > 0)

    # [N, L]: the bounds of each element's segment.
    begin = bounds[..., 0].gather(1, segment)
    least = bounds[..., 2].gather(1, segment)
    most = bounds[..., 3].gather(1, segment)
    always = bounds[..., 4].gather(1, segment)
    chosen = (wanted | (rank < least)) & (rank < most)
    chosen |= order < begin + always
    chosen &= segment < n
    # In order of position again. Flat, as a GPU has no deterministic scatter over more dims.
    row = torch.arange(len(mass), device=mass.device)[:, None]
    selected = torch.zeros_like(chosen)
    selected.view(-1).scatter_(0, (row * mass.shape[1] + order).flatten(), chosen.flatten())

    # [N, n + 1]: how many wanted elements the cap left out.
    left_out = torch.zeros_like(bounds[..., 0])
    is_left_out = wanted & (rank >= most)
    place = row * (n + 1) + segment
    left_out.view(-1).scatter_add_(0, place.flatten(), is_left_out.flatten().long())
    return selected, left_out[:, :n] > 0


class IndependentPlan(NamedTuple):
    """The choices of a rank: for N = ceil(B Hq / ranks) pairs of a sequence and a head."""

    geometry: ProbeGeometry
    recall: float
    """That is asked for."""
    segments: Segments
    """What is chosen from in a row of masses [S + E], in 2 n segments: each span's verticals, then
    each span's slashes."""
    tile: Tensor
    """int64 [N, E U], the tiles that make up each slash, in global order. The one behind the last
    stands for none."""


def make_plan(
    options: VerticalSlashOptions,
    spans: Spans,
    geometry: ProbeGeometry,
    seq_len: int,
    cp: ContextParallel,
    heads: int,
) -> IndependentPlan:
    batch, n = spans.start.shape
    device = spans.start.device
    # [N]: the sequence of each pair. The last ranks may choose for the last pair again.
    pairs = -(-batch * heads // cp.size)
    pair = torch.arange(pairs, device=device) + cp.rank * pairs
    sequence = pair.clamp(max=batch * heads - 1) // heads

    blocks = torch.arange(seq_len // cp.block_size, device=device)
    slot = spans_of_blocks(spans, blocks, cp.block_size)
    of_all_ranks = geometry._replace(blocks=blocks, slot=slot)
    slashes = slash_tiles(spans, of_all_ranks, seq_len, cp.block_size)
    groups, diagonals = slashes.tile.shape[1:]
    none = len(blocks) * slot.shape[-1] * groups
    # [B, U, E] -> [B, E U]
    tile = slashes.tile.where(slashes.tile >= 0, none).mT.flatten(1)

    # [B, S + E]: the segment of a vertical is its span, those of the slashes come after them.
    vertical_segment = span_of_tokens(spans.start, spans.stop, seq_len)
    vertical_segment = vertical_segment.where(vertical_segment < n, 2 * n)
    segment = torch.cat([vertical_segment, n + slashes.span], dim=1)
    most_verticals = share_of_cap(options.max_verticals, options.min_verticals, spans)
    # No cap must not be shared out: a short span can touch more slashes than its part of the list's
    # length.
    most_slashes = spans.diagonals
    if options.max_slashes:
        most_slashes = share_of_cap(options.max_slashes, options.min_slashes, spans)
    first = seq_len + spans.offset
    stop = first + spans.diagonals
    kinds = (
        (spans.start, spans.stop, options.min_verticals, most_verticals, options.sinks),
        (first, stop, options.min_slashes, most_slashes, options.local_slashes),
    )
    bounds = []
    for begin, stop, least, most, always in kinds:
        fields = (begin, stop, torch.full_like(begin, least), most, torch.full_like(begin, always))
        bounds.append(torch.stack(fields, dim=-1))
    # [B, 2 n, 5]; the counts may be larger than int32, for example an unlimited maximum.
    of_all = torch.cat(bounds, dim=1).clamp(max=seq_len + diagonals)
    segments = Segments(sequence.int(), segment.int(), of_all.int())
    return IndependentPlan(geometry, options.recall, segments, tile[sequence])


def choose(
    q: Tensor, k: Tensor, plan: IndependentPlan, cp: ContextParallel, scale: float, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Verticals int32 [B, Hq, capacity], slashes bool [B, Hq, E], and capped bool [B, Hq, 2].

    Collective over cp. q, k: [B, Hq, S_local, D] and [B, Hkv, S_local, D], whole blocks.
    """
    batch, heads = q.shape[:2]
    verticals, diagonals = _masses(q, k, plan, cp, scale)
    seq_len = verticals.shape[1]
    entry_count = diagonals.shape[1]
    queries = plan.geometry.start.shape[2]

    # selected: bool [N, S + E], capped: bool [N, 2 n].
    mass = torch.cat([verticals, diagonals], dim=1)
    selected, capped = smallest_sets(mass, plan.segments, plan.recall, queries)

    # One gather for everything chosen, int32 [N, C + E + 2] a rank.
    positions, _ = compact(selected[:, :seq_len], capacity, seq_len)
    slashes = selected[:, seq_len:].int()
    capped = capped.unflatten(1, (2, -1)).any(-1).int()
    chosen = torch.cat([positions, slashes, capped], dim=1)
    # The last ranks may have chosen for pairs that do not exist.
    all_chosen = cp.all_gather(chosen).flatten(0, 1)[: batch * heads]
    all_chosen = all_chosen.view(batch, heads, -1)
    positions, slashes, capped = all_chosen.split([capacity, entry_count, 2], dim=-1)
    return positions.contiguous(), slashes.bool(), capped.bool()


def _masses(
    q: Tensor, k: Tensor, plan: IndependentPlan, cp: ContextParallel, scale: float
) -> tuple[Tensor, Tensor]:
    """Masses that the probe gives to verticals [N, S] and to slashes [N, E] of N pairs."""
    batch, heads = q.shape[:2]
    probe, keys, lse = look(q, k, plan.geometry, cp, scale)
    # Of this rank's keys, for all heads: [B, Hq, n_local, b] and [B, Hq, n_local, T, U].
    module = kernels if by_kernels(k, cp.block_size) else kernels.naive
    vertical, tiles = module.block_masses(probe, keys, lse)

    # [B Hq, elements]: one exchange for both, padded so that every rank gets equally many pairs.
    pairs = -(-batch * heads // cp.size)
    pooled = torch.cat([vertical.flatten(2), tiles.flatten(2)], dim=-1).flatten(0, 1)
    pooled = F.pad(pooled, (0, 0, 0, pairs * cp.size - batch * heads))
    # [ranks, N, elements]
    received = cp.all_to_all(pooled.unflatten(0, (cp.size, pairs)))
    # [N, ranks, elements]: now of all ranks' keys, for this rank's pairs.
    by_pair = received.transpose(0, 1)
    elements = [vertical[0, 0].numel(), tiles[0, 0].numel()]
    vertical_masses, tile_masses = by_pair.split(elements, dim=-1)

    # [N, K, b] and [N, K, T U], in global order.
    vertical_masses = vertical_masses.reshape(pairs, -1, vertical.shape[3])
    vertical_masses = vertical_masses[:, plan.geometry.order]
    tile_masses = tile_masses.reshape(pairs, -1, tiles[0, 0, 0].numel())
    tile_masses = tile_masses[:, plan.geometry.order]

    # [N, K T U + 1]: the last entry is the tile that stands for none.
    tile_masses = F.pad(tile_masses.flatten(1), (0, 1))
    # [N, E U]. Gathered, not scattered: with atomic additions a slash's mass would depend on
    # their order.
    diagonal_tiles = tile_masses.gather(1, plan.tile)
    # [N, E, U] -> [N, E]
    return vertical_masses.flatten(1), diagonal_tiles.unflatten(1, (-1, probe.groups)).sum(-1)
