"""Visible pairs, in all and in each tile, against the dense mask."""

import pytest
import torch
from torch import Tensor

from tests.attention.masks.dense_cases import MASKS, SLICES
from tests.reference import tiles_of
from tests.slice_cases import SEQ_LEN
from titan_sparse.attention.masks import Causal
from titan_sparse.attention.masks.reach import pairs_by_block, tile_weights, visible_pairs

SIZE = 8
BLOCKS = SEQ_LEN // SIZE
Q_BLOCKS = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))[:19]


def _pairs(dense: Tensor, size: int) -> Tensor:
    """int64 [Bm, blocks, blocks]: visible pairs of each tile, from bool [Bm, S, S]."""
    return tiles_of(dense, size).sum((-1, -2))


def test_tiles_of_a_causal_mask():
    blocks = torch.arange(3)
    weights = tile_weights(Causal().rows(6), blocks, blocks, 2)
    assert weights.whole.tolist() == [[[0, 0, 0], [1, 0, 0], [1, 1, 0]]]
    assert weights.partial.tolist() == [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]
    assert weights.pairs.tolist() == [[[3, 0, 0], [4, 3, 0], [4, 4, 3]]]
    assert torch.equal(pairs_by_block(Causal().rows(6), blocks, 2), weights.pairs)


@pytest.mark.parametrize("name", MASKS)
def test_pairs_in_all(name):
    pairs = visible_pairs(MASKS[name].rows(SEQ_LEN))
    assert pairs.dtype == torch.float64
    assert torch.equal(pairs, MASKS[name].dense(SEQ_LEN).sum((1, 2)).double())


@pytest.mark.parametrize("name", MASKS)
def test_weights_of_tiles(name):
    k_blocks = torch.arange(BLOCKS).flip(0)[3:]
    weights = tile_weights(MASKS[name].rows(SEQ_LEN), Q_BLOCKS, k_blocks, SIZE)
    want = _pairs(MASKS[name].dense(SEQ_LEN), SIZE)[:, Q_BLOCKS][:, :, k_blocks]
    assert {values.dtype for values in weights} == {torch.int32}
    assert torch.equal(weights.pairs.long(), want)
    assert torch.equal(weights.whole == 1, want == SIZE * SIZE)
    in_part = (want > 0) & (want < SIZE * SIZE)
    assert (weights.partial[in_part] > 0).all()
    assert (weights.partial[weights.whole == 1] == 0).all()
    if name in SLICES:
        assert (weights.partial[want == 0] == 0).all()


def test_a_last_block_that_is_short():
    """Blocks of 7 do not divide the sequence."""
    blocks = torch.arange(-(-SEQ_LEN // 7))
    for mask in SLICES.values():
        padding = (0, -SEQ_LEN % 7, 0, -SEQ_LEN % 7)
        dense = torch.nn.functional.pad(mask.dense(SEQ_LEN), padding)
        assert torch.equal(pairs_by_block(mask.rows(SEQ_LEN), blocks, 7).long(), _pairs(dense, 7))
