"""Prices: the marginal mass per pair of tokens at which each vertical and slash is worth its cost.

first_prices(free, keys, lse) -> prices of verticals, masses of tiles, levels
diagonal_gains(tiles, left, saved, tile, rows) -> worth of diagonals at each level
diagonal_prices(gains, cost, is_local) -> prices of diagonals, and codes
final_prices(free, keys, lse, first, diagonal, offset) -> FinalPrices
mass_by_code(final, keys, spans) -> masses and counts of verticals by code
diagonal_masses(tiles, tile) -> masses of diagonals
add_diagonals(mass, on_diagonals, codes, span, offset) -> masses of both by code, and counts
head_limits(mass, allowed, verticals, diagonals) -> codes from which on up heads take elements
taken(elements, vertical_limit, diagonal_limit) -> which these are

A price is the attention mass that one more pair of tokens holds, among the rows of a probe. A pair
of a vertical costs VERTICAL_COST and a pair of a slash costs 1, which is the time that they take.
Elements with a price above a limit are chosen, so that all heads get the most mass for their time. Rows are
split into even and odd ones. The choice of one half is tested on the other half, which gives the
recall of a limit for rows outside the probe.

Prices become codes of one byte each, in steps of 7 %. The twins in prices.naive have the same names
and signatures.
"""

from titan_sparse.kernels.prices import naive
from titan_sparse.kernels.prices.diagonals import (
    diagonal_gains,
    diagonal_masses,
    diagonal_prices,
)
from titan_sparse.kernels.prices.final import final_prices, mass_by_code
from titan_sparse.kernels.prices.first import first_prices
from titan_sparse.kernels.prices.limits import (
    Counted,
    Elements,
    HeadLimits,
    add_diagonals,
    head_limits,
    loss_allowed,
    taken,
)
from titan_sparse.kernels.prices.shared import (
    ALWAYS,
    CODES,
    CODES_PER_OCTAVE,
    LEVELS,
    PSEUDO_ROWS,
    VERTICAL_COST,
    FinalPrices,
    SpanTokens,
    codes_of,
)
