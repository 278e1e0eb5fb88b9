"""The best choices that know all rows, each kind as a curve of recall and density.

A curve has a point for each price. An element is taken where its mass, without what others hold, is
worth its pairs' price. The price is one for all heads of a layer.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scripts.study.density.mass import BLOCK, attention_rows, pairs_by_key

KEYS = "best keys of each row"
STATIC = "best verticals + diagonals"
TILES = "best tiles"
VERTICALS_AND_TILES = "best verticals + tiles"
ORACLES = (KEYS, STATIC, TILES, VERTICALS_AND_TILES)

_STRIDE = 8
"""One row in so many is looked at for the best keys of each row."""
_ROUNDS = 8
"""Turns in which verticals and blocks are chosen beside each other."""


class Point(NamedTuple):
    """Means over heads. recall: mass kept, mean of all rows. density: of the causal pairs."""

    recall: float
    density: float


Curve = list[Point]


def prices(seq_len: int) -> list[float]:
    """The mass that a pair of tokens must hold, from most to least.

    In a longer row more keys share the mass, so that prices are lower.
    """
    at_4096_tokens = torch.logspace(-1, -4.5, 22, dtype=torch.float64)
    return (at_4096_tokens * 4096 / seq_len).tolist()


def value_at(recall: float, recalls: Sequence[float], values: Sequence[float]) -> float | None:
    """What keeping at least `recall` takes, where values[i] keeps recalls[i].

    Linear between the two around it. The value of the least recall where all keep more: what is
    always on may do so. None where all keep less.
    """
    if not len(recalls) or recall > max(recalls):
        return None
    order = np.argsort(recalls)
    ascending = np.asarray(recalls, dtype=np.float64)[order]
    values_of_them = np.asarray(values, dtype=np.float64)[order]
    return float(np.interp(recall, ascending, values_of_them))


def oracles(q: Tensor, k: Tensor, by_key: Tensor) -> dict[str, Curve]:
    """The curve of each of ORACLES, at the same prices.

    q: [Hq, S, D], k: [Hkv, S, D]. by_key: [Hq, Q, S] of mass.Mass.
    """
    at = prices(q.shape[1])
    return {
        KEYS: best_keys(q, k, at),
        STATIC: best_static(by_key, at),
        TILES: best_tiles(by_key, at),
        VERTICALS_AND_TILES: best_verticals_and_tiles(by_key, at),
    }


def best_keys(q: Tensor, k: Tensor, at: Sequence[float]) -> Curve:
    """Single keys of single rows, which no kernel computes alone.

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
            worth = attention > price
            taken[number] += worth.sum()
            held[number] += (attention * worth).sum(dtype=torch.float64)
    return _curve(held / rows_seen, taken / pairs)


def best_static(by_key: Tensor, at: Sequence[float]) -> Curve:
    """Verticals and block diagonals. by_key: [H, Q, S] of mass.Mass."""
    pairs = by_diagonal(pairs_by_key(by_key.shape[2], by_key.device))
    return _bought(by_diagonal(by_key), pairs, at, _verticals_and_diagonals)


def best_tiles(by_key: Tensor, at: Sequence[float]) -> Curve:
    """Pairs of blocks. by_key: [H, Q, S] of mass.Mass."""
    pairs = pairs_by_key(by_key.shape[2], by_key.device)
    return _bought(by_key, pairs, at, _tiles)


def best_verticals_and_tiles(by_key: Tensor, at: Sequence[float]) -> Curve:
    """Verticals, and pairs of blocks beside them. by_key: [H, Q, S] of mass.Mass."""
    pairs = pairs_by_key(by_key.shape[2], by_key.device)
    return _bought(by_key, pairs, at, _verticals_and_tiles)


def by_diagonal(x: Tensor) -> Tensor:
    """From [..., Q, S], by block of queries and key, to [..., S, E]: by key and block diagonal."""
    blocks, seq_len = x.shape[-2:]
    # [S, E]
    key_block = torch.arange(seq_len, device=x.device)[:, None] // BLOCK
    q_block = key_block + torch.arange(blocks, device=x.device)
    exists = q_block < blocks
    q_block = q_block.clamp(max=blocks - 1).expand(*x.shape[:-2], -1, -1)
    return x.mT.gather(-1, q_block) * exists


def _bought(
    mass: Tensor, pairs: Tensor, at: Sequence[float], worth: Callable[[Tensor], Tensor]
) -> Curve:
    """mass: [H, n, m]. pairs: [n, m]. worth: from gains [H, n, m] to what is taken, bool."""
    heads = len(mass)
    # Every row has a mass of 1.
    seq_len = max(pairs.shape)
    held = []
    taken = []
    for price in at:
        kept = worth(mass - price * pairs)
        held.append((mass * kept).sum(dtype=torch.float64))
        taken.append((pairs * kept).sum(dtype=torch.float64))
    causal = pairs.sum(dtype=torch.float64)
    recall = torch.stack(held) / (heads * seq_len)
    density = torch.stack(taken) / (heads * causal)
    return _curve(recall, density)


def _curve(recall: Tensor, density: Tensor) -> Curve:
    """From fp64 [prices] each."""
    points = zip(recall.tolist(), density.tolist(), strict=True)
    return [Point(*point) for point in points]


def _verticals_and_diagonals(gain: Tensor) -> Tensor:
    """bool, like gain [H, S, E]: the union of verticals and diagonals of most gain, nearly.

    Verticals are chosen beside the diagonals, then diagonals beside the verticals, in turns.
    """
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


def _tiles(gain: Tensor) -> Tensor:
    """bool, like gain [H, Q, S]: tiles of a gain, and each block's own."""
    blocks = gain.shape[1]
    own = torch.eye(blocks, dtype=torch.bool, device=gain.device)
    # [H, Q, K]
    by_tile = gain.unflatten(2, (blocks, BLOCK)).sum(3)
    tiles = (by_tile > 0) | own
    return tiles.repeat_interleave(BLOCK, dim=2)


def _verticals_and_tiles(gain: Tensor) -> Tensor:
    """bool, like gain [H, Q, S]; in turns as _verticals_and_diagonals()."""
    tiles = _tiles(torch.full_like(gain, -1.0))
    for _ in range(_ROUNDS):
        # [H, 1, S]
        verticals = (gain * ~tiles).sum(1, keepdim=True) > 0
        tiles = _tiles(gain * ~verticals)
    return verticals | tiles
