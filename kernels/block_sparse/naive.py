"""The twin of the kernels in plain PyTorch: dense masks made from the lists.

It takes any dtype and device, for small sizes.
"""

import torch
from torch import Tensor

from titan_sparse.kernels.bits import unpack
from titan_sparse.kernels.block_sparse.piece import Piece
from titan_sparse.kernels.chunks import chosen_keys


def forward(
    q: Tensor, pieces: list[Piece], start: Tensor, stop: Tensor, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As forward() of the kernels, but over any number of pieces, and the results are fp32 (fp64
    for fp64)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = _keys_and_values(pieces, q.shape[1], dtype)
    # [B, Hq, Sq, all Sk]
    seen = torch.cat([_seen(piece, start, stop, block_size) for piece in pieces], dim=3)
    scores = _scores(q, keys, seen, scale)
    lse = scores.logsumexp(-1)
    return _probability(scores, lse) @ values, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: list[Piece],
    start: Tensor,
    stop: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """As backward() of the kernels, but over any number of pieces, and the results are fp32 (fp64
    for fp64). Does not read by_key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = _keys_and_values(pieces, q.shape[1], dtype)
    # [B, Hq, Sq, all Sk]
    seen = torch.cat([_seen(piece, start, stop, block_size) for piece in pieces], dim=3)
    p = _probability(_scores(q, keys, seen, scale), lse)
    d_out = d_out.to(dtype)
    delta = (d_out * out.to(dtype)).sum(-1, keepdim=True)
    d_scores = p * (d_out @ values.mT - delta) * scale

    # Back to pieces, and from query heads to the KV heads that they share.
    lengths = [piece.k.shape[2] for piece in pieces]
    dk_pieces = (d_scores.mT @ q.to(dtype)).split(lengths, 2)
    dv_pieces = (p.mT @ d_out).split(lengths, 2)
    summed = []
    for piece, dk, dv in zip(pieces, dk_pieces, dv_pieces):
        kv_heads = piece.k.shape[1]
        dk = dk.unflatten(1, (kv_heads, -1)).sum(2)
        dv = dv.unflatten(1, (kv_heads, -1)).sum(2)
        summed.append((dk, dv))
    return d_scores @ keys, summed


def _keys_and_values(pieces: list[Piece], heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of all pieces, one after the other, for every query head.

    Both are [B, Hq, all Sk, D].
    """
    keys = []
    values = []
    for piece in pieces:
        group = heads // piece.k.shape[1]
        keys.append(piece.k.to(dtype).repeat_interleave(group, 1))
        values.append(piece.v.to(dtype).repeat_interleave(group, 1))
    return torch.cat(keys, 2), torch.cat(values, 2)


def _scores(q: Tensor, keys: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Scores [B, Hq, Sq, all Sk], -inf for the pairs that are not seen."""
    scores = q.to(keys.dtype) @ keys.mT * scale
    return scores.masked_fill(~seen, -torch.inf)


def _probability(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that see nothing, where lse is -inf and would give NaN."""
    lowest = torch.finfo(scores.dtype).min
    finite = lse.to(scores.dtype).clamp(min=lowest)
    return (scores - finite[..., None]).exp()


def _seen(piece: Piece, start: Tensor, stop: Tensor, block_size: int) -> Tensor:
    """bool [B, Hq, Sq, Sk]: the pairs that a piece computes."""
    lists = piece.by_query
    k_len = piece.k.shape[2]
    kv_blocks = k_len // block_size

    # Of a full tile every pair is seen.
    full = _listed(lists.full_count, lists.full, kv_blocks)
    full = _of_tokens(full, block_size)

    # In a partial one the mask decides, or the slice that the entry names.
    if piece.slices is None:
        position = piece.k_positions[:, :, None]
        seen = (position >= start[:, None, :, None]) & (position < stop[:, None, :, None])
        partial = _listed(lists.partial_count, lists.partial, kv_blocks)
        seen = seen & _of_tokens(partial, block_size)
    else:
        seen = _seen_in_slices(piece, block_size)
    if piece.covered is not None:
        covered = unpack(piece.covered, k_len)
        seen = seen & ~covered.repeat_interleave(block_size, 2)
    if piece.chosen is not None:
        seen = seen & chosen_keys(piece.chosen, piece.k_positions)
    return full | seen


def _listed(count: Tensor, table: Tensor, blocks: int) -> Tensor:
    """bool [B, Hq, n, blocks]: which blocks of the other side are on the lists [B, Hq, n, K]."""
    # Entries behind the count are no blocks, and may hold any number.
    entry = torch.arange(table.shape[-1], device=table.device)
    is_real = entry < count[..., None]
    number = table.long().clamp(0, blocks - 1)
    hits = torch.zeros(*table.shape[:-1], blocks, dtype=torch.int32, device=table.device)
    return hits.scatter_add_(-1, number, is_real.int()) > 0


def _of_tokens(of_blocks: Tensor, block_size: int) -> Tensor:
    """[B, Hq, nq, nk] -> [B, Hq, nq * block_size, nk * block_size]"""
    return of_blocks.repeat_interleave(block_size, 2).repeat_interleave(block_size, 3)


def _seen_in_slices(piece: Piece, block_size: int) -> Tensor:
    """bool [B, Hq, Sq, Sk]: the pairs of partial tiles, each entry of the lists with its slice."""
    lists = piece.by_query
    batch, heads, q_blocks, _ = lists.partial.shape
    # Positions: [nq, block, 1] and [nk, 1, block]
    queries = piece.q_positions.view(-1, block_size, 1)
    keys = piece.k_positions.flatten().view(-1, 1, block_size)
    seen = torch.zeros(
        (batch, heads, q_blocks, len(keys), block_size, block_size),
        dtype=torch.bool,
        device=queries.device,
    )
    rows = torch.cartesian_prod(torch.arange(batch), torch.arange(heads), torch.arange(q_blocks))
    for b, h, q_block in rows.tolist():
        q = queries[q_block]
        for entry in range(int(lists.partial_count[b, h, q_block])):
            number = int(lists.partial_slice[b, h, q_block, entry])
            kv_block = int(lists.partial[b, h, q_block, entry])
            k = keys[kv_block]
            q_start, q_stop, k_start, k_stop, low, high = piece.slices[b, number].tolist()
            inside = (q >= q_start) & (q < q_stop) & (k >= k_start) & (k < k_stop)
            between = (k - q >= low) & (k - q <= high)
            # A tile may be there once for each of its slices.
            seen[b, h, q_block, kv_block] |= inside & between
    # [B, Hq, nq, block, nk, block]
    seen = seen.transpose(3, 4)
    return seen.flatten(2, 3).flatten(3, 4)
