"""Patterns that select any set of blocks of keys for every head and block of queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges, token_positions
from titan_sparse.attention.masks.visibility import block_reach, reached
from titan_sparse.attention.patterns.base import BlockIndex, Pattern, gather_blocks, no_verticals
from titan_sparse.kernels.block_sparse import chosen_bits
from titan_sparse.kernels.compact import pack


@dataclass(eq=False)
class BlockSets(BlockIndex):
    """For every head and query block any set of key blocks, as bits.

    That is 32 MiB for 16 heads at 524,288 tokens in blocks of 128.
    """

    by_head = ("verticals", "words")
    words: Tensor
    """int32 [B, Hq, blocks, ceil(blocks / 32)]; bit c (kernels/compact.py) of query block a:
    a meets key block c."""

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        # [B, Hq, nq, words] and [1, 1, nq, nk]
        words = self.words[:, :, q_blocks.long()]
        return chosen_bits(words, k_blocks.expand(1, 1, len(q_blocks), -1))

    def tensors(self) -> list[Tensor]:
        return [self.words]


class BlockPattern(Pattern):
    """For every head and block of queries any set of blocks of keys: a subclass selects them."""

    def select_blocks(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> Tensor:
        """bool [B, Hq, n, blocks]: what each of this rank's n blocks of queries computes, of all
        blocks of keys in global order.

        q: [B, Hq, S_local, D]. k: [B, Hkv, S_local, D]. Both are this rank's, in whole blocks. The
        mask still hides keys in the selected blocks.
        """
        raise NotImplementedError

    def select_tensors(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        selected = self.select_blocks(q, k, ranges, cp, scale)
        size = cp.block_size
        shape = (*q.shape[:2], q.shape[2] // size, ranges.start.shape[1] // size)
        found = f"{type(selected).__name__}"
        if isinstance(selected, Tensor):
            found = f"{selected.dtype} {list(selected.shape)}"
        if found != f"{torch.bool} {list(shape)}":
            raise ValueError(
                f"{type(self).__name__}.select_blocks() returned {found}; write bool {list(shape)}, [B, Hq, "
                "this rank's blocks, all blocks]"
            )
        return [gather_blocks(pack(selected), cp, ranges)]

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        blocks = seq_len // block_size
        # A bit for each key block.
        words = -(-blocks // 32)
        return [q.new_empty(batch, heads, blocks, words, dtype=torch.int32)]

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> BlockSets:
        [words] = tensors
        return BlockSets(ranges.start.shape[1], block_size, no_verticals(words), words)


def visible_blocks(ranges: MaskRanges, cp: ContextParallel) -> Tensor:
    """bool [B or 1, 1, n, blocks]: the blocks of keys of which some query in each of this rank's n
    blocks of queries sees a key."""
    size = cp.block_size
    positions = token_positions(cp.blocks(ranges), size)
    k_blocks = torch.arange(ranges.start.shape[1] // size, device=positions.device)
    return reached(block_reach(ranges, positions, size), k_blocks, size)[:, None]
