"""Block lists and covered verticals: the kernels against their plain-torch twins."""

import dataclasses

import pytest
import torch

from tests.attention.problems import RANGES, SEQ_LEN
from tests.reference import DEVICE, structured_qkv
from titan_sparse.attention import tiles
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.ranges import SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.kernels.compact import unpack

SIZE = 16
# Windows that begin where blocks do, for the first query of a block, as that of
# 65, and for the last.
MASKS = RANGES | {"window of whole blocks": SlidingWindow(96)}
PATTERNS = [
    VerticalSlash(recall=0.7, sinks=3, max_verticals=60, dense_below=48),
    VerticalSlash(recall=0.5, sinks=0, max_verticals=20, max_slashes=4, dense_below=64),
]


def _same_lists(got: tiles.BlockLists, want: tiles.BlockLists) -> None:
    for count, table, wanted_count, wanted_table in (
        (*got[:2], *want[:2]),
        (*got[2:4], *want[2:4]),
    ):
        assert torch.equal(count, wanted_count)
        width = wanted_table.shape[-1]
        inside = torch.arange(width, device=count.device) < count[..., None]
        assert table.shape[-1] >= int(count.max())
        table = torch.nn.functional.pad(table, (0, max(0, width - table.shape[-1])))[..., :width]
        assert torch.equal(table.where(inside, 0), wanted_table)


SETTINGS = {
    "open": (PATTERNS[0], "striped"),
    "capped": (PATTERNS[1], "zigzag"),
    "nearly all": (VerticalSlash(recall=0.98, sinks=3, dense_below=48), "striped"),
}


@pytest.mark.parametrize(
    "mask, setting",
    [
        ("causal", "capped"),
        ("padded window", "nearly all"),
        ("window of whole blocks", "nearly all"),
        ("documents", "open"),
        ("long and short", "capped"),
    ],
)
def test_lists(mask, setting):
    pattern, layout = SETTINGS[setting]
    q, k, _ = (x.to(DEVICE) for x in structured_qkv(2, 2, 1, SEQ_LEN, 16, seed=5))
    rows = MASKS[mask].rows(SEQ_LEN, DEVICE)
    index = pattern.select(q, k, rows, block_size=SIZE)
    table = block_ids(layout, 3, SEQ_LEN, SIZE).to(DEVICE)
    side = tiles.slash_queries(rows, index, table[1])
    keys = tiles.slash_keys(table[2], SIZE)
    got = tiles.slash_block_tiles(side, keys, index, True)
    want = tiles.block_tiles(rows, index, table[1], table[2], True)
    _same_lists(got.by_query, want.by_query)
    _same_lists(got.by_key, want.by_key)
    assert all(torch.equal(a, b) for a, b in zip(got[2:5], want[2:5]))
    # A view, as a ring's parts may be.
    second_block = dataclasses.replace(index, verticals=index.verticals[..., SIZE : 2 * SIZE])
    by_query = tiles.slash_block_tiles(side, keys, index, False)
    assert by_query.by_key is None
    _same_lists(by_query.by_query, want.by_query)
    # Whole tiles of them, which nobody covers but the diagonals.
    neighbors = torch.arange(8, 8 + 3 * SIZE, dtype=torch.int32, device=DEVICE)
    many = dataclasses.replace(index, verticals=neighbors.expand(2, 2, -1))
    for part in (index, second_block, many):
        got = tiles.slash_vertical_tiles(side, part, True)
        want = tiles.vertical_tiles(rows, part, table[1], True)
        if part is many and setting != "nearly all":
            assert bool(want.by_query.full_count.any())
        _same_lists(got.by_query, want.by_query)
        _same_lists(got.by_key, want.by_key)
        # What fills up the list is covered or not, nobody minds.
        real = (part.verticals < SEQ_LEN)[:, :, None]
        count = part.verticals.shape[-1]
        assert torch.equal(unpack(got.covered, count) & real, unpack(want.covered, count) & real)
    by_query = tiles.slash_vertical_tiles(side, many, False)
    assert by_query.by_key is None
    assert torch.equal(unpack(by_query.covered, count), unpack(got.covered, count))
    _same_lists(by_query.by_query, want.by_query)
