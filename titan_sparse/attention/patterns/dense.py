"""Everything the mask allows."""

from typing import ClassVar

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex, Pattern
from titan_sparse.options import DenseOptions


class DenseIndex(BlockIndex):
    """Selects every pair of blocks; no verticals."""

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        # [1, 1, nq, nk]
        shape = (1, 1, len(q_blocks), len(k_blocks))
        return torch.ones(shape, dtype=torch.bool, device=q_blocks.device)


class Dense(Pattern, DenseOptions):
    """All pairs that the mask allows: the baseline of every comparison."""

    dynamic: ClassVar[bool] = False
    takes_slices: ClassVar[bool] = True

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> DenseIndex:
        seq_len = ranges.start.shape[1]
        device = ranges.start.device
        # [B, Hq, 0]
        verticals = torch.empty(batch, heads, 0, dtype=torch.int32, device=device)
        return DenseIndex(heads, seq_len, block_size, verticals)
