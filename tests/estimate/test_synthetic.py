"""Synthetic heads make the slashes and verticals of their formula, and indexes survive their file."""

import math

import pytest
import torch

from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.estimate.index_file import load_indexes, save_indexes
from titan_sparse.estimate.synthetic import (
    draw_heads,
    expected_logits,
    keys,
    queries,
    random_index,
)

SEQ_LEN, HEADS, KV_HEADS, BLOCK = 16384, 4, 2, 64
PATTERN = VerticalSlash(
    recall=0.9, max_verticals=2048, budget="independent", probe_rows="last", count_sinks=True
)


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
    first = SEQ_LEN - 512
    q = queries(heads, first, SEQ_LEN)
    k = keys(heads, 0, SEQ_LEN)
    distances = torch.arange(512, first, 37)
    # [512, distances]: the key that lies so far before each of the last 512 queries.
    key = torch.arange(first, SEQ_LEN)[:, None] - distances
    # [Hq, distances]
    wanted = expected_logits(heads, distances)
    is_ordinary = torch.ones(KV_HEADS, SEQ_LEN, dtype=torch.bool)
    is_ordinary.scatter_(1, heads.outliers, False)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        # [512, S]
        logits = (q[0, head] @ k[0, kv_head].T) * 64**-0.5

        by_distance = logits.gather(1, key)
        of_ordinary = by_distance.where(is_ordinary[kv_head][key], torch.nan)
        mean = of_ordinary.nanmean(0).double()
        # 512 noisy pairs a distance.
        assert (mean - wanted[head]).abs().max() < 0.5
        correlation = torch.corrcoef(torch.stack([mean, wanted[head]]))[0, 1]
        assert correlation > 0.995

        # Outliers are the same from everywhere.
        of_outliers = logits[:, heads.outliers[kv_head]]
        assert of_outliers.mean(0).std() < 1.2
        assert of_outliers.mean() > wanted[head].median() + 2


def test_selection_finds_slashes_and_planted_verticals():
    heads = _heads()
    q = queries(heads, 0, SEQ_LEN)
    k = keys(heads, 0, SEQ_LEN)
    slashes, verticals, _ = PATTERN.select(q, k, Causal(), block_size=BLOCK).tensors()
    # [Hq, blocks]
    slashes = slashes[0]
    blocks = SEQ_LEN // BLOCK
    length_of_diagonal = torch.arange(blocks, 0, -1.0)
    density = slashes.float() @ length_of_diagonal / length_of_diagonal.sum()
    # Few slashes carry the recall,
    assert (density < 0.5).all()
    assert density.mean() < 0.25
    # near ones, and runs of far ones.
    assert slashes[:, :3].any(-1).all()
    run_begins = slashes[:, 1:] & ~slashes[:, :-1]
    assert (run_begins.sum(-1) >= 2).all()
    assert (slashes[:, blocks // 4 :].sum(-1) >= 2).all()
    for head in range(HEADS):
        positions = verticals[0, head]
        chosen = positions[positions < SEQ_LEN]
        assert len(chosen) <= PATTERN.max_verticals + PATTERN.sinks
        is_chosen = torch.isin(heads.outliers[head // 2], chosen)
        assert is_chosen.float().mean() > 0.8


def test_verticals_hold_the_share_that_was_drawn():
    heads = _heads()
    k = keys(heads, 0, SEQ_LEN)
    last = queries(heads, SEQ_LEN - 64, SEQ_LEN)
    for head in range(HEADS):
        logits = last[0, head] @ k[0, head // 2].T / math.sqrt(64)
        mass = logits.softmax(-1).mean(0)
        assert 0.03 < mass[heads.outliers[head // 2]].sum() < 0.93


@pytest.mark.parametrize(
    "sizes, words", [((1024,), "2048"), ((4096, 5, 2), "multiple of kv_heads")]
)
def test_too_short_or_ungrouped_is_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        draw_heads(*sizes)


def test_a_random_index_has_its_density():
    pattern, tensors = random_index(4, 2048, 16, 0.1, vertical_share=0.01, sinks=8)
    index = pattern.index(tensors, Causal().rows(2048), 1, 4, 16)
    computed = index.dense(Causal()).sum().item()
    assert computed / (4 * 2048 * 2049 / 2) == pytest.approx(0.1, rel=0.05)
    assert ((index.verticals < 2048).sum(-1) == 20).all()


@pytest.mark.parametrize(
    "mask, pattern",
    [
        (Documents([[90, 7, 31], [120]]), VerticalSlash(recall=0.6, sinks=2, dense_below=32)),
        (Causal(), Dense()),
    ],
)
def test_an_index_survives_its_file(tmp_path, mask, pattern):
    torch.manual_seed(0)
    ranges = mask.rows(128)
    indexes = []
    for _ in range(2):
        q = torch.randn(2, 4, 128, 8)
        k = torch.randn(2, 2, 128, 8)
        if pattern.dynamic:
            indexes.append(pattern.select(q, k, ranges, block_size=16))
        else:
            indexes.append(pattern.index([], ranges, 2, 4, 16))
    save_indexes(tmp_path / "index.pt", pattern, ranges, indexes)
    loaded_ranges, loaded = load_indexes(tmp_path / "index.pt")
    for a, b in zip(loaded_ranges[:4], ranges[:4]):
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    for a, b in zip(loaded, indexes, strict=True):
        assert torch.equal(a.dense(mask), b.dense(mask)) and a.heads == b.heads


@pytest.mark.parametrize("name", ["text", "other", "missing"])
def test_other_files_are_refused(tmp_path, name):
    (tmp_path / "text").write_text("no index")
    torch.save({"x": 1}, tmp_path / "other")
    with pytest.raises(ValueError, match=f"--index .*{name}: "):
        load_indexes(tmp_path / name)
