"""Sums along antidiagonals and what is chosen by them: the kernels against
their plain-torch twins."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.problems import RANGES, SEQ_LEN
from tests.reference import DEVICE, structured_qkv
from titan_sparse.attention.context_parallel.layouts import LAYOUTS
from titan_sparse.attention.patterns.spans import find_spans
from titan_sparse.attention.patterns.xattention import _counted, _query_blocks
from titan_sparse.kernels import antidiagonals as kernels
from titan_sparse.kernels.antidiagonals import BlockSums, QueryBlocks, TileShape
from titan_sparse.kernels.compact import unpack

SIZE = 16
BLOCKS = SEQ_LEN // SIZE
SMALL = TileShape(query_cells=32, key_cells=32, depth=16, warps=1, stages=1)


class Problem(NamedTuple):
    """Queries of a KV head, its keys, and which blocks of queries these are."""

    q: Tensor
    k: Tensor
    blocks: QueryBlocks
    stride: int


def problem(
    mask: str,
    group: int = 2,
    stride: int = 4,
    dim: int = 16,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """With several ranks, the blocks of the second one in the striped layout."""
    ranges = RANGES[mask].rows(SEQ_LEN)
    spans = find_spans(ranges, 2, 48, SIZE)
    own_blocks = torch.arange(BLOCKS)
    if ranks > 1:
        own_blocks = torch.as_tensor(LAYOUTS["striped"](ranks, BLOCKS)[1])
    blocks = _query_blocks(ranges, spans, own_blocks, SIZE, stride)
    q, k, _ = structured_qkv(2, group, 1, SEQ_LEN, dim, seed=7, dtype=dtype)
    q = q.unflatten(2, (-1, SIZE))[:, :, own_blocks]
    of_keys, _ = _counted(spans, torch.arange(BLOCKS), SIZE, stride, SEQ_LEN // stride)
    _, of_queries = _counted(spans, own_blocks, SIZE, stride, SEQ_LEN // stride)
    q = (q * of_queries[:, None, :, :, None]).flatten(2, 3)
    k = k[:, 0] * of_keys.flatten(1)[..., None]
    blocks = QueryBlocks._make(x.to(DEVICE) for x in blocks)
    return Problem(q.to(DEVICE), k.to(DEVICE), blocks, stride)


def sums_of(given: Problem) -> BlockSums:
    q, k, blocks, stride = given
    tiles = kernels.visible_tiles(blocks, k.shape[1] // stride, q.shape[1], SMALL)
    return kernels.block_sums(q, k, blocks, stride, 0.1, tiles)


def twin_of(given: Problem) -> BlockSums:
    q, k, blocks, stride = given
    return kernels.block_sums_naive(q.double(), k.double(), blocks, stride, 0.1)


def masses(sums: BlockSums, blocks: QueryBlocks) -> Tensor:
    exact = BlockSums(sums.weight.double(), sums.top.double(), sums.run)
    return kernels.document_masses(exact, blocks, BLOCKS)


CASES = [
    ("causal", {}),
    ("causal", {"dtype": torch.float16}),
    # Three heads, tiles of which lie beside each other; a head dimension that K does not divide.
    ("padded", {"group": 3, "dim": 48}),
    ("documents", {"ranks": 2}),
    ("windowed documents", {"stride": 8}),
    # A cell is a block; and it is a token.
    ("documents", {"stride": 16}),
    ("padded window", {"stride": 1, "group": 1}),
]


@pytest.mark.parametrize("mask, options", CASES, ids=str)
def test_sums(mask, options):
    given = problem(mask, **options)
    want = masses(twin_of(given), given.blocks)
    got = masses(sums_of(given), given.blocks)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    # Every cell that sees anything holds a mass of 1.
    cells = given.blocks.stop > given.blocks.first
    held = cells.sum(2)[:, None].expand(got.shape[:3])
    torch.testing.assert_close(got.sum((3, 4)), held.double())
    assert cells.any()


def test_weights_that_vanish_beside_the_largest():
    """A tile's sums are relative to its own maxima: scores of -1000 become
    neither zeros nor NaN."""
    given = problem("causal")
    given = given._replace(q=given.q * 300)
    want = twin_of(given)
    got = masses(sums_of(given), given.blocks)
    torch.testing.assert_close(got, masses(want, given.blocks), atol=1e-4, rtol=1e-3)
    assert want.top.max() > 1000


@pytest.mark.parametrize(
    "mask, threshold",
    [("causal", 0.3), ("padded", 0.9), ("documents", 0.9), ("windowed documents", 1.0)],
)
def test_choice(mask, threshold):
    """From sums with several maxima a row."""
    given = problem(mask)
    sums = sums_of(given)
    assert sums.run < BLOCKS
    got = kernels.chosen_blocks(sums, given.blocks, threshold, BLOCKS, BLOCKS)
    exact = BlockSums(sums.weight.double(), sums.top.double(), sums.run)
    want = kernels.chosen_blocks_naive(exact, given.blocks, threshold, BLOCKS, BLOCKS)
    assert torch.equal(got, want)
    chosen = unpack(got, BLOCKS)
    assert 0.05 < chosen.double().mean() < 0.6


def _one_row(mass: list[float], forced: tuple[int, int]) -> tuple[BlockSums, QueryBlocks]:
    """A query block of one cell with these masses; the two blocks are always on."""
    count = len(mass)
    weight = torch.tensor(mass, device=DEVICE).view(1, 1, 1, count)
    top = torch.zeros(1, 1, 1, 1, device=DEVICE)

    def whole(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE).view(1, 1, -1)

    blocks = QueryBlocks(
        first=whole(0),
        stop=whole(count),
        slot=whole(0),
        number=whole(forced[1]).flatten(),
        first_block=whole(forced[0]),
        dense_from=whole(count)[0],
    )
    return BlockSums(weight, top, count), blocks


@pytest.mark.parametrize(
    "mass, forced, threshold, want",
    [
        # Equal ones in order of position.
        ([1, 3, 1, 1, 1, 1], (5, 5), 0.7, [0, 1, 2, 5]),
        ([1.0] * 64, (0, 63), 0.5, [*range(31), 63]),
        # What is always on is enough.
        ([4, 1, 1, 1, 4], (0, 4), 0.7, [0, 4]),
        # All that hold anything, however little, and no others.
        ([1, 1e-30, 0, 1e-12, 1], (0, 4), 1.0, [0, 1, 3, 4]),
        ([0, 0, 0, 0], (1, 3), 0.9, [1, 3]),
    ],
)
def test_choice_of_masses(mass, forced, threshold, want):
    sums, blocks = _one_row(mass, forced)
    # More words than the program's masses fill: the rest is 0.
    words = kernels.chosen_blocks(sums, blocks, threshold, len(mass), 100)
    assert words.shape == (1, 1, 1, 4)
    assert unpack(words, 128)[0, 0, 0].nonzero().flatten().tolist() == want
