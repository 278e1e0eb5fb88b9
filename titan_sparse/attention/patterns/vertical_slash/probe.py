"""What the probe sees: attention mass of a span's last queries, by vertical and by diagonal.

MTraining, section 4 and appendix B.1. There are four collectives, and none of them waits for the
host: the probe's queries go to all ranks, the softmax normalizers are gathered, the pooled masses
are exchanged so that each rank holds all keys for its share of the heads, and (in the caller) the
choices are gathered.
"""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.vertical_slash.spans import (
    Spans,
    entries,
    lookup,
    once_per_selection,
    spans_of_blocks,
)
from titan_sparse.kernels import probe as kernels

_CHUNK_ELEMENTS = 1 << 26
"""Scores held at a time: 256 MiB in fp32."""


class Probe(NamedTuple):
    """The last P queries of each of n spans; a span shorter than P has rows that see nothing.

    q: [B, Hq, n, P, D] in its own dtype.
    start, stop: int32 [B, n, P], the keys that each row sees.
    block_back: int32 [B, n, P], how many blocks the row lies before the span's last block.
    scale: of the scores.
    """

    q: Tensor
    start: Tensor
    stop: Tensor
    block_back: Tensor
    scale: float


class Geometry(NamedTuple):
    """What a probe needs to know of spans and layout, the same for every layer.

    int32 where a kernel reads it.
    blocks: int32 [n_local], the global blocks of this rank.
    slot: int32 [B, n_local, T], the spans that touch them, -1 for none.
    run: int32 [B, n, 2], the first local block that touches a span and the one behind the last.
    order: int64 [ranks * n_local], brings the blocks of all ranks into global order.
    local: int64 [B, n P], where this rank holds each probe row.
    mine: bool [B, n P], whether it does.
    start, stop, block_back: as in Probe.
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
    lse = _normaliser(probe, k, geometry, cp)
    # Of this rank's keys, for all heads: [B, Hq, n_local, V, b] and [B, Hq, n_local, T, U].
    vertical, tile = _pooled(probe, lse, k, geometry.blocks, geometry.slot, cp.block_size, split)

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


def blocks_back(queries: int, block_size: int) -> int:
    """Query blocks that the last `queries` queries can lie in."""
    # As many as if the first of them were the last token of its block.
    return (queries + block_size - 2) // block_size + 1


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


def _normaliser(probe: Probe, k: Tensor, geometry: Geometry, cp: ContextParallel) -> Tensor:
    """Log of the softmax sum over all ranks' keys, [B, Hq, n, P].

    -inf for rows that see nothing.
    """
    blocks = geometry.blocks
    slot = geometry.slot
    if k.is_cuda and k.dtype != torch.float64:
        block_lse = kernels.block_lse(*_kernel_inputs(probe, k, blocks, slot, cp.block_size))
        local_lse = kernels.span_lse(block_lse, slot, geometry.run)
    else:
        block_lse = _block_lse(probe, k, blocks, slot, cp.block_size)
        local_lse = _span_lse(block_lse, slot, probe.q.shape[2])

    # [ranks, B, Hq, n, P]
    all_lse = cp.all_gather(local_lse)
    if len(all_lse) == 1:
        return all_lse[0]
    return all_lse.logsumexp(0)


def _pooled(
    probe: Probe,
    lse: Tensor,
    k: Tensor,
    blocks: Tensor,
    slot: Tensor,
    block_size: int,
    split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Masses of this rank's keys, by vertical and by tile.

    By vertical: [B, Hq, n_local, V, b]. By tile and block back: [B, Hq, n_local, T, U].
    V = U if split, else 1. lse: [B, Hq, n, P], of _normaliser().
    """
    if k.is_cuda and k.dtype != torch.float64:
        # The same as _block_masses(), by a kernel; it takes no fp64.
        queries = probe.q.shape[3]
        back = blocks_back(queries, block_size)
        inputs = _kernel_inputs(probe, k, blocks, slot, block_size)
        return kernels.block_masses(*inputs, lse, probe.block_back, back, split)
    return _block_masses(probe, lse, k, blocks, slot, block_size, split)


def _kernel_inputs(probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int) -> tuple:
    """The arguments that kernels.block_lse() and kernels.block_masses() both begin with."""
    q, start, stop, _, scale = probe
    return q, k, start, stop, slot, blocks, scale, block_size


def _scores(
    probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Scores of the probe's rows, some local blocks at a time.

    Yields first and last of m local blocks, and their scores [B, Hq, m, T, P, b], -inf where
    nothing is seen.
    """
    batch, heads, _, queries, dim = probe.q.shape
    kv_heads = k.shape[1]
    touching = slot.shape[-1]
    dtype = torch.promote_types(probe.q.dtype, torch.float32)
    # [B, Hkv, 1, n_local, 1, b, D]: KV heads beside their groups, as the scores are computed.
    k_blocks = k.view(batch, kv_heads, -1, 1, block_size, dim)[:, :, None]
    # [B, n, Hq, P, D]
    q_spans = probe.q.transpose(1, 2)
    sequence = torch.arange(batch, device=k.device)[:, None, None]
    in_block = torch.arange(block_size, device=k.device)

    block_elements = batch * heads * touching * queries * block_size
    step = max(1, _CHUNK_ELEMENTS // block_elements)
    for first in range(0, len(blocks), step):
        last = min(first + step, len(blocks))
        # [B, m, T]
        span = slot[:, first:last].clamp(min=0)

        # [B, m, T, Hq, P, D] -> [B, Hq, m, T, P, D] -> [B, Hkv, G, m, T, P, D]
        q = q_spans[sequence, span].permute(0, 3, 1, 2, 4, 5)
        q = q.unflatten(1, (kv_heads, -1)).to(dtype)
        # [B, Hkv, 1, m, 1, b, D]
        keys = k_blocks[:, :, :, first:last].to(dtype)
        # [B, Hkv, G, m, T, P, b] -> [B, Hq, m, T, P, b]
        scores = q * probe.scale @ keys.transpose(-1, -2)
        scores = scores.flatten(1, 2)

        # [m, 1, 1, b]
        position = blocks[first:last, None] * block_size + in_block
        position = position[:, None, None]
        # [B, m, T, P, 1]
        start = probe.start[sequence, span][..., None]
        stop = probe.stop[sequence, span][..., None]
        # [B, m, T, 1, 1]
        touched = (slot[:, first:last] >= 0)[..., None, None]
        # [B, m, T, P, b]
        seen = (position >= start) & (position < stop) & touched
        yield first, last, scores.masked_fill(~seen[:, None], -torch.inf)


def _block_lse(probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int) -> Tensor:
    """Twin of kernels.block_lse(): [B, Hq, n_local, T, P]."""
    chunks = []
    # [B, Hq, m, T, P, b] -> [B, Hq, m, T, P]
    for _, _, scores in _scores(probe, k, blocks, slot, block_size):
        chunks.append(scores.logsumexp(-1))
    return torch.cat(chunks, dim=2)


def _span_lse(block_lse: Tensor, slot: Tensor, n: int) -> Tensor:
    """Twin of kernels.span_lse(): [B, Hq, n, P] from [B, Hq, n_local, T, P]."""
    # [B, Hq, n_local T, P]
    lse = block_lse.flatten(2, 3)
    batch, heads, _, queries = lse.shape
    # [B, Hq, n_local T, P]: what touches no span is -inf, so that it may be added to any.
    span = slot.long().clamp(min=0).flatten(1)
    span = span[:, None, :, None].expand_as(lse)

    # [B, Hq, n, P], finite also for rows that see nothing.
    nothing = lse.new_full((batch, heads, n, queries), -torch.inf)
    largest = nothing.scatter_reduce(2, span, lse, "amax")
    largest = largest.clamp(min=torch.finfo(lse.dtype).min)

    # [B, Hq, n_local T, P]
    weight = (lse - largest.gather(2, span)).exp()
    # [B, Hq, n, P]
    total = torch.zeros_like(largest).scatter_add(2, span, weight)
    return largest + total.log()


def _block_masses(
    probe: Probe,
    lse: Tensor,
    k: Tensor,
    blocks: Tensor,
    slot: Tensor,
    block_size: int,
    split: bool,
) -> tuple[Tensor, Tensor]:
    """Twin of kernels.block_masses(): what _pooled() returns."""
    batch, _, _, queries, _ = probe.q.shape
    back = blocks_back(queries, block_size)
    # [B, n, Hq, P], finite also for rows that see nothing: their masses are 0, not NaN.
    finite_lse = lse.clamp(min=torch.finfo(lse.dtype).min)
    finite_lse = finite_lse.transpose(1, 2)
    sequence = torch.arange(batch, device=k.device)[:, None, None]
    verticals = []
    tiles = []
    for first, last, scores in _scores(probe, k, blocks, slot, block_size):
        # [B, m, T]
        span = slot[:, first:last].clamp(min=0)
        # [B, m, T, Hq, P] -> [B, Hq, m, T, P]
        row_lse = finite_lse[sequence, span].permute(0, 3, 1, 2, 4)
        # [B, Hq, m, T, P, b]
        mass = (scores - row_lse[..., None]).exp()

        # [B, m, T, P], and one-hot [B, 1, m, T, P, U]: in which block each row lies.
        row_back = probe.block_back[sequence, span].long()
        row_back = row_back.clamp(max=back - 1)
        row_block = F.one_hot(row_back, back).to(mass.dtype)[:, None]

        # [B, Hq, m, V, b]: a vertical is in one span at most, the others hold no mass of it.
        if split:
            verticals.append((row_block.mT @ mass).sum(3))
        else:
            verticals.append(mass.sum(dim=(3, 4))[..., None, :])
        # [B, Hq, m, T, 1, P] @ [B, 1, m, T, P, U] -> [B, Hq, m, T, U]
        row_mass = mass.sum(-1)[..., None, :]
        tiles.append((row_mass @ row_block).squeeze(-2))
    return torch.cat(verticals, dim=2), torch.cat(tiles, dim=2)
