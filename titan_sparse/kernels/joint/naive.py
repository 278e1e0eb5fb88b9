"""The plain-torch twin of kernel.py: the cheapest union, by sorting.

__init__.py says what is chosen, and what a price is. Below, N rows of masses (sequence and head)
are looked at together. K blocks of b tokens, S = K b verticals, T spans at a block, U blocks that
the probe's rows lie in, n spans, and E diagonals of all spans.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels.budget import Segments
from titan_sparse.kernels.joint.incidence import (
    COST_UNITS,
    ROUNDS,
    VERTICAL_COST,
    Incidence,
    mass_scale,
)


class _Problem(NamedTuple):
    """What is chosen from, in N rows. What is always on holds no mass here.

    mass: int64 [N, K, U, b], in units.
    dtype: of the probe's masses of verticals, in which they are compared.
    incidence: of the rows.
    spare: int64 [N, n], how much of a span's mass may be missing.
    verticals, diagonals: int64 [N, n, 5], bounds as in Segments.
    """

    mass: Tensor
    dtype: torch.dtype
    incidence: Incidence
    spare: Tensor
    verticals: Tensor
    diagonals: Tensor


def smallest_union_naive(
    verticals: Tensor, segments: Segments, incidence: Incidence, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """The twin of smallest_union(), for masses of any floating dtype."""
    incidence = incidence.of_rows(segments.sequence.long())
    problem = _problem(verticals, segments, incidence, recall, most_mass)

    # Two sets of diagonals, bool [N, E], and the verticals that reach the target beside each.
    with_last, without_last, wants_more = _diagonals(problem)
    first, short = _verticals_beside(problem, with_last)
    second, second_short = _verticals_beside(problem, without_last)

    # [N, n] -> [N, S + E]
    cheaper = (_cost(problem, second) < _cost(problem, first)) & ~second_short
    takes_second = F.pad(cheaper, (0, 1)).gather(1, incidence.segment)
    selected = torch.where(takes_second, second, first)
    return selected, torch.cat([short, short & wants_more], dim=1)


def _problem(
    verticals: Tensor, segments: Segments, incidence: Incidence, recall: float, most_mass: float
) -> _Problem:
    """verticals: float [N, K, U, b]. incidence: of the N rows."""
    # Rounded up: any mass above 0 weighs something, so that recall 1 takes all of them.
    units = (verticals.double() * mass_scale(most_mass)).ceil().long()
    always_verticals, always_diagonals = incidence.split(incidence.always)
    vertical_on = always_verticals.view_as(incidence.slot)[:, :, None]
    held_anyway = incidence.of_verticals(always_diagonals) | vertical_on  # [N, K, U, b]

    bounds = segments.bounds.long()[segments.sequence.long()]
    vertical_bounds, diagonal_bounds = bounds.chunk(2, dim=1)
    # Positions of diagonals are counted from the first diagonal.
    positions = diagonal_bounds[..., :2] - always_verticals.shape[1]
    diagonal_bounds = torch.cat([positions, diagonal_bounds[..., 2:]], dim=-1)

    total = _span_sums(incidence.diagonal_sums(units), diagonal_bounds)  # [N, n]
    # The recall is rounded as finely as the kernels are told.
    exact_recall = round(recall * 2**53) / 2**53
    target = (total.double() * exact_recall).ceil().long()
    return _Problem(
        mass=units * ~held_anyway,
        dtype=verticals.dtype,
        incidence=incidence,
        spare=(total - target).clamp(min=0),
        verticals=vertical_bounds,
        diagonals=diagonal_bounds,
    )


def _span_sums(values: Tensor, bounds: Tensor) -> Tensor:
    """int64 [N, n]: sums of integers or bools [N, L] over the elements of each span.

    bounds: [N, n, 5].
    """
    length = values.shape[1]
    # [N, L + 1]: the sum of all elements in front of each position.
    up_to = F.pad(values.long().cumsum(-1), (1, 0))
    # [N, n]
    begin = bounds[..., 0].clamp(0, length)
    stop = bounds[..., 1].clamp(0, length)
    return up_to.gather(1, stop) - up_to.gather(1, begin)


class _PriceOrder(NamedTuple):
    """L elements span by span, in each span from the highest price down.

    place: int64 [N, L], positions of the elements.
    span: int64 [N, L], n for none.
    first: int64 [N, n + 1], where each span begins.
    """

    place: Tensor
    span: Tensor
    first: Tensor

    def before(self, values: Tensor) -> Tensor:
        """int64 [N, L]: sum of the values before each element in its span.

        values: [N, L], in this order.
        """
        values = values.long()
        # [N, L]
        up_to = values.cumsum(-1) - values
        # [N, n + 1] -> [N, L]: the sum in front of each span.
        first = self.first.clamp(max=values.shape[1] - 1)
        base = up_to.gather(1, first).gather(1, self.span)
        return up_to - base

    def of_spans(self, values: Tensor) -> Tensor:
        """Values of spans [N, n] at each element, [N, L]; 0 for those in no span."""
        # [N, n + 1]
        values = F.pad(values, (0, 1))
        return values.gather(1, self.span)

    def by_position(self, values: Tensor) -> Tensor:
        """Values [N, L] of this order, in order of position."""
        # place is a permutation, so every position is written.
        by_position = torch.zeros_like(values)
        return by_position.scatter_(1, self.place, values)


def _order(price: Tensor, span: Tensor, n: int) -> _PriceOrder:
    """price: [N, L], -1 or more. span: int64 [N, L], n for none."""
    # [N, L], what is in no span last.
    price = price.masked_fill(span == n, -2)
    place = price.sort(dim=-1, descending=True, stable=True).indices
    span = span.gather(1, place)

    if n > 1:
        # Stably, so that prices still descend in each span.
        by_span = span.sort(dim=-1, stable=True)
        place = place.gather(1, by_span.indices)
        span = by_span.values

    # [N, n + 1]
    numbers = torch.arange(n + 1, device=span.device)
    numbers = numbers.expand(len(span), -1).contiguous()
    return _PriceOrder(place, span, torch.searchsorted(span, numbers))


def _diagonals(problem: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The diagonals above the price at which the target is reached.

    Returns bool [N, E] with the diagonal that crosses the target, the same without it, and bool [N,
    n], whether a cap kept some out. No more verticals count than the cap on them lets in.
    """
    mass = problem.mass
    incidence = problem.incidence
    n = problem.spare.shape[1]
    # [N, E]
    whole = incidence.diagonal_sums(mass)
    pays, price = _replacing_prices(problem, whole)

    # The mass that verticals hold before the diagonals take over, [N, K, U, b].
    no_spare = torch.zeros_like(problem.spare)
    allowed, _ = _verticals(problem, mass.sum(2).flatten(1), no_spare)
    held = mass * (pays & allowed.view_as(incidence.slot)[:, :, None])

    # All elements from the highest price down, those that are always on last. All [N, S + E].
    prices = torch.cat([_vertical_prices(mass).flatten(1), price], dim=1)
    order = _order(prices.masked_fill(incidence.always, -1), incidence.segment, n)
    is_diagonal = order.place >= allowed.shape[1]
    vertical_gain = held.sum(2).flatten(1)
    diagonal_gain = whole - incidence.diagonal_sums(held)
    gain = torch.cat([vertical_gain, diagonal_gain], dim=1).gather(1, order.place)

    # What comes before each element in its span: mass, and a number of diagonals.
    before = order.before(gain)
    rank = order.before(is_diagonal)

    # Diagonals are wanted while what comes before them does not reach the target.
    total = _span_sums(whole, problem.diagonals)
    needed = order.of_spans(total - problem.spare)
    least = order.of_spans(problem.diagonals[..., 2])
    most = order.of_spans(problem.diagonals[..., 3])
    wanted = (before < needed) & (gain > 0) & is_diagonal
    wanted_without_last = wanted & (before + gain < needed)
    floor = is_diagonal & (rank < least) & (order.span < n)

    # [N, S + E], in order of position, of which the diagonals count, [N, E].
    on = order.by_position((wanted & (rank < most)) | floor) | incidence.always
    on_without_last = order.by_position((wanted_without_last & (rank < most)) | floor)
    on_without_last = on_without_last | incidence.always
    _, with_last = incidence.split(on)
    _, without_last = incidence.split(on_without_last)
    _, left_out = incidence.split(order.by_position(wanted & (rank >= most)))
    return with_last, without_last, _span_sums(left_out, problem.diagonals) > 0


def _vertical_prices(mass: Tensor) -> Tensor:
    """Mass for cost, fp32 [N, K, b], of verticals in units [N, K, U, b]."""
    block_size = mass.shape[3]
    # [N, K, b]
    vertical_mass = mass.sum(2).double()
    return (vertical_mass * (block_size / VERTICAL_COST)).float()


def _replacing_prices(problem: _Problem, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The price at which each diagonal begins to replace the verticals that it covers.

    whole: int64 [N, E], masses of the diagonals. Returns bool [N, K, U, b], which verticals pay
    before the diagonals that cover them do, and the prices fp32 [N, E], at and below which the
    diagonals are cheaper.
    Newton's method, from above: the gain (D - P) - price (1 - Q) is concave in the price.
    """
    mass = problem.mass
    incidence = problem.incidence
    block_size = mass.shape[3]
    # [N, K, U, b]: a vertical's cost is shared out among its diagonals by the mass that they hold
    # of it, as integers.
    vertical_mass = mass.sum(2, keepdim=True).clamp(min=1).double()
    cost_per_mass = VERTICAL_COST * COST_UNITS / block_size / vertical_mass
    cost = (mass * cost_per_mass).long()

    # [N, K, 1, b], and [N, E]
    vertical_price = _vertical_prices(mass)[:, :, None]
    price = whole.float()
    for _ in range(ROUNDS):
        pays = vertical_price > incidence.of_verticals(price)
        left = whole - incidence.diagonal_sums(mass * pays)  # D - P
        saved = incidence.diagonal_sums(cost * pays).double() / COST_UNITS  # Q
        price = torch.where(saved < 1, left / (1 - saved), price).float()
    return vertical_price > incidence.of_verticals(price), price


def _verticals(problem: _Problem, mass: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """The fewest verticals that hold all of these masses but spare.

    mass: int64 [N, S]. spare: int64 [N, n]. Returns bool [N, S], and whether the cap kept a span
    below that, bool [N, n]. Masses are rounded to the probe's dtype; those that are then equal are
    taken in order of position.
    """
    incidence = problem.incidence
    n = spare.shape[1]
    always, _ = incidence.split(incidence.always)
    span, _ = incidence.split(incidence.segment)

    # Verticals span by span, the largest first, those that are always on last.
    mass = mass.to(problem.dtype)
    order = _order(mass.masked_fill(always, -1), span, n)

    # [N, S], in this order.
    units = mass.long()
    gain = units.gather(1, order.place)
    rank = order.before(torch.ones_like(units))
    needed = order.of_spans(_span_sums(units, problem.verticals) - spare)
    wanted = (order.before(gain) < needed) & (gain > 0)

    # [N, S]: within the bounds on the count.
    least = order.of_spans(problem.verticals[..., 2])
    most = order.of_spans(problem.verticals[..., 3])
    chosen = (wanted | (rank < least)) & (rank < most) & (order.span < n)
    # In order of position again.
    left_out = order.by_position(wanted & (rank >= most))
    return order.by_position(chosen), _span_sums(left_out, problem.verticals) > 0


def _verticals_beside(problem: _Problem, on: Tensor) -> tuple[Tensor, Tensor]:
    """The fewest verticals that reach the target beside the diagonals `on`, bool [N, E].

    Returns both together, bool [N, S + E], and whether the cap on verticals kept a span below its
    target, bool [N, n].
    """
    incidence = problem.incidence
    # [N, K, U, b]: the mass that these diagonals do not hold.
    left = problem.mass * ~incidence.of_verticals(on)
    # [N, S]
    left = left.sum(2).flatten(1)
    chosen, short = _verticals(problem, left, problem.spare)
    always, _ = incidence.split(incidence.always)
    # [N, S + E]
    return torch.cat([chosen | always, on], dim=1), short


def _cost(problem: _Problem, selected: Tensor) -> Tensor:
    """float64 [N, n]: what each span's selection costs a block of queries, times the block's size.

    selected: bool [N, S + E].
    """
    verticals, diagonals = problem.incidence.split(selected)
    # [N, n]
    vertical_count = _span_sums(verticals, problem.verticals).double()
    diagonal_count = _span_sums(diagonals, problem.diagonals).double()
    block_size = problem.incidence.slot.shape[2]
    return VERTICAL_COST * vertical_count + block_size * diagonal_count
