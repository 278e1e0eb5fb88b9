"""Synthetic heads make the slashes and verticals that their formula says.

The index drawn from expected masses is the one that selection finds.
"""

import math

import pytest
import torch

from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.estimate.synthetic import (
    draw_heads,
    expected_logits,
    expected_selection,
    keys,
    queries,
    select,
)

SEQ_LEN, HEADS, KV_HEADS, BLOCK = 16384, 4, 2, 64
PATTERN = VerticalSlash(recall=0.9, sinks=4, local_diagonals=1, max_columns=2048)


def _heads(seed: int = 0):
    return draw_heads(SEQ_LEN, HEADS, KV_HEADS, 64, seed)


def test_any_part_of_a_sequence_is_a_part_of_the_whole():
    heads = _heads()
    for make, count in ((queries, HEADS), (keys, KV_HEADS)):
        whole = make(heads, 0, 10000)
        assert whole.shape == (1, count, 10000, 64) and whole.dtype == torch.float32
        assert torch.equal(make(heads, 4000, 8200), whole[:, :, 4000:8200])
        assert not torch.equal(make(_heads(1), 0, 100), whole[:, :, :100])


def test_logits_depend_on_the_distance_and_on_outliers_as_the_formula_says():
    heads = _heads()
    q, k = queries(heads, SEQ_LEN - 512, SEQ_LEN), keys(heads, 0, SEQ_LEN)
    ordinary = torch.ones(KV_HEADS, SEQ_LEN, dtype=torch.bool).scatter_(1, heads.outliers, False)
    distances = torch.arange(512, SEQ_LEN - 512, 37)
    wanted = expected_logits(heads, distances)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        position = torch.arange(SEQ_LEN - 512, SEQ_LEN)[:, None]
        logits = (q[0, head] @ k[0, group].T) * 64**-0.5
        near = logits.gather(1, position - distances)
        mean = torch.where(ordinary[group][position - distances], near, torch.nan).nanmean(0)
        assert (mean - wanted[head]).abs().max() < 0.5  # 512 noisy pairs a distance
        assert torch.corrcoef(torch.stack([mean.double(), wanted[head]]))[0, 1] > 0.995
        vertical = logits[:, heads.outliers[group]]  # the same from everywhere
        assert vertical.mean(0).std() < 1.2 and vertical.mean() > wanted[head].median() + 2


def test_selection_finds_slashes_and_planted_verticals():
    heads = _heads()
    slashes, verticals, _ = select(heads, PATTERN, BLOCK)
    blocks = SEQ_LEN // BLOCK
    density = slashes[0].float() @ torch.arange(blocks, 0, -1.0) / (blocks * (blocks + 1) / 2)
    assert (density < 0.5).all() and density.mean() < 0.25  # few diagonals carry the recall
    gaps = slashes[0, :, 1:] & ~slashes[0, :, :-1]
    assert (slashes[0, :, :3].any(-1)).all() and (
        gaps.sum(-1) >= 2
    ).all()  # near ones, and runs of far ones
    assert (slashes[0, :, blocks // 4 :].sum(-1) >= 2).all()
    for head in range(HEADS):
        chosen = verticals[0, head][verticals[0, head] < SEQ_LEN]
        assert len(chosen) <= PATTERN.max_columns + PATTERN.sinks
        assert torch.isin(heads.outliers[head // 2], chosen).float().mean() > 0.8


@pytest.mark.parametrize("seed", [0, 1])
def test_the_expected_selection_is_near_the_real_one(seed):
    heads = _heads(seed)
    real, expected = (make(heads, PATTERN, BLOCK)[0][0] for make in (select, expected_selection))
    assert expected.shape == real.shape and expected.dtype == torch.bool
    overlap = (real & expected).sum() / (real | expected).sum()
    assert overlap > 0.45
    assert 0.6 < expected.sum() / real.sum() < 1.6


def test_the_expected_selection_keeps_to_the_patterns_limits():
    pattern = VerticalSlash(
        recall=0.95, sinks=3, local_diagonals=2, max_columns=100, max_slashes=9, min_slashes=5
    )
    slashes, verticals, capped = expected_selection(_heads(), pattern, BLOCK)
    assert slashes[..., :2].all() and (slashes.sum(-1) >= 5).all() and (slashes.sum(-1) <= 11).all()
    assert (verticals[..., :3] == torch.arange(3)).all() and (
        (verticals < SEQ_LEN).sum(-1) <= 103
    ).all()
    assert (
        verticals.shape[-1] == pattern.vertical_capacity(SEQ_LEN, BLOCK, False)
        and verticals.dtype == torch.int32
    )
    assert (verticals.diff() >= 0).all() and capped[..., 1].all() and not capped[..., 0].all()
    index = pattern.index([slashes, verticals, capped], Causal().rows(SEQ_LEN), 1, HEADS, BLOCK)
    assert index.selects(torch.arange(20), torch.arange(20)).diagonal(dim1=-2, dim2=-1).all()


def test_verticals_hold_the_share_that_was_drawn():
    heads = _heads()
    k = keys(heads, 0, SEQ_LEN)
    last = queries(heads, SEQ_LEN - 64, SEQ_LEN)
    for head in range(HEADS):
        mass = ((last[0, head] @ k[0, head // 2].T) / math.sqrt(64)).softmax(-1).mean(0)
        assert 0.03 < mass[heads.outliers[head // 2]].sum() < 0.93


def test_too_short_or_ungrouped_is_refused():
    with pytest.raises(ValueError, match="2048"):
        draw_heads(1024)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        draw_heads(4096, 5, 2)
