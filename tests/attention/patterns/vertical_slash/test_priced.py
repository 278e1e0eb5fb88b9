"""Prices of verticals and diagonals against a brute force: a dense softmax, then plain loops."""

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.reference import structured_qkv
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns.spans import Spans, find_spans
from titan_sparse.attention.patterns.vertical_slash import priced
from titan_sparse.attention.patterns.vertical_slash.priced import Priced
from titan_sparse.attention.patterns.vertical_slash.probe import Geometry, look, probe_geometry
from titan_sparse.attention.patterns.vertical_slash.rows import last_rows, spread_rows
from titan_sparse.kernels import prices
from titan_sparse.kernels.prices import naive
from titan_sparse.kernels.probe import KeyBlocks

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

    start, stop: of the span. rows: {number in the probe: position}.
    free: {row: [S]}, whether it sees a key that is not on in any case. held: {row: [S]}, its mass.
    """

    case: Case
    start: int
    stop: int
    rows: dict[int, int]
    free: dict[int, list[bool]]
    held: dict[int, list[float]]

    def distance(self, row: int, key: int) -> int:
        return self.rows[row] // BLOCK - key // BLOCK

    def meets(self, row: int, key: int) -> bool:
        """Whether a row sees anything of the key's block: it counts for all of it."""
        first = key // BLOCK * BLOCK
        return any(self.free[row][first : first + BLOCK])

    def column(self, key: int, rows: list[int] | None = None) -> float:
        """The mass of a key, in all rows or in these."""
        return sum(self.held[row][key] for row in (self.rows if rows is None else rows))

    def keys(self, block: int | None = None) -> range:
        """Those of the span, or of a block of it."""
        if block is None:
            return range(self.start, self.stop)
        return range(max(self.start, block * BLOCK), min(self.stop, (block + 1) * BLOCK))


def _code(price: float) -> int:
    """A byte: 255 - 10 a halving, down to 0."""
    if price <= 0:
        return 0
    return min(max(math.floor(10 * math.log2(price)) + 255, 0), 254)


def _per_pair(mass: float, rows: int) -> float:
    """What a pair of a vertical holds for its cost; some rows without mass see it besides."""
    return mass / (prices.VERTICAL_COST * (rows + prices.PSEUDO_ROWS))


def _first_prices(of: Known) -> dict[int, float]:
    prices = {}
    for key in of.keys():
        rows = sum(of.meets(row, key) for row in of.rows)
        prices[key] = _per_pair(of.column(key), rows)
    return prices


LEVEL_PRICES = [2 ** (-1 - 1.6 * level) for level in range(16)]


def _gain(of: Known, distance: int, level: float, first: dict[int, float]) -> float:
    """The mass that a diagonal has besides the verticals of this price, and their cost on it."""
    gain = 0.0
    for row, position in of.rows.items():
        block = position // BLOCK - distance
        if block < of.start // BLOCK:
            continue
        keys = of.keys(block)
        total = sum(of.column(key) for key in keys)
        below = sum(of.column(key) for key in keys if first[key] < level)
        chosen = sum(first[key] >= level for key in keys)
        if total:
            gain += sum(of.held[row][key] for key in keys) * below / total
        gain += prices.VERTICAL_COST * chosen * level
    return gain


def _diagonal_price(of: Known, distance: int, first: dict[int, float]) -> float:
    """The first level at which a diagonal is worth its cost, and a part of the step to it."""
    if distance < of.case.local:
        return 0.0
    meet = [row for row in of.rows if of.rows[row] // BLOCK - distance >= of.start // BLOCK]
    cost = (len(meet) + prices.PSEUDO_ROWS) * BLOCK
    before = None
    for level in LEVEL_PRICES:
        gain = _gain(of, distance, level, first)
        worth = math.log2(max(gain / (level * cost), 1e-20))
        if worth >= 0:
            if before is None:
                return level
            old_level, old_worth = before
            return old_level * (level / old_level) ** (-old_worth / (worth - old_worth))
        before = (level, worth)
    return 0.0


class Final(NamedTuple):
    codes: dict[int, int]
    mass: Counter
    count: Counter


def _final(of: Known, first: dict[int, float], diagonals: list[float]) -> Final:
    """A mass is 2/3 where the other half of the rows puts it, and 1/3 where all rows do."""
    codes, mass, count = {}, Counter(), Counter()
    for key in of.keys():
        free = [row for row in of.rows if of.meets(row, key)]
        paid = [row for row in free if diagonals[of.distance(row, key)] < first[key]]
        even = [row for row in paid if row % 2 == 0]
        odd = [row for row in paid if row % 2 == 1]
        price, of_even, of_odd = (
            _per_pair(of.column(key, rows), len(rows)) for rows in (paid, even, odd)
        )
        codes[key] = _code(price)
        if codes[key] > 0:
            count[codes[key]] += 1
        for row in free:
            of_others = of_even if row % 2 else of_odd
            of_diagonal = diagonals[of.distance(row, key)]
            mass[_code(max(of_diagonal, of_others))] += of.held[row][key] * 2 / 3
            mass[_code(max(of_diagonal, price))] += of.held[row][key] / 3
    return Final(codes, mass, count)


class Made(NamedTuple):
    """By the twins. codes, mass, count: what a selection is made from, of each span."""

    spans: Spans
    geometry: Geometry
    needed: Priced
    first: Tensor
    gains: Tensor
    diagonal: Tensor
    diagonal_codes: Tensor
    codes: Tensor
    mass: Tensor
    count: Tensor


def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    q, k, _ = structured_qkv(2, HEADS, KV_HEADS, case.seq_len, 8, seed=case.queries)
    return q, k


def _made(case: Case) -> Made:
    q, k = _inputs(case)
    cp = one_rank(BLOCK)
    ranges = case.mask.rows(case.seq_len)
    spans = find_spans(ranges, 2, 16, BLOCK)
    if case.rows == "spread":
        rows = spread_rows(spans, case.queries, case.seq_len, BLOCK, seed=5)
    else:
        rows = last_rows(spans, case.queries, case.seq_len, BLOCK)
    geometry = probe_geometry(ranges, spans, rows, cp)
    needed = priced.priced_geometry(spans, geometry, case.seq_len, BLOCK, case.sinks, case.local)
    probe, keys, lse = look(q, k, geometry, cp, SCALE)

    free = probe._replace(start=needed.free_start, stop=needed.free_stop)
    first, *table = prices.first_prices_naive(free, keys, lse)
    gains = prices.diagonal_gains_naive(*table, needed.tile, needed.rows)
    diagonal = prices.diagonal_prices_naive(gains, needed.cost)
    by_span = priced._codes(q, k, geometry, needed, cp, SCALE)
    return Made(spans, geometry, needed, first, gains, diagonal, *by_span)


def _known(case: Case, made: Made, b: int, h: int, span: int) -> Known:
    q, k = _inputs(case)
    seen = case.mask.dense(case.seq_len).expand(2, -1, -1)[b]
    scores = q[b, h] @ k[b, h // (HEADS // KV_HEADS)].T * SCALE
    mass = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0).tolist()

    start, stop = int(made.spans.start[b, span]), int(made.spans.stop[b, span])
    first_free = start + case.sinks
    positions = made.geometry.rows.position[b, span].tolist()
    rows, free, held = {}, {}, {}
    for number, exists in enumerate(made.geometry.rows.exists[b, span].tolist()):
        if not exists:
            continue
        row = positions[number]
        behind_free = (row // BLOCK - case.local + 1) * BLOCK
        rows[number] = row
        free[number] = [
            bool(seen[row, key]) and first_free <= key < behind_free for key in range(case.seq_len)
        ]
        held[number] = [m if is_free else 0.0 for m, is_free in zip(mass[row], free[number])]
    return Known(case, start, stop, rows, free, held)


def _check(case: Case) -> None:
    """Everything that is made from a case's masses, by hand."""
    made = _made(case)
    codes, mass, count = made.codes, made.mass, made.count
    assert mass.dtype == torch.float64
    checked = 0
    for b in range(2):
        # Heads of both KV heads.
        for h in (0, 3):
            in_a_span = set()
            for span in range(made.spans.start.shape[1]):
                of = _known(case, made, b, h, span)
                if of.start == of.stop:
                    assert not mass[b, h, span].any() and not count[b, h, span].any()
                    continue
                _check_span(made, of, (b, h, span))
                in_a_span |= set(of.keys())
                checked += 1
            outside = [key for key in range(case.seq_len) if key not in in_a_span]
            assert not codes[b, h].flatten()[outside].any()
            assert not made.needed.is_sink[b, outside].any()
    assert checked >= 4


def _check_span(made: Made, of: Known, at: tuple[int, int, int]) -> None:
    b, h, span = at
    first = _first_prices(of)
    got_first = made.first[b, h].flatten().tolist()
    assert [got_first[key] for key in of.keys()] == pytest.approx(list(first.values()), rel=1e-9)

    offset = int(made.spans.offset[b, span])
    count = int(made.spans.diagonals[b, span])
    assert count == (of.stop - 1) // BLOCK - of.start // BLOCK + 1
    diagonals = [_diagonal_price(of, distance, first) for distance in range(count)]
    got_diagonals = made.diagonal[b, h, offset : offset + count].tolist()
    assert got_diagonals == pytest.approx(diagonals, rel=1e-6)
    for distance in range(of.case.local, count):
        for number, level in enumerate(LEVEL_PRICES):
            got = made.gains[b, h, offset + distance, number].item()
            assert got == pytest.approx(_gain(of, distance, level, first), rel=1e-9, abs=1e-12)

    want_codes = [_code(price) for price in diagonals]
    want_codes[: of.case.local] = [255] * min(of.case.local, count)
    assert made.diagonal_codes[b, h, offset : offset + count].tolist() == want_codes

    want = _final(of, first, diagonals)
    got_codes = made.codes[b, h].flatten().tolist()
    assert {key: got_codes[key] for key in of.keys()} == want.codes
    got_mass = made.mass[b, h, span].tolist()
    for code in range(256):
        assert got_mass[code] == pytest.approx(want.mass[code], abs=1e-9)
        assert made.count[b, h, span, code] == want.count[code]

    is_sink = made.needed.is_sink[b].tolist()
    assert [key for key in of.keys() if is_sink[key]] == list(of.keys())[: of.case.sinks]
    assert made.needed.probed[b, span] == len(of.rows)
    tokens = of.stop - of.start
    assert made.needed.weight[b, span].item() * len(of.rows) == pytest.approx(tokens)


@pytest.mark.parametrize("name", CASES)
def test_prices_are_those_of_the_definition(name):
    _check(CASES[name])


# Planted faults.

Fault = Callable[[pytest.MonkeyPatch], None]


def _in_geometry(change: Callable[[Priced], Priced]) -> Fault:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = priced.priced_geometry
        patch.setattr(priced, "priced_geometry", lambda *args: change(right(*args)))

    return plant


def _in_results(twin: str, change: Callable) -> Fault:
    """change(what the twin returns)"""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(prices, twin)
        patch.setattr(prices, twin, lambda *args: change(right(*args)))

    return plant


def _in_arguments(twin: str, change: Callable) -> Fault:
    """change(what the twin is given)"""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(prices, twin)
        patch.setattr(prices, twin, lambda *args: right(*change(*args)))

    return plant


def _in_constant(name: str, value: float) -> Fault:
    return lambda patch: patch.setattr(naive, name, value)


def _stops_later(blocks: int) -> Fault:
    def change(right: Priced) -> Priced:
        return right._replace(free_stop=right.free_stop + blocks * BLOCK)

    return _in_geometry(change)


def _of_the_other_slot(right: Priced) -> Priced:
    """Two spans may touch a block: the tiles of the first one for the second, and back."""
    groups = right.tile.shape[1]
    slot = right.tile // groups
    other = (slot ^ 1) * groups + right.tile % groups
    return right._replace(tile=other.where(right.tile >= 0, right.tile))


def _own_codes(right: prices.FinalPrices) -> prices.FinalPrices:
    return right._replace(held_codes=right.held_codes[..., [1, 0, 2], :])


def _whole_sequence(
    final: prices.FinalPrices, keys: KeyBlocks, spans: prices.SpanTokens
) -> tuple[prices.FinalPrices, KeyBlocks, prices.SpanTokens]:
    start, stop = spans
    return (
        final,
        keys,
        prices.SpanTokens(torch.zeros_like(start), stop.amax(1, True).expand_as(stop)),
    )


def _priced_at_least(
    final: prices.FinalPrices, keys: KeyBlocks, spans: prices.SpanTokens
) -> tuple[prices.FinalPrices, KeyBlocks, prices.SpanTokens]:
    return final._replace(codes=final.codes.clamp(min=1)), keys, spans


FAULTS = {
    "halves weigh 1/3, all rows 2/3": ("causal", _in_constant("HELD_OUT", 1 / 3)),
    "halves alone": ("causal", _in_constant("HELD_OUT", 1.0)),
    "a half asked for its own choice": ("causal", _in_results("final_prices_naive", _own_codes)),
    "levels an octave apart": ("causal", _in_constant("OCTAVES_BETWEEN_LEVELS", 1.0)),
    "no pseudo rows": ("causal", _in_constant("PSEUDO_ROWS", 0.0)),
    "sinks that are not on": (
        "causal",
        _in_geometry(lambda right: right._replace(is_sink=torch.zeros_like(right.is_sink))),
    ),
    "a block too much is seen": ("last rows", _stops_later(1)),
    "a block too few is seen": ("causal", _stops_later(-1)),
    "tiles of the other span": ("documents", _in_geometry(_of_the_other_slot)),
    "codes of one span in another": (
        "documents",
        _in_arguments("mass_by_code_naive", _whole_sequence),
    ),
    "what has no price is counted": (
        "documents",
        _in_arguments("mass_by_code_naive", _priced_at_least),
    ),
    "masses of the next block's diagonals": (
        "causal",
        _in_arguments("diagonal_masses_naive", lambda tiles, tile: (tiles.roll(1, 2), tile)),
    ),
    "masses in fp32": (
        "causal",
        _in_results("diagonal_masses_naive", lambda masses: masses.float()),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    name, plant = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        _check(CASES[name])
