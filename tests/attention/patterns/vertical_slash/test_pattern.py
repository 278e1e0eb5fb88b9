"""The published selection, budget = "independent", against a brute-force reading of it.

Document by document, and head by head.
"""

import dataclasses
import math
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.patterns.helpers import published
from tests.reference import structured_qkv
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash

Span = tuple[int, int]


class Selection(NamedTuple):
    """What one head of one sequence should select."""

    verticals: set[int]
    pairs: set[tuple[int, int]]
    capped: tuple[bool, bool]


class Case(NamedTuple):
    """One selection problem. documents: the lengths per sequence if packed; else `valid` tokens per
    sequence.
    """

    shape: tuple[int, int, int, int]
    block: int
    mask: Mask
    pattern: VerticalSlash
    documents: list[list[int]] | None = None
    valid: list[int] | None = None

    def spans(self, sequence: int) -> list[Span]:
        """(start, stop) of every document. An unpacked sequence is one."""
        if self.documents is None:
            return [(0, self.shape[3] if self.valid is None else self.valid[sequence])]
        spans = []
        start = 0
        for length in self.documents[sequence % len(self.documents)]:
            spans.append((start, start + length))
            start += length
        return spans


def _smallest(mass: list[float], recall: float, least: int, most: int) -> tuple[set[int], bool]:
    """Fewest elements that reach the recall, including the one that crosses it, and whether the cap cut them."""
    exact = [Fraction(m) for m in mass]
    order = sorted(range(len(mass)), key=lambda element: (-mass[element], element))
    target = Fraction(recall) * sum(exact)
    running = Fraction(0)
    count = 0
    while running < target:
        running += exact[order[count]]
        count += 1
    chosen = set(order[: min(max(count, least), most)])
    return chosen, count > most


def _masses(
    q: Tensor, k: Tensor, seen: Tensor, span: Span, probe: int, block: int
) -> tuple[list[float], list[float]]:
    """Attention mass per token, and per slash, of the span's last queries.

    By a dense softmax, pair by pair.
    """
    start, stop = span
    verticals = [0.0] * (stop - start)
    diagonals = [0.0] * ((stop - 1) // block - start // block + 1)
    for i in range(max(start, stop - probe), stop):
        scores = (k @ q[i] * q.shape[-1] ** -0.5).masked_fill(~seen[i], -math.inf)
        for j, p in enumerate(scores.softmax(0).tolist()):
            if p > 0:
                verticals[j - start] += p
                diagonals[i // block - j // block] += p
    return verticals, diagonals


def _cap(most: int, least: int, span: Span, case: Case, tokens: int) -> int:
    """A packed document's share of the cap by length; all of it if unpacked.

    tokens: of the sequence, padding not counted.
    """
    if case.documents is None:
        return most
    start, stop = span
    share = -(-most * (stop - start) // tokens)
    return max(share, least)


def _select_span(q: Tensor, k: Tensor, seen: Tensor, span: Span, case: Case) -> Selection:
    pattern = case.pattern
    block = case.block
    start, stop = span
    first = start // block
    last = (stop - 1) // block
    every = {(i, j) for i in range(first, last + 1) for j in range(first, i + 1)}
    if case.documents is not None and stop - start < pattern.dense_below:
        return Selection(set(), every, (False, False))
    verticals, diagonals = _masses(q, k, seen, span, pattern.probe or block, block)
    tokens = int(seen.any(-1).sum())
    most = len(diagonals)
    if pattern.max_slashes:
        most = _cap(pattern.max_slashes, pattern.min_slashes, span, case, tokens)
    most_verticals = _cap(pattern.max_verticals, pattern.min_verticals, span, case, tokens)
    kept, vertical_capped = _smallest(
        verticals, pattern.recall, pattern.min_verticals, most_verticals
    )
    on, slash_capped = _smallest(diagonals, pattern.recall, pattern.min_slashes, most)
    kept |= set(range(min(pattern.sinks, stop - start)))
    on |= set(range(pattern.local_slashes))
    return Selection(
        {start + j for j in kept},
        {(i, j) for i, j in every if i - j in on},
        (vertical_capped, slash_capped),
    )


def _select(q: Tensor, k: Tensor, seen: Tensor, spans: list[Span], case: Case) -> Selection:
    verticals = set()
    pairs = set()
    verticals_capped = False
    slashes_capped = False
    for span in spans:
        if span[0] == span[1]:
            continue
        of_span = _select_span(q, k, seen, span, case)
        verticals |= of_span.verticals
        pairs |= of_span.pairs
        verticals_capped |= of_span.capped[0]
        slashes_capped |= of_span.capped[1]
    return Selection(verticals, pairs, (verticals_capped, slashes_capped))


def _dense(selection: Selection, seen: Tensor, block: int) -> Tensor:
    """bool [S, S]: the pairs that are computed."""
    chosen = torch.zeros_like(seen)
    for i, j in selection.pairs:
        chosen[i * block : (i + 1) * block, j * block : (j + 1) * block] = True
    chosen[:, sorted(selection.verticals)] = True
    return chosen & seen


def _check_verticals(got: Tensor, want: set[int], seq_len: int) -> None:
    """Ascending, each once, then filled up past the end."""
    listed = got.tolist()
    assert listed[: len(want)] == sorted(want)
    assert all(position >= seq_len for position in listed[len(want) :])


def _check(case: Case, q: Tensor, k: Tensor) -> None:
    batch, heads, kv_heads, seq_len = case.shape
    index = case.pattern.select(q, k, case.mask, block_size=case.block)
    seen = case.mask.dense(seq_len).expand(batch, -1, -1)
    dense = index.dense(case.mask)
    blocks = torch.arange(-(-seq_len // case.block))
    assert not index.selects(blocks, blocks).triu(1).any(), "a block of the future is selected"
    for b in range(batch):
        for h in range(heads):
            k_head = k[b, h * kv_heads // heads]
            want = _select(q[b, h], k_head, seen[b], case.spans(b), case)
            _check_verticals(index.verticals[b, h], want.verticals, seq_len)
            assert tuple(index.capped[b, h].tolist()) == want.capped, (b, h)
            assert torch.equal(dense[b, h], _dense(want, seen[b], case.block)), (b, h)


def _inputs(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    q, k, _ = structured_qkv(*case.shape, 8, seed=seed)
    return q * 0.5, k


USUAL = published(recall=0.8, sinks=3, local_slashes=1, dense_below=48)
MIXED = [[70, 9, 61, 17], [5, 48, 47, 49]]

CASES = {
    "gqa": Case((2, 4, 2, 128), 16, Causal(), USUAL),
    "one token": Case((1, 2, 1, 1), 16, Causal(), USUAL),
    "shorter than a block": Case((1, 2, 1, 10), 16, Causal(), USUAL),
    "probe of one": Case(
        (1, 2, 1, 97), 16, Causal(), published(recall=0.9, probe=1, sinks=0, dense_below=16)
    ),
    "probe above sequence": Case(
        (1, 2, 1, 50), 16, Causal(), published(recall=0.7, probe=64, dense_below=64)
    ),
    "padding": Case((3, 2, 1, 128), 16, Causal(valid=(120, 0, 37)), USUAL, None, [120, 0, 37]),
    "window": Case((1, 4, 2, 157), 16, Causal() & SlidingWindow(40), USUAL),
    "packed, ragged": Case((2, 2, 1, 157), 16, Documents(MIXED), USUAL, MIXED),
    "packed, two long in one block": Case(
        (1, 2, 1, 173), 16, Documents([55, 50, 60]), USUAL, [[55, 50, 60]]
    ),
    "packed, window": Case((2, 2, 1, 160), 16, Documents(MIXED) & SlidingWindow(20), USUAL, MIXED),
    "nothing but padding": Case((2, 2, 1, 160), 16, Documents([[], [160]]), USUAL, [[], [160]]),
    "recall 1, window": Case(
        (1, 4, 2, 100), 16, SlidingWindow(30), published(recall=1.0, sinks=0, dense_below=16)
    ),
    "no verticals": Case(
        (1, 4, 2, 157), 16, Causal(), published(max_verticals=0, sinks=2, dense_below=16)
    ),
    "floors take verticals without mass": Case(
        (1, 2, 1, 157),
        16,
        SlidingWindow(24),
        published(recall=0.5, sinks=0, min_verticals=60, min_slashes=6, dense_below=16),
    ),
    "no cap is no cap for a packed document": Case(
        (1, 2, 1, 128),
        16,
        Documents([15, 50, 63]),
        published(recall=1.0, sinks=0, dense_below=48),
        [[15, 50, 63]],
    ),
    "padding is no length": Case(
        (1, 2, 1, 160),
        16,
        Documents([90, 20]),
        published(recall=0.95, sinks=0, max_verticals=10, dense_below=80),
        [[90, 20]],
    ),
    "packed floors": Case(
        (2, 2, 1, 160),
        16,
        Documents(MIXED),
        published(
            recall=0.1,
            sinks=0,
            min_verticals=15,
            max_verticals=20,
            min_slashes=2,
            max_slashes=4,
            dense_below=48,
        ),
        MIXED,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_selection_is_the_specification(name):
    case = CASES[name]
    _check(case, *_inputs(case, seed=len(name)))


LENGTHS = st.lists(st.integers(1, 70), max_size=4)


@settings(max_examples=35, deadline=None, derandomize=True)
@given(
    documents=st.one_of(st.none(), LENGTHS),
    tail=st.integers(1, 20),
    block=st.sampled_from([8, 16]),
    probe=st.integers(0, 24),
    recall=st.floats(0.2, 0.99),
    sinks=st.integers(0, 4),
    local=st.integers(1, 3),
    verticals=st.integers(1, 60),
    slashes=st.integers(0, 5),
    seed=st.integers(0, 9),
)
def test_selection_is_the_specification_for_any_lengths(
    documents, tail, block, probe, recall, sinks, local, verticals, slashes, seed
):
    seq_len = sum(documents or [60]) + tail
    pattern = published(
        recall=recall,
        probe=probe,
        sinks=sinks,
        local_slashes=local,
        min_verticals=verticals // 4,
        max_verticals=verticals,
        max_slashes=slashes,
        dense_below=max(probe, block),
    )
    mask = Causal() if documents is None else Documents(documents)
    case = Case(
        (1, 2, 1, seq_len), block, mask, pattern, None if documents is None else [documents]
    )
    _check(case, *_inputs(case, seed))


def test_equal_bounds_are_fixed_budgets():
    """MInference's budgets: fixed numbers of verticals and slashes, in addition to the sinks and
    the local slashes.
    """
    q, k, _ = structured_qkv(1, 4, 2, 320, 8, seed=3)
    pattern = published(
        recall=0.1,
        sinks=5,
        local_slashes=2,
        min_verticals=20,
        max_verticals=20,
        min_slashes=4,
        max_slashes=4,
        dense_below=16,
    )
    index = pattern.select(q, k, Causal(), block_size=16)
    other = dataclasses.replace(pattern, recall=1.0).select(q, k, Causal(), block_size=16)
    assert torch.equal(index.verticals, other.verticals)
    assert torch.equal(index.slashes, other.slashes)

    verticals = (index.verticals < 320).sum(-1)
    assert (verticals >= 20).all() and (verticals <= 25).all()
    assert (index.verticals[..., :5] == torch.arange(5)).all()
    slashes = index.slashes.sum(-1)
    assert (slashes >= 4).all() and (slashes <= 6).all()
    assert index.slashes[..., :2].all()


def test_patterns_on_one_mask_do_not_share_what_is_remembered():
    """Two patterns with different spans on the same ranges give the same results as on separate ranges."""
    q, k, _ = structured_qkv(1, 2, 1, 192, 8)
    mask = Documents([70, 50, 72])
    shared = mask.rows(192)
    for dense_below in (65, 71, 65):
        pattern = published(recall=0.6, sinks=1, local_slashes=1, dense_below=dense_below)
        together = pattern.select(q, k, shared, block_size=16).dense(mask)
        alone = pattern.select(q, k, mask, block_size=16).dense(mask)
        assert torch.equal(together, alone)
