"""What the probe sees: attention mass of a span's last queries by key vertical and by block diagonal.

Four collectives, none of which waits for the host: the probe's queries go to all ranks, the softmax normalisers are
gathered, the pooled masses are exchanged so that each rank holds all keys for its share of the heads, and (in the
caller) the choices are gathered.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.vertical_slash.spans import Spans, entries, spans_of_blocks
from titan_sparse.kernels import probe as kernels

if TYPE_CHECKING:
    from titan_sparse.attention.context_parallel.group import ContextParallel

_CHUNK_ELEMENTS = 1 << 26
"""Scores held at a time: 256 MiB in fp32."""


class Probe(NamedTuple):
    """The last P queries of each of n spans; a span shorter than P has rows that see nothing.

    q: [B, Hq, n, P, D] in its own dtype. start, stop: int32 [B, n, P], keys that each row sees.
    block_back: int32 [B, n, P], how many blocks the row lies before the span's last block. scale: of the scores.
    """

    q: Tensor
    start: Tensor
    stop: Tensor
    block_back: Tensor
    scale: float


class Geometry(NamedTuple):
    """What a probe needs to know of spans and layout, for every layer the same; int32 where a kernel reads it.

    blocks: int32 [n_local], this rank's. slot: int32 [B, n_local, T], spans that touch them, -1 for none.
    run: int32 [B, n, 2], first local block that touches a span and the one behind the last.
    order: int64, global order of the blocks of all ranks. start, stop, block_back: as in Probe.
    local: int64 [B, n P], where this rank holds each probe row. mine: bool [B, n P], whether it does.
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
    rows: MaskRanges,
    spans: Spans,
    pattern: str,
    cp: "ContextParallel",
    queries: int,
    scale: float,
    split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention masses that the probe gives to verticals and to block diagonals, for this rank's share of the heads.

    q [B, Hq, S_local, D], k [B, Hkv, S_local, D]: whole blocks. pattern: key of the pattern, which decides the spans.
    Collective over cp. Of N = ceil(B Hq / ranks) (sequence, head) pairs come back: verticals [N, K, V, block_size], and
    diagonals [N, E]; sequences_of_pairs() tells their sequences. split: apart for each of the V = blocks_back() blocks that
    the probe's rows lie in, 0 the span's last; else V = 1. fp32, for fp64 inputs fp64.
    """
    batch, heads = q.shape[:2]
    key = ("probe", pattern, cp.key, batch, heads)
    geometry = once_per_mask(rows, key, lambda: _geometry(rows, spans, cp, queries, batch, heads))
    probe = _gather_probe(q, geometry, cp, queries, scale)
    lse = _normaliser(probe, k, geometry, cp)
    vertical, tile = _pooled(probe, lse, k, geometry.blocks, geometry.slot, cp.block_size, split)
    pairs = -(-batch * heads // cp.size)
    pooled = torch.cat([vertical.flatten(2), tile.flatten(2)], dim=-1).flatten(0, 1)
    pooled = torch.nn.functional.pad(pooled, (0, 0, 0, pairs * cp.size - batch * heads))
    received = cp.all_to_all(pooled.unflatten(0, (cp.size, pairs))).transpose(0, 1)
    verticals, tiles = received.split([vertical[0, 0].numel(), tile[0, 0].numel()], dim=-1)
    verticals = verticals.reshape(pairs, -1, *vertical.shape[3:])[:, geometry.order]
    tiles = tiles.reshape(pairs, -1, *tile.shape[3:])[:, geometry.order].flatten(1)
    # Gathered, not scattered: with atomic additions a diagonal's mass would depend on their order.
    slash = (
        torch.nn.functional.pad(tiles, (0, 1))
        .gather(1, geometry.tile)
        .unflatten(1, (-1, tile.shape[4]))
        .sum(-1)
    )
    return verticals, slash


def sequences_of_pairs(
    batch: int, heads: int, cp: "ContextParallel", device: torch.device
) -> Tensor:
    """int64 [N]: the sequence of each (sequence, head) pair that this rank chooses for."""
    pairs = -(-batch * heads // cp.size)
    return (torch.arange(pairs, device=device) + cp.rank * pairs).clamp(
        max=batch * heads - 1
    ) // heads


def _geometry(
    rows: MaskRanges, spans: Spans, cp: "ContextParallel", queries: int, batch: int, heads: int
) -> Geometry:
    seq_len, device, blocks = rows.start.shape[1], rows.start.device, cp.blocks(rows)
    order = torch.argsort(cp.table(rows).flatten())
    position = spans.stop[..., None] - queries + torch.arange(queries, device=device)
    exists = (position >= spans.start[..., None]) & (spans.start < spans.stop)[..., None]
    position = position.clamp(min=0, max=seq_len - 1)
    local = cp.local_position(position.flatten(1), rows)
    start, stop = (
        x.expand(batch, -1).gather(1, position.flatten(1)).view_as(position)
        for x in (rows.start, rows.stop)
    )
    block_back = (spans.last_block[..., None] - position // cp.block_size).clamp(min=0).int()
    own = Spans(*(x[sequences_of_pairs(batch, heads, cp, device)] for x in spans))
    tile = tiles_of_diagonals(
        own, seq_len // cp.block_size, blocks_back(queries, cp.block_size), cp.block_size
    )
    slot = spans_of_blocks(spans, blocks, cp.block_size)
    return Geometry(
        blocks.int(),
        slot.int(),
        _runs(slot, spans.start.shape[1]),
        order,
        local.clamp(min=0),
        local >= 0,
        start,
        torch.where(exists, stop, start),
        block_back,
        tile,
    )


def _runs(slot: Tensor, n: int) -> Tensor:
    """int32 [B, n, 2]: from the first to behind the last local block that touches each span; [B, n_local, T] slots."""
    batch, local = slot.shape[:2]
    place = torch.arange(local, device=slot.device)[:, None].expand_as(slot).flatten(1)
    slot = torch.where(slot >= 0, slot, n).flatten(1)
    first = torch.full((batch, n + 1), local, device=slot.device).scatter_reduce(
        1, slot, place, "amin"
    )
    last = torch.full((batch, n + 1), -1, device=slot.device).scatter_reduce(1, slot, place, "amax")
    return torch.stack([first, last + 1], dim=-1)[:, :n].int().contiguous()


def blocks_back(queries: int, block_size: int) -> int:
    """Query blocks that `queries` last queries can lie in."""
    return (queries + block_size - 2) // block_size + 1


def _gather_probe(
    q: Tensor, geometry: Geometry, cp: "ContextParallel", queries: int, scale: float
) -> Probe:
    batch, heads, _, dim = q.shape
    picked = q.gather(2, geometry.local[:, None, :, None].expand(-1, heads, -1, dim))
    picked = cp.all_reduce(picked * geometry.mine[:, None, :, None])
    picked = picked.view(batch, heads, -1, queries, dim)
    return Probe(picked, geometry.start, geometry.stop, geometry.block_back, scale)


def _scores(probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int):
    """Chunk by chunk: (first, last) of m local blocks, their scores [B, Hq, m, T, P, b], -inf where nothing is seen."""
    batch, heads, n, queries, dim = probe.q.shape
    kv_heads, touched = k.shape[1], slot.shape[-1]
    k_blocks = k.view(batch, kv_heads, -1, 1, block_size, dim)
    step = max(1, _CHUNK_ELEMENTS // (batch * heads * touched * queries * block_size))
    which = torch.arange(batch, device=k.device)[:, None, None]
    for first in range(0, len(blocks), step):
        last = min(first + step, len(blocks))
        span = slot[:, first:last].clamp(min=0)
        q = (
            probe.q.transpose(1, 2)[which, span]
            .permute(0, 3, 1, 2, 4, 5)
            .unflatten(1, (kv_heads, -1))
        )
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys = k_blocks[:, :, None, first:last].to(dtype)
        scores = (q.to(dtype) * probe.scale @ keys.transpose(-1, -2)).flatten(1, 2)
        key = (blocks[first:last, None] * block_size + torch.arange(block_size, device=k.device))[
            :, None, None
        ]
        seen = (key >= probe.start[which, span][..., None]) & (
            key < probe.stop[which, span][..., None]
        )
        seen &= (slot[:, first:last] >= 0)[..., None, None]
        yield first, last, scores.masked_fill(~seen[:, None], -torch.inf)


def _normaliser(probe: Probe, k: Tensor, geometry: Geometry, cp: "ContextParallel") -> Tensor:
    """Log of the softmax sum over all ranks' keys, [B, Hq, n, P]; -inf for rows that see nothing."""
    if k.is_cuda and k.dtype != torch.float64:
        piece = kernels.block_lse(
            *_kernel_inputs(probe, k, geometry.blocks, geometry.slot, cp.block_size)
        )
        own = kernels.span_lse(piece, geometry.slot, geometry.run)
    else:
        scores = _scores(probe, k, geometry.blocks, geometry.slot, cp.block_size)
        own = _span_lse(
            torch.cat([s.logsumexp(-1) for _, _, s in scores], dim=2),
            geometry.slot,
            probe.q.shape[2],
        )
    every = cp.all_gather(own)
    return every.logsumexp(0) if len(every) > 1 else every[0]


def _span_lse(block_lse: Tensor, slot: Tensor, n: int) -> Tensor:
    """Twin of kernels.span_lse(): [B, Hq, n, P] from [B, Hq, n_local, T, P]."""
    piece = block_lse.flatten(2, 3)
    where = slot.long().clamp(min=0).flatten(1)[:, None, :, None].expand_as(piece)
    top = piece.new_full((*piece.shape[:2], n, piece.shape[3]), -torch.inf)
    top = top.scatter_reduce(2, where, piece, "amax").clamp(min=torch.finfo(piece.dtype).min)
    total = torch.zeros_like(top).scatter_add(2, where, (piece - top.gather(2, where)).exp())
    return top + total.log()


def _kernel_inputs(probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int) -> tuple:
    return probe.q, k, probe.start, probe.stop, slot, blocks, probe.scale, block_size


def _pooled(
    probe: Probe,
    lse: Tensor,
    k: Tensor,
    blocks: Tensor,
    slot: Tensor,
    block_size: int,
    split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Masses of this rank's keys: by vertical [B, Hq, n_local, V, b], where V = U if split and 1 else; by tile and probe
    block back [B, Hq, n_local, T, U]."""
    batch, heads, n, queries, _ = probe.q.shape
    back = blocks_back(queries, block_size)
    if k.is_cuda and k.dtype != torch.float64:
        inputs = _kernel_inputs(probe, k, blocks, slot, block_size)
        return kernels.block_masses(*inputs, lse, probe.block_back, back, split)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min).transpose(1, 2)
    which = torch.arange(batch, device=k.device)[:, None, None]
    verticals, tiles = [], []
    for first, last, scores in _scores(probe, k, blocks, slot, block_size):
        span = slot[:, first:last].clamp(min=0)
        mass = (scores - finite[which, span].permute(0, 3, 1, 2, 4)[..., None]).exp()
        row_back = probe.block_back[which, span].long().clamp(max=back - 1)
        row_block = torch.nn.functional.one_hot(row_back, back).to(mass.dtype)[:, None]
        verticals.append(
            (row_block.mT @ mass).sum(3) if split else mass.sum(dim=(3, 4))[..., None, :]
        )
        tiles.append((mass.sum(-1)[..., None, :] @ row_block).squeeze(-2))
    return torch.cat(verticals, dim=2), torch.cat(tiles, dim=2)


def tiles_of_diagonals(spans: Spans, blocks: int, back: int, block_size: int) -> Tensor:
    """int64 [N, E U]: entry e of the list of all spans' diagonals is the sum of tiles U e .. U e + U - 1 of these.

    Tiles are numbered (key block, span touching it, probe blocks back); the one behind the last stands for none.
    """
    n, device = spans.start.shape[1], spans.start.device
    count = entries(blocks * block_size, block_size, n)
    entry = torch.arange(count, device=device).expand(len(spans.start), -1).contiguous()
    span = torch.searchsorted(spans.offset + spans.diagonals, entry, right=True)
    known = span.clamp(max=n - 1)
    last, offset = spans.last_block.gather(1, known), spans.offset.gather(1, known)
    block = (last - entry + offset)[..., None] - torch.arange(back, device=device)
    touching = spans_of_blocks(spans, torch.arange(blocks, device=device), block_size)
    slots = touching.shape[-1]
    slot = known[..., None] - touching[..., 0].gather(
        1, block.clamp(0, blocks - 1).flatten(1)
    ).view_as(block)
    valid = (span < n)[..., None] & (block >= spans.first_block.gather(1, known)[..., None])
    tile = (block * slots + slot) * back + torch.arange(back, device=device)
    return torch.where(valid, tile, blocks * slots * back).flatten(1)
