"""Any mask as slices: rectangles of queries and keys, each cut to a range of the diagonal k - q.

A slice is six integers, (q_start, q_stop, k_start, k_stop, low, high): query q sees key k if q_start <= q < q_stop,
k_start <= k < k_stop and low <= k - q <= high. Cutting a slice along queries, keys or diagonals gives a slice again,
so that blocks, ranks and documents need no cases of their own. No pair of tokens may be in two slices.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import Mask, MaskRanges

FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL = KINDS = ("full", "causal", "inv_causal", "bi_causal")
"""full: every pair. causal: aligned at the bottom right, the last query sees all keys. inv_causal: aligned at the top
left, the first query sees all keys. bi_causal: both."""

_PAIRS = 1 << 20
"""Pairs of slices looked at together."""


class Slices(Mask):
    """What the slices see, each pair of tokens in one slice at most; what no slice covers sees nothing.

    q_ranges, k_ranges: half-open (start, stop) in global tokens. types: one of KINDS for each; with sq queries and sk
    keys in the slice, query i and key j of it: causal j <= i + (sk - sq), inv_causal j >= i, bi_causal both, for sq >
    sk too (as MagiAttention's AttnSlice). Queries and keys may be shared by slices, pairs may not.
    Raises ValueError for other types, ranges that are none, and for a pair covered twice, naming the two slices.
    """

    def __init__(
        self,
        q_ranges: Sequence[tuple[int, int]],
        k_ranges: Sequence[tuple[int, int]],
        types: Sequence[str],
    ):
        if not len(q_ranges) == len(k_ranges) == len(types):
            raise ValueError(
                f"Slices: {len(q_ranges)} q_ranges, {len(k_ranges)} k_ranges and {len(types)} types; "
                "write as many of each"
            )
        for kind in set(types) - set(KINDS):
            raise ValueError(f'Slices: type "{kind}" is unknown; write one of {", ".join(KINDS)}')
        self._set([_with_diagonals(_ranges(q_ranges), _ranges(k_ranges), types)])

    @classmethod
    def of(cls, slices: Iterable[tuple[int, int, int, int, str]]) -> "Slices":
        """From (q_start, q_stop, k_start, k_stop, type) each."""
        slices = list(slices)
        return cls([x[:2] for x in slices], [x[2:4] for x in slices], [x[4] for x in slices])

    @classmethod
    def of_diagonals(cls, numbers: Sequence[Sequence[int]] | Tensor) -> "Slices":
        """From the six numbers of each slice, [N, 6]."""
        made = cls.__new__(cls)
        made._set([torch.as_tensor(numbers, dtype=torch.int64).reshape(-1, 6)])
        return made

    @classmethod
    def batch(cls, masks: Sequence["Slices"]) -> "Slices":
        """One mask of its own for each sequence of the batch."""
        made = cls.__new__(cls)
        made._set([numbers for mask in masks for numbers in mask.sequences])
        return made

    def _set(self, sequences: list[Tensor]) -> None:
        """sequences: int64 [N, 6] for each sequence."""
        for numbers in sequences:
            check_disjoint(numbers)
        self.sequences = [tightened(numbers) for numbers in sequences]
        self.extent = max((int(x[:, [1, 3]].max()) for x in self.sequences if len(x)), default=0)
        self._causal = all(bool((x[:, 5] <= 0).all()) for x in self.sequences)
        self._table = _padded(self.sequences)

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        if self.extent > seq_len:
            raise ValueError(f"Slices reach to token {self.extent}, the sequence holds {seq_len}")
        table = self._table.to(device)
        if not torch.compiler.is_compiling():  # the number of slices differs from batch to batch
            torch._dynamo.maybe_mark_dynamic(table, 1)
        ends = torch.zeros(len(table), seq_len + 1, dtype=torch.int32)
        for column, step in ((0, 1), (1, -1)):
            ends.scatter_add_(
                1, self._table[..., column].long(), torch.full_like(self._table[..., column], step)
            )
        sees = ends[:, :seq_len].cumsum(1, dtype=torch.int32) > 0
        start = torch.where(sees, 0, seq_len).int().to(device)
        return MaskRanges(
            start, torch.full_like(start, seq_len), None, causal=self._causal, slices=table
        )


def dense(rows: MaskRanges) -> Tensor:
    """bool [Bm, S, S] of rows with slices, in global order."""
    token = torch.arange(rows.start.shape[1], device=rows.start.device)
    seen = torch.zeros(
        len(rows.slices), len(token), len(token), dtype=torch.bool, device=token.device
    )
    for table, numbers in zip(seen, rows.slices.tolist()):
        for q_start, q_stop, k_start, k_stop, low, high in numbers:
            distance = token[k_start:k_stop] - token[q_start:q_stop, None]
            table[q_start:q_stop, k_start:k_stop] |= (distance >= low) & (distance <= high)
    return seen


def seen_by(rows: MaskRanges, queries: Tensor) -> Callable[[Tensor], Tensor]:
    """Of rows with slices a function from keys int [m] to what `queries` int [n] see of them, bool [Bm, n, m]."""
    q_start, q_stop, k_start, k_stop, low, high = (
        x[:, None] for x in rows.slices.long().unbind(-1)
    )
    query, seq_len = queries[:, None], rows.start.shape[1]
    start, stop = torch.maximum(k_start, query + low), torch.minimum(k_stop, query + high + 1)
    any_key = (query >= q_start) & (query < q_stop) & (start < stop)
    # No two slices overlap: the ranges of a query begin and end at different keys, and a byte holds their count.
    ends = torch.zeros(
        len(rows.slices), len(queries), seq_len + 1, dtype=torch.int8, device=queries.device
    )
    line = torch.arange(ends[..., 0].numel(), device=queries.device).view(len(ends), -1, 1) * (
        seq_len + 1
    )
    for at, step in (
        (start, 1),
        (stop, -1),
    ):  # flat: of more dimensions there is no deterministic scatter on a GPU
        place, steps = line + at.where(any_key, seq_len), any_key.to(torch.int8) * step
        ends.view(-1).scatter_add_(0, place.flatten(), steps.flatten())
    seen = ends.cumsum(-1, dtype=torch.int8) > 0
    return lambda keys: seen[..., keys]


def _ranges(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """int64 [N, 2]; ValueError for what is no range."""
    table = torch.as_tensor(ranges, dtype=torch.int64).reshape(-1, 2)
    wrong = (table[:, 0] < 0) | (table[:, 0] > table[:, 1])
    if wrong.any():
        number = int(wrong.nonzero()[0])
        raise ValueError(
            f"Slices: range {tuple(table[number].tolist())} of slice {number} is none; "
            "write 0 <= start <= stop"
        )
    return table


def _with_diagonals(q: Tensor, k: Tensor, types: Sequence[str]) -> Tensor:
    """int64 [N, 6]: causal means k - q <= k_stop - q_stop, inv_causal k - q >= k_start - q_start."""
    right = torch.tensor([kind in (CAUSAL, BI_CAUSAL) for kind in types], dtype=torch.bool)
    left = torch.tensor([kind in (INV_CAUSAL, BI_CAUSAL) for kind in types], dtype=torch.bool)
    low = torch.where(left, k[:, 0] - q[:, 0], k[:, 0] - q[:, 1] + 1)
    high = torch.where(right, k[:, 1] - q[:, 1], k[:, 1] - 1 - q[:, 0])
    return torch.cat([q, k, low[:, None], high[:, None]], dim=1)


def _padded(sequences: list[Tensor]) -> Tensor:
    """int32 [Bm, N, 6], filled up with slices of nothing to a power of two, so that little is compiled anew."""
    most = max((len(x) for x in sequences), default=0)
    table = torch.zeros(len(sequences), max(16, 1 << (most - 1).bit_length()), 6, dtype=torch.int32)
    table[..., 5] = -1
    for padded, numbers in zip(table, sequences):
        padded[: len(numbers)] = numbers
    return table


# Geometry -----------------------------------------------------------------------------------------------------------


def tightened(slices: Tensor) -> Tensor:
    """The same slices with every number as tight as the others make it, in order; those that hold no pair left out.

    int64 [N, 6]. The three ranges are differences of two integers and 0, so one round of shortest paths is enough.
    """
    tight = _tight(slices)
    return tight[_holds_any(slices, tight)]


def _tight(slices: Tensor) -> Tensor:
    q_start, q_stop, k_start, k_stop, low, high = slices.unbind(-1)
    return torch.stack(
        [
            torch.maximum(q_start, k_start - high),
            torch.minimum(q_stop, k_stop - low),
            torch.maximum(k_start, q_start + low),
            torch.minimum(k_stop, q_stop + high),
            torch.maximum(low, k_start - q_stop + 1),
            torch.minimum(high, k_stop - 1 - q_start),
        ],
        dim=-1,
    )


def _holds_any(slices: Tensor, tight: Tensor) -> Tensor:
    """bool [...]: of some pair of tokens. Looks at the ranges as given too: an empty one need not be empty when
    tight."""
    return (
        (slices[..., 0::2][..., :2] < slices[..., 1::2][..., :2]).all(-1)
        & (slices[..., 4] <= slices[..., 5])
        & (tight[..., 0] < tight[..., 1])
        & (tight[..., 2] < tight[..., 3])
        & (tight[..., 4] <= tight[..., 5])
    )


def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The slices [..., 6] of what is in both, and whether that is anything, bool [...]."""
    bounds = [(torch.minimum if i % 2 else torch.maximum)(a[..., i], b[..., i]) for i in range(6)]
    both = torch.stack(bounds, dim=-1)
    tight = _tight(both)
    return tight, _holds_any(both, tight)


def intersected(a: Tensor, b: Tensor) -> Tensor:
    """int64 [N, 6]: what slices of both lists hold, pair by pair."""
    parts = []
    for some in a.split(max(1, _PAIRS // max(1, len(b)))):
        both, any_pair = overlap(some[:, None], b)
        parts.append(both[any_pair])
    return torch.cat(parts) if parts else a[:0]


def area(slices: Tensor) -> Tensor:
    """Pairs of tokens that each slice [..., 6] holds, int64 [...]."""
    q_start, q_stop, k_start, k_stop, low, high = slices.long().unbind(-1)
    queries, keys = (q_stop - q_start).clamp(min=0), (k_stop - k_start).clamp(min=0)
    offset = k_start - q_start
    return (_below(queries, keys, high - offset) - _below(queries, keys, low - 1 - offset)).clamp(
        min=0
    )


def _below(queries: Tensor, keys: Tensor, high: Tensor) -> Tensor:
    """Pairs (i, j) with 0 <= i < queries, 0 <= j < keys and j - i <= high."""
    triangle = lambda x: x.clamp(min=0) * (x.clamp(min=0) + 1) // 2
    ends = lambda x: triangle(x + queries) - triangle(x)
    return ends(high) - ends(high - keys)


def check_disjoint(slices: Tensor) -> None:
    """ValueError if two of the slices, int64 [N, 6], hold the same pair of tokens, naming both.

    Sweeps along queries, keys or diagonals, whichever brings fewer slices together.
    """
    tight = _tight(slices)
    kept = _holds_any(slices, tight).nonzero().flatten()
    starts, stops = tight[kept, 0::2].T.contiguous(), tight[kept, 1::2].T.contiguous()
    stops[2] += 1
    axis = min(range(3), key=lambda axis: int(_sweep(starts[axis], stops[axis])[1].sum()))
    order, following = _sweep(starts[axis], stops[axis])
    for first, second in _candidates(following):
        first, second = order[first], order[second]
        for start, stop in zip(starts, stops):
            meet = (start[first] < stop[second]) & (start[second] < stop[first])
            first, second = first[meet], second[meet]
        both, twice = overlap(tight[kept[first]], tight[kept[second]])
        if twice.any():
            _refuse(
                slices,
                *sorted((int(kept[first[twice]][0]), int(kept[second[twice]][0]))),
                both[twice][0].tolist(),
            )


def _sweep(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges in the order in which they begin, and how many of those after each begin before it ends."""
    start, order = start.sort()
    reached = torch.searchsorted(start, stop[order])
    return order, (reached - torch.arange(1, len(order) + 1)).clamp(min=0)


def _candidates(following: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each place of an ordered list with the `following` ones after it, some _PAIRS at a time."""
    ends, begin = following.cumsum(0), 0
    while begin < len(following):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(torch.searchsorted(ends, done + _PAIRS, right=True)))
        count = following[begin:end]
        first = torch.repeat_interleave(torch.arange(begin, begin + len(count)), count)
        yield first, first + 1 + within_runs(count)
        begin = end


def within_runs(count: Tensor) -> Tensor:
    """0 .. count[0] - 1, 0 .. count[1] - 1, ... after each other, int64."""
    begin = torch.repeat_interleave(count.cumsum(0) - count, count)
    return torch.arange(len(begin), device=count.device) - begin


def _refuse(slices: Tensor, first: int, second: int, both: Tensor) -> None:
    says = lambda number: "{} (queries {}..{}, keys {}..{}, {} <= k - q <= {})".format(
        number, *slices[number].tolist()
    )
    raise ValueError(
        f"Slices: {says(first)} and {says(second)} both hold query {both[0]}, key {both[2]}; "
        "write them so that each pair is in one slice only"
    )


# Other masks as slices ----------------------------------------------------------------------------------------------


def slices_of_rows(start: Tensor, stop: Tensor) -> Tensor:
    """int64 [N, 6] that see what one sequence's int [S] start and stop do: a slice for each run of rows whose ends
    stand still or move on by one."""
    start, stop = start.long(), stop.long()
    steps = torch.stack([start.diff(), stop.diff()])
    jump = ((steps < 0) | (steps > 1)).any(0)
    turn = torch.zeros_like(jump)
    turn[1:] = (steps[:, 1:] != steps[:, :-1]).any(0) & ~jump[:-1]
    begins = torch.nn.functional.pad(jump | turn, (1, 0), value=True).nonzero().flatten()
    ends = torch.nn.functional.pad(begins[1:], (0, 1), value=len(start))
    position = torch.arange(len(start), device=start.device)
    low, high = start - position, stop - 1 - position
    last = ends - 1
    return tightened(
        torch.stack(
            [
                begins,
                ends,
                start[begins],
                stop[last],
                torch.minimum(low[begins], low[last]),
                torch.maximum(high[begins], high[last]),
            ],
            dim=-1,
        ).cpu()
    )


def intersected_rows(a: MaskRanges, b: MaskRanges) -> MaskRanges:
    """What both of two masks see, of which one or both have slices."""
    a_sequences, b_sequences = (_of_sequences(x, max(len(a.start), len(b.start))) for x in (a, b))
    both = [Slices.of_diagonals(intersected(x, y)) for x, y in zip(a_sequences, b_sequences)]
    return Slices.batch(both).rows(a.start.shape[1], a.start.device)


def _of_sequences(rows: MaskRanges, batch: int) -> list[Tensor]:
    """int64 [N, 6] for each of `batch` sequences."""
    if rows.slices is not None:
        found = [tightened(x) for x in rows.slices.long().cpu()]
    else:
        found = [slices_of_rows(start, stop) for start, stop in zip(rows.start, rows.stop)]
    return found * (batch if len(found) == 1 else 1)
