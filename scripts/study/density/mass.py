"""Exact attention of one layer, summed up so that any choice of blocks and keys can be weighed."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import Causal, MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.kernels.chunks import chosen_keys

BLOCK = 128
"""Tokens of a block."""
_ROWS = 1024
"""Rows of the softmax that are held at a time."""


class Mass(NamedTuple):
    """Softmax mass of a layer's heads. Q = K = S / BLOCK.

    by_key: fp32 [H, Q, S], what each block of queries gives to each key.
    by_row: fp32 [H, S, K], what each query gives to each block of keys.
    """

    by_key: Tensor
    by_row: Tensor


class Kept(NamedTuple):
    """Of each head, fp64 [H]. recall: mean of all rows. density: share of the causal pairs."""

    recall: Tensor
    density: Tensor


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


@functools.lru_cache(maxsize=1)
def pairs_by_row(seq_len: int, device: torch.device) -> Tensor:
    """fp32 [S, K]: keys of each block that each query sees."""
    query = torch.arange(seq_len, device=device)[:, None]
    # [K]
    begin = torch.arange(0, seq_len, BLOCK, device=device)
    return (query + 1 - begin).clamp(0, BLOCK).float()


def kept(index: BlockIndex, mass: Mass) -> Kept:
    """What the index of one sequence keeps of a layer."""
    chosen, pairs = _chosen(index)
    of_rows = chosen.shape[1:] == mass.by_row.shape[1:]
    weights = mass.by_row if of_rows else mass.by_key
    held = (weights * chosen).sum((1, 2), dtype=torch.float64)
    # Every row has a mass of 1.
    return Kept(recall=held / index.seq_len, density=_density(chosen, pairs))


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
        return keys_of_blocks(index), pairs_by_key(index.seq_len, position.device)
    # Whole blocks.
    block_begin = position[::BLOCK]
    chosen = chosen_keys(chunks, block_begin.view(1, 1, -1))[0]
    return chosen, pairs_by_row(index.seq_len, position.device)


def keys_of_blocks(index: BlockIndex) -> Tensor:
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
