"""Bytes that a ring sends by the index, against counts by hand."""

import pytest
import torch

from scripts.study.route_bytes import shares
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash

BLOCK = 16
RANKS = 4


def _index(far: int):
    """Two heads of which each query looks at its own key; the second one's `far` blocks back."""
    generator = torch.Generator().manual_seed(0)
    k = 6 * torch.randn(1, 2, 32 * BLOCK, 32, generator=generator)
    q = k.clone()
    q[:, 1] = k[:, 1].roll(far * BLOCK, dims=1)
    pattern = VerticalSlash(sinks=0, local_diagonals=1, max_columns=0, dense_below=BLOCK)
    return pattern.select(q, k, Causal(), block_size=BLOCK)


@pytest.mark.parametrize(
    "far, hops",
    [
        # The second head's keys stay at home.
        (4, 0),
        # One hop to the rank that wants them, of three, forward and backward: 2 * 2 bytes each.
        # Their gradients have all three to go, of 4 bytes.
        (5, (1 * 4 + 3 * 4) / (3 * 8)),
        # Three hops there, one home.
        (3, (3 * 4 + 1 * 4) / (3 * 8)),
    ],
)
def test_shares_by_hand(far, hops):
    found = shares([_index(far)], kv_heads=2, ranks=RANKS)
    # The first head sends nothing.
    assert found["ring"] == pytest.approx(hops / 2, abs=1e-4)


@pytest.mark.parametrize(
    "far, keys, gradients",
    [
        # Ranks 0, 1 | 2, 3. Chunk 1 is wanted by rank 2, chunk 3 by rank 0: of four chunks two
        # cross, and a gradient that comes from the other node crosses back.
        (1, 2, 2),
        # Every chunk is wanted by the other node.
        (2, 4, 4),
    ],
)
def test_shares_across_nodes(far, keys, gradients):
    found = shares([_index(far)], kv_heads=2, ranks=RANKS)
    assert found["across"] == pytest.approx((keys * 4 + gradients * 4) / (4 * 8) / 2, abs=1e-4)
