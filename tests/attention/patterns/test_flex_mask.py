"""flex_attention with index.block_mask(mask) computes what attend() computes."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from tests.attention.problems import PATTERNS, assert_equal, problem
from tests.reference import gradients, tiles_of
from titan_sparse.attention.masks import (
    Causal,
    Documents,
    Full,
    SlidingWindow,
    prefix_lm,
    sliding_window,
)
from titan_sparse.attention.patterns import Dense

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


def check(pattern, mask):
    p = problem((4, 2), mask, pattern, seq_len=203)
    block_mask = pattern.select(*p.inputs[:2], mask, block_size=16).block_mask(mask)
    out, grads = gradients(
        lambda *x: flex.flex_attention(*x, block_mask=block_mask, enable_gqa=True),
        *(p.d_out, *p.inputs),
    )
    theirs = dict(zip(("out", "dq", "dk", "dv"), (out, *grads)))
    assert_equal(p.results(), theirs)
    # The tables hold every pair of blocks that has a pair of tokens, and full ones hold all.
    pairs = torch.nn.functional.pad(p.seen(), (0, 5, 0, 5))
    tiles = tiles_of(pairs, 16)
    assert (block_mask.to_dense().bool() >= tiles.any(-1).any(-1)).all()
    tables = (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    full = flex.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=16).to_dense().bool()
    assert (full <= tiles.all(-1).all(-1)).all()
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
