"""Blocks of tokens: where they lie."""

import torch
from torch import Tensor


def token_positions(blocks: Tensor, block_size: int) -> Tensor:
    """Global token positions int64 [n * block_size] of the global blocks int [n], in local order."""
    offsets = torch.arange(block_size, device=blocks.device)
    return (blocks.long()[:, None] * block_size + offsets).flatten()
