"""The twin of the kernels in plain PyTorch: dense masks made from the lists. Any dtype and device, small sizes."""

import torch
from torch import Tensor

from ..bits import unpack
from ..chunks import chosen_keys
from .piece import Piece


def _listed(count: Tensor, table: Tensor, verticals: int) -> Tensor:
    """bool [B, Hq, n, verticals]: which blocks of the other side are on the lists."""
    real = torch.arange(table.shape[-1], device=table.device) < count[..., None]
    hits = torch.zeros(*table.shape[:-1], verticals, dtype=torch.int32, device=table.device)
    return hits.scatter_add_(-1, table.long().clamp(0, verticals - 1), real.int()) > 0


def _seen(piece: Piece, start: Tensor, stop: Tensor, block_size: int) -> Tensor:
    """bool [B, Hq, Sq, Sk]: the pairs that a piece computes."""

    def tokens(x: Tensor) -> Tensor:
        return x.repeat_interleave(block_size, 2).repeat_interleave(block_size, 3)

    lists, verticals = piece.by_query, piece.k.shape[2] // block_size
    full = tokens(_listed(lists.full_count, lists.full, verticals))
    if piece.slices is None:
        position = piece.k_positions[:, :, None]
        seen = (position >= start[:, None, :, None]) & (position < stop[:, None, :, None])
        seen = seen & tokens(_listed(lists.partial_count, lists.partial, verticals))
    else:
        seen = _seen_in_slices(piece, block_size)
    if piece.covered is not None:
        seen = seen & ~unpack(piece.covered, piece.k.shape[2]).repeat_interleave(block_size, 2)
    if piece.chosen is not None:
        seen = seen & chosen_keys(piece.chosen, piece.k_positions)
    return full | seen


def _seen_in_slices(piece: Piece, block_size: int) -> Tensor:
    """bool [B, Hq, Sq, Sk]: the pairs of partial tiles, each entry of the lists with its slice."""
    lists, query = piece.by_query, piece.q_positions.view(-1, block_size, 1)
    keys = piece.k_positions.flatten().view(-1, 1, block_size)
    shape = lists.partial.shape
    seen = torch.zeros(
        *shape[:3], len(keys), block_size, block_size, dtype=torch.bool, device=query.device
    )
    for b, h, block in torch.cartesian_prod(*map(torch.arange, shape[:3])).tolist():
        for entry in range(int(lists.partial_count[b, h, block])):
            number, other = (
                int(x[b, h, block, entry]) for x in (lists.partial_slice, lists.partial)
            )
            q_start, q_stop, k_start, k_stop, low, high = piece.slices[b, number].tolist()
            q, k = query[block], keys[other]
            seen[b, h, block, other] |= (
                (q >= q_start)
                & (q < q_stop)
                & (k >= k_start)
                & (k < k_stop)
                & (k - q >= low)
                & (k - q <= high)
            )
    return seen.transpose(3, 4).flatten(2, 3).flatten(3, 4)


def _keys(pieces: list[Piece], heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of all pieces, one after the other and for every query head: [B, Hq, all Sk, D]."""
    both = [(p.k, p.v) for p in pieces]
    return tuple(
        torch.cat([x.to(dtype).repeat_interleave(heads // x.shape[1], 1) for x in xs], 2)
        for xs in zip(*both)
    )


def _scores(
    q: Tensor,
    keys: Tensor,
    pieces: list[Piece],
    start: Tensor,
    stop: Tensor,
    block_size: int,
    scale: float,
) -> Tensor:
    seen = torch.cat([_seen(piece, start, stop, block_size) for piece in pieces], dim=3)
    return (q.to(keys.dtype) @ keys.mT * scale).masked_fill(~seen, -torch.inf)


def _probability(scores: Tensor, lse: Tensor) -> Tensor:
    """-inf as lse would give NaN."""
    return (scores - lse.to(scores.dtype).clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp()


def forward(
    q: Tensor, pieces: list[Piece], start: Tensor, stop: Tensor, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As forward() of the kernels, but any number of pieces, fp64 stays fp64, and results are fp32 or fp64."""
    keys, values = _keys(pieces, q.shape[1], torch.promote_types(q.dtype, torch.float32))
    scores = _scores(q, keys, pieces, start, stop, block_size, scale)
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
    """As backward() of the kernels, but any number of pieces, and fp64 stays fp64. by_key is not looked at."""
    dtype, heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    keys, values = _keys(pieces, heads, dtype)
    p = _probability(_scores(q, keys, pieces, start, stop, block_size, scale), lse)
    d_out = d_out.to(dtype)
    d_scores = p * (d_out @ values.mT - (d_out * out.to(dtype)).sum(-1, keepdim=True)) * scale
    lengths = [piece.k.shape[2] for piece in pieces]
    gradients = ((d_scores.mT @ q.to(dtype)).split(lengths, 2), (p.mT @ d_out).split(lengths, 2))
    summed = [
        tuple(x.unflatten(1, (piece.k.shape[1], -1)).sum(2) for x in both)
        for piece, *both in zip(pieces, *gradients)
    ]
    return d_scores @ keys, summed
