"""Thresholds and the selection: the kernels against their plain-torch twins."""

import pytest
import torch
from torch import Tensor

from titan_sparse.kernels import selection
from titan_sparse.kernels.selection import ALWAYS, BINS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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
