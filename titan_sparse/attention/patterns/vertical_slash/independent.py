"""budget = "independent": verticals alone reach the recall, and slashes alone reach it too.

MTraining, appendix B.1. Each rank gets all keys' masses for its share of the heads, and chooses for
them; then the choices are gathered. This takes two collectives in addition to those of look().
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.patterns.spans import Spans, lookup, spans_of_blocks
from titan_sparse.attention.patterns.vertical_slash.budget import Segments, compact, smallest_sets
from titan_sparse.attention.patterns.vertical_slash.probe import (
    Geometry,
    by_kernels,
    diagonals_of_entries,
    look,
)
from titan_sparse.attention.patterns.vertical_slash.rows import ProbedRows
from titan_sparse.kernels import probe as kernels


class Pairs(NamedTuple):
    """What a rank chooses for: N = ceil(B Hq / ranks) pairs of a sequence and a head.

    segments: what is chosen from in a row of masses [S + E], in 2 n segments: each span's
        verticals, then each span's slashes.
    tile: int64 [N, E U], the tiles that make up each slash (tiles_of_diagonals).
    """

    segments: Segments
    tile: Tensor


def choose_independent(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    pairs: Pairs,
    cp: ContextParallel,
    scale: float,
    recall: float,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verticals int32 [B, Hq, capacity], slashes bool [B, Hq, E], and capped bool [B, Hq, 2].

    Collective over cp. q, k: [B, Hq, S_local, D] and [B, Hkv, S_local, D], whole blocks.
    """
    batch, heads = q.shape[:2]
    verticals, diagonals = _masses(q, k, geometry, pairs.tile, cp, scale)
    seq_len = verticals.shape[1]
    entry_count = diagonals.shape[1]
    queries = geometry.start.shape[2]

    # selected: bool [N, S + E], capped: bool [N, 2 n].
    mass = torch.cat([verticals, diagonals], dim=1)
    selected, capped = smallest_sets(mass, pairs.segments, recall, queries)

    # One gather for everything chosen, int32 [N, C + E + 2] a rank.
    positions = compact(selected[:, :seq_len], capacity, seq_len)
    slashes = selected[:, seq_len:].int()
    capped = capped.unflatten(1, (2, -1)).any(-1).int()
    chosen = torch.cat([positions, slashes, capped], dim=1)
    # The last ranks may have chosen for pairs that do not exist.
    all_chosen = cp.all_gather(chosen).flatten(0, 1)[: batch * heads]
    all_chosen = all_chosen.view(batch, heads, -1)
    positions, slashes, capped = all_chosen.split([capacity, entry_count, 2], dim=-1)
    return positions.contiguous(), slashes.bool(), capped.bool()


def _masses(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    tile: Tensor,
    cp: ContextParallel,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Masses that the probe gives to verticals [N, S] and to slashes [N, E] of N pairs."""
    batch, heads = q.shape[:2]
    probe, keys, lse = look(q, k, geometry, cp, scale)
    # Of this rank's keys, for all heads: [B, Hq, n_local, b] and [B, Hq, n_local, T, U].
    module = kernels if by_kernels(keys) else kernels.naive
    vertical, tiles = module.block_masses(probe, keys, lse)

    # What one head of one sequence holds on this rank.
    vertical_elements = vertical[0, 0].numel()
    tile_elements = tiles[0, 0].numel()

    # [B Hq, elements]: one exchange for both, padded so that every rank gets equally many pairs.
    pairs = -(-batch * heads // cp.size)
    pooled = torch.cat([vertical.flatten(2), tiles.flatten(2)], dim=-1)
    pooled = pooled.flatten(0, 1)
    pooled = F.pad(pooled, (0, 0, 0, pairs * cp.size - batch * heads))
    # [ranks, N, elements]
    received = cp.all_to_all(pooled.unflatten(0, (cp.size, pairs)))
    # [N, ranks, elements]: now of all ranks' keys, for this rank's pairs.
    by_pair = received.transpose(0, 1)
    vertical_masses, tile_masses = by_pair.split([vertical_elements, tile_elements], dim=-1)

    # [N, K, b] and [N, K, T U], in global order.
    vertical_masses = vertical_masses.reshape(pairs, -1, vertical.shape[3])
    vertical_masses = vertical_masses[:, geometry.order]
    tile_masses = tile_masses.reshape(pairs, -1, tiles[0, 0, 0].numel())
    tile_masses = tile_masses[:, geometry.order]

    # [N, K T U + 1]: the last entry is the tile that stands for none.
    tile_masses = F.pad(tile_masses.flatten(1), (0, 1))
    # [N, E U]. Gathered, not scattered: with atomic additions a slash's mass would depend on
    # their order.
    diagonal_tiles = tile_masses.gather(1, tile)
    # [N, E, U] -> [N, E]
    diagonal_masses = diagonal_tiles.unflatten(1, (-1, probe.groups)).sum(-1)
    return vertical_masses.flatten(1), diagonal_masses


def sequences_of_pairs(batch: int, heads: int, cp: ContextParallel, device: torch.device) -> Tensor:
    """int64 [N]: the sequence of each (sequence, head) pair that this rank chooses for."""
    pairs = -(-batch * heads // cp.size)
    # [N]. The last ranks may have pairs too many; they choose for the last one again.
    pair = torch.arange(pairs, device=device) + cp.rank * pairs
    pair = pair.clamp(max=batch * heads - 1)
    return pair // heads


def tiles_of_diagonals(spans: Spans, rows: ProbedRows, blocks: int, block_size: int) -> Tensor:
    """int64 [B, E U]: the tiles that make up each slash.

    Entry e of the list of all spans' slashes is the sum of tiles U e .. U e + U - 1 of these.
    Tiles are numbered (key block, span touching it, group of rows); the one behind the last stands
    for none. blocks: K, of the sequence.
    """
    groups = rows.group_block.shape[-1]
    # [B, E]
    span, distance = diagonals_of_entries(spans, blocks, block_size)
    known = span.clamp(max=spans.start.shape[1] - 1)
    first_block = lookup(spans.first_block, known)
    # [B, E, U]: the block of keys that each group of rows meets on the slash.
    group_block = rows.group_block.gather(1, known[..., None].expand(-1, -1, groups))
    block = group_block - distance[..., None]

    # [B, K, T]; spans that touch a block are consecutive, so that the span's place among them is a
    # difference.
    all_blocks = torch.arange(blocks, device=span.device)
    touching = spans_of_blocks(spans, all_blocks, block_size)
    slots = touching.shape[-1]
    first_slot = lookup(touching[..., 0], block.clamp(0, blocks - 1))
    slot = known[..., None] - first_slot

    # [B, E, U]
    valid = (span < spans.start.shape[1])[..., None] & (block >= first_block[..., None])
    tile = (block * slots + slot) * groups + torch.arange(groups, device=span.device)
    return torch.where(valid, tile, blocks * slots * groups).flatten(1)
