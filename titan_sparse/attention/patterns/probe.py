"""What the probe sees: attention mass of a span's last queries by key column and by block diagonal.

Four collectives, none of which waits for the host: the probe's queries go to all ranks, the softmax normalisers are
gathered, the pooled masses are exchanged so that each rank holds all keys for its share of the heads, and (in the
caller) the choices are gathered.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks import Rows
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


def probe_masses(q: Tensor, k: Tensor, rows: Rows, spans: Spans, cp: "ContextParallel", queries: int,
                 scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention masses that the probe gives to columns and to block diagonals, for this rank's share of the heads.

    q [B, Hq, S_local, D], k [B, Hkv, S_local, D]: whole blocks. Collective over cp. N = ceil(B Hq / ranks) (sequence,
    head) pairs come back: vertical [N, S], slash [N, E], and int64 [N] the sequence each pair belongs to.
    """
    batch, heads = q.shape[:2]
    blocks = cp.blocks(rows.start.shape[1], device=q.device)
    slot = spans_of_blocks(spans, blocks, cp.block_size)
    probe = _gather_probe(q, rows, spans, cp, queries, scale)
    lse = _normaliser(probe, k, blocks, slot, cp)
    column, tile = _pooled(probe, lse, k, blocks, slot, cp.block_size)
    pairs = -(-batch * heads // cp.size)
    pooled = torch.cat([column.flatten(2), tile.flatten(2)], dim=-1).flatten(0, 1)
    pooled = torch.nn.functional.pad(pooled, (0, 0, 0, pairs * cp.size - batch * heads))
    received = cp.all_to_all(pooled.unflatten(0, (cp.size, pairs))).transpose(0, 1)
    columns, tiles = received.split([column[0, 0].numel(), tile[0, 0].numel()], dim=-1)
    order = torch.argsort(cp.block_table(rows.start.shape[1], q.device).flatten())
    columns = columns.reshape(pairs, -1, cp.block_size)[:, order].flatten(1)
    tiles = tiles.reshape(pairs, -1, *tile.shape[3:])[:, order]
    sequence = (torch.arange(pairs, device=q.device) + cp.rank * pairs).clamp(max=batch * heads - 1) // heads
    return columns, _by_diagonal(tiles, Spans(*(x[sequence] for x in spans)), cp.block_size), sequence


def _gather_probe(q: Tensor, rows: Rows, spans: Spans, cp: "ContextParallel", queries: int, scale: float) -> Probe:
    batch, heads, _, dim = q.shape
    seq_len = rows.start.shape[1]
    position = spans.stop[..., None] - queries + torch.arange(queries, device=q.device)
    exists = position >= spans.start[..., None]
    exists &= (spans.start < spans.stop)[..., None]
    position = position.clamp(min=0, max=seq_len - 1)
    local = cp.local_position(position.flatten(1), seq_len)
    picked = q.gather(2, local.clamp(min=0)[:, None, :, None].expand(-1, heads, -1, dim))
    picked = cp.all_reduce(picked * (local >= 0)[:, None, :, None])
    start, stop = (x.expand(batch, -1).gather(1, position.flatten(1)).view_as(position) for x in (rows.start, rows.stop))
    block_back = (spans.last_block[..., None] - position // cp.block_size).clamp(min=0)
    picked = picked.view(batch, heads, *position.shape[1:], dim)
    return Probe(picked, start, torch.where(exists, stop, start), block_back, scale)


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
    back = (queries + block_size - 2) // block_size + 1
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


def _by_diagonal(tile: Tensor, spans: Spans, block_size: int) -> Tensor:
    """Masses [N, E] of the block diagonals from those of the tiles [N, blocks, T, U] in global order."""
    pairs, blocks, _, back = tile.shape
    key_block = torch.arange(blocks, device=tile.device)
    slot = spans_of_blocks(spans, key_block, block_size)
    known = slot.clamp(min=0).flatten(1)
    last, offset = (x.gather(1, known).view_as(slot)[..., None] for x in (spans.last_block, spans.offset))
    delta = last - torch.arange(back, device=tile.device) - key_block[:, None, None]
    valid = (slot >= 0)[..., None] & (delta >= 0)
    out = tile.new_zeros(pairs, entries(blocks * block_size, block_size, spans.start.shape[1]))
    return out.scatter_add_(1, torch.where(valid, offset + delta, 0).flatten(1), (tile * valid).flatten(1))
