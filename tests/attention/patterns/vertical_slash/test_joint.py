"""Prices of verticals and slashes against a brute force: a dense softmax, then plain loops."""

import itertools
import math
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import probed
from tests.reference import structured_qkv
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.spans import Spans
from titan_sparse.attention.patterns.vertical_slash import joint
from titan_sparse.attention.patterns.vertical_slash.joint import JointPlan
from titan_sparse.attention.patterns.vertical_slash.probe import ProbeGeometry
from titan_sparse.kernels import selection

BLOCK = 8
HEADS, KV_HEADS = 4, 2
SCALE = 0.3


class Case(NamedTuple):
    """Two sequences. queries: of the probe, in the last rows or in spread ones."""

    mask: Mask
    seq_len: int
    queries: int
    rows: str = "spread"
    sinks: int = 3
    local: int = 1


CASES = {
    "causal": Case(Causal(), 64, 12),
    "last rows": Case(Causal(), 64, 13, "last", local=2),
    "padding": Case(Causal(valid=(64, 43)), 64, 10, sinks=0),
    "window": Case(Causal() & SlidingWindow(29), 72, 16),
    "documents": Case(Documents([[27, 4, 33], [18, 19, 27]]), 64, 9, local=2),
    "last rows of documents": Case(Documents([[27, 4, 33], [18, 19, 27]]), 72, 11, "last"),
    "more rows than tokens": Case(Documents([[20, 44], [50]]), 64, 32, sinks=5),
}


class Known(NamedTuple):
    """What the brute force knows of a span of a head.

    start, stop: of the span. rows: {number in the probe: position}. free: {row: [S]}, whether it
    sees a key that is not always selected. mass: {row: [S]}, its mass.
    """

    case: Case
    start: int
    stop: int
    rows: dict[int, int]
    free: dict[int, list[bool]]
    mass: dict[int, list[float]]

    def distance(self, row: int, key: int) -> int:
        """The slash on which a row meets a key: the number of blocks between them."""
        return self.rows[row] // BLOCK - key // BLOCK

    def meets(self, row: int, key: int) -> bool:
        """Whether a row sees any of the key's block. If so, it counts for the whole block."""
        first = key // BLOCK * BLOCK
        return any(self.free[row][first : first + BLOCK])

    def column(self, key: int, rows: list[int] | None = None) -> float:
        if rows is None:
            rows = list(self.rows)
        return sum(self.mass[row][key] for row in rows)

    def keys(self, block: int | None = None) -> range:
        if block is None:
            return range(self.start, self.stop)
        first = block * BLOCK
        return range(max(self.start, first), min(self.stop, first + BLOCK))


def _bin(score: float) -> int:
    """A byte: 255 - 10 per halving, at least 0."""
    if score <= 0:
        return 0
    number = 255 + math.floor(10 * math.log2(score))
    # 255 itself is for what is on in any case.
    return min(max(number, 0), 254)


def _per_pair(mass: float, rows: int) -> float:
    """Mass per pair of a vertical over its cost, with a pseudo-count of rows without mass."""
    return mass / (selection.VERTICAL_COST * (rows + selection.PSEUDO_ROWS))


def _first_scores(known: Known) -> dict[int, float]:
    """Geometric mean of the scores by the even and the odd rows, and at least an eighth of the
    score by all rows.
    """
    scores = {}
    for key in known.keys():
        of_halves = []
        for parity in (0, 1):
            half = [row for row in known.rows if row % 2 == parity]
            rows = sum(known.meets(row, key) for row in half)
            of_halves.append(_per_pair(known.column(key, half), rows))
        rows = sum(known.meets(row, key) for row in known.rows)
        of_all = _per_pair(known.column(key), rows)
        scores[key] = max(math.sqrt(of_halves[0] * of_halves[1]), of_all / 8)
    return scores


LEVEL_SCORES = [2 ** (-1 - 1.6 * level) for level in range(16)]


def _gain(known: Known, distance: int, level: float, first: dict[int, float]) -> float:
    """The mass of a slash outside the verticals of this score, and the cost of
    the verticals on it."""
    first_block = known.start // BLOCK
    gain = 0.0
    for row, position in known.rows.items():
        block = position // BLOCK - distance
        if block < first_block:
            continue
        keys = known.keys(block)
        total = sum(known.column(key) for key in keys)
        below = sum(known.column(key) for key in keys if first[key] < level)
        if total:
            tile = sum(known.mass[row][key] for key in keys)
            gain += tile * below / total
        chosen = sum(first[key] >= level for key in keys)
        gain += selection.VERTICAL_COST * chosen * level
    return gain


def _slash_score(known: Known, distance: int, first: dict[int, float]) -> float:
    """The first level at which a slash is worth its cost, interpolated within the step."""
    if distance < known.case.local:
        return 0.0
    # A row meets the slash if its block is that far behind the span's first one.
    nearest = known.start // BLOCK + distance
    rows = sum(position // BLOCK >= nearest for position in known.rows.values())
    cost = (rows + selection.PSEUDO_ROWS) * BLOCK
    before = None
    for level in LEVEL_SCORES:
        gain = _gain(known, distance, level, first)
        # In octaves.
        worth = math.log2(max(gain / (level * cost), 1e-20))
        if worth < 0:
            before = (level, worth)
            continue
        if before is None:
            return level
        old_level, old_worth = before
        part = -old_worth / (worth - old_worth)
        return old_level * (level / old_level) ** part
    return 0.0


def _final(
    known: Known, first: dict[int, float], slashes: list[float]
) -> tuple[list[int], Counter, Counter]:
    """Bins of the keys, and mass and number of candidates by bin.

    A mass is 2/3 the estimate of the other half of the rows plus 1/3 that of all rows.
    """
    bins = []
    mass = Counter()
    for key in known.keys():
        free = [row for row in known.rows if known.meets(row, key)]
        on_slash = {row: slashes[known.distance(row, key)] for row in free}
        vertical = [row for row in free if on_slash[row] < first[key]]
        even = [row for row in vertical if row % 2 == 0]
        odd = [row for row in vertical if row % 2 == 1]
        score = _per_pair(known.column(key, vertical), len(vertical))
        of_even = _per_pair(known.column(key, even), len(even))
        of_odd = _per_pair(known.column(key, odd), len(odd))

        bins.append(_bin(score))
        for row in free:
            of_others = of_even if row % 2 else of_odd
            mass_of_pair = known.mass[row][key]
            mass[_bin(max(on_slash[row], of_others))] += mass_of_pair * 2 / 3
            mass[_bin(max(on_slash[row], score))] += mass_of_pair / 3
    return bins, mass, Counter(number for number in bins if number > 0)


class Made(NamedTuple):
    """By the twins. bins, mass, count: what a selection is made from, of each span."""

    spans: Spans
    geometry: ProbeGeometry
    needed: JointPlan
    slash_bins: Tensor
    slash_count: Tensor
    bins: Tensor
    mass: Tensor
    count: Tensor


def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    q, k, _ = structured_qkv(2, HEADS, KV_HEADS, case.seq_len, 8, seed=case.queries)
    return q, k


def _made(case: Case) -> Made:
    q, k = _inputs(case)
    cp = one_rank(BLOCK)
    ranges = case.mask.rows(case.seq_len)
    spans, geometry = probed(ranges, case.rows, case.queries, BLOCK, 16, seed=5)
    options = VerticalSlash(sinks=case.sinks, local_slashes=case.local, count_sinks=True)
    needed = joint.make_plan(options, spans, geometry, case.seq_len, BLOCK)
    return Made(spans, geometry, needed, *joint._histograms(q, k, needed, cp, SCALE))


def _known(case: Case, made: Made, b: int, h: int, span: int) -> Known:
    # [S, S]
    seen = case.mask.dense(case.seq_len).expand(2, -1, -1)[b]
    q, k = _inputs(case)
    scores = (q[b, h] @ k[b, h // (HEADS // KV_HEADS)].T * SCALE).masked_fill(~seen, -math.inf)
    # Rows that see nothing have no mass.
    mass = scores.softmax(-1).nan_to_num(0).tolist()
    sees = seen.tolist()

    start = int(made.spans.start[b, span])
    stop = int(made.spans.stop[b, span])
    positions = made.geometry.rows.position[b, span].tolist()
    exists = made.geometry.rows.exists[b, span].tolist()

    # What lies between the sinks and the local slashes may be chosen.
    first_free = start + case.sinks
    rows = {}
    free = {}
    row_masses = {}
    for number, row in enumerate(positions):
        if not exists[number]:
            continue
        behind_free = (row // BLOCK - case.local + 1) * BLOCK
        rows[number] = row
        free[number] = []
        row_masses[number] = []
        for key in range(case.seq_len):
            is_free = sees[row][key] and first_free <= key < behind_free
            free[number].append(is_free)
            row_masses[number].append(mass[row][key] if is_free else 0.0)
    return Known(case, start, stop, rows, free, row_masses)


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_the_definition(name):
    case = CASES[name]
    made = _made(case)
    assert made.mass.dtype == torch.float64
    checked = 0
    # Heads of both KV heads.
    for b, h in itertools.product(range(2), (0, 3)):
        outside = torch.ones(case.seq_len, dtype=torch.bool)
        for span in range(made.spans.start.shape[1]):
            known = _known(case, made, b, h, span)
            if known.start == known.stop:
                assert not made.mass[b, h, span].any()
                assert not made.count[b, h, span].any()
                continue
            _check_span(made, known, (b, h, span))
            outside[known.start : known.stop] = False
            checked += 1
        assert not made.bins[b, h].flatten()[: case.seq_len][outside].any()
        assert not made.needed.is_sink[b, : case.seq_len][outside].any()
    assert checked >= 4


def _check_span(made: Made, known: Known, at: tuple[int, int, int]) -> None:
    """All that is made from a span's masses, by hand. at: the sequence, the head and the span."""
    b, h, span = at
    inside = slice(known.start, known.stop)
    local = known.case.local
    first = _first_scores(known)

    offset = int(made.spans.offset[b, span])
    count = int(made.spans.diagonals[b, span])
    assert count == (known.stop - 1) // BLOCK - known.start // BLOCK + 1
    slashes = [_slash_score(known, distance, first) for distance in range(count)]
    wanted = [_bin(score) for score in slashes]
    wanted[:local] = [255] * min(local, count)
    assert made.slash_bins[b, h, offset : offset + count].tolist() == wanted
    counted = Counter(wanted[local:])
    assert made.slash_count[at].tolist() == [counted[number] for number in range(256)]

    bins, mass, count = _final(known, first, slashes)
    assert made.bins[b, h].flatten()[inside].tolist() == bins
    assert made.mass[at].tolist() == pytest.approx(
        [mass[number] for number in range(256)], abs=1e-9
    )
    assert made.count[at].tolist() == [count[number] for number in range(256)]

    is_sink = torch.arange(known.stop - known.start) < known.case.sinks
    assert torch.equal(made.needed.is_sink[b, inside], is_sink)
    assert made.geometry.rows.group_rows[b, span].sum() == len(known.rows)
