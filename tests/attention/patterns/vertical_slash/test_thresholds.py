"""From masses by bin to the bins that reach a recall, by hand."""

import math

import pytest
import torch
from torch import Tensor

from titan_sparse.kernels.selection import (
    ALWAYS,
    BINS,
    bins_of,
    max_missed_mass,
)
from titan_sparse.kernels.selection.naive import bounded, recall_thresholds

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
    max_missed = max_missed_mass(torch.tensor([[10]]), recall)
    assert recall_thresholds(mass, max_missed).tolist() == [[[threshold]]]


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
    got, cut = bounded(thresholds, _count(COUNT), least, cap)
    assert got.tolist() == [[[want]]]
    assert cut.tolist() == [[capped]]


def test_bounds_are_those_of_each_span():
    """Two heads, two spans: the head counts as capped whichever cap cuts."""
    count = torch.cat([_count(COUNT, COUNT), _count({50: 1}, {50: 9})], dim=2)
    threshold = torch.full((1, 2, 2), 20)
    got, cut = bounded(threshold, count, 0, torch.tensor([[9, 5]]))
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
    assert bins_of(scores).tolist() == list(bin_of_score.values())
