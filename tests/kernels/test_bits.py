"""Flags as bits of words."""

import pytest
import torch

from titan_sparse.kernels.bits import pack, unpack


@pytest.mark.parametrize("n", [1, 31, 32, 33, 144])
def test_bits(n):
    flags = torch.rand(2, 3, n, generator=torch.Generator().manual_seed(n)) < 0.5
    words = pack(flags)
    assert (
        words.dtype == torch.int32
        and words.shape == (2, 3, -(-n // 32))
        and torch.equal(unpack(words, n), flags)
    )
    assert all(bool(words[1, 2, i // 32] >> (i % 32) & 1) == bool(flags[1, 2, i]) for i in range(n))
