"""The index drawn from expected masses is the one that selection finds."""

import pytest
import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.estimate.expected_selection import expected_selection, over_diagonals
from titan_sparse.estimate.synthetic import Heads, draw_heads, keys, queries

SEQ_LEN, HEADS, KV_HEADS, BLOCK = 16384, 4, 2, 64
RECALL = 0.9


def _heads(seed: int = 0) -> Heads:
    return draw_heads(SEQ_LEN, HEADS, KV_HEADS, 64, seed)


def _selected(heads: Heads, pattern: VerticalSlash) -> list[Tensor]:
    q = queries(heads, 0, SEQ_LEN)
    k = keys(heads, 0, SEQ_LEN)
    return pattern.select(q, k, Causal(), block_size=BLOCK).tensors()


def test_sums_over_diagonals():
    generator = torch.Generator().manual_seed(0)
    value, weight = torch.rand(2, 3, 5, generator=generator, dtype=torch.float64)
    sums = over_diagonals(value, weight)
    for i in range(5):
        wanted = sum(value[:, d] * weight[:, i + d] for d in range(5 - i))
        torch.testing.assert_close(sums[:, i], wanted)


@pytest.mark.parametrize(
    "budget, probe_rows, least_overlap",
    [
        ("joint", "both", 0.7),
        ("layer", "spread", 0.8),
        ("joint", "spread", 0.8),
        ("joint", "last", 0.6),
        ("independent", "last", 0.5),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_near_the_real_one(budget, probe_rows, least_overlap, seed):
    heads = _heads(seed)
    pattern = VerticalSlash(RECALL, budget=budget, probe_rows=probe_rows, count_sinks=True)
    real_slashes, real_verticals, _ = _selected(heads, pattern)
    slashes, verticals, capped = expected_selection(heads, pattern, BLOCK)
    assert slashes.shape == real_slashes.shape and slashes.dtype == torch.bool
    assert not capped.any()
    overlap = (real_slashes & slashes).sum() / (real_slashes | slashes).sum()
    assert overlap > least_overlap
    real_count = (real_verticals < SEQ_LEN).sum()
    count = (verticals < SEQ_LEN).sum()
    assert 0.4 < count / real_count < 1.6
    found = 0
    for head in range(HEADS):
        chosen = verticals[0, head][verticals[0, head] < SEQ_LEN]
        found += torch.isin(chosen, real_verticals[0, head]).sum()
    assert found / count > 0.6


def _kept(heads: Heads, slashes: Tensor, verticals: Tensor, at: Tensor) -> Tensor:
    """Mean share of the softmax mass of the rows at `at` that an index keeps, [Hq]."""
    q = queries(heads, 0, SEQ_LEN)[0, :, at]
    k = keys(heads, 0, SEQ_LEN)[0].repeat_interleave(heads.group_size, 0)
    future = torch.arange(SEQ_LEN) > at[:, None]
    scores = (q @ k.mT) * heads.head_dim**-0.5
    mass = scores.masked_fill(future, -torch.inf).softmax(-1)
    distance = at[:, None] // BLOCK - torch.arange(SEQ_LEN) // BLOCK
    on = slashes[0][:, distance.clamp(min=0)]
    vertical = torch.zeros(HEADS, SEQ_LEN + 1, dtype=torch.bool)
    vertical.scatter_(1, verticals[0].long(), True)
    return (mass * (on | vertical[:, None, :-1])).sum(-1).mean(-1)


@pytest.mark.parametrize("seed", [0, 1])
def test_it_keeps_the_recall(seed):
    """With one price the mean over heads, and with a price a head each of them.

    One diagonal more is a large step for these heads, so that they keep more than is asked.
    """
    heads = _heads(seed)
    at = torch.arange(100, SEQ_LEN, 331)
    kept = {}
    for budget in ("layer", "joint"):
        pattern = VerticalSlash(
            0.95, budget=budget, probe_rows="spread", local_diagonals=1, count_sinks=True
        )
        slashes, verticals, _ = expected_selection(heads, pattern, BLOCK)
        kept[budget] = _kept(heads, slashes, verticals, at)
    assert kept["layer"].mean() == pytest.approx(0.95, abs=0.025)
    assert kept["layer"].min() < 0.925 <= kept["joint"].min()


@pytest.mark.parametrize("seed", [0, 1])
def test_it_takes_a_little_less_than_the_real_one(seed):
    """Rows differ from their expectation, and what is kept of them is less than of it."""
    heads = _heads(seed)
    at = torch.arange(100, SEQ_LEN, 331)
    pattern = VerticalSlash(0.95, local_diagonals=2)
    expected = expected_selection(heads, pattern, BLOCK)
    real = _selected(heads, pattern)
    kept = _kept(heads, *expected[:2], at).mean()
    assert 0 < _kept(heads, *real[:2], at).mean() - kept < 0.06
    assert kept > 0.91


@pytest.mark.parametrize("budget", ["joint", "independent"])
def test_it_keeps_to_the_patterns_limits(budget):
    pattern = VerticalSlash(
        recall=0.999,
        sinks=3,
        local_diagonals=2,
        max_columns=20,
        max_slashes=9,
        min_slashes=5,
        budget=budget,
        probe_rows="last",
        count_sinks=True,
    )
    slashes, verticals, capped = expected_selection(_heads(), pattern, BLOCK)
    count = slashes.sum(-1)
    assert slashes[..., :2].all() and (count >= 5).all() and (count <= 11).all()
    assert (verticals[..., :3] == torch.arange(3)).all()
    assert ((verticals < SEQ_LEN).sum(-1) <= 23).all()
    assert verticals.shape[-1] == pattern.vertical_capacity(SEQ_LEN, BLOCK, False)
    assert verticals.dtype == torch.int32 and (verticals.diff() >= 0).all()
    assert capped.any(1).all()
    index = pattern.index([slashes, verticals, capped], Causal().rows(SEQ_LEN), 1, HEADS, BLOCK)
    assert index.selects(torch.arange(20), torch.arange(20)).diagonal(dim1=-2, dim2=-1).all()


def test_floors_come_besides_what_is_always_on():
    pattern = VerticalSlash(0.5, sinks=3, local_diagonals=2, min_columns=40, min_slashes=5)
    slashes, verticals, _ = expected_selection(_heads(), pattern, BLOCK)
    assert (slashes.sum(-1) >= 7).all()
    assert ((verticals < SEQ_LEN).sum(-1) >= 43).all()
