"""What budget "joint" selects: the requested recall, within bounds, and nothing that is masked."""

import itertools

import pytest
import torch
from torch import Tensor

from scripts.benchmarks import synthetic
from tests.reference import structured_qkv
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash import joint, probe
from titan_sparse.kernels import compact

BLOCK = 16
SEQ_LEN = 256


def _pattern(**parameters) -> VerticalSlash:
    usual = dict(recall=0.9, sinks=2, local_slashes=1, dense_below=48, probe_rows="spread")
    return VerticalSlash(**usual | parameters)


def _select(pattern: VerticalSlash, mask: Mask):
    q, k, _ = structured_qkv(2, 4, 2, SEQ_LEN, 8)
    return pattern.select(q, k, mask, block_size=BLOCK)


def _verticals(index) -> list[list[list[int]]]:
    """Of each sequence and head, without what fills the list up."""
    listed = index.verticals.tolist()
    return [[[v for v in head if v < SEQ_LEN] for head in heads] for heads in listed]


# Recall.


def _generated(kind: str, seq_len: int) -> tuple[Tensor, Tensor]:
    if kind == "noisy":
        q, k, _ = structured_qkv(1, 4, 2, seq_len, 32, seed=1, dtype=torch.float32)
        return q, k
    heads = synthetic.draw_heads(seq_len, heads=4, kv_heads=2, head_dim=32, seed=1)
    return heads.q, heads.k


@pytest.mark.parametrize(
    "kind, mask",
    [("noisy", Causal()), ("bands and outliers", Documents([[1200, 40, 500, 308]]))],
    ids=["causal", "packed"],
)
def test_all_rows_keep_the_recall_that_was_asked_for(kind, mask):
    """Means over probe seeds and heads, of all rows of long documents.

    Each head reaches it. One more slash is a large step for these heads.
    """
    seq_len, block = 2048, 32
    q, k = _generated(kind, seq_len)
    seen = mask.dense(seq_len)
    scores = (q @ k.repeat_interleave(2, 1).mT * 32**-0.5).masked_fill(~seen, -torch.inf)
    mass = scores.softmax(-1)
    rows = torch.ones(seq_len, dtype=torch.bool)
    if isinstance(mask, Documents):
        # The short document is computed whole.
        rows[1200:1240] = False
    for recall in (0.9, 0.95):
        kept = []
        for seed in range(2):
            ranges = mask.rows(seq_len)._replace(probe_seed=torch.tensor(seed))
            pattern = _pattern(recall=recall, probe=128, dense_below=128, count_sinks=True)
            chosen = pattern.select(q, k, ranges, block_size=block).dense(mask)
            kept.append((mass * chosen).sum(-1)[..., rows].mean().item())
        mean = sum(kept) / len(kept)
        print(f"{kind}, asked {recall}: {mean:.4f}, {min(kept):.4f} to {max(kept):.4f}")
        assert -0.01 <= mean - recall <= 0.05


@pytest.mark.parametrize("probe_rows", ["both", "spread", "last"])
def test_a_narrow_diagonal_is_a_diagonal(probe_rows):
    """Each probe row looks at a key that no other row looks at, so it is not a vertical."""
    seq_len, size = 1024, 32
    generator = torch.Generator().manual_seed(0)
    k = 6 * torch.randn(1, 1, seq_len, 32, generator=generator)
    # Each query sees the key three blocks back, and nothing else.
    q = k.roll(3 * size, dims=2)
    pattern = VerticalSlash(dense_below=size, probe_rows=probe_rows)
    index = pattern.select(q, k, Causal(), block_size=size)
    assert index.slashes[0, 0].nonzero().flatten().tolist() == [0, 1, 3]
    assert (index.verticals < seq_len).sum() < 20


# Bounds.


def test_bounds_on_what_comes_besides_sinks_and_local_slashes():
    def choose(mask: Mask, **bounds) -> tuple[Tensor, Tensor, Tensor]:
        """How many verticals and how many slashes each head has, and what was capped."""
        index = _select(_pattern(dense_below=16, **bounds), mask)
        seen = mask.dense(SEQ_LEN).any(-2).expand(2, -1).tolist()
        for sequence, heads in enumerate(_verticals(index)):
            assert all(seen[sequence][v] for head in heads for v in head)
        return (index.verticals < SEQ_LEN).sum(-1), index.slashes.sum(-1), index.capped

    free_verticals, free_slashes, capped = choose(Causal())
    assert (free_verticals > 3).all() and (free_slashes > 2).any() and not capped.any()
    verticals, slashes, capped = choose(Causal(), max_verticals=1, max_slashes=1)
    assert (verticals <= 3).all() and (slashes <= 2).all()
    assert torch.equal(capped[..., 0], free_verticals > 3)
    assert torch.equal(capped[..., 1], free_slashes > 2)
    # A cap that is not reached cuts nothing.
    verticals, slashes, capped = choose(Causal(), max_verticals=SEQ_LEN, max_slashes=16)
    assert torch.equal(verticals, free_verticals) and torch.equal(slashes, free_slashes)
    assert not capped.any()

    # Candidates of one bin come together, so that there may be more.
    verticals, slashes, capped = choose(Causal(), recall=0.01, min_verticals=40, min_slashes=3)
    assert (verticals >= 42).all() and (verticals < 60).all()
    assert (slashes >= 4).all() and (slashes < 8).all() and not capped.any()
    # Nor what has a score of 0, which would not count for a cap.
    verticals, _, capped = choose(Causal(), min_verticals=180, max_verticals=180)
    assert (verticals > 80).all() and (verticals < 180).all() and not capped[..., 0].any()
    # Two documents, with a floor of their own each.
    documents = Documents([[128, 128]])
    verticals, _, _ = choose(documents, min_verticals=60, max_verticals=60)
    assert (verticals <= 2 * (60 + 2)).all()
    # Floors take no more than there is.
    padded = Causal(valid=(30, 30))
    verticals, slashes, _ = choose(padded, recall=0.01, min_verticals=40, min_slashes=3)
    assert (verticals >= 2).all() and (slashes == 2).all()


def test_sinks_and_local_slashes_are_always_on():
    mask = Documents([[100, 60, 90]] * 2)
    index = _select(_pattern(recall=0.01, sinks=5, local_slashes=3), mask)
    for head in itertools.chain(*_verticals(index)):
        assert set(head) >= {*range(5), *range(100, 105), *range(160, 165)}
    # Seven, four and six slashes.
    assert index.slashes[..., [0, 1, 2, 7, 8, 9, 11, 12, 13]].all()
    assert not index.slashes.all()


# Masks.


def test_a_recall_of_one_takes_all_that_is_seen_and_nothing_else():
    """Padding is excluded, and so are verticals of short documents, which are computed in full."""
    mask = Documents([[100, 30, 90], [60, 150]])
    index = _select(_pattern(recall=1.0), mask)
    chosen, seen = index.dense(mask), mask.dense(SEQ_LEN)[:, None].expand(-1, 4, -1, -1)
    assert torch.equal(chosen, seen)
    short, whole = _verticals(index)
    for head in short:
        assert not any(100 <= v < 130 or v >= 220 for v in head)
    for head in whole:
        assert not any(v >= 210 for v in head)


def test_a_sequence_without_tokens_selects_nothing():
    index = _select(_pattern(), Causal(valid=(200, 0)))
    _, empty = _verticals(index)
    assert not any(empty) and not index.capped[1].any()
    # And changes nothing for the other one.
    alone = _select(_pattern(), Causal(valid=(200, 200)))
    assert torch.equal(index.slashes[0], alone.slashes[0])


@pytest.mark.parametrize("probe_rows", ["spread", "last"])
def test_what_lies_outside_the_span_changes_nothing(probe_rows):
    """Padding and other documents may hold any finite values if each head has its own budget."""
    mask = Documents([[70, 60]])
    pattern = _pattern(recall=0.8, probe_rows=probe_rows)
    q, k, _ = structured_qkv(1, 2, 1, 144, 8)
    before = pattern.select(q, k, mask, block_size=BLOCK)
    other_q, other_k = q.clone(), k.clone()
    other_q[:, :, :70] += 3
    other_k[:, :, :70] -= 5
    other_q[:, :, 130:] = 1e4
    other_k[:, :, 130:] = -1e4
    after = pattern.select(other_q, other_k, mask, block_size=BLOCK)
    assert torch.equal(before.dense(mask)[:, :, 70:], after.dense(mask)[:, :, 70:])
    assert not torch.equal(before.dense(mask), after.dense(mask))


# Kernels.

BOUNDS = dict(max_verticals=20, max_slashes=4, min_slashes=2)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreted; tests/gpu/test_selection.py does it on a GPU"
)
@pytest.mark.parametrize(
    "pattern, mask",
    [
        (VerticalSlash(sinks=3, dense_below=48), Documents([[71, 7, 1, 49], [60, 60]])),
        (VerticalSlash(0.8, sinks=0, dense_below=64, **BOUNDS), Causal() & SlidingWindow(100)),
    ],
    ids=["joint", "capped"],
)
def test_selection_by_kernels_is_that_of_the_twins(pattern, mask, monkeypatch):
    """From the probe to the lists, but for a candidate that rounding moves over a threshold."""
    q, k, _ = structured_qkv(2, 4, 2, 128, 16, seed=5, dtype=torch.float32)
    of_twins = pattern.select(q, k, mask, block_size=16)
    for module in (probe, joint):
        monkeypatch.setattr(module, "by_kernels", lambda keys, block_size: True)
    monkeypatch.setattr(joint, "compact", compact.compact)
    of_kernels = pattern.select(q, k, mask, block_size=16)
    assert torch.equal(of_kernels.capped, of_twins.capped)
    assert torch.equal(of_kernels.slashes, of_twins.slashes) and of_twins.slashes.any()
    different = 0
    for got, want in zip(of_kernels.verticals.flatten(0, 1), of_twins.verticals.flatten(0, 1)):
        # Ascending, and filled up behind the last one.
        assert (got.diff() >= 0).all()
        different += len(set(got.tolist()) ^ set(want.tolist()))
    assert different <= 1 and (of_twins.verticals < 128).any()
