"""flex_attention with index.block_mask(mask) computes what attend() computes."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from tests.reference import gradients, relative_error
from titan_sparse.attention import attend
from titan_sparse.attention.masks import (
    Causal,
    Documents,
    Full,
    SlidingWindow,
    prefix_lm,
    sliding_window,
)
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention

SPARSE = VerticalSlash(
    recall=0.5, dense_below=40, sinks=1, max_verticals=6, max_slashes=1, local_slashes=1
)
PATTERNS = {
    "dense": Dense(),
    "vertical_slash": SPARSE,
    "xattention": XAttention(stride=4, threshold=0.5, dense_below=40),
    "moba": MoBA(chunk_size=32, top_k=2),
}
MASKS = {
    "causal": Causal(),
    "padding": Causal(valid=(200, 83)),
    "documents": Documents([[150, 1, 40], [60, 70, 73]]),
    "window": SlidingWindow(50),
    "packed window": Documents([90, 110]) & SlidingWindow(37),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """torch refuses gradients on a CPU, where the kernels have none. Its own formulas do."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


def check(pattern, mask, seq_len=203, heads=4):
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (
        torch.randn(2, h, seq_len, 16, dtype=torch.float64, generator=generator)
        for h in (heads, 2, 2, heads)
    )
    index = pattern.select(q, k, mask, block_size=16)
    block_mask = index.block_mask(mask)
    want = gradients(
        lambda *x: attend(*x, mask=mask, pattern=pattern, block_size=16), d_out, q, k, v
    )
    got = gradients(
        lambda *x: flex.flex_attention(*x, block_mask=block_mask, enable_gqa=True), d_out, q, k, v
    )
    assert relative_error(got[0], want[0]) < 1e-9
    for ours, theirs in zip(want[1], got[1], strict=True):
        assert relative_error(theirs, ours) < 1e-9
    # The tables hold every pair of blocks that has a pair of tokens, and full ones hold all.
    pairs = index.dense(mask).expand(2, heads, seq_len, seq_len)
    blocks = -(-seq_len // 16)
    padded = torch.zeros(2, heads, blocks * 16, blocks * 16, dtype=torch.bool)
    padded[..., :seq_len, :seq_len] = pairs
    tiles = padded.unflatten(3, (blocks, 16)).unflatten(2, (blocks, 16))
    assert (block_mask.to_dense().bool() >= tiles.any(5).any(3)).all()
    tables = (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    full = flex.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=16).to_dense().bool()
    assert (full <= tiles.all(5).all(3)).all()
    return full, block_mask.to_dense()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flex_attention_computes_the_same(pattern, mask, on_cpu):
    full, met = check(PATTERNS[pattern], MASKS[mask])
    if pattern == "vertical_slash" and mask == "causal":
        assert full.any() and met.float().mean() < 0.5


@pytest.mark.parametrize(
    "mask", [Full(), prefix_lm([60, 143], [30, 90]), sliding_window([120, 83], 40, sinks=3)]
)
def test_masks_that_only_dense_takes(mask, on_cpu):
    check(Dense(), mask)


def test_mask_of_another_length():
    q = torch.randn(1, 2, 64, 16)
    index = Dense().select(q, q, Causal(), block_size=16)
    with pytest.raises(ValueError, match=r"write mask.rows\(64\)"):
        index.block_mask(Causal().rows(65))
