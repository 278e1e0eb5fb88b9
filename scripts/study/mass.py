"""Exact attention of one layer, summed up so that any choice of keys can be measured, and the best
choices given all rows.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import Causal, MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.kernels.chunks import chosen_keys

BLOCK = 128
"""Tokens of a block."""
KEYS = "best keys of each row"
STATIC = "best verticals + diagonals"
_ROWS = 1024
"""Rows of the softmax that are held at a time."""
_STRIDE = 8
"""The best keys of each row are looked for in one row of so many."""
_ROUNDS = 8
"""How often verticals and slashes are chosen in turn, each given the others."""


class Mass(NamedTuple):
    """Softmax mass of a layer's heads. Q = K = S / BLOCK.

    by_key: fp32 [H, Q, S], what each block of queries gives to each key.
    by_row: fp32 [H, S, K], what each query gives to each block of keys.
    """

    by_key: Tensor
    by_row: Tensor


class Point(NamedTuple):
    """Means over heads. recall: mass kept, mean of all rows. density: of the causal pairs."""

    recall: float
    density: float


def attention_mass(q: Tensor, k: Tensor) -> Mass:
    """Of q [Hq, S, D] and k [Hkv, S, D]; S is a multiple of BLOCK."""
    heads, seq_len = q.shape[:2]
    blocks = seq_len // BLOCK
    by_key = q.new_zeros(heads, blocks, seq_len, dtype=torch.float32)
    by_row = q.new_zeros(heads, seq_len, blocks, dtype=torch.float32)
    for rows, attention in attention_rows(q, k, 1):
        keys = attention.shape[2]
        q_blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
        by_key[:, q_blocks, :keys] = attention.unflatten(1, (-1, BLOCK)).sum(2)
        by_row[:, rows, : keys // BLOCK] = attention.unflatten(2, (-1, BLOCK)).sum(3)
    return Mass(by_key, by_row)


def attention_rows(q: Tensor, k: Tensor, stride: int) -> Iterator[tuple[slice, Tensor]]:
    """The softmax of every `stride`-th row, the last one among them, some rows at a time.

    q: [Hq, S, D], k: [Hkv, S, D]. Yields (rows, fp32 [Hq, rows, keys]); later keys are not seen.
    """
    kv_heads, seq_len, head_dim = k.shape
    # [Hkv, G, S, D]
    q_by_group = q.unflatten(0, (kv_heads, -1))
    position = torch.arange(seq_len, device=q.device)
    for begin in range(0, seq_len, _ROWS * stride):
        stop = min(begin + _ROWS * stride, seq_len)
        rows = slice(begin + stride - 1, stop, stride)
        # [Hkv, G, rows, D] @ [Hkv, 1, D, keys]
        scores = q_by_group[:, :, rows].float() @ k[:, None, :stop].float().mT
        scores *= head_dim**-0.5
        scores.masked_fill_(position[:stop] > position[rows, None], -torch.inf)
        if stride == 1:
            rows = slice(begin, stop)
        yield rows, scores.softmax(-1).flatten(0, 1)


@functools.lru_cache(maxsize=1)
def causal_mask(seq_len: int, device: torch.device) -> MaskRanges:
    """One for all calls, so that what selection derives from it is derived once."""
    return Causal().rows(seq_len, device)


@functools.lru_cache(maxsize=1)
def pairs_by_key(seq_len: int, device: torch.device) -> Tensor:
    """fp32 [Q, S]: queries of each block that see each key."""
    key = torch.arange(seq_len, device=device)
    # [Q, 1]: behind the last query of each block.
    block = torch.arange(seq_len // BLOCK, device=device)
    stop = (block[:, None] + 1) * BLOCK
    return (stop - key).clamp(0, BLOCK).float()


def kept(index: BlockIndex, mass: Mass) -> tuple[Tensor, Tensor]:
    """(recall, density) of each head, fp64 [H], of what the index of one sequence keeps."""
    chosen, pairs = _chosen(index)
    of_rows = chosen.shape[1:] == mass.by_row.shape[1:]
    weights = mass.by_row if of_rows else mass.by_key
    held = (weights * chosen).sum((1, 2), dtype=torch.float64)
    # Every row has a mass of 1.
    return held / index.seq_len, _density(chosen, pairs)


def density(index: BlockIndex) -> Tensor:
    """Share of the causal pairs that the index of one sequence keeps, fp64 [H]."""
    return _density(*_chosen(index))


def _density(chosen: Tensor, pairs: Tensor) -> Tensor:
    """fp64 [H]. chosen: bool [H, n, m], pairs: [n, m]."""
    visited = (pairs * chosen).sum((1, 2), dtype=torch.float64)
    return visited / pairs.sum(dtype=torch.float64)


def _chosen(index: BlockIndex) -> tuple[Tensor, Tensor]:
    """What is chosen, bool [H, Q, S], and the pairs that this is, fp32 [Q, S].

    Where each query chose for itself they are [H, S, K] and [S, K].
    """
    position = torch.arange(index.seq_len, device=index.verticals.device)
    chunks = index.chosen_chunks(position)
    if chunks is None:
        return _keys_of_blocks(index), pairs_by_key(index.seq_len, position.device)
    # Whole blocks.
    block_begin = position[::BLOCK]
    begin = block_begin.view(1, 1, -1)
    chosen = chosen_keys(chunks, begin)[0]
    # Keys of each block that each query sees.
    stop = position[:, None] + 1
    pairs = (stop - block_begin).clamp(0, BLOCK).float()
    return chosen, pairs


def _keys_of_blocks(index: BlockIndex) -> Tensor:
    """bool [H, Q, S]: keys that a block of queries sees, whole blocks and verticals."""
    seq_len = index.seq_len
    device = index.verticals.device
    blocks = torch.arange(seq_len // BLOCK, device=device)
    # [H or 1, Q, K] -> [.., Q, S]
    in_blocks = index.selects(blocks, blocks)[0]
    in_blocks = in_blocks.repeat_interleave(BLOCK, dim=2)
    # One place more takes the filling of `verticals`.
    is_vertical = torch.zeros(index.heads, seq_len + 1, dtype=torch.bool, device=device)
    is_vertical.scatter_(1, index.verticals[0].long().clamp(max=seq_len), True)
    return in_blocks | is_vertical[:, None, :seq_len]


def prices(seq_len: int) -> list[float]:
    """The mass that a pair of tokens must hold to be taken, from most to least.

    In a longer row more keys share the mass, so that prices are lower.
    """
    at_4096_tokens = torch.logspace(-1, -4.5, 22, dtype=torch.float64)
    return (at_4096_tokens * 4096 / seq_len).tolist()


def best_keys(q: Tensor, k: Tensor, at: Sequence[float]) -> list[Point]:
    """Single keys of single rows, a choice that no kernel computes.

    q: [Hq, S, D], k: [Hkv, S, D]. at: prices.
    """
    held = torch.zeros(len(at), dtype=torch.float64, device=q.device)
    taken = torch.zeros_like(held)
    rows_seen = pairs = 0
    for rows, attention in attention_rows(q, k, _STRIDE):
        positions = range(rows.start, rows.stop, _STRIDE)
        rows_seen += len(positions) * len(q)
        pairs += sum(position + 1 for position in positions) * len(q)
        for number, price in enumerate(at):
            is_worth = attention > price
            taken[number] += is_worth.sum()
            held[number] += (attention * is_worth).sum(dtype=torch.float64)
    points = zip((held / rows_seen).tolist(), (taken / pairs).tolist(), strict=True)
    return [Point(*point) for point in points]


def best_static(by_key: Tensor, at: Sequence[float]) -> list[Point]:
    """Verticals and slashes. by_key: [H, Q, S] of Mass. at: prices."""
    heads, _, seq_len = by_key.shape
    pairs = by_diagonal(pairs_by_key(seq_len, by_key.device))
    mass = by_diagonal(by_key)
    causal = pairs.sum(dtype=torch.float64)
    points = []
    for price in at:
        taken = _verticals_and_diagonals(mass - price * pairs)
        held = (mass * taken).sum(dtype=torch.float64) / (heads * seq_len)
        computed = (pairs * taken).sum(dtype=torch.float64) / (heads * causal)
        points.append(Point(held.item(), computed.item()))
    return points


def by_diagonal(x: Tensor) -> Tensor:
    """[..., Q, S], by block of queries and key, as [..., S, E], by key and slash."""
    blocks, seq_len = x.shape[-2:]
    # [S, E]
    key_block = torch.arange(seq_len, device=x.device)[:, None] // BLOCK
    q_block = key_block + torch.arange(blocks, device=x.device)
    exists = q_block < blocks
    q_block = q_block.clamp(max=blocks - 1).expand(*x.shape[:-2], -1, -1)
    return x.mT.gather(-1, q_block) * exists


def _verticals_and_diagonals(gain: Tensor) -> Tensor:
    """bool, like gain [H, S, E]: approximately the union of verticals and slashes with the most gain."""
    # [H, 1, E]
    diagonals = torch.zeros_like(gain[:, :1], dtype=torch.bool)
    for _ in range(_ROUNDS):
        # A query must see its own block.
        diagonals[:, :, 0] = True
        # [H, S, 1]
        verticals = (gain * ~diagonals).sum(2, keepdim=True) > 0
        diagonals = (gain * ~verticals).sum(1, keepdim=True) > 0
    diagonals[:, :, 0] = True
    return verticals | diagonals


ORACLES: dict[str, Callable[[Tensor, Tensor, Mass, Sequence[float]], list[Point]]] = {
    KEYS: lambda q, k, mass, at: best_keys(q, k, at),
    STATIC: lambda q, k, mass, at: best_static(mass.by_key, at),
}
"""From q [Hq, S, D], k [Hkv, S, D], their mass, and prices to a point for each price."""
