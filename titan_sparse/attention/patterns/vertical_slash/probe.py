"""What the probe sees: attention mass of a span's last queries, by vertical and by diagonal.

MTraining, section 4 and appendix B.1. There are four collectives, and none of them waits for the
host: the probe's queries go to all ranks, the softmax normalizers are gathered, the pooled masses
are exchanged so that each rank holds all keys for its share of the heads, and (in the caller) the
choices are gathered.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.spans import (
    Spans,
    entries,
    lookup,
    once_per_selection,
    spans_of_blocks,
)
from titan_sparse.kernels import probe as kernels
from titan_sparse.kernels.probe import KeyBlocks, Probe, blocks_back


class Geometry(NamedTuple):
    """What a probe needs to know of spans and layout, the same for every layer.

    int32 where a kernel reads it.
    blocks: int32 [n_local], the global blocks of this rank.
    slot: int32 [B, n_local, T], the spans that touch them, -1 for none.
    run: int32 [B, n, 2], the first local block that touches a span and the one behind the last.
    order: int64 [ranks * n_local], brings the blocks of all ranks into global order.
    local: int64 [B, n P], where this rank holds each probe row.
    mine: bool [B, n P], whether it does.
    start, stop, block_back: int32 [B, n, P], as in Probe.
    tile: int64 [N, E U], the tiles that make up each diagonal, the one behind the last for none.
    """

    blocks: Tensor
    slot: Tensor
    run: Tensor
    order: Tensor
    local: Tensor
    mine: Tensor
    start: Tensor
    stop: Tensor
    block_back: Tensor
    tile: Tensor


def probe_masses(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    cp: ContextParallel,
    queries: int,
    scale: float,
    split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention masses that the probe gives to verticals and to block diagonals.

    Collective over cp. Each rank gets the masses of its share of the heads: of N = ceil(B Hq /
    ranks) (sequence, head) pairs, whose sequences sequences_of_pairs() tells.

    q, k: [B, Hq, S_local, D] and [B, Hkv, S_local, D], whole blocks.
    geometry: probe_geometry() for `queries` queries.
    split: the masses of verticals come apart for each of the V = blocks_back() blocks that the
        probe's rows lie in, 0 being the span's last; else V = 1.
    Returns the masses of verticals [N, K, V, block_size] and of diagonals [N, E], in fp32 (fp64 for
    fp64 inputs).
    """
    batch, heads = q.shape[:2]
    probe = _gather_probe(q, geometry, cp, queries, scale)
    keys = KeyBlocks(k, geometry.blocks, geometry.slot, cp.block_size)
    lse = _normalizer(probe, keys, geometry.run, cp)
    # Of this rank's keys, for all heads: [B, Hq, n_local, V, b] and [B, Hq, n_local, T, U].
    if _by_kernels(keys):
        vertical, tile = kernels.block_masses(probe, keys, lse, split)
    else:
        vertical, tile = kernels.block_masses_naive(probe, keys, lse, split)

    # What one head of one sequence holds on this rank.
    vertical_elements = vertical[0, 0].numel()
    tile_elements = tile[0, 0].numel()

    # [B Hq, elements]: one exchange for both, padded so that every rank gets equally many pairs.
    pairs = -(-batch * heads // cp.size)
    pooled = torch.cat([vertical.flatten(2), tile.flatten(2)], dim=-1)
    pooled = pooled.flatten(0, 1)
    pooled = F.pad(pooled, (0, 0, 0, pairs * cp.size - batch * heads))
    # [ranks, N, elements]
    received = cp.all_to_all(pooled.unflatten(0, (cp.size, pairs)))
    # [N, ranks, elements]: now of all ranks' keys, for this rank's pairs.
    by_pair = received.transpose(0, 1)
    vertical_masses, tile_masses = by_pair.split([vertical_elements, tile_elements], dim=-1)

    # [N, K, V, b], in global order.
    vertical_masses = vertical_masses.reshape(pairs, -1, *vertical.shape[3:])
    vertical_masses = vertical_masses[:, geometry.order]
    # [N, K, T, U], in global order.
    tile_masses = tile_masses.reshape(pairs, -1, *tile.shape[3:])
    tile_masses = tile_masses[:, geometry.order]

    # [N, K T U + 1]: the last entry is the tile that stands for none.
    tile_masses = F.pad(tile_masses.flatten(1), (0, 1))
    # [N, E U]. Gathered, not scattered: with atomic additions a diagonal's mass would depend on
    # their order.
    diagonal_tiles = tile_masses.gather(1, geometry.tile)
    # [N, E, U] -> [N, E]
    back = tile.shape[4]
    diagonal_masses = diagonal_tiles.unflatten(1, (-1, back)).sum(-1)
    return vertical_masses, diagonal_masses


def sequences_of_pairs(batch: int, heads: int, cp: ContextParallel, device: torch.device) -> Tensor:
    """int64 [N]: the sequence of each (sequence, head) pair that this rank chooses for."""
    pairs = -(-batch * heads // cp.size)
    # [N]. The last ranks may have pairs too many; they choose for the last one again.
    pair = torch.arange(pairs, device=device) + cp.rank * pairs
    pair = pair.clamp(max=batch * heads - 1)
    return pair // heads


def probe_geometry(
    ranges: MaskRanges,
    spans: Spans,
    pattern: Hashable,
    cp: ContextParallel,
    queries: int,
    shape: tuple[int, int],
) -> Geometry:
    """The Geometry of the last `queries` queries of each span, remembered for the mask.

    pattern: decides the spans. shape: batch size and query heads.
    """
    batch, heads = shape
    return once_per_selection(
        ranges,
        "probe",
        pattern,
        cp,
        shape,
        lambda: _geometry(ranges, spans, cp, queries, batch, heads),
    )


def _geometry(
    ranges: MaskRanges, spans: Spans, cp: ContextParallel, queries: int, batch: int, heads: int
) -> Geometry:
    """The Geometry of the last `queries` queries of each span."""
    seq_len = ranges.start.shape[1]
    device = ranges.start.device
    # [n_local], and [B, n_local, T]
    blocks = cp.blocks(ranges)
    slot = spans_of_blocks(spans, blocks, cp.block_size)

    # [B, n, P]. A row before the span's start sees nothing, its position only has to be legal.
    row = torch.arange(queries, device=device)
    position = spans.stop[..., None] - queries + row
    used = (spans.start < spans.stop)[..., None]
    exists = (position >= spans.start[..., None]) & used
    position = position.clamp(min=0, max=seq_len - 1)

    # [B, n, P]
    start = lookup(ranges.start.expand(batch, -1), position)
    stop = lookup(ranges.stop.expand(batch, -1), position)
    block_back = spans.last_block[..., None] - position // cp.block_size
    block_back = block_back.clamp(min=0).int()

    # [B, n P]
    local = cp.local_position(position.flatten(1), ranges)
    # [N, n]
    sequences = sequences_of_pairs(batch, heads, cp, device)
    spans_of_pairs = spans.of_sequences(sequences)
    back = blocks_back(queries, cp.block_size)
    return Geometry(
        blocks=blocks.int(),
        slot=slot.int(),
        run=_runs(slot, spans.start.shape[1]),
        order=torch.argsort(cp.table(ranges).flatten()),
        local=local.clamp(min=0),
        mine=local >= 0,
        start=start,
        stop=torch.where(exists, stop, start),
        block_back=block_back,
        tile=tiles_of_diagonals(spans_of_pairs, seq_len // cp.block_size, back, cp.block_size),
    )


def _runs(slot: Tensor, n: int) -> Tensor:
    """int32 [B, n, 2]: from the first to behind the last local block that touches each span.

    slot: int64 [B, n_local, T], the spans that touch each local block, -1 for none.
    """
    batch, local = slot.shape[:2]
    # [n_local, 1] -> [B, n_local T]
    block = torch.arange(local, device=slot.device)[:, None]
    block = block.expand_as(slot).flatten(1)
    # [B, n_local T]
    span = torch.where(slot >= 0, slot, n).flatten(1)

    # [B, n + 1]: the last entry collects the blocks that no span touches, and is cut off.
    shape = (batch, n + 1)
    no_first = torch.full(shape, local, device=slot.device)
    no_last = torch.full(shape, -1, device=slot.device)
    first = no_first.scatter_reduce(1, span, block, "amin")
    last = no_last.scatter_reduce(1, span, block, "amax")

    # [B, n, 2]
    run = torch.stack([first, last + 1], dim=-1)[:, :n]
    return run.int().contiguous()


def tiles_of_diagonals(spans: Spans, blocks: int, back: int, block_size: int) -> Tensor:
    """int64 [N, E U]: the tiles that make up each diagonal.

    Entry e of the list of all spans' diagonals is the sum of tiles U e .. U e + U - 1 of these.
    Tiles are numbered (key block, span touching it, probe blocks back); the one behind the last
    stands for none.
    spans: of N rows. blocks: K, of the sequence. back: U, query blocks that the probe's rows lie
        in.
    """
    device = spans.start.device
    rows, n = spans.start.shape
    count = entries(blocks * block_size, block_size, n)

    # [N, E]: the span of each entry.
    entry = torch.arange(count, device=device)
    entry = entry.expand(rows, -1).contiguous()
    span = torch.searchsorted(spans.offset + spans.diagonals, entry, right=True)
    known = span.clamp(max=n - 1)
    # [N, E]
    last_block = spans.last_block.gather(1, known)
    first_block = spans.first_block.gather(1, known)
    offset = spans.offset.gather(1, known)

    # [N, E]: the key block that the diagonal meets in the span's last row of blocks.
    block = last_block - (entry - offset)
    # [N, E, U]: and in each of the U last rows of blocks.
    blocks_before_last = torch.arange(back, device=device)
    block = block[..., None] - blocks_before_last

    # [N, K, T]
    touching = spans_of_blocks(spans, torch.arange(blocks, device=device), block_size)
    slots = touching.shape[-1]
    # [N, E, U]: spans that touch a block are consecutive, so that the span's place among them is a
    # difference.
    first_slot = lookup(touching[..., 0], block.clamp(0, blocks - 1))
    slot = known[..., None] - first_slot

    # [N, E, U]
    valid = (span < n)[..., None] & (block >= first_block[..., None])
    tile = (block * slots + slot) * back + blocks_before_last
    return torch.where(valid, tile, blocks * slots * back).flatten(1)


def _gather_probe(
    q: Tensor, geometry: Geometry, cp: ContextParallel, queries: int, scale: float
) -> Probe:
    """The probe's rows of q [B, Hq, S_local, D], on every rank."""
    batch, heads, _, dim = q.shape
    # [B, Hq, n P, D]
    row = geometry.local[:, None, :, None].expand(-1, heads, -1, dim)
    held = q.gather(2, row) * geometry.mine[:, None, :, None]
    # Each row is held by one rank and is 0 elsewhere, so that the sum over ranks is exact.
    held = cp.all_reduce(held)
    # [B, Hq, n, P, D]
    return Probe(
        q=held.view(batch, heads, -1, queries, dim),
        start=geometry.start,
        stop=geometry.stop,
        block_back=geometry.block_back,
        scale=scale,
    )


def _normalizer(probe: Probe, keys: KeyBlocks, run: Tensor, cp: ContextParallel) -> Tensor:
    """Log of the softmax sum over all ranks' keys, [B, Hq, n, P].

    -inf for rows that see nothing. run: as in Geometry.
    """
    if _by_kernels(keys):
        block_lse = kernels.block_lse(probe, keys)
        local_lse = kernels.span_lse(block_lse, keys.slot, run)
    else:
        block_lse = kernels.block_lse_naive(probe, keys)
        local_lse = kernels.span_lse_naive(block_lse, keys.slot, run)

    # [ranks, B, Hq, n, P]
    all_lse = cp.all_gather(local_lse)
    if len(all_lse) == 1:
        return all_lse[0]
    return all_lse.logsumexp(0)


def _by_kernels(keys: KeyBlocks) -> bool:
    """Whether Triton's kernels take these keys; they take no fp64."""
    return keys.k.is_cuda and keys.k.dtype != torch.float64
