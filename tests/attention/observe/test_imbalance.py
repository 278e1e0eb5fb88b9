"""Degrees of imbalance by their definitions."""

import torch

from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe.visits import (
    by_step,
    count_visits,
    step_imbalance,
    step_sources,
    worker_imbalance,
    worker_imbalance_per_step,
)
from titan_sparse.attention.patterns import VerticalSlash

BLOCK = 8


def test_imbalance_degrees_by_hand():
    work = torch.tensor([[4.0, 0.0], [1.0, 3.0]])  # [ranks, steps]
    assert worker_imbalance(work.sum(1)) == 1.0  # both ranks do 4
    assert step_imbalance(work) == (4 / 2 + 3 / 2) / 2
    assert worker_imbalance_per_step(work) == (4 / 2.5 + 3 / 1.5) / 2
    assert worker_imbalance(torch.tensor([[6, 2], [0, 0]])).tolist() == [1.5, 1.0]


def test_vertical_slash_balances_when_striped_but_not_in_zigzag():
    blocks = 256
    ranks = 8
    seq_len = blocks * BLOCK
    ranges = Causal().rows(seq_len)
    slashes = torch.zeros(1, 1, blocks, dtype=torch.bool)
    slashes[..., :5] = True
    slashes[..., [60, 61, 62, 120, 121]] = True
    verticals = torch.full((1, 1, 0), 0, dtype=torch.int32)
    capped = torch.zeros(1, 1, 2)
    pattern = VerticalSlash(dense_below=BLOCK)
    index = pattern.index([slashes, verticals, capped], ranges, 1, 1, BLOCK)
    sources = step_sources("ring", 1, ranks)
    degrees = {}
    for layout in ("striped", "zigzag", "contiguous"):
        visits = count_visits(index, ranges, block_ids(layout, ranks, seq_len, BLOCK))
        work = by_step(visits, sources)
        degrees[layout] = step_imbalance(work).item()
        if layout == "striped":
            assert worker_imbalance(work.sum(-1)).item() < 1.03
    assert degrees["striped"] < 2.0
    assert degrees["zigzag"] > 3.0
