"""The cheapest union of verticals and diagonals that holds a share of a mass: kernels, and a twin.

smallest_union(verticals, segments, incidence, recall, most_mass) -> selected, capped

What is chosen. A mass counts once, whether a vertical or a diagonal holds it. It is weighed against
the time that it costs a block of queries: 1 for a diagonal, VERTICAL_COST / block_size for a
vertical. Call mass for cost a price. A vertical pays at prices below its own. Take a diagonal of
mass D and cost 1 and the verticals that it covers, as far as they pay: of mass P and cost Q
together. The diagonal replaces them at the price (D - P) / (1 - Q) and below. Verticals and
diagonals are taken from the highest price down until the target is reached. Then the verticals are
chosen again beside the diagonals found: once with the diagonal that crosses the target, and once
without it. The cheaper of the choices that reach the target is kept.

Where the probe lies in one block, that is the optimum of the linear relaxation, except for the last
element. Over several blocks a vertical's cost is shared out among the diagonals that hold its mass,
which is close.

The kernels sort no verticals. A program of the first ones looks at one block of verticals, and adds
what they hold to the sums of the diagonals that they meet (prices.py). Diagonals are few. They are
put in order of price, each vertical finds its place among them, and a walk along that order finds
where the target is reached (walk.py). Verticals beside the diagonals found are chosen by
kernels/budget (kernel.py). The twin (naive.py) sorts everything.

All sums are of integers, so that no order of additions shows.
"""

from titan_sparse.kernels.joint.incidence import VERTICAL_COST, Incidence
from titan_sparse.kernels.joint.kernel import smallest_union
from titan_sparse.kernels.joint.naive import smallest_union_naive

__all__ = ["VERTICAL_COST", "Incidence", "smallest_union", "smallest_union_naive"]
