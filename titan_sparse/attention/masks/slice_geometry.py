"""Geometry of slices: rectangles of queries and keys, each cut to a range of the diagonal k - q.

A slice is six integers, (q_start, q_stop, k_start, k_stop, low, high). Query q sees key k if
q_start <= q < q_stop, k_start <= k < k_stop and low <= k - q <= high. Cutting a slice along
queries, keys or diagonals gives a slice again, so blocks, ranks and documents need no special
cases.

Everything here works on plain integer tensors whose last dim holds the six numbers.
"""

import torch
from torch import Tensor

_MAX_PAIRS = 1 << 20
"""Pairs of slices that are compared at once. Bounds the memory."""
_MAX_PLACES = 1 << 8
"""Slices that are compared at once with all those that begin before they end."""


def within_runs(count: Tensor) -> Tensor:
    """0 .. count[0] - 1, then 0 .. count[1] - 1, and so on, as one int64 vector.

    Example: counts [3, 0, 2] give [0, 1, 2, 0, 1].
    """
    # Where each run begins: [0, 3, 3], and that of each place: [0, 0, 0, 3, 3].
    begin_of_run = count.cumsum(0) - count
    begin = torch.repeat_interleave(begin_of_run, count)
    place = torch.arange(len(begin), device=count.device)
    return place - begin


def tightened(slices: Tensor) -> Tensor:
    """The same slices with every number as tight as the other five make it. int64 [N, 6].

    The order stays. Slices that hold no pair of tokens are left out. The three ranges are
    differences of two integers and 0, so one round of shortest paths is enough.
    """
    tight = _tight(slices)
    return tight[_holds_any(slices, tight)]


def _tight(slices: Tensor) -> Tensor:
    q_start, q_stop, k_start, k_stop, low, high = slices.unbind(-1)
    numbers = [
        torch.maximum(q_start, k_start - high),
        torch.minimum(q_stop, k_stop - low),
        torch.maximum(k_start, q_start + low),
        torch.minimum(k_stop, q_stop + high),
        torch.maximum(low, k_start - q_stop + 1),
        torch.minimum(high, k_stop - 1 - q_start),
    ]
    return torch.stack(numbers, dim=-1)


def _holds_any(slices: Tensor, tight: Tensor) -> Tensor:
    """bool [...]: the slice holds some pair of tokens. tight: _tight(slices).

    Looks at the ranges as given too. An empty range may look nonempty once it is tightened.
    """
    holds_any = torch.ones_like(slices[..., 0], dtype=torch.bool)
    for form in (slices, tight):
        q_start, q_stop, k_start, k_stop, low, high = form.unbind(-1)
        # `high` is included in its range, the stops are not.
        holds_any &= (q_start < q_stop) & (k_start < k_stop) & (low <= high)
    return holds_any


def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Slices [..., 6] of the pairs that are in both `a` and `b`, and whether there are any, bool
    [...].

    The leading dims of `a` and `b` broadcast.
    """
    # Even places are lower bounds: both starts, and `low`. Odd places are upper bounds.
    # [..., 3] each: queries, keys, diagonals
    lower = torch.maximum(a[..., 0::2], b[..., 0::2])
    upper = torch.minimum(a[..., 1::2], b[..., 1::2])
    # [..., 3, 2] -> [..., 6]
    both = torch.stack([lower, upper], dim=-1).flatten(-2)
    tight = _tight(both)
    return tight, _holds_any(both, tight)


def intersected(a: Tensor, b: Tensor) -> Tensor:
    """int64 [N, 6]: what slices of both lists hold, pair by pair."""
    overlaps = [a[:0]]
    # A chunk of `a` against all of `b`: [n, 1, 6] against [m, 6].
    step = max(1, _MAX_PAIRS // max(1, len(b)))
    for chunk in a.split(step):
        both, any_pair = overlap(chunk[:, None], b)
        overlaps.append(both[any_pair])
    return torch.cat(overlaps)


def area(slices: Tensor) -> Tensor:
    """Pairs of tokens that each slice [..., 6] holds, int64 [...]."""
    q_start, q_stop, k_start, k_stop, low, high = slices.long().unbind(-1)
    queries = (q_stop - q_start).clamp(min=0)
    keys = (k_stop - k_start).clamp(min=0)
    # Count from the slice's own first query and first key.
    offset = k_start - q_start
    pairs = _pairs_up_to(queries, keys, high - offset)
    below_low = _pairs_up_to(queries, keys, low - offset - 1)
    return (pairs - below_low).clamp(min=0)


def _pairs_up_to(queries: Tensor, keys: Tensor, high: Tensor) -> Tensor:
    """Pairs (i, j) with 0 <= i < queries, 0 <= j < keys and j - i <= high."""
    # Count as if keys went on for ever: rows of high + 1, high + 2, ... keys.
    pairs = _triangle(high + queries) - _triangle(high)
    # Then take away the keys from `keys` on.
    beyond = high - keys
    pairs_beyond = _triangle(beyond + queries) - _triangle(beyond)
    return pairs - pairs_beyond


def _triangle(side: Tensor) -> Tensor:
    """1 + 2 + ... + side; 0 for a negative side."""
    side = side.clamp(min=0)
    return side * (side + 1) // 2


def check_disjoint(slices: Tensor) -> None:
    """Raises ValueError if two of the slices, int64 [N, 6], hold the same pair of tokens. Names
    both.

    Sweeps along queries, keys or diagonals, whichever brings fewer slices together.
    """
    tight = _tight(slices)
    kept = _holds_any(slices, tight).nonzero().flatten()
    tight = tight[kept]
    # [3, n] each: queries, keys, diagonals
    starts = tight[:, 0::2].T.contiguous()
    stops = tight[:, 1::2].T.contiguous()
    stops[2] += 1  # `high` is included in its range, the other stops are not
    sweeps = [_sweep(start, stop) for start, stop in zip(starts, stops)]
    order, following = min(sweeps, key=lambda sweep: int(sweep[1].sum()))
    for place in torch.arange(len(order), device="cpu").split(_MAX_PLACES):
        count = following[place]
        first = torch.repeat_interleave(place, count)
        second = order[first + 1 + within_runs(count)]
        first = order[first]
        # Keep the pairs of slices whose ranges meet in all three directions.
        for start, stop in zip(starts, stops):
            meet = (start[first] < stop[second]) & (start[second] < stop[first])
            first = first[meet]
            second = second[meet]
        # Meeting ranges are not enough: diagonals may leave out what they share.
        both, twice = overlap(tight[first], tight[second])
        if twice.any():
            query, _, key = both[twice][0, :3].tolist()
            one, other = sorted(int(kept[which[twice][0]]) for which in (first, second))
            raise ValueError(
                f"Slices: slice {one} and slice {other} both hold query {query}, key {key}; "
                "write them so that each pair is in one slice only"
            )


def _sweep(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The order in which ranges begin, and how many later ones begin before each of them ends."""
    start, order = start.sort()
    # How many ranges have begun where each ends, itself and those before it among them.
    begun = torch.searchsorted(start, stop[order])
    begun_before = torch.arange(1, len(order) + 1, device="cpu")
    following = (begun - begun_before).clamp(min=0)
    return order, following


def slices_of_ranges(start: Tensor, stop: Tensor) -> Tensor:
    """int64 [N, 6] on the CPU: slices that see what one sequence's int [S] start and stop see.

    Makes one slice for each run of queries whose ends stand still or move on by one.
    """
    start, stop = start.long(), stop.long()
    # [2, S - 1]: 0 where an end stands still, 1 where it moves on by one
    steps = torch.stack([start.diff(), stop.diff()])
    jump = ((steps < 0) | (steps > 1)).any(0)
    # A run also ends where one of its ends begins to move or comes to rest. Behind a jump a new
    # run begins in any case, with any steps.
    changes = (steps[:, 1:] != steps[:, :-1]).any(0)
    turn = torch.zeros_like(jump)
    turn[1:] = changes & ~jump[:-1]
    begins_run = torch.nn.functional.pad(jump | turn, (1, 0), value=True)
    # [N]: first query of each run, and the query behind its last one
    begins = begins_run.nonzero().flatten()
    ends = torch.nn.functional.pad(begins[1:], (0, 1), value=len(start))
    last = ends - 1
    # Along a run each diagonal bound changes in one direction only, so its ends are enough.
    position = torch.arange(len(start), device=start.device)
    low = start - position
    high = stop - 1 - position
    numbers = [
        begins,
        ends,
        start[begins],
        stop[last],
        torch.minimum(low[begins], low[last]),
        torch.maximum(high[begins], high[last]),
    ]
    return tightened(torch.stack(numbers, dim=-1).cpu())


def padded_table(sequences: list[Tensor]) -> Tensor:
    """int32 [Bm, N, 6] of the slices int64 [n, 6] of each sequence, filled up with empty slices.

    N is a power of two, 16 or more, so that few sizes are compiled anew.
    """
    # A list, because torch.compile cannot trace max() of a map before torch 2.14.
    most = max([len(slices) for slices in sequences], default=0)
    size = max(16, 1 << (most - 1).bit_length())
    table = torch.zeros(len(sequences), size, 6, dtype=torch.int32, device="cpu")
    # high < low: an empty slice
    table[..., 5] = -1
    for padded, slices in zip(table, sequences):
        padded[: len(slices)] = slices
    return table
