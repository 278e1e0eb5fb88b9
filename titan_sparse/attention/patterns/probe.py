"""What the probe sees: attention mass of a span's last queries by key column and by block diagonal.

Four collectives, none of which waits for the host: the probe's queries go to all ranks, the softmax normalisers are
gathered, the pooled masses are exchanged so that each rank holds all keys for its share of the heads, and (in the
caller) the choices are gathered.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks import Rows
from titan_sparse.attention.memo import once_per_mask
from titan_sparse.attention.patterns.spans import Spans, entries, spans_of_blocks
from titan_sparse.kernels import probe as kernels

if TYPE_CHECKING:
    from titan_sparse.attention.context_parallel import ContextParallel

_CHUNK_ELEMENTS = 1 << 26
"""Scores held at a time: 256 MiB in fp32."""


class Probe(NamedTuple):
    """The last P queries of each of n spans; a span shorter than P has rows that see nothing.

    q: [B, Hq, n, P, D] in its own dtype. start, stop: int32 [B, n, P], keys that each row sees.
    block_back: int64 [B, n, P], how many blocks the row lies before the span's last block. scale: of the scores.
    """

    q: Tensor
    start: Tensor
    stop: Tensor
    block_back: Tensor
    scale: float


class Geometry(NamedTuple):
    """What a probe needs to know of spans and layout, for every layer the same.

    blocks: int64 [n_local], this rank's. slot: int64 [B, n_local, T], spans that touch them. order: global order of the
    blocks of all ranks. local, mine: where this rank holds each probe row [B, n P] and whether. start, stop, block_back:
    as in Probe. diagonal, valid: [N, blocks T U], entry of each tile in the list of diagonals, and whether it has one.
    entries: length of that list.
    """

    blocks: Tensor
    slot: Tensor
    order: Tensor
    local: Tensor
    mine: Tensor
    start: Tensor
    stop: Tensor
    block_back: Tensor
    diagonal: Tensor
    valid: Tensor
    entries: int


def probe_masses(q: Tensor, k: Tensor, rows: Rows, spans: Spans, pattern: str, cp: "ContextParallel", queries: int,
                 scale: float) -> tuple[Tensor, Tensor]:
    """Attention masses that the probe gives to columns and to block diagonals, for this rank's share of the heads.

    q [B, Hq, S_local, D], k [B, Hkv, S_local, D]: whole blocks. pattern: key of the pattern, which decides the spans.
    Collective over cp. N = ceil(B Hq / ranks) (sequence, head) pairs come back: vertical [N, S], slash [N, E];
    sequences_of_pairs() tells their sequences.
    """
    batch, heads = q.shape[:2]
    key = ("probe", pattern, cp.key, batch, heads)
    geometry = once_per_mask(rows, key, lambda: _geometry(rows, spans, cp, queries, batch, heads))
    probe = _gather_probe(q, geometry, cp, queries, scale)
    lse = _normaliser(probe, k, geometry.blocks, geometry.slot, cp)
    column, tile = _pooled(probe, lse, k, geometry.blocks, geometry.slot, cp.block_size)
    pairs = -(-batch * heads // cp.size)
    pooled = torch.cat([column.flatten(2), tile.flatten(2)], dim=-1).flatten(0, 1)
    pooled = torch.nn.functional.pad(pooled, (0, 0, 0, pairs * cp.size - batch * heads))
    received = cp.all_to_all(pooled.unflatten(0, (cp.size, pairs))).transpose(0, 1)
    columns, tiles = received.split([column[0, 0].numel(), tile[0, 0].numel()], dim=-1)
    columns = columns.reshape(pairs, -1, cp.block_size)[:, geometry.order].flatten(1)
    tiles = tiles.reshape(pairs, -1, *tile.shape[3:])[:, geometry.order].flatten(1)
    slash = tiles.new_zeros(pairs, geometry.entries)
    return columns, slash.scatter_add_(1, geometry.diagonal, tiles * geometry.valid)


def sequences_of_pairs(batch: int, heads: int, cp: "ContextParallel", device: torch.device) -> Tensor:
    """int64 [N]: the sequence of each (sequence, head) pair that this rank chooses for."""
    pairs = -(-batch * heads // cp.size)
    return (torch.arange(pairs, device=device) + cp.rank * pairs).clamp(max=batch * heads - 1) // heads


def _geometry(rows: Rows, spans: Spans, cp: "ContextParallel", queries: int, batch: int, heads: int) -> Geometry:
    seq_len, device = rows.start.shape[1], rows.start.device
    blocks = cp.blocks(seq_len, device=device)
    order = torch.argsort(cp.block_table(seq_len, device).flatten())
    position = spans.stop[..., None] - queries + torch.arange(queries, device=device)
    exists = (position >= spans.start[..., None]) & (spans.start < spans.stop)[..., None]
    position = position.clamp(min=0, max=seq_len - 1)
    local = cp.local_position(position.flatten(1), seq_len)
    start, stop = (x.expand(batch, -1).gather(1, position.flatten(1)).view_as(position) for x in (rows.start, rows.stop))
    block_back = (spans.last_block[..., None] - position // cp.block_size).clamp(min=0)
    back = _blocks_back(queries, cp.block_size)
    own = Spans(*(x[sequences_of_pairs(batch, heads, cp, device)] for x in spans))
    diagonal, valid = _diagonals(own, seq_len // cp.block_size, back, cp.block_size)
    return Geometry(blocks, spans_of_blocks(spans, blocks, cp.block_size), order, local.clamp(min=0), local >= 0, start,
                    torch.where(exists, stop, start), block_back, diagonal, valid,
                    entries(seq_len, cp.block_size, spans.start.shape[1]))


def _blocks_back(queries: int, block_size: int) -> int:
    """Query blocks that `queries` last queries can lie in."""
    return (queries + block_size - 2) // block_size + 1


def _gather_probe(q: Tensor, geometry: Geometry, cp: "ContextParallel", queries: int, scale: float) -> Probe:
    batch, heads, _, dim = q.shape
    picked = q.gather(2, geometry.local[:, None, :, None].expand(-1, heads, -1, dim))
    picked = cp.all_reduce(picked * geometry.mine[:, None, :, None])
    picked = picked.view(batch, heads, -1, queries, dim)
    return Probe(picked, geometry.start, geometry.stop, geometry.block_back, scale)


def _scores(probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int):
    """Chunk by chunk: (first, last) of m local blocks and their scores [B, Hq, m, T, P, b], -inf where nothing is seen."""
    batch, heads, n, queries, dim = probe.q.shape
    kv_heads, touched = k.shape[1], slot.shape[-1]
    k_blocks = k.view(batch, kv_heads, -1, 1, block_size, dim)
    step = max(1, _CHUNK_ELEMENTS // (batch * heads * touched * queries * block_size))
    which = torch.arange(batch, device=k.device)[:, None, None]
    for first in range(0, len(blocks), step):
        last = min(first + step, len(blocks))
        span = slot[:, first:last].clamp(min=0)
        q = probe.q.transpose(1, 2)[which, span].permute(0, 3, 1, 2, 4, 5).unflatten(1, (kv_heads, -1))
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys = k_blocks[:, :, None, first:last].to(dtype)
        scores = (q.to(dtype) * probe.scale @ keys.transpose(-1, -2)).flatten(1, 2)
        key = (blocks[first:last, None] * block_size + torch.arange(block_size, device=k.device))[:, None, None]
        seen = (key >= probe.start[which, span][..., None]) & (key < probe.stop[which, span][..., None])
        seen &= (slot[:, first:last] >= 0)[..., None, None]
        yield first, last, scores.masked_fill(~seen[:, None], -torch.inf)


def _normaliser(probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, cp: "ContextParallel") -> Tensor:
    """Log of the softmax sum over all ranks' keys, [B, Hq, n, P]; -inf for rows that see nothing."""
    batch, heads, n, queries, _ = probe.q.shape
    piece = _block_lse(probe, k, blocks, slot, cp.block_size).flatten(2, 3)
    where = slot.clamp(min=0).flatten(1)[:, None, :, None].expand_as(piece)
    top = torch.full((batch, heads, n, queries), -torch.inf, dtype=piece.dtype, device=k.device)
    top = top.scatter_reduce(2, where, piece, "amax").clamp(min=torch.finfo(piece.dtype).min)
    total = torch.zeros_like(top).scatter_add(2, where, (piece - top.gather(2, where)).exp())
    return cp.all_gather(top + total.log()).logsumexp(0)


def _block_lse(probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int) -> Tensor:
    """Log of each row's softmax sum over each of this rank's blocks, [B, Hq, n_local, T, P]."""
    if k.is_cuda and k.dtype != torch.float64:
        return kernels.block_lse(*_kernel_inputs(probe, k, blocks, slot, block_size))
    return torch.cat([s.logsumexp(-1) for _, _, s in _scores(probe, k, blocks, slot, block_size)], dim=2)


def _kernel_inputs(probe: Probe, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int) -> tuple:
    return probe.q, k, probe.start, probe.stop, slot.int(), blocks.int(), probe.scale, block_size


def _pooled(probe: Probe, lse: Tensor, k: Tensor, blocks: Tensor, slot: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Masses of this rank's keys: by column [B, Hq, n_local, b], by tile and probe block back [B, Hq, n_local, T, U]."""
    batch, heads, n, queries, _ = probe.q.shape
    back = _blocks_back(queries, block_size)
    if k.is_cuda and k.dtype != torch.float64:
        inputs = _kernel_inputs(probe, k, blocks, slot, block_size)
        return kernels.block_masses(*inputs, lse, probe.block_back.int(), back)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min).transpose(1, 2)
    which = torch.arange(batch, device=k.device)[:, None, None]
    columns, tiles = [], []
    for first, last, scores in _scores(probe, k, blocks, slot, block_size):
        span = slot[:, first:last].clamp(min=0)
        mass = (scores - finite[which, span].permute(0, 3, 1, 2, 4)[..., None]).exp()
        columns.append(mass.sum(dim=(3, 4)))
        row_block = torch.nn.functional.one_hot(probe.block_back[which, span].clamp(max=back - 1), back).to(mass.dtype)
        tiles.append((mass.sum(-1)[..., None, :] @ row_block[:, None]).squeeze(-2))
    return torch.cat(columns, dim=2), torch.cat(tiles, dim=2)


def _diagonals(spans: Spans, blocks: int, back: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The block diagonal of every tile (key block, span touching it, blocks back): its entry in the list of all spans'
    diagonals, int64 [N, blocks T U], and whether there is one."""
    key_block = torch.arange(blocks, device=spans.start.device)
    slot = spans_of_blocks(spans, key_block, block_size)
    known = slot.clamp(min=0).flatten(1)
    last, offset = (x.gather(1, known).view_as(slot)[..., None] for x in (spans.last_block, spans.offset))
    delta = last - torch.arange(back, device=key_block.device) - key_block[:, None, None]
    valid = (slot >= 0)[..., None] & (delta >= 0)
    return torch.where(valid, offset + delta, 0).flatten(1), valid.flatten(1)
