"""How much VerticalSlash computes for a recall, on heads of a real model.

The heads are in data/ (README.md there). Densities may fall. A rise of more than 3 % is a fault.
The best static choice is printed beside (pytest -s): it knows all rows.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.study.density.mass import BLOCK
from scripts.study.density.oracles import Point, best_static, value_at
from scripts.study.save_attention import load
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash

FILE = Path(__file__).parent / "data" / "smollm2_heads.safetensors"
RECALL = 0.9
MOST_RISE = 1.03
MEASURED = {"independent": 0.2403, "joint": 0.1562}
"""Density at a recall of 0.9 when the data was saved."""
TARGETS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
"""Recall that is asked of the probe. For one of them or between two, all rows have 0.9."""
PRICES = torch.logspace(-1, -4, 25, dtype=torch.float64).tolist()


@pytest.fixture(scope="module")
def heads() -> tuple[Tensor, Tensor]:
    """q and k [1, H, S, D]."""
    return load(FILE)


@pytest.fixture(scope="module")
def attention(heads) -> Tensor:
    """The exact softmax of all rows, [H, S, S]."""
    q, k = heads
    scores = q[0] @ k[0].mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1)


@pytest.fixture(scope="module")
def best(attention) -> float:
    """Density at RECALL of the best static choice."""
    by_key = attention.unflatten(1, (-1, BLOCK)).sum(2)
    return _density_at(RECALL, best_static(by_key, PRICES))


def _point(attention: Tensor, kept: Tensor) -> Point:
    """attention [H, S, S]; kept bool [H, S, S], causal."""
    count, rows, _ = attention.shape
    mass = sum(float(head[pairs].sum()) for head, pairs in zip(attention, kept))
    return Point(mass / (count * rows), int(kept.sum()) / (count * rows * (rows + 1) / 2))


def _density_at(recall: float, points: list[Point]) -> float:
    """Interpolated between the two points around it."""
    density = value_at(recall, *zip(*points))
    assert density is not None, f"a recall of {recall} is not between those of {points}"
    return density


@pytest.mark.parametrize("budget", MEASURED)
def test_a_recall_needs_no_more_than_it_did(heads, attention, best, budget):
    points = []
    for target in TARGETS:
        index = VerticalSlash(recall=target, budget=budget).select(*heads, Causal())
        points.append(_point(attention, index.dense(Causal())[0]))
    density = _density_at(RECALL, points)
    print(f"{budget}: {density:.2%} at recall {RECALL}, best static choice {best:.2%}; {points}")
    assert best < density <= MOST_RISE * MEASURED[budget]
