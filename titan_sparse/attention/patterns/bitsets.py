"""Explicit sets of block pairs, as bits: 32 MiB for 16 heads at 524,288 tokens in blocks of 128."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.kernels.chunks import chosen_bits

if TYPE_CHECKING:
    from titan_sparse.attention.context_parallel.group import ContextParallel


class BlockSets(BlockIndex):
    """For every head and query block any set of key blocks.

    words: int32 [B, Hq, blocks, ceil(blocks / 32)], bit c (kernels/bits.py) of query block a: a meets key block c.
    """

    by_head = ("verticals", "words")

    def __init__(self, words: Tensor, seq_len: int, block_size: int):
        super().__init__(words.shape[1], seq_len, block_size, no_verticals(words))
        self.words = words

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        numbers = k_blocks.expand(1, 1, len(q_blocks), -1)
        return chosen_bits(self.words[:, :, q_blocks.long()], numbers)

    def tensors(self) -> list[Tensor]:
        return [self.words]


def no_verticals(like: Tensor) -> Tensor:
    """BlockIndex.verticals of a pattern without: int32 [B, Hq, 0], of a tensor [B, Hq, ...]."""
    return like.new_empty(*like.shape[:2], 0, dtype=torch.int32)


def gather_blocks(x: Tensor, cp: "ContextParallel", rows: MaskRanges) -> Tensor:
    """All ranks' blocks [B, H, n_local, ...] in global order [B, H, blocks, ...], on every rank."""
    if cp.size == 1:
        return x
    every = cp.all_gather(x).movedim(0, 2).flatten(2, 3)
    return every[:, :, torch.argsort(cp.table(rows).flatten())]
