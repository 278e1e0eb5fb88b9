"""What a probe sees of blocks of keys: the kernels against their plain-torch twins."""

import pytest
import torch

from tests.reference import structured_qkv
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns.spans import find_spans
from titan_sparse.attention.patterns.vertical_slash import probe as vertical_slash_probe
from titan_sparse.kernels import probe as kernels
from titan_sparse.kernels.probe import KeyBlocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, SEQ_LEN = 16, 384
MASKS = {
    "causal": Causal(),
    "window": Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 70)) & SlidingWindow(100),
    "documents": Documents([[201, 7, 1, 130], [90, 90, 90, 90]]),
    "long and short": Documents([[SEQ_LEN], [3, 200, 60, 17, 40]]),
}


@pytest.mark.parametrize(
    "mask, queries",
    [
        ("causal", 16),
        ("documents", 24),
        pytest.param("window", 9, marks=pytest.mark.slow),
        pytest.param("long and short", 16, marks=pytest.mark.slow),
    ],
)
def test_probe(mask, queries):
    """The kernels and the twins, which are fp32 here, on the same probe."""
    q, k, _ = structured_qkv(2, 4, 2, SEQ_LEN, 24, seed=6, dtype=torch.float32)
    q = q.to(DEVICE)
    k = k.to(DEVICE)
    cp = one_rank(SIZE)
    ranges = MASKS[mask].rows(SEQ_LEN, DEVICE)
    spans = find_spans(ranges, 2, 48, SIZE)
    geometry = vertical_slash_probe._geometry(ranges, spans, cp, queries, 2, 4)
    probe = vertical_slash_probe._gather_probe(q, geometry, cp, queries, 24**-0.5)
    keys = KeyBlocks(k, geometry.blocks, geometry.slot, SIZE)

    block_lse = kernels.block_lse_naive(probe, keys)
    torch.testing.assert_close(kernels.block_lse(probe, keys), block_lse, atol=1e-3, rtol=1e-3)
    span_lse = kernels.span_lse_naive(block_lse, geometry.slot, geometry.run)
    got_span_lse = kernels.span_lse(block_lse, geometry.slot, geometry.run)
    torch.testing.assert_close(got_span_lse, span_lse, atol=1e-5, rtol=1e-5)

    split = queries != 16
    got = kernels.block_masses(probe, keys, span_lse, split)
    want = kernels.block_masses_naive(probe, keys, span_lse, split)
    for got_masses, want_masses in zip(got, want, strict=True):
        torch.testing.assert_close(got_masses, want_masses, atol=2e-3, rtol=2e-3)
    back = (queries + SIZE - 2) // SIZE + 1
    assert kernels.blocks_back(queries, SIZE) == back
    assert want[0].shape[3] == (back if split else 1)
