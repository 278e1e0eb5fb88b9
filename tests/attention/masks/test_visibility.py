"""Which queries reach which keys, by block, by rank and by key, and visible pairs, in all and in
each tile, for masks of both kinds against the dense mask."""

import pytest
import torch
from torch import Tensor

from tests.attention.masks.test_slices import check_tiles
from tests.attention.problems import RANGES
from tests.reference import tiles_of
from tests.slice_cases import NAMES, SEQ_LEN, mask_and_truth
from titan_sparse.attention.context_parallel.layouts import LAYOUTS, block_ids
from titan_sparse.attention.masks import Dilated, Mask
from titan_sparse.attention.masks.ranges import token_positions
from titan_sparse.attention.masks.visibility import (
    block_reach,
    pairs_by_block,
    queries_seeing,
    reached,
    seen_blocks,
    seen_chunks,
    seen_whole,
    visible_pairs,
)

SLICES: dict[str, Mask] = {name: mask_and_truth(name)[0] for name in NAMES[::3]} | {
    "dilated": Dilated(40, 7),
    "dilated documents": RANGES["documents"] & Dilated(50, 20),
}
MASKS = RANGES | SLICES

SIZE = 8
BLOCKS = SEQ_LEN // SIZE


def _tiles(dense: Tensor) -> Tensor:
    """bool [Bm, blocks, blocks]: some pair of the tile is seen, from bool [Bm, S, S]."""
    return tiles_of(dense, SIZE).any(-1).any(-1)


@pytest.mark.parametrize("name", RANGES)
def test_tiles_reached_and_seen_whole(name):
    """Reached tiles end exactly where the visible keys do. A mask may empty a tile in between."""
    ranges = RANGES[name].rows(SEQ_LEN)
    dense = RANGES[name].dense(SEQ_LEN)
    q_blocks = torch.tensor([3, 17, 0])
    k_blocks = torch.arange(BLOCKS).flip(0)
    reach = block_reach(ranges, token_positions(q_blocks, SIZE), SIZE)
    got = reached(reach, k_blocks, SIZE)
    want = _tiles(dense)[:, q_blocks][:, :, k_blocks]
    before = want.cumsum(-1) > 0
    behind = want.flip(-1).cumsum(-1).flip(-1) > 0
    assert torch.equal(got, before & behind)
    hidden = _tiles(~dense)[:, q_blocks][:, :, k_blocks]
    assert torch.equal(seen_whole(reach, k_blocks, SIZE), ~hidden)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_blocks_and_chunks_that_ranks_see(name, layout):
    ranges = MASKS[name].rows(SEQ_LEN)
    tiles = _tiles(MASKS[name].dense(SEQ_LEN)).any(0)
    table = block_ids(layout, 3, SEQ_LEN, SIZE)
    by_rank = tiles[table].any(1)  # [W, blocks]
    assert torch.equal(seen_blocks(ranges, table, SIZE), by_rank)
    assert torch.equal(seen_chunks(ranges, table, SIZE), by_rank[:, table].any(-1))
    some_blocks = table[:, 1:3]
    assert torch.equal(seen_blocks(ranges, some_blocks, SIZE), tiles[some_blocks].any(1))


@pytest.mark.parametrize("name", RANGES)
def test_queries_that_see_a_key(name):
    ranges = RANGES[name].rows(SEQ_LEN)
    dense = RANGES[name].dense(SEQ_LEN).expand(2, -1, -1)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, SEQ_LEN, (2, 3, 40), generator=generator, dtype=torch.int32)
    first, last = queries_seeing(ranges, keys)
    assert first.shape == last.shape == keys.shape
    assert first.dtype == last.dtype == torch.int32
    query = torch.arange(SEQ_LEN)
    got = (query >= first[..., None]) & (query < last[..., None])  # [B, H, n, S]
    for sequence in range(2):
        assert torch.equal(got[sequence], dense[sequence].T[keys[sequence]])


@pytest.mark.parametrize("name", MASKS)
def test_pairs_in_all(name):
    pairs = visible_pairs(MASKS[name].rows(SEQ_LEN))
    assert pairs.dtype == torch.float64
    assert torch.equal(pairs, MASKS[name].dense(SEQ_LEN).sum((1, 2)).double())


@pytest.mark.parametrize("name", RANGES)
def test_weights_of_tiles(name):
    check_tiles(RANGES[name], RANGES[name].dense(SEQ_LEN), SIZE)
    blocks = torch.arange(BLOCKS).flip(0)[3:]
    want = tiles_of(RANGES[name].dense(SEQ_LEN), SIZE).sum((-1, -2))[:, blocks]
    assert torch.equal(pairs_by_block(RANGES[name].rows(SEQ_LEN), blocks, SIZE).long(), want)
