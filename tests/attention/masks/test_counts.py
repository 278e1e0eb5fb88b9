"""Visible pairs, in all and in each tile, against the dense mask."""

import pytest
import torch

from tests.attention.masks.dense_cases import MASKS, RANGES
from tests.reference import tiles_of
from tests.slice_cases import SEQ_LEN
from titan_sparse.attention.masks.reach import pairs_by_block, tile_weights, visible_pairs

SIZE = 8
BLOCKS = SEQ_LEN // SIZE
Q_BLOCKS = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))[:19]


@pytest.mark.parametrize("name", MASKS)
def test_pairs_in_all(name):
    pairs = visible_pairs(MASKS[name].rows(SEQ_LEN))
    assert pairs.dtype == torch.float64
    assert torch.equal(pairs, MASKS[name].dense(SEQ_LEN).sum((1, 2)).double())


@pytest.mark.parametrize("name", RANGES)
def test_weights_of_tiles(name):
    k_blocks = torch.arange(BLOCKS).flip(0)[3:]
    weights = tile_weights(RANGES[name].rows(SEQ_LEN), Q_BLOCKS, k_blocks, SIZE)
    want = tiles_of(RANGES[name].dense(SEQ_LEN), SIZE).sum((-1, -2))[:, Q_BLOCKS][:, :, k_blocks]
    assert {values.dtype for values in weights} == {torch.int32}
    assert torch.equal(weights.pairs.long(), want)
    of_all = pairs_by_block(RANGES[name].rows(SEQ_LEN), Q_BLOCKS, SIZE)
    assert torch.equal(of_all[..., k_blocks], weights.pairs)
    assert torch.equal(weights.whole == 1, want == SIZE * SIZE)
    in_part = (want > 0) & (want < SIZE * SIZE)
    assert (weights.partial[in_part] > 0).all()
    assert (weights.partial[weights.whole == 1] == 0).all()
