"""The published selection, budget = "independent", against a brute-force reading of it, document by
document and head by head; and its smallest sets that hold a share of the mass, in fractions.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.patterns.helpers import BLOCK, Case, cases_of_masks, check_selection, published
from tests.reference import DEVICE, structured_qkv
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns.spans import find_spans, share_of_cap
from titan_sparse.attention.patterns.vertical_slash.independent import Segments, smallest_sets

MOST_MASS = 128

Span = tuple[int, int]


class Selection(NamedTuple):
    """What one head of one sequence should select."""

    verticals: set[int]
    pairs: set[tuple[int, int]]
    capped: tuple[bool, bool]


def _smallest(mass: list[float], recall: float, least: int, most: int) -> tuple[set[int], bool]:
    """Fewest elements that reach the recall, including the one that crosses it, and
    whether the cap cut them."""
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
    q: Tensor, k: Tensor, seen: Tensor, span: Span, probe: int
) -> tuple[list[float], list[float]]:
    """Attention mass per token, and per slash, of the span's last queries.

    By a dense softmax, pair by pair.
    """
    start, stop = span
    verticals = [0.0] * (stop - start)
    diagonals = [0.0] * ((stop - 1) // BLOCK - start // BLOCK + 1)
    for i in range(max(start, stop - probe), stop):
        scores = (k @ q[i] * q.shape[-1] ** -0.5).masked_fill(~seen[i], -math.inf)
        for j, p in enumerate(scores.softmax(0).tolist()):
            if p > 0:
                verticals[j - start] += p
                diagonals[i // BLOCK - j // BLOCK] += p
    return verticals, diagonals


def _cap(most: int, least: int, span: Span, case: Case, tokens: int) -> int:
    """A packed document's share of the cap by length; all of it if unpacked.

    tokens: of the sequence, padding not counted.
    """
    if not case.is_packed:
        return most
    start, stop = span
    share = -(-most * (stop - start) // tokens)
    return max(share, least)


def _select_span(q: Tensor, k: Tensor, seen: Tensor, span: Span, case: Case) -> Selection:
    pattern = case.pattern
    start, stop = span
    first = start // BLOCK
    last = (stop - 1) // BLOCK
    every = {(i, j) for i in range(first, last + 1) for j in range(first, i + 1)}
    if case.is_packed and stop - start < pattern.dense_below:
        return Selection(set(), every, (False, False))
    verticals, diagonals = _masses(q, k, seen, span, pattern.probe or BLOCK)
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


def _check(case: Case) -> None:
    wanted: list[Selection] = []

    def specification(case: Case, q: Tensor, k: Tensor, sequence: int, seen: Tensor) -> Tensor:
        """bool [S, S]: the pairs that are computed."""
        selection = _select(q, k, seen, case.spans(sequence), case)
        wanted.append(selection)
        chosen = torch.zeros_like(seen)
        for i, j in selection.pairs:
            chosen[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = True
        chosen[:, sorted(selection.verticals)] = True
        return chosen & seen

    index = check_selection(case, specification)
    blocks = index.all_blocks()
    selected = index.selects(blocks, blocks)
    assert not selected.triu(1).any(), "a block of the future is selected"
    assert selected.sum(-1).max() <= index.most_blocks <= len(blocks)
    # By sequence and head.
    found = zip(index.verticals.flatten(0, 1).tolist(), index.capped.flatten(0, 1).tolist())
    for (listed, capped), want in zip(found, wanted, strict=True):
        # Ascending, each once, then filled up past the end.
        count = len(want.verticals)
        assert listed[:count] == sorted(want.verticals)
        assert all(position >= case.seq_len for position in listed[count:])
        assert tuple(capped) == want.capped


USUAL = published(recall=0.8, sinks=3, local_slashes=1, dense_below=48)
PROBE_ABOVE_SEQUENCE = published(recall=0.7, probe=64, dense_below=64)
FEW_SLASHES = published(recall=0.5, sinks=0, local_slashes=1, max_slashes=1, dense_below=80)
FLOORS = published(recall=0.5, sinks=0, min_verticals=60, min_slashes=6, dense_below=16)

CASES = cases_of_masks(USUAL) | {
    "one token": Case(USUAL, Causal(), 1),
    "probe above sequence": Case(PROBE_ABOVE_SEQUENCE, Causal(), 50),
    "nothing but padding": Case(USUAL, Documents([[], [160]]), 160),
    "short documents of more blocks than slashes": Case(FEW_SLASHES, Documents([70, 79])),
    "a document from token 2 to the end": Case(USUAL, Documents([2, 155])),
    "recall 1": Case(published(recall=1.0, sinks=0, dense_below=16), SlidingWindow(30)),
    "floors take verticals without mass": Case(FLOORS, SlidingWindow(24)),
}


@pytest.mark.parametrize("name", CASES)
def test_selection_is_the_specification(name):
    _check(CASES[name])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    documents=st.lists(st.integers(1, 70), max_size=4),
    tail=st.integers(1, 20),
    probe=st.integers(0, 24),
    recall=st.floats(0.2, 0.99),
    sinks=st.integers(0, 4),
    local=st.integers(1, 3),
    verticals=st.integers(0, 60),
    slashes=st.integers(0, 5),
)
def test_selection_is_the_specification_for_any_lengths(
    documents, tail, probe, recall, sinks, local, verticals, slashes
):
    seq_len = sum(documents or [60]) + tail
    pattern = published(
        recall=recall,
        probe=probe,
        sinks=sinks,
        local_slashes=local,
        min_verticals=verticals // 4,
        max_verticals=verticals,
        min_slashes=slashes // 2,
        max_slashes=slashes,
        dense_below=max(probe, BLOCK),
    )
    mask = Documents(documents) if documents else Causal()
    _check(Case(pattern, mask, seq_len, (2, 1)))


def test_a_cap_is_shared_by_length_and_rounded_up():
    spans = find_spans(Documents([107, 53]).rows(160), 1, 48, BLOCK)
    # 3 x 107 / 160 is just above 2.
    assert share_of_cap(3, 0, spans)[0].tolist() == [3, 1, 0]


def test_patterns_on_one_mask_do_not_share_what_is_remembered():
    """Two patterns with different spans on the same ranges give the same results
    as on separate ranges."""
    q, k, _ = structured_qkv(1, 2, 1, 192, 8)
    mask = Documents([70, 50, 72])
    shared = mask.rows(192)
    for dense_below in (65, 71, 65):
        pattern = published(recall=0.6, sinks=1, local_slashes=1, dense_below=dense_below)
        together = pattern.select(q, k, shared, block_size=16).dense(mask)
        alone = pattern.select(q, k, mask, block_size=16).dense(mask)
        assert torch.equal(together, alone)


# The smallest sets.


def _segments(
    lengths: list[list[int]], gap: int, limits: list[tuple[int, int, int]], rows: int, tail: int
) -> Segments:
    """Segments of these lengths, one list a sequence, before each `gap` elements of
    none, `tail` at the end.

    limits: (least, most, always) in turn. The rows are spread over the sequences.
    """
    total = max(sum(row) + gap * len(row) for row in lengths) + tail
    n = len(lengths[0])
    segment = torch.full((len(lengths), total), n, dtype=torch.int32)
    bounds = torch.zeros(len(lengths), n, 5)
    for b, row in enumerate(lengths):
        stop = 0
        for d, length in enumerate(row):
            start, stop = stop + gap, stop + gap + length
            segment[b, start:stop] = d
            bounds[b, d] = torch.tensor([start, stop, *limits[(b + d) % len(limits)]])
    sequence = torch.arange(rows) * len(lengths) // rows
    return Segments(*(x.to(DEVICE, torch.int32) for x in (sequence, segment, bounds)))


def _exact(mass: Tensor, segments: Segments, recall: float) -> tuple[Tensor, Tensor]:
    """The definition, in fractions."""
    selected = torch.zeros(mass.shape, dtype=torch.bool)
    capped = torch.zeros(len(mass), segments.bounds.shape[1], dtype=torch.bool)
    for row, sequence in enumerate(segments.sequence.tolist()):
        for d, (start, stop, least, most, always) in enumerate(segments.bounds[sequence].tolist()):
            chosen, capped[row, d] = _smallest(mass[row, start:stop].tolist(), recall, least, most)
            selected[row, [start + element for element in chosen]] = True
            selected[row, start : min(start + always, stop)] = True
    return selected, capped


def _drawn(kind: str, segments: Segments) -> Tensor:
    rows, length = len(segments.sequence), segments.segment.shape[1]
    random = torch.rand(rows, length, generator=torch.Generator().manual_seed(length + rows))
    if kind == "random":
        mass = random**3
    elif kind == "ties":  # 7 / 256 and so on: sums are exact in any arithmetic
        return (random * 8).floor() / 256
    elif kind == "window":
        mass = random * (torch.arange(length) > length * 0.8)
    elif kind == "orders of magnitude":
        # The last of each segment is large: sums are as fine as MOST_MASS * 2**-61.
        last_one = segments.bounds[..., 1].cpu().long().clamp(min=1)[segments.sequence.cpu()] - 1
        mass = (10 ** (random.double() * 30 - 29)).float().scatter(1, last_one, 0.7)
    else:
        return torch.zeros(rows, length)
    return mass / (mass.sum(-1, keepdim=True) / MOST_MASS).clamp(min=1)


KINDS = ["random", "ties", "window", "orders of magnitude", "none"]
LAYOUTS = {
    "one segment": _segments([[500]], 3, [(300, 10**6, 2)], 3, 1),
    "many": _segments(
        [[130, 1, 0, 77, 300], [70, 70, 70, 1, 0]], 0, [(0, 10**6, 3), (5, 40, 0), (0, 0, 1)], 5, 9
    ),
    "many, gaps": _segments(
        [[50] * 8, [7, 90] * 4], 5, [(0, 10**6, 3), (60, 70, 0), (9, 4, 1), (0, 12, 0)], 3, 0
    ),
    "tiny": _segments([[1, 2, 3, 0, 1, 5]], 0, [(0, 1, 0), (1, 3, 0), (0, 9, 1)], 2, 2),
    "all empty": _segments([[0, 0]], 1, [(3, 5, 2)], 2, 1),
    "a cap": _segments([[333]], 0, [(0, 20, 0)], 4, 0),
}


@pytest.mark.parametrize(
    "layout, kind",
    [
        *((layout, "ties") for layout in LAYOUTS if layout != "all empty"),
        *((layout, kind) for layout in ("one segment", "a cap") for kind in KINDS),
        ("tiny", "orders of magnitude"),
        ("all empty", "none"),
    ],
)
def test_sets_are_the_definition(layout, kind):
    segments = LAYOUTS[layout]
    mass = _drawn(kind, segments)
    for recall in (0.5, 1.0) if kind == "ties" else (0.9, 1.0):
        got = smallest_sets(mass.to(DEVICE), segments, recall, MOST_MASS)
        for a, b in zip(got, _exact(mass, segments, recall), strict=True):
            assert torch.equal(a.cpu(), b), recall


@pytest.mark.parametrize(
    "extra, recall, count", [(0.0, 0.5, 1), (2**-23, 0.5, 2), (0.0, 0.5 + 2**-53, 2)]
)
def test_a_target_that_is_just_met_or_just_missed(extra, recall, count):
    """One element of 64, 64 elements of 1: half the mass is the first, unless the
    last bit says otherwise."""
    mass = torch.ones(1, 65)
    mass[0, 20], mass[0, 30] = 64, 1 + extra
    segments = _segments([[65]], 0, [(0, 64, 0)], 1, 0)
    selected, _ = smallest_sets(mass.to(DEVICE), segments, recall, MOST_MASS)
    assert selected.nonzero()[:, 1].tolist() == (
        [20] if count == 1 else [20, 30] if extra else [0, 20]
    )
