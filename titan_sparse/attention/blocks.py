"""Blocks of tokens: where they lie in the sequence."""

import torch
from torch import Tensor


def token_positions(blocks: Tensor, block_size: int) -> Tensor:
    """Global token positions int64 [n * block_size] of the global blocks int [n], in local order.

    Example with block_size 2: blocks [3, 0, 5] are tokens [6, 7, 0, 1, 10, 11].
    """
    # [n, 1] and [block_size]
    first = blocks.long()[:, None] * block_size
    offsets = torch.arange(block_size, device=blocks.device)
    positions = first + offsets
    return positions.flatten()
