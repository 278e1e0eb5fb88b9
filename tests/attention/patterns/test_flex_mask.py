"""flex_attention with index.block_mask(mask) computes what attend() computes."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from tests.attention.problems import PATTERNS, RANGES, assert_equal, combinations, problem
from tests.reference import gradients, tiles_of
from titan_sparse.attention.masks import Causal, prefix_lm, sliding_window
from titan_sparse.attention.patterns import Dense

MASKS = RANGES | {
    "prefix": prefix_lm([60, 143], [30, 90]),
    "window with sinks": sliding_window([120, 83], 40, sinks=3),
}


@pytest.mark.parametrize("mask, pattern", combinations(MASKS))
def test_flex_attention_computes_the_same(monkeypatch, mask, pattern):
    # torch refuses gradients on a CPU, where the kernels have none. Its own formulas do.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    p = problem((4, 2), MASKS[mask], PATTERNS[pattern], seq_len=203)
    index = p.pattern.select(*p.inputs[:2], p.mask, block_size=p.block)
    block_mask = index.block_mask(p.mask)
    out, grads = gradients(
        lambda *x: flex.flex_attention(*x, block_mask=block_mask, enable_gqa=True),
        *(p.d_out, *p.inputs),
    )
    assert_equal(p.results(), dict(zip(("out", "dq", "dk", "dv"), (out, *grads))))
    # The tables hold every pair of blocks that has a pair of tokens, and full ones hold all.
    seen = p.seen()
    assert torch.equal(index.dense(p.mask.rows(203)).expand_as(seen), seen)
    tiles = tiles_of(torch.nn.functional.pad(seen, (0, 5, 0, 5)), 16)
    listed = block_mask.to_dense().bool()
    assert (listed >= tiles.any(-1).any(-1)).all()
    tables = (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    full = flex.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=16).to_dense().bool()
    assert (full <= tiles.all(-1).all(-1)).all()
    if pattern == "vertical_slash" and mask == "causal":
        assert full.any() and listed.float().mean() < 0.5


def test_mask_of_another_length():
    q = torch.randn(1, 2, 64, 16)
    index = Dense().select(q, q, Causal(), block_size=16)
    for function in (index.block_mask, index.dense):
        with pytest.raises(ValueError, match=r"write mask.rows\(64\)"):
            function(Causal().rows(65))
