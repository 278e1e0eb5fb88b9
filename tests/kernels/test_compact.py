"""Flags as bits of words, and the positions of those that are set: against
nonzero() and the twin."""

import pytest
import torch

from tests.reference import DEVICE
from titan_sparse.kernels.compact import compact, compact_naive, pack, unpack


@pytest.mark.parametrize(
    "shape, capacity",
    [
        ((3, 5000), 1700),
        ((2, 1024), 1024),
        ((1, 1), 128),
        ((2, 70), 200),
        ((2, 3000), 17),
        ((2, 50), 0),
        ((1, 100), 5000),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_positions(shape, capacity, share):
    rows, length = shape
    fill = length + 5
    random = torch.rand(rows, length + 13, generator=torch.Generator().manual_seed(1))
    # A slice of longer rows.
    on = (random.to(DEVICE) < share)[:, :length]
    got, count = compact(on, capacity, fill)
    want, _ = compact_naive(on, capacity, fill)
    assert got.dtype == want.dtype == count.dtype
    assert torch.equal(got, want)
    assert count.tolist() == [row.count_nonzero() for row in on]
    for row in range(rows):
        listed = on[row].nonzero().flatten()[:capacity]
        assert torch.equal(got[row, : len(listed)].long(), listed)
        assert (got[row, len(listed) :] == fill).all()


@pytest.mark.parametrize("n", [1, 31, 32, 33, 144])
def test_bits(n):
    flags = torch.rand(2, 3, n, generator=torch.Generator().manual_seed(n)) < 0.5
    words = pack(flags)
    assert words.dtype == torch.int32 and words.shape == (2, 3, -(-n // 32))
    assert torch.equal(unpack(words, n), flags)
    assert all(bool(words[1, 2, i // 32] >> (i % 32) & 1) == bool(flags[1, 2, i]) for i in range(n))
