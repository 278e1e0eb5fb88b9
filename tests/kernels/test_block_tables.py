"""Kernels around attention against their plain-torch twins: block lists, covered verticals, merge, probe masses."""

import pytest
import torch

from tests.reference import structured_qkv
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash import probe
from titan_sparse.attention.tiles import blocks as tiles
from titan_sparse.attention.tiles import slash as slash_tiles
from titan_sparse.kernels import block_tables, merge
from titan_sparse.kernels import probe as probe_kernels
from titan_sparse.kernels.bits import pack, unpack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, SEQ_LEN = 16, 384
MASKS = {
    "causal": Causal(),
    "window": Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 70)) & SlidingWindow(100),
    "documents": Documents([[201, 7, 1, 130], [90, 90, 90, 90]]),
    "long and short": Documents([[SEQ_LEN], [3, 200, 60, 17, 40]]),
}
PATTERNS = [
    VerticalSlash(recall=0.7, sinks=3, max_columns=60, dense_below=48),
    VerticalSlash(recall=0.5, sinks=0, max_columns=20, max_slashes=4, dense_below=64),
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


SETTINGS = {"open": (PATTERNS[0], "striped"), "capped": (PATTERNS[1], "zigzag")}


@pytest.mark.parametrize(
    "mask, setting",
    [
        ("causal", "capped"),
        ("window", "open"),
        ("documents", "open"),
        ("long and short", "capped"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("causal", "open"),
                ("window", "capped"),
                ("documents", "capped"),
                ("long and short", "open"),
            )
        ),
    ],
)
def test_lists(mask, setting):
    pattern, layout = SETTINGS[setting]
    q, k, _ = (x.to(DEVICE) for x in structured_qkv(2, 2, 1, SEQ_LEN, 16, seed=5))
    rows = MASKS[mask].rows(SEQ_LEN, DEVICE)
    index = pattern.select(q, k, rows, block_size=SIZE)
    table = block_ids(layout, 3, SEQ_LEN, SIZE).to(DEVICE)
    side = slash_tiles.query_side(rows, index, table[1], 2)
    got = slash_tiles.block_tiles(side, index, slash_tiles.key_side(table[2], SIZE), True)
    want = tiles.block_tiles(rows, index, table[1], table[2], 2, True)
    _same_lists(got.by_query, want.by_query)
    _same_lists(got.by_key, want.by_key)
    assert all(torch.equal(a, b) for a, b in zip(got[2:5], want[2:5]))
    second_block = index.with_verticals(
        index.verticals[..., SIZE : 2 * SIZE]
    )  # a view, as a ring's parts may be
    for index in (index, second_block):
        got, want = (
            slash_tiles.vertical_tiles(side, index, True),
            tiles.vertical_tiles(rows, index, table[1], True),
        )
        _same_lists(got.by_query, want.by_query)
        _same_lists(got.by_key, want.by_key)
        real = (index.verticals < SEQ_LEN)[:, :, None]
        assert torch.equal(
            *(unpack(x.covered, index.verticals.shape[-1]) & real for x in (got, want))
        )


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 7, 5), (1, 2, 140, 3), (1, 2, 3, 150)])
def test_lists_of_kinds(shape, by_key):
    kind = torch.randint(
        3, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(shape[2])
    ).to(DEVICE)
    kind[..., -1] = 0
    kind[:, -1] = 2
    for got, want in zip(
        block_tables.kind_lists(kind, by_key),
        block_tables.kind_lists_naive(kind, by_key),
        strict=True,
    ):
        assert got.dtype == torch.int32 and got.is_contiguous() and torch.equal(got, want)


@pytest.mark.parametrize("shape", [(1, 2, 7, 24), (2, 3, 65, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge(shape, dtype):
    g = torch.Generator().manual_seed(0)
    out, piece = (torch.randn(shape, generator=g).to(DEVICE, dtype) for _ in range(2))
    lse, lse_piece = (torch.randn(shape[:-1], generator=g).to(DEVICE) * 50 for _ in range(2))
    lse[..., 0] = lse_piece[..., 0] = lse[..., 1] = lse_piece[..., 2] = -torch.inf
    for x, l in ((out, lse), (piece, lse_piece)):
        x[l.isinf()] = 0
    got, got_lse = merge.merge(out, lse, piece, lse_piece, torch.float32)
    want, want_lse = merge.merge_naive(out.float(), lse, piece.float(), lse_piece)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "total, dtype",
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("float16", "float32"),
        ("float32", "float16"),
    ],
)
def test_add(total, dtype):
    g = torch.Generator().manual_seed(0)
    total, piece = (
        torch.randn(2, 3, 65, 24, generator=g).to(DEVICE, x)
        for x in (getattr(torch, total), torch.float16)
    )
    dtype, want = getattr(torch, dtype), merge.add_naive(total, piece, getattr(torch, dtype))
    got = merge.add(total, piece, dtype)
    assert got.dtype == dtype and (got is total) == (total.dtype == dtype)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 2e-3)
    place = torch.empty_like(piece)
    assert merge.add(piece, piece, torch.float32, place) is place and torch.equal(place, 2 * piece)


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
    """The kernels and the twin, which is fp32 here, on the same probe."""
    from titan_sparse.attention.context_parallel.group import one_rank
    from titan_sparse.attention.patterns.spans import find_spans

    q, k, _ = (
        x.to(DEVICE) for x in structured_qkv(2, 4, 2, SEQ_LEN, 24, seed=6, dtype=torch.float32)
    )
    cp, rows = one_rank(SIZE), MASKS[mask].rows(SEQ_LEN, DEVICE)
    spans = find_spans(rows, 2, 48, SIZE)
    geometry = probe._geometry(rows, spans, cp, queries, 2, 4)
    blocks, slot = geometry.blocks, geometry.slot
    seen = probe._gather_probe(q, geometry, cp, queries, 24**-0.5)
    lse = torch.cat(
        [s.logsumexp(-1) for _, _, s in probe._scores(seen, k, blocks, slot, SIZE)], dim=2
    )
    inputs = probe._kernel_inputs(seen, k, blocks, slot, SIZE)
    torch.testing.assert_close(probe_kernels.block_lse(*inputs), lse, atol=1e-3, rtol=1e-3)
    want = probe._span_lse(lse, slot, spans.start.shape[1])
    torch.testing.assert_close(
        probe_kernels.span_lse(lse, slot, geometry.run), want, atol=1e-5, rtol=1e-5
    )
    whole = probe._normaliser(seen, k, geometry, cp)
    back = (queries + SIZE - 2) // SIZE + 1
    split = queries != 16
    got = probe_kernels.block_masses(*inputs, whole, seen.block_back, back, split)
    want = probe._pooled(seen, whole, k, blocks, slot, SIZE, split)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
    assert want[0].shape[3] == (back if split else 1)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 144])
def test_bits(n):
    flags = torch.rand(2, 3, n, generator=torch.Generator().manual_seed(n)) < 0.5
    words = pack(flags)
    assert (
        words.dtype == torch.int32
        and words.shape == (2, 3, -(-n // 32))
        and torch.equal(unpack(words, n), flags)
    )
    assert all(bool(words[1, 2, i // 32] >> (i % 32) & 1) == bool(flags[1, 2, i]) for i in range(n))
