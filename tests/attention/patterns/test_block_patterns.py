"""What holds for both patterns of explicit blocks, XAttention and MoBA: attention over the
selection, ranks, files.
"""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch

from tests.attention.context_parallel.against_one import check_everything
from tests.attention.patterns.helpers import BLOCK, cases_of_masks
from tests.attention.problems import PATTERNS, RANGES, SEQ_LEN
from tests.distributed import run_processes
from tests.reference import structured_qkv
from tests.refusals import refused
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention, moba, xattention
from titan_sparse.estimate.indexes import load_indexes, save_indexes
from titan_sparse.kernels.block_sparse import Tiles

BOTH = [PATTERNS["xattention"], PATTERNS["moba"]]


@pytest.mark.parametrize("pattern", BOTH, ids=str)
def test_pieces_of_a_selection_are_the_whole(pattern, monkeypatch):
    """Long sequences are selected a few query blocks at a time."""
    case = cases_of_masks(pattern)["packed"]
    q, k, _ = case.inputs()
    whole = pattern.select(q, k, case.mask, block_size=BLOCK).tensors()
    for module in (moba, xattention):
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)
    in_pieces = pattern.select(q, k, case.mask, block_size=BLOCK).tensors()
    torch.testing.assert_close(in_pieces, whole, rtol=0, atol=0)


@pytest.mark.parametrize("pattern", BOTH, ids=str)
def test_a_packed_document_selects_as_it_does_alone(pattern):
    """The documents start at block boundaries, so that chunks and cells are the same."""
    q, k, _ = structured_qkv(1, 2, 1, 176, 8, seed=5)
    mask = Documents([80, 96])
    packed = pattern.select(q, k, mask, block_size=BLOCK).dense(mask)
    alone = pattern.select(q[:, :, 80:], k[:, :, 80:], Causal(), block_size=BLOCK)
    alone = alone.dense(Causal())
    assert torch.equal(packed[:, :, 80:, 80:], alone) and not alone.all()


@pytest.mark.parametrize("mask", [Documents([[101, 7, 60]]), Causal(valid=(80,))], ids=str)
@pytest.mark.parametrize("pattern", BOTH, ids=str)
def test_nothing_waits_for_a_batch(pattern, mask):
    """Else no step could be a CUDA graph. Tensors of the device "meta" have
    nothing that could be read."""
    cp = one_rank(BLOCK)
    # Kernels make them.
    no_tiles = Tiles(None, None, None, None, None, None, BLOCK)
    q, k = (torch.empty(1, heads, SEQ_LEN, 8, device="meta") for heads in (4, 2))
    for rows in (mask, mask & SlidingWindow(50)):
        ranges = rows.rows(SEQ_LEN, "meta")
        tensors = pattern.select_tensors(q, k, ranges, cp, 1.0)
        index = pattern.index(tensors, ranges, 1, 4, BLOCK)
        gathers = index.computation(ranges, cp, 1.0, lambda mask: no_tiles)
        assert (gathers is not None) == (isinstance(pattern, MoBA) and rows is mask)


@pytest.mark.parametrize(
    "axes, every",
    [
        ((3,), 6),
        pytest.param((2, 2), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_select_and_compute_as_one_does(axes, every):
    masks = [RANGES["padded"], RANGES["documents"]]
    arguments = (axes, masks, BOTH, (4, 2), every)
    run_processes(torch.Size(axes).numel(), check_everything, *arguments)


@pytest.mark.parametrize("pattern", BOTH, ids=str)
def test_indexes_in_a_file(tmp_path, pattern):
    case = cases_of_masks(pattern)["packed"]
    q, k, _ = case.inputs()
    index = pattern.select(q, k, case.mask, block_size=BLOCK)
    save_indexes(tmp_path / "index.pt", pattern, case.mask.rows(157), [index])
    _, [read] = load_indexes(tmp_path / "index.pt")
    assert torch.equal(read.dense(case.mask), index.dense(case.mask))


class Own(MoBA):
    """A pattern that a file does not know."""


def test_a_file_keeps_no_indexes_of_others(tmp_path):
    """Of another pattern, other options, another mask, block size, or number of heads."""
    q, k, _ = structured_qkv(1, 4, 2, 192, 8)
    moba, xattention = MoBA(28, 2), XAttention(4, 0.6, 48)
    rows = Causal().rows(192)
    index = moba.select(q, k, rows, block_size=8)
    others = [
        (xattention, rows, [index]),
        (Dense(), rows, [xattention.select(q, k, rows, block_size=8)]),
        (MoBA(24, 2), rows, [index]),
        (moba, Documents([100, 92]).rows(192), [index]),
        (moba, Causal().rows(200), [index]),
        (moba, rows, [index, moba.select(q, k, rows, block_size=16)]),
        (moba, rows, [index, moba.select(q[:, :2], k, rows, block_size=8)]),
        (moba, rows, []),
    ]
    for arguments in others:
        with refused("not of this pattern, mask, or number of heads; write"):
            save_indexes(tmp_path / "index.pt", *arguments)
    with refused("write mask.rows"):
        save_indexes(tmp_path / "index.pt", moba, Causal(), [index])
    with refused("keeps indexes of dense, .*, not of Own"):
        save_indexes(tmp_path / "index.pt", Own(28, 2), rows, [index])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: VerticalSlash(recall=1.5),
            "vertical_slash.recall = 1.5 .* write more than 0, at most 1",
        ),
        (lambda: VerticalSlash(local_slashes=0), "local_slashes = 0 .* 1 or more"),
        (lambda: VerticalSlash(budget="layer"), '"joint", "independent"'),
        (lambda: VerticalSlash(count_sinks=0.5), "count_sinks = 0.5"),
        (lambda: VerticalSlash(budget="independent"), "write count_sinks = true"),
        (lambda: VerticalSlash(min_verticals=9, max_verticals=8), "min_verticals = 9 is above"),
        (lambda: VerticalSlash(min_slashes=9, max_slashes=8), "min_slashes = 9 is above"),
        (lambda: VerticalSlash(dense_below=100).check_block_size(128), "dense_below = 128"),
        (lambda: VerticalSlash(probe=8192).check_block_size(128), "dense_below = 8192"),
        (lambda: XAttention(threshold=0.0), "threshold"),
        (lambda: XAttention(stride=12).check_block_size(128), "write stride = 4"),
        (lambda: XAttention(dense_below=100).check_block_size(128), "dense_below = 128 or more"),
        (lambda: MoBA(top_k=0), "top_k"),
        (lambda: MoBA(top_k=np.True_), "top_k = .* is not an integer"),
        (lambda: MoBA(chunk_size=64).check_block_size(128), "chunk_size = 128 or more"),
    ],
)
def test_parameters_that_do_not_fit(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_parameters_may_be_numbers_of_numpy():
    recall, sinks = np.float32(0.5), np.int64(3)
    pattern = VerticalSlash(recall=recall, sinks=sinks)
    assert pattern == VerticalSlash(recall=0.5, sinks=3)
    assert type(pattern.recall) is float and type(pattern.sinks) is int


def test_a_pattern_cannot_be_changed():
    """Its cache key identifies it permanently."""
    pattern = VerticalSlash(recall=0.8, min_slashes=9)
    with pytest.raises(FrozenInstanceError):
        pattern.recall = 0.7
    assert pattern == replace(VerticalSlash(min_slashes=9), recall=0.8)
    assert {pattern: 1}[VerticalSlash(recall=0.8, min_slashes=9)] == 1
