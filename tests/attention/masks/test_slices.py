"""Masks of slices: what they see, how tiles are classified, and attention over them,
against dense masks."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.problems import RANGES, assert_equal, problem
from tests.reference import tiles_of
from tests.slice_cases import NAMES, SEQ_LEN, counts, mask_and_truth, random_legal
from titan_sparse.attention import attend
from titan_sparse.attention.masks import slices
from titan_sparse.attention.masks.ranges import Causal, Mask
from titan_sparse.attention.masks.slice_geometry import area, slices_of_ranges
from titan_sparse.attention.masks.slices import (
    Slices,
    dilated,
    documents,
    prefix_lm,
    sliding_window,
)
from titan_sparse.attention.masks.visibility import tile_weights
from titan_sparse.attention.patterns import VerticalSlash

QKV = torch.zeros(3, 1, 1, 64, 16)


def check_tiles(mask: Mask, truth: Tensor, size: int) -> None:
    """Weights of tiles against bool [B, S, S]: a tile that is covered counts
    as full, and no other."""
    ranges = mask.rows(truth.shape[-1])
    # Up to whole blocks.
    more = -truth.shape[-1] % size
    tiles = tiles_of(torch.nn.functional.pad(truth, (0, more, 0, more)), size)
    # In another order than the sequence's, and not all of them.
    q_blocks = torch.arange(tiles.shape[1]).flip(0)
    k_blocks = q_blocks[1:]
    visible = tiles.sum((-1, -2))[:, q_blocks][:, :, k_blocks]
    whole, partial, pairs = weights = tile_weights(ranges, q_blocks, k_blocks, size)
    assert {x.dtype for x in weights} == {torch.int32}
    assert torch.equal(pairs.long(), visible)
    is_covered = visible == size * size
    assert torch.equal(whole == 1, is_covered)
    assert torch.equal(partial > 0, (visible > 0) & ~is_covered)


@pytest.mark.parametrize("name", NAMES)
def test_sees_the_definition(name):
    mask, truth = mask_and_truth(name)
    ranges = mask.rows(SEQ_LEN)
    assert torch.equal(mask.dense(SEQ_LEN)[0], truth)
    for size in (16, 7):
        check_tiles(mask, truth[None], size)
    assert int(sum(area(x).sum() for x in mask.sequences)) == truth.sum()
    assert torch.equal(ranges.start[0] < ranges.stop[0], truth.any(1))
    assert ranges.causal == (not truth.triu(1).any()) and ranges.slices.dtype == torch.int32
    assert ranges.slices.shape[1].bit_count() == 1, "padded to a power of two"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), wanted=st.integers(0, 12), size=st.sampled_from([1, 4, 8]))
def test_random_legal_slices(seed, wanted, size):
    written = random_legal(seed, wanted, 40)
    mask, truth = Slices.of(written), counts(written, 40) > 0
    assert torch.equal(mask.dense(40)[0], truth)
    check_tiles(mask, truth[None], size)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.integers(0, 12)] * 4, st.sampled_from(slices.KINDS)), max_size=4))
def test_a_pair_covered_twice_is_refused_and_nothing_else(drawn):
    written = [(*sorted(x[:2]), *sorted(x[2:4]), x[4]) for x in drawn]
    if (counts(written, 12) <= 1).all():
        assert torch.equal(Slices.of(written).dense(12)[0], counts(written, 12) > 0)
    else:
        with pytest.raises(ValueError, match="both hold query"):
            Slices.of(written)


@pytest.mark.parametrize("mask", RANGES.values(), ids=RANGES)
def test_rows_as_slices_and_intersections(mask):
    ranges = mask.rows(SEQ_LEN)
    for start, stop, seen in zip(ranges.start, ranges.stop, mask.dense(SEQ_LEN), strict=True):
        same = Slices.of_diagonals(slices_of_ranges(start, stop))
        assert torch.equal(same.dense(SEQ_LEN)[0], seen)
    for name in ("random 7", "causal, more queries"):
        other, truth = mask_and_truth(name)
        for both in (mask & other, other & mask):
            assert torch.equal(both.dense(SEQ_LEN), mask.dense(SEQ_LEN) & truth)
    assert torch.equal(documents([30, 0, 70]).dense(100), documents([30, 70]).dense(100))
    first, second = (Slices.batch([other, Slices.of([])]) & mask).dense(SEQ_LEN)
    assert torch.equal(first, mask.dense(SEQ_LEN)[0] & truth)
    assert not second.any()


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: Slices([(0, 4)], [(0, 4)], ["triangle"]),
            "one of full, causal, inv_causal, bi_causal",
        ),
        (lambda: Slices([(0, 4)], [(0, 4), (4, 8)], ["full"]), "as many of each"),
        (lambda: Slices([(4, 2)], [(0, 4)], ["full"]), "slice 0"),
        (lambda: Slices([(0, 2)], [(-1, 4)], ["full"]), "slice 0"),
        (lambda: Slices([(0, 4)], [(0, 3.5)], ["full"]), "slice 0 .* whole numbers"),
        (lambda: Slices.of_diagonals([[0, 4, 0, 3.5, -4, 0]]), "float32; write six integers"),
        (lambda: Slices.of_diagonals([[0, 4, 0, 3, -4]]), "5 numbers are .*six integers"),
        (lambda: Slices.of_diagonals([[-3, 5, 0, 5, -5, 3]]), "starts of 0 or more"),
        (lambda: Slices.batch([Causal(), Slices.of([])]), "Causal is not Slices"),
        (lambda: Slices([(0, 4)], [(0, 90)], ["full"]).rows(64), "token 90, the sequence holds 64"),
        (lambda: prefix_lm([5, 5], [3]), "a prefix for each"),
        (lambda: documents([5, -1]), "0 or more"),
        (lambda: documents([[5], [1]]), r"For several, write Slices.batch\(\)"),
        (lambda: sliding_window(torch.tensor([[5], [1]]), 3), "For several, write Slices.batch"),
        (lambda: sliding_window([5], 0), "window"),
        (lambda: dilated([5], 4, 0), "1 or more"),
        (lambda: documents([5, 5], causal=[True]), "one for each"),
        (lambda: attend(*QKV, documents([64]), VerticalSlash()), "vertical_slash.* not Slices"),
        (lambda: attend(*QKV, documents([64]), backend="flex"), "flex"),
        (lambda: (Slices.batch([Slices.of([])] * 3) & Causal(valid=(1, 2))).rows(8), "sequences"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_windows_without_a_bound():
    mask = sliding_window([9, 5], sys.maxsize, sinks=2, look_ahead=sys.maxsize)
    assert torch.equal(mask.dense(14), documents([9, 5], causal=False).dense(14))


def _check_attention(mask: Mask, truth: Tensor) -> None:
    """Two sequences against dense attention over bool [Bm, S, S]."""
    p = problem((4, 2), mask, seq_len=truth.shape[-1])
    assert_equal(p.results(), p.wanted(truth[:, None].expand(2, 4, -1, -1)))


@pytest.mark.parametrize("name", NAMES)
def test_attention_on_one_rank(name):
    mask, truth = mask_and_truth(name)
    _check_attention(mask, truth[None])


def test_attention_over_a_batch_of_a_ragged_length():
    written = [random_legal(seed, 9, 101) for seed in (1, 2)]
    mask = Slices.batch([Slices.of(x) for x in written])
    _check_attention(mask, torch.stack([counts(x, 101) > 0 for x in written]))
