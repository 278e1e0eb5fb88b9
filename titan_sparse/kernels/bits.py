"""Flags as bits of int32 words: an eighth of the memory of bools, and what kernels can prefetch."""

import torch
from torch import Tensor


def pack(flags: Tensor) -> Tensor:
    """bool [..., n] -> int32 [..., ceil(n / 32)]: flag i is bit i % 32 of word i // 32."""
    padded = (
        torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    )
    return (padded << torch.arange(32, device=flags.device)).sum(-1).to(torch.int32)


def unpack(words: Tensor, n: int) -> Tensor:
    """int32 [..., ceil(n / 32)] -> bool [..., n]."""
    bits = words[..., None] >> torch.arange(32, device=words.device, dtype=torch.int32)
    return (bits & 1).bool().flatten(-2)[..., :n]
