"""Explicit sets of block pairs, as bits: 32 MiB for 16 heads at 524,288 tokens in blocks of 128."""

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.kernels.chunks import chosen_bits


class BlockSets(BlockIndex):
    """For every head and query block any set of key blocks.

    words: int32 [B, Hq, blocks, ceil(blocks / 32)]; bit c (kernels/bits.py) of query block a: a
        meets key block c.
    """

    by_head = ("verticals", "words")

    def __init__(self, words: Tensor, seq_len: int, block_size: int):
        super().__init__(words.shape[1], seq_len, block_size, no_verticals(words))
        self.words = words

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        # [B, Hq, nq, words]
        words = self.words[:, :, q_blocks.long()]
        # [1, 1, nq, nk]
        numbers = k_blocks.expand(1, 1, len(q_blocks), -1)
        return chosen_bits(words, numbers)

    def tensors(self) -> list[Tensor]:
        return [self.words]


def no_verticals(like: Tensor) -> Tensor:
    """BlockIndex.verticals of a pattern that has none: int32 [B, Hq, 0].

    like: [B, Hq, ...].
    """
    batch, heads = like.shape[:2]
    # [B, Hq, 0]
    return like.new_empty(batch, heads, 0, dtype=torch.int32)


def gather_blocks(x: Tensor, cp: ContextParallel, ranges: MaskRanges) -> Tensor:
    """All ranks' blocks [B, H, n_local, ...] in global order [B, H, blocks, ...], on every rank."""
    if cp.size == 1:
        return x
    # [ranks, B, H, n_local, ...] -> [B, H, ranks * n_local, ...], ordered by rank.
    by_rank = cp.all_gather(x).movedim(0, 2).flatten(2, 3)
    global_order = torch.argsort(cp.table(ranges).flatten())
    return by_rank[:, :, global_order]
