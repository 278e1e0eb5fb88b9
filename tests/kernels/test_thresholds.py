"""Thresholds and the selection: the kernels against their plain-torch twins, and these by hand."""

import math

import pytest
import torch
from torch import Tensor

from tests.reference import DEVICE
from titan_sparse.kernels import selection
from titan_sparse.kernels.selection import ALWAYS, BINS

BATCH, HEADS = 2, 3


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spans_of(lengths: list[list[int]], total: int) -> tuple[Tensor, Tensor]:
    """The span of each of `total` elements int64 [B, total], and where spans begin int32 [B, n].

    What is behind the last span is of none.
    """
    n = len(lengths[0])
    span = torch.full((len(lengths), total), n)
    offset = torch.zeros(len(lengths), n, dtype=torch.int32)
    for b, of_sequence in enumerate(lengths):
        begin = 0
        for s, length in enumerate(of_sequence):
            offset[b, s] = begin
            span[b, begin : begin + length] = s
            begin += length
    return span.to(DEVICE), offset.to(DEVICE)


@pytest.mark.parametrize("lengths", [[[70], [40]], [[1, 0, 33], [32, 31, 7]]])
def test_add_diagonals(lengths):
    entries = 77
    n = len(lengths[0])
    span, offset = spans_of(lengths, entries)
    mass = torch.rand(BATCH, HEADS, n, BINS, generator=drawn(0)).to(DEVICE)
    slash_mass = torch.rand(BATCH, HEADS, entries, generator=drawn(1)).to(DEVICE)
    bins = torch.randint(0, BINS, (BATCH, HEADS, entries), generator=drawn(2)).to(DEVICE)
    # Many share a bin.
    bins[..., ::3] = ALWAYS
    bins = bins.to(torch.uint8)

    want = mass.double().clone()
    want_count = torch.zeros_like(want)
    for b in range(BATCH):
        for e in range(entries):
            if span[b, e] < n:
                for h in range(HEADS):
                    number = int(bins[b, h, e])
                    want[b, h, span[b, e], number] += slash_mass[b, h, e]
                    want_count[b, h, span[b, e], number] += number != ALWAYS
    twin, twin_count = selection.naive.add_slashes(mass, slash_mass, bins, span, offset)
    torch.testing.assert_close(twin, want, atol=1e-9, rtol=0)
    assert torch.equal(twin_count.double(), want_count)
    got, count = selection.add_slashes(mass, slash_mass, bins, span, offset)
    assert got.dtype == count.dtype == torch.float32
    torch.testing.assert_close(got, twin.float(), atol=0, rtol=0)
    assert torch.equal(count, twin_count.float())


UNBOUNDED = (0, None)
BOUNDS = [
    # recall, and least and most of verticals and of slashes
    (0.9, (0, 10**6), UNBOUNDED),
    (0.95, (0, 40), UNBOUNDED),
    (0.5, (60, 10**6), (0, 30)),
    (0.7, (20, 33), (60, 10**6)),
    (0.9, (0, 0), (0, 0)),
    # The least asks for more than the most.
    (0.2, (90, 80), (90, 80)),
    (1.0, (0, 10**6), (0, 10**6)),
    (1.0, UNBOUNDED, (0, 50)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recall, of_verticals, of_slashes", BOUNDS)
def test_head_thresholds(recall, of_verticals, of_slashes, dtype):
    n = 2
    # As many as a probe has rows, on a few bins; the rest is not free.
    mass = torch.rand(BATCH, HEADS, n, BINS, generator=drawn(3)) ** 8
    mass = mass / mass.sum(-1, keepdim=True) * 20
    # A span without rows, and a head whose masses are lost.
    mass[1, :, 1] = 0
    mass[0, 2, 0] = torch.nan
    mass = mass.to(DEVICE, dtype)
    max_missed = selection.max_missed_mass(torch.tensor([[32, 21], [25, 0]]).to(DEVICE), recall)
    bounds = []
    for seed, (least, most) in ((4, of_verticals), (5, of_slashes)):
        count = torch.randint(0, 3, mass.shape, generator=drawn(seed)).to(DEVICE, dtype)
        caps = None
        if most is not None:
            caps = torch.tensor([[most, most], [most + 5, most]]).to(DEVICE)
        bounds.append(selection.CountBounds(count, least, caps))

    want = selection.naive.head_thresholds(mass, max_missed, *bounds)
    got = selection.head_thresholds(mass, max_missed, *bounds)
    for one, wanted in zip(got, want, strict=True):
        assert torch.equal(one.to(wanted.dtype), wanted)
    # The case is what it says.
    unbounded = selection.naive.recall_thresholds(mass.double(), max_missed)
    for i, (least, most) in enumerate((of_verticals, of_slashes)):
        assert bool(want.capped[..., i].any()) == (most is not None and most < 10**6)
        if least:
            assert bool((want[i] < unbounded).any())
    if recall == 1:
        assert not unbounded.any()


@pytest.mark.parametrize("lengths", [[[1200], [1030]], [[700, 1, 400], [0, 1200, 0]]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_select(lengths, dtype):
    """A sequence of 75 blocks of 16; of them none are in order."""
    n, size, blocks, entries = len(lengths[0]), 16, 75, 90
    span_of_token, _ = spans_of(lengths, blocks * size)
    span_of_entry, _ = spans_of([[length // 16 for length in one] for one in lengths], entries)
    bins = torch.randint(0, BINS, (BATCH, HEADS, blocks, size), generator=drawn(5))
    slashes = torch.randint(0, BINS, (BATCH, HEADS, entries), generator=drawn(6))
    slashes[..., :2] = ALWAYS
    candidates = selection.Candidates(
        verticals=bins.to(DEVICE, torch.uint8),
        order=torch.randperm(blocks, generator=drawn(7)).to(DEVICE),
        is_sink=(torch.rand(BATCH, blocks * size, generator=drawn(8)) < 0.05).to(DEVICE),
        slashes=slashes.to(DEVICE, torch.uint8),
        span_of_token=span_of_token,
        span_of_entry=span_of_entry,
    )
    vertical_threshold = torch.randint(0, BINS + 1, (BATCH, HEADS, n), generator=drawn(9))
    # Verticals of bin 0 are never selected.
    vertical_threshold[:, 0] = 0
    slash_threshold = torch.randint(0, BINS + 1, (BATCH, HEADS, n), generator=drawn(10))
    slash_threshold[:, 1] = 0
    thresholds = [
        threshold.to(DEVICE, dtype) for threshold in (vertical_threshold, slash_threshold)
    ]
    got = selection.select(candidates, *thresholds)
    want = selection.naive.select(candidates, *thresholds)
    for one, wanted in zip(got, want, strict=True):
        assert one.dtype == torch.bool and one.shape == wanted.shape
        assert torch.equal(one, wanted)
        assert 0.2 < wanted.double().mean() < 0.9


# From masses by bin to the bins that reach a recall, by hand.

STEPS = {10: 1.0, 20: 2.0, 30: 1.0}
"""Masses of a head whose probe has ten rows; the other six are always on."""


@pytest.mark.parametrize(
    "recall, threshold",
    [
        # A tenth may miss bin 10, three tenths also bin 20, and four tenths also bin 30.
        (0.95, 10),
        (0.9, 20),
        (0.71, 20),
        (0.69, 30),
        (0.61, 30),
        (0.59, ALWAYS),
        # What holds no mass comes with it.
        (1.0, 0),
    ],
)
def test_a_head_of_its_own(recall, threshold):
    mass = torch.zeros(1, 1, 1, BINS, dtype=torch.float64)
    for number, value in STEPS.items():
        mass[..., number] = value
    max_missed = selection.max_missed_mass(torch.tensor([[10]]), recall)
    assert selection.naive.recall_thresholds(mass, max_missed).tolist() == [[[threshold]]]


def _count(*heads: dict[int, int]) -> Tensor:
    """fp32 [1, Hq, 1, BINS], as sums of products are."""
    count = torch.zeros(1, len(heads), 1, BINS)
    for h, histogram in enumerate(heads):
        for number, candidates in histogram.items():
            count[0, h, 0, number] = candidates
    return count


COUNT = {20: 4, 30: 3, 40: 2}
"""Two candidates from bin 40 up, five from 30 up, nine from 20 up."""


@pytest.mark.parametrize(
    "threshold, least, most, want, capped",
    [
        (30, 0, None, 30, False),
        # The most wins, and candidates of a bin stay together.
        (30, 0, 5, 30, False),
        (25, 0, 4, 31, True),
        (30, 0, 2, 31, True),
        (30, 0, 1, 41, True),
        (35, 0, 4, 35, False),
        # The least.
        (35, 2, None, 35, False),
        (45, 2, None, 40, False),
        (45, 3, None, 30, False),
        (45, 6, None, 20, False),
        (10, 6, None, 10, False),
        # There are not as many.
        (45, 10, None, 0, False),
        # Both: the most wins, which cut what was asked for.
        (45, 3, 3, 31, True),
        (45, 2, 3, 40, False),
    ],
)
def test_bounds(threshold, least, most, want, capped):
    thresholds = torch.tensor([[[threshold]]])
    cap = None if most is None else torch.tensor([[most]])
    got, cut = selection.naive.bounded(thresholds, _count(COUNT), least, cap)
    assert got.tolist() == [[[want]]]
    assert cut.tolist() == [[capped]]


def test_bounds_are_those_of_each_span():
    """Two heads, two spans: the head counts as capped whichever cap cuts."""
    count = torch.cat([_count(COUNT, COUNT), _count({50: 1}, {50: 9})], dim=2)
    threshold = torch.full((1, 2, 2), 20)
    got, cut = selection.naive.bounded(threshold, count, 0, torch.tensor([[9, 5]]))
    assert got.tolist() == [[[20, 20], [20, 51]]]
    assert cut.tolist() == [[False, True]]


def test_bins_of_scores():
    """255 - 10 per halving, rounded down. Only inf lies outside 0 to 254."""
    bin_of_score = {
        3.0: 254,
        1.0: 254,
        0.99: 254,
        0.5: 245,
        2**-1.05: 244,
        2**-25.45: 0,
        2**-25.6: 0,
        0.0: 0,
        math.inf: ALWAYS,
    }
    scores = torch.tensor(list(bin_of_score), dtype=torch.float64)
    assert selection.bins_of(scores).tolist() == list(bin_of_score.values())
