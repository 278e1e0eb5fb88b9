"""The cheapest union of verticals and block diagonals whose mass reaches the recall target (budget = "joint").

MTraining's budgets (B.1) let verticals, and diagonals, each reach the target alone; together they hold more than was asked
for. Here mass counts once, whoever computes it, and is weighed against the time that it costs a block of queries: 1 for a
diagonal, VERTICAL_COST / block_size for a vertical. Counted over the whole sequence instead, verticals near its end would cost
next to nothing, and the choice would hold the probe's mass with verticals that no other query wants (docs/patterns.md).

Of a vertical's mass the probe tells which diagonals hold it too: one for each block that the probe's rows lie in, mostly one.
Let a price be mass for cost. A vertical pays at prices below its own. A diagonal of mass D and cost 1 replaces the verticals that
it covers, of mass P and cost Q as far as they pay: it does from the price (D - P) / (1 - Q) down. Columns and diagonals are
taken from the highest price down until the target is reached, then the verticals anew beside the diagonals found. Where the
probe lies in one block that is the optimum of the linear relaxation, but for the last element; over several blocks a
vertical's cost is shared out among the diagonals that hold its mass, which is close.

On a GPU, fp32 masses go to titan_sparse/kernels/joint.py, which sorts nothing; the plain-torch twin is here.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.patterns.vertical_slash.budget import Segments
from titan_sparse.attention.patterns.vertical_slash.probe import tiles_of_diagonals
from titan_sparse.attention.patterns.vertical_slash.spans import (
    Spans,
    span_of_tokens,
    spans_of_blocks,
)
from titan_sparse.kernels import joint as kernels

VERTICAL_COST = 2.0
"""Time of a pair of tokens in gathered verticals over that of a pair in blocks, forward and backward, at 131,072 tokens on an
H200 (docs/benchmarks.md, where the time goes): 1.5 with triton's kernels, 2.4 with flex's."""
_COST_UNITS = 2.0**32
"""Costs are summed as integers too."""
_ROUNDS = 3
"""Of the search for each diagonal's price: more than two changed no choice that was tried."""


class Incidence(NamedTuple):
    """Which diagonals a vertical meets in the probe's rows; for every layer the same.

    K blocks of b tokens, T spans at a block, U blocks that the probe's rows lie in, n spans, E diagonals of all spans.
    tile: int64 [B, E U], the tiles (block, span touching it, blocks back) that make up each diagonal, K T U for none.
    diagonal: int64 [B, K, T, U], the diagonal of each tile, E for none. slot: int64 [B, K, b], which of its block's spans
    holds a vertical. segment: int64 [B, S + E], the span of each vertical and diagonal, n for none. always: bool [B, S + E], what
    is on in any case. free_verticals: int32 [B, n, 5], bounds as in Segments, of each span's verticals that are not.
    """

    tile: Tensor
    diagonal: Tensor
    slot: Tensor
    segment: Tensor
    always: Tensor
    free_verticals: Tensor

    def of_rows(self, sequence: Tensor) -> "Incidence":
        """The same for each of N rows, of these sequences [N]."""
        return Incidence(
            *(x[sequence] if len(x) > 1 else x.expand(len(sequence), *x.shape[1:]) for x in self)
        )

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Columns [., S] and diagonals [., E] of [., S + E]."""
        return x.tensor_split([self.slot[0].numel()], dim=1)

    def diagonal_sums(self, x: Tensor) -> Tensor:
        """Sums over each diagonal's verticals, [N, E], of what is told by vertical and block back, [N, K, U, b]."""
        slots = torch.arange(self.diagonal.shape[2], device=x.device)
        if len(slots) == 1:
            tiles = x.sum(-1)[:, :, None]
        else:
            tiles = (x[:, :, None] * (self.slot[:, :, None] == slots[:, None])[:, :, :, None]).sum(
                -1
            )
        back = self.diagonal.shape[3]
        return (
            torch.nn.functional.pad(tiles.flatten(1), (0, 1))
            .gather(1, self.tile)
            .unflatten(1, (-1, back))
            .sum(-1)
        )

    def of_verticals(self, x: Tensor) -> Tensor:
        """What is told by diagonal, [N, E], by vertical and block back, [N, K, U, b]; 0 where there is no diagonal."""
        tiles = (
            torch.nn.functional.pad(x, (0, 1))
            .gather(1, self.diagonal.flatten(1))
            .view(len(x), *self.diagonal.shape[1:])
        )
        if tiles.shape[2] == 1:
            return tiles.mT.expand(-1, -1, -1, self.slot.shape[2])
        return tiles.mT.gather(3, self.slot[:, :, None].expand(-1, -1, tiles.shape[3], -1))


def incidence(
    spans: Spans, segments: Segments, seq_len: int, back: int, block_size: int
) -> Incidence:
    """Of the verticals and diagonals in `segments`, n spans' verticals first; back: U."""
    n, device = spans.start.shape[1], spans.start.device
    block = torch.arange(seq_len // block_size, device=device)
    touching = spans_of_blocks(spans, block, block_size)
    known = touching.clamp(min=0).flatten(1)
    last, offset = (x.gather(1, known).view_as(touching) for x in (spans.last_block, spans.offset))
    delta = (last - block[:, None])[..., None] - torch.arange(back, device=device)
    place = torch.arange(segments.segment.shape[1], device=device)
    diagonal = torch.where(
        (touching >= 0)[..., None] & (delta >= 0), offset[..., None] + delta, len(place) - seq_len
    )
    slot = (
        span_of_tokens(spans.start, spans.stop, seq_len).unflatten(1, (-1, block_size))
        - touching[:, :, :1]
    )
    segment = segments.segment.long()
    bounds = torch.nn.functional.pad(segments.bounds.long(), (0, 0, 0, 1))
    begin, always = (bounds[..., i].gather(1, segment) for i in (0, 4))
    # Diagonals are segments n .. 2 n - 1 there.
    span = torch.where(segment < 2 * n, segment % n, n)
    first, stop, least, most, sinks = segments.bounds[:, :n].unbind(-1)
    free_verticals = torch.stack(
        [torch.minimum(first + sinks, stop), stop, least, most, torch.zeros_like(sinks)], dim=-1
    )
    return Incidence(
        tiles_of_diagonals(spans, len(block), back, block_size),
        diagonal,
        slot.clamp(0, touching.shape[2] - 1),
        span,
        (span < n) & (place < begin + always),
        free_verticals,
    )


class _Task(NamedTuple):
    """What is chosen from, in N rows: what is on in any case holds no mass here.

    mass: int64 [N, K, U, b], in units. dtype: of verticals' masses, for comparing them. of: the rows' incidence. spare: int64
    [N, n], what of a span's mass may be missing. verticals, diagonals: int64 [N, n, 5], bounds as in Segments.
    """

    mass: Tensor
    dtype: torch.dtype
    of: Incidence
    spare: Tensor
    verticals: Tensor
    diagonals: Tensor


def smallest_union(
    verticals: Tensor, segments: Segments, of: Incidence, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each span of each row, verticals and diagonals of least cost that hold `recall` of its mass together.

    verticals: float [N, K, U, b], masses by block back, at most most_mass in a span. What is on in any case counts as held;
    the bounds on counts are on what comes besides. Equal prices are taken in order of position, sums are integers: every
    run and world size chooses the same. Units are most_mass * 2**-52 (or up to twice as much).
    Returns selected bool [N, S + E] and capped bool [N, 2 n]: whether the most verticals, the most diagonals kept a span
    below its target.
    """
    if verticals.is_cuda and verticals.dtype == torch.float32:
        return smallest_union_by_kernels(verticals, segments, of, recall, most_mass)
    return smallest_union_naive(verticals, segments, of, recall, most_mass)


def smallest_union_by_kernels(
    verticals: Tensor, segments: Segments, of: Incidence, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """smallest_union() of fp32 masses."""
    geometry = kernels.Geometry(*segments, of.diagonal, of.slot, of.always, of.free_verticals)
    return kernels.smallest_union(
        verticals, geometry, recall, _scale(most_mass), VERTICAL_COST, _ROUNDS
    )


def smallest_union_naive(
    verticals: Tensor, segments: Segments, of: Incidence, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """The twin of kernels.smallest_union(): by sorting."""
    task = _task(verticals, segments, of.of_rows(segments.sequence.long()), recall, most_mass)
    with_last, without, wants_more = _diagonals(task)
    (first, short), (second, still_short) = (
        _verticals_beside(task, on) for on in (with_last, without)
    )
    cheaper = (_cost(task, second) < _cost(task, first)) & ~still_short
    cheaper = torch.nn.functional.pad(cheaper, (0, 1)).gather(1, task.of.segment)
    return torch.where(cheaper, second, first), torch.cat([short, short & wants_more], dim=1)


def _scale(most_mass: float) -> float:
    """Units in a mass of 1, such that sums of them are exact in fp64."""
    return 2.0 ** (52 - math.ceil(math.log2(most_mass)))


def _task(
    verticals: Tensor, segments: Segments, of: Incidence, recall: float, most_mass: float
) -> _Task:
    units = (verticals.double() * _scale(most_mass)).ceil().long()
    always, always_diagonals = of.split(of.always)
    on = of.of_verticals(always_diagonals) | always.view_as(of.slot)[:, :, None]
    bounds = segments.bounds.long()[segments.sequence.long()]
    vertical_bounds, diagonal_bounds = bounds.chunk(2, dim=1)
    diagonal_bounds = torch.cat(
        [diagonal_bounds[..., :2] - always.shape[1], diagonal_bounds[..., 2:]], dim=-1
    )
    total = _span_sums(of.diagonal_sums(units), diagonal_bounds)
    share = (
        (total.double() * (round(recall * 2**53) / 2**53)).ceil().long()
    )  # as finely as the kernels are told
    return _Task(
        units * ~on,
        verticals.dtype,
        of,
        (total - share).clamp(min=0),
        vertical_bounds,
        diagonal_bounds,
    )


def _span_sums(x: Tensor, bounds: Tensor) -> Tensor:
    """Sums of integers or bools [N, L] over each span's elements, int64 [N, n]; bounds: [N, n, 5]."""
    up_to = torch.nn.functional.pad(x.long().cumsum(-1), (1, 0))
    begin, stop = (bounds[..., i].clamp(0, x.shape[1]) for i in (0, 1))
    return up_to.gather(1, stop) - up_to.gather(1, begin)


class _Order(NamedTuple):
    """Elements span by span, in each from the highest price down.

    place: int64 [N, L], positions. span: int64 [N, L], n for none. first: int64 [N, n + 1], where each span begins.
    """

    place: Tensor
    span: Tensor
    first: Tensor

    def before(self, x: Tensor) -> Tensor:
        """Sum of what comes before each element in its span, int64 [N, L], of x [N, L], in order."""
        up_to = x.long().cumsum(-1) - x.long()
        return up_to - up_to.gather(1, self.first.clamp(max=x.shape[1] - 1)).gather(1, self.span)

    def of_spans(self, x: Tensor) -> Tensor:
        """x [N, n] at each element, [N, L]; 0 for none."""
        return torch.nn.functional.pad(x, (0, 1)).gather(1, self.span)

    def back(self, x: Tensor) -> Tensor:
        """In order of position again."""
        return torch.zeros_like(x).scatter_(1, self.place, x)


def _order(price: Tensor, span: Tensor, n: int) -> _Order:
    place = price.masked_fill(span == n, -2).sort(dim=-1, descending=True, stable=True).indices
    span = span.gather(1, place)
    if n > 1:
        by_span = span.sort(dim=-1, stable=True)
        place, span = place.gather(1, by_span.indices), by_span.values
    numbers = torch.arange(n + 1, device=span.device).expand(len(span), -1).contiguous()
    return _Order(place, span, torch.searchsorted(span, numbers))


def _diagonals(task: _Task) -> tuple[Tensor, Tensor, Tensor]:
    """The diagonals above the price at which the target is reached: bool [N, E], with the one that crosses it and without;
    and whether a cap kept some out, bool [N, n]. Of verticals no more count than the cap on them lets in."""
    mass, of, n = task.mass, task.of, task.spare.shape[1]
    whole = of.diagonal_sums(mass)
    pays, price = _replacing_prices(task, whole)
    allowed = _verticals(task, mass.sum(2).flatten(1), torch.zeros_like(task.spare))[0]
    held = mass * (pays & allowed.view_as(of.slot)[:, :, None])
    order = _order(
        torch.cat([_vertical_prices(mass).flatten(1), price], dim=1).masked_fill(of.always, -1),
        of.segment,
        n,
    )
    is_diagonal = order.place >= allowed.shape[1]
    gain = torch.cat([held.sum(2).flatten(1), whole - of.diagonal_sums(held)], dim=1).gather(
        1, order.place
    )
    before, rank = order.before(gain), order.before(is_diagonal)
    needed = order.of_spans(_span_sums(whole, task.diagonals) - task.spare)
    least, most = (order.of_spans(task.diagonals[..., i]) for i in (2, 3))
    wanted, floor = (
        (before < needed) & (gain > 0) & is_diagonal,
        is_diagonal & (rank < least) & (order.span < n),
    )
    choices = (wanted, wanted & (before + gain < needed))
    on = [of.split(order.back(x & (rank < most) | floor) | of.always)[1] for x in choices]
    return *on, _span_sums(of.split(order.back(wanted & (rank >= most)))[1], task.diagonals) > 0


def _vertical_prices(mass: Tensor) -> Tensor:
    """Mass for cost, fp32 [N, K, b], of verticals in units [N, K, U, b]."""
    return (mass.sum(2).double() * (mass.shape[3] / VERTICAL_COST)).float()


def _replacing_prices(task: _Task, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Which verticals pay before the diagonals that cover them do, bool [N, K, U, b], and the prices fp32 [N, E] from which
    down these diagonals are cheaper. whole: their masses.

    Newton's method, from above: the gain (D - P) - price (1 - Q) is concave in the price.
    """
    mass, of = task.mass, task.of
    cost = (
        VERTICAL_COST
        * _COST_UNITS
        / mass.shape[3]
        / mass.sum(2, keepdim=True).clamp(min=1).double()
    )
    share = (mass * cost).long()
    vertical, price = _vertical_prices(mass)[:, :, None], whole.float()
    for _ in range(_ROUNDS):
        pays = vertical > of.of_verticals(price)
        left, saved = (
            whole - of.diagonal_sums(mass * pays),
            of.diagonal_sums(share * pays).double() / _COST_UNITS,
        )
        price = torch.where(saved < 1, left / (1 - saved), price).float()
    return vertical > of.of_verticals(price), price


def _verticals(task: _Task, mass: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """The fewest verticals that hold all but spare [N, n] of these masses, int64 [N, S]: bool [N, S]; and whether the cap
    kept a span below that, bool [N, n]. Masses are rounded to the probe's dtype, those then equal are taken in order of
    position."""
    (always, _), (span, _) = task.of.split(task.of.always), task.of.split(task.of.segment)
    mass = mass.to(task.dtype)
    order = _order(mass.masked_fill(always, -1), span, spare.shape[1])
    units = mass.long()
    gain, rank = units.gather(1, order.place), order.before(torch.ones_like(units))
    wanted = (order.before(gain) < order.of_spans(_span_sums(units, task.verticals) - spare)) & (
        gain > 0
    )
    least, most = (order.of_spans(task.verticals[..., i]) for i in (2, 3))
    chosen = (wanted | (rank < least)) & (rank < most) & (order.span < spare.shape[1])
    return order.back(chosen), _span_sums(order.back(wanted & (rank >= most)), task.verticals) > 0


def _verticals_beside(task: _Task, on: Tensor) -> tuple[Tensor, Tensor]:
    """The fewest verticals that reach the target beside these diagonals, bool [N, E]: bool [N, S + E], both together; and
    whether the cap on verticals kept a span below its target, bool [N, n]."""
    chosen, short = _verticals(
        task, (task.mass * ~task.of.of_verticals(on)).sum(2).flatten(1), task.spare
    )
    return torch.cat([chosen | task.of.split(task.of.always)[0], on], dim=1), short


def _cost(task: _Task, selected: Tensor) -> Tensor:
    """Of each span's selection to a block of queries, float64 [N, n], times the block's size."""
    verticals, diagonals = (
        _span_sums(x, bounds)
        for x, bounds in zip(task.of.split(selected), (task.verticals, task.diagonals))
    )
    return VERTICAL_COST * verticals.double() + task.of.slot.shape[2] * diagonals.double()
