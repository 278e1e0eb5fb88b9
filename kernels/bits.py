"""Flags as bits of int32 words: an eighth of the memory of bools, and what kernels can prefetch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(flags: Tensor) -> Tensor:
    """bool [..., n] -> int32 [..., ceil(n / 32)]: flag i is bit i % 32 of word i // 32."""
    missing = -flags.shape[-1] % 32
    # [..., words, 32]; int64, as bit 31 is the sign of an int32.
    bits = F.pad(flags, (0, missing)).unflatten(-1, (-1, 32)).long()
    place = torch.arange(32, device=flags.device)
    return (bits << place).sum(-1).to(torch.int32)


def unpack(words: Tensor, n: int) -> Tensor:
    """int32 [..., ceil(n / 32)] -> bool [..., n]."""
    place = torch.arange(32, device=words.device, dtype=torch.int32)
    # [..., words, 32]
    bits = (words[..., None] >> place) & 1
    return bits.bool().flatten(-2)[..., :n]
