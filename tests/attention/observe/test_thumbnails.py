"""Pictures and counts of the selection, against the mask of all pairs."""

import pytest
import torch

from tests.reference import structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.attention.patterns import Dense, VerticalSlash, XAttention

BLOCK, TOKENS = 16, 192
SPARSE = VerticalSlash(recall=0.8, sinks=3, local_slashes=1, max_verticals=12, dense_below=48)
CASES = {
    "dense": (Dense(), Causal() & SlidingWindow(50)),
    "xattention": (XAttention(stride=4, threshold=0.6, dense_below=48), Causal(valid=(170,))),
    "verticals": (SPARSE, Documents([[100, 30, 55]])),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cells", [5, 100])
def test_thumbnail_is_the_mask_pooled(name, cells):
    pattern, mask = CASES[name]
    q, k, v = structured_qkv(1, 2, 1, TOKENS, 8)
    with recording(thumbnail_cells=cells) as seen:
        _, aux = attend(q, k, v, mask, pattern, block_size=BLOCK, return_aux=True)
    (got,), size = seen.thumbnails, min(cells, TOKENS // BLOCK)
    cell = torch.arange(TOKENS) // BLOCK * size // (TOKENS // BLOCK)
    pool = torch.nn.functional.one_hot(cell, size).double()
    blocks = torch.arange(TOKENS // BLOCK)
    pairs = (
        aux.index.selects(blocks, blocks)[0].repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    )
    if name == "verticals":
        pairs = aux.index.dense(mask)[0]
    allowed = pool.T @ mask.dense(TOKENS)[0].double() @ pool
    want = pool.T @ (pairs & mask.dense(TOKENS)[0]).double() @ pool / allowed
    assert torch.equal(got.isnan(), (allowed == 0).expand_as(got)) and got.shape == (2, size, size)
    # In a block cut by the mask verticals are not where their average is.
    close = (got - want).abs().nan_to_num() < (0.25 if name == "verticals" else 1e-6)
    assert close.all() and (got - want).nanmean().abs() < 0.01


def test_counts_of_blocks_and_verticals():
    q, k, v = structured_qkv(1, 2, 1, TOKENS, 8)
    mask = Documents([[100, 60]])
    with recording() as seen:
        _, aux = attend(q, k, v, mask, SPARSE, block_size=BLOCK, return_aux=True)
        attend(q, k, v, mask, Dense(), block_size=BLOCK)
    verticals = [sorted(set(row.tolist()) - {TOKENS}) for row in aux.index.verticals[0]]
    assert seen.verticals[0].tolist() == [len(row) for row in verticals]
    assert len(seen.verticals) == 1
    blocks = torch.arange(TOKENS // BLOCK)
    in_blocks = aux.index.selects(blocks, blocks)[0].repeat_interleave(BLOCK, 1).repeat_interleave(
        BLOCK, 2
    ) & mask.dense(TOKENS)
    torch.testing.assert_close(
        seen.blocks_per_query[0], in_blocks.sum((1, 2)) / 160 / BLOCK, check_dtype=False
    )
    assert (seen.blocks_per_query[1] == (100 * 101 + 60 * 61) / 2 / 160 / BLOCK).all()
