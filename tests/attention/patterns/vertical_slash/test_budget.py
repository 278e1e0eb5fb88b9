"""The smallest sets that hold a share of the mass, against their definition in fractions."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from titan_sparse.attention.patterns.vertical_slash.independent import Segments, smallest_sets

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST_MASS = 128


def _segments(
    lengths: list[list[int]], gap: int, limits: list[tuple[int, int, int]], rows: int, tail: int
) -> Segments:
    """Segments of these lengths, one list a sequence, before each `gap` elements of none, `tail` at the end.

    limits: (least, most, always) in turn. The rows are spread over the sequences.
    """
    total = max(sum(row) + gap * len(row) for row in lengths) + tail
    n = len(lengths[0])
    segment, bounds = (
        torch.full((len(lengths), total), n, dtype=torch.int32),
        torch.zeros(len(lengths), n, 5),
    )
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
    selected, capped = (
        torch.zeros(mass.shape).bool(),
        torch.zeros(len(mass), segments.bounds.shape[1]).bool(),
    )
    for row, sequence in enumerate(segments.sequence.tolist()):
        for d, (start, stop, least, most, always) in enumerate(segments.bounds[sequence].tolist()):
            values = mass[row].tolist()
            order = sorted(range(start, stop), key=lambda e: (-values[e], e))
            target, before, wanted = (
                Fraction(recall) * sum(Fraction(v) for v in values[start:stop]),
                Fraction(0),
                0,
            )
            while before < target:
                before += Fraction(values[order[wanted]])
                wanted += 1
            selected[row, order[: min(max(wanted, least), most)]] = True
            selected[row, start : min(start + always, stop)] = True
            capped[row, d] = wanted > most
    return selected, capped


def _masses(kind: str, segments: Segments) -> Tensor:
    rows, length = len(segments.sequence), segments.segment.shape[1]
    random = torch.rand(rows, length, generator=torch.Generator().manual_seed(length + rows))
    if kind == "random":
        mass = random**3
    elif kind == "ties":  # 7 / 256 and so on: sums are exact in any arithmetic
        return (random * 8).floor() / 256
    elif kind == "window":
        mass = random * (torch.arange(length) > length * 0.8)
    elif (
        kind == "orders of magnitude"
    ):  # the last of each segment is large: sums are as fine as MOST_MASS * 2**-61
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
    mass = _masses(kind, segments)
    for recall in (0.5, 1.0) if kind == "ties" else (0.9, 1.0):
        got = smallest_sets(mass.to(DEVICE), segments, recall, MOST_MASS)
        for a, b in zip(got, _exact(mass, segments, recall), strict=True):
            assert torch.equal(a.cpu(), b), recall


@pytest.mark.parametrize(
    "extra, recall, count", [(0.0, 0.5, 1), (2**-23, 0.5, 2), (0.0, 0.5 + 2**-53, 2)]
)
def test_a_target_that_is_just_met_or_just_missed(extra, recall, count):
    """One element of 64, 64 elements of 1: half the mass is the first, unless the last bit says otherwise."""
    mass = torch.ones(1, 65)
    mass[0, 20], mass[0, 30] = 64, 1 + extra
    segments = _segments([[65]], 0, [(0, 64, 0)], 1, 0)
    selected, _ = smallest_sets(mass.to(DEVICE), segments, recall, MOST_MASS)
    assert selected.nonzero()[:, 1].tolist() == (
        [20] if count == 1 else [20, 30] if extra else [0, 20]
    )
