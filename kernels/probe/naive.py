"""The plain-torch twins of kernel.py, for any floating dtype."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.kernels.probe.kernel import KeyBlocks, Probe

_CHUNK_ELEMENTS = 1 << 26
"""Scores held at a time: 256 MiB in fp32."""


def held_rows(q: Tensor, local: Tensor, mine: Tensor) -> Tensor:
    """The twin of probe.held_rows()."""
    # [B, 1, R, 1]
    row = local[:, None, :, None]
    is_mine = mine[:, None, :, None]
    # [B, Hq, R, D]
    row = row.expand(-1, q.shape[1], -1, q.shape[-1])
    held = q.gather(2, row)
    return torch.where(is_mine, held, 0)


def block_lse(probe: Probe, keys: KeyBlocks) -> Tensor:
    """The twin of probe.block_lse()."""
    chunks = []
    # [B, Hq, m, T, P, b] -> [B, Hq, m, T, P]
    for _, _, scores in scores_of_blocks(probe, keys):
        chunks.append(scores.logsumexp(-1))
    return torch.cat(chunks, dim=2)


def span_lse(block_lse: Tensor, slot: Tensor, run: Tensor) -> Tensor:
    """The twin of probe.span_lse(); of `run` it reads only how many spans there are."""
    # [B, Hq, n_local T, P]
    lse = block_lse.flatten(2, 3)
    batch, heads, _, queries = lse.shape
    # [B, Hq, n_local T, P]: what touches no span is -inf, so that it may be added to any.
    span = slot.long().clamp(min=0).flatten(1)
    span = span[:, None, :, None].expand_as(lse)

    # [B, Hq, n, P], finite also for rows that see nothing.
    nothing = lse.new_full((batch, heads, run.shape[1], queries), -torch.inf)
    largest = nothing.scatter_reduce(2, span, lse, "amax")
    largest = largest.clamp(min=torch.finfo(lse.dtype).min)

    # [B, Hq, n_local T, P]
    weight = (lse - largest.gather(2, span)).exp()
    # [B, Hq, n, P]
    total = torch.zeros_like(largest).scatter_add(2, span, weight)
    return largest + total.log()


def block_masses(probe: Probe, keys: KeyBlocks, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of probe.block_masses()."""
    batch = len(probe.q)
    # [B, n, Hq, P], finite also for rows that see nothing: their masses are 0, not NaN.
    finite_lse = lse.clamp(min=torch.finfo(lse.dtype).min)
    finite_lse = finite_lse.transpose(1, 2)
    sequence = torch.arange(batch, device=keys.k.device)[:, None, None]
    verticals = []
    tiles = []
    for first, last, scores in scores_of_blocks(probe, keys):
        # [B, m, T]
        span = keys.slot[:, first:last].clamp(min=0)
        # [B, m, T, Hq, P] -> [B, Hq, m, T, P]
        row_lse = finite_lse[sequence, span].permute(0, 3, 1, 2, 4)
        # [B, Hq, m, T, P, b]
        mass = (scores - row_lse[..., None]).exp()
        # [B, Hq, m, b]: a vertical is in one span at most, the others hold no mass of it.
        verticals.append(mass.sum(dim=(3, 4)))

        # [B, m, T, P], and one-hot [B, 1, m, T, P, U].
        group = probe.group[sequence, span].long()
        in_group = F.one_hot(group, probe.groups).to(mass.dtype)[:, None]
        # [B, Hq, m, T, 1, P] @ [B, 1, m, T, P, U] -> [B, Hq, m, T, U]
        row_mass = mass.sum(-1)[..., None, :]
        tiles.append((row_mass @ in_group).squeeze(-2))
    return torch.cat(verticals, dim=2), torch.cat(tiles, dim=2)


def scores_of_blocks(probe: Probe, keys: KeyBlocks) -> Iterator[tuple[int, int, Tensor]]:
    """Scores of the probe's rows, some blocks of keys at a time.

    Yields first and last of m blocks, and their scores [B, Hq, m, T, P, b], -inf where nothing is
    seen.
    """
    k, blocks, slot, block_size = keys
    batch, heads, _, queries, dim = probe.q.shape
    kv_heads = k.shape[1]
    touching = slot.shape[-1]
    dtype = accumulation_dtype(probe.q.dtype)
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
        chunk_keys = k_blocks[:, :, :, first:last].to(dtype)
        # [B, Hkv, G, m, T, P, b] -> [B, Hq, m, T, P, b]
        scores = q * probe.scale @ chunk_keys.transpose(-1, -2)
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
