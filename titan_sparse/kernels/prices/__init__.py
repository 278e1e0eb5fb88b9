"""Prices: at which marginal mass for a pair of tokens each vertical and diagonal is worth it.

first_prices(probe, keys, lse, always, seq_len) -> prices of verticals, masses of tiles, levels
diagonal_gains(tiles, left, saved, tile, rows) -> worth of diagonals at each level
diagonal_prices(gains, cost, seq_len) -> prices of diagonals
final_prices(probe, keys, lse, always, first, diagonal, offset) -> codes, masses, counts

A price is the attention mass that one more pair of tokens holds, among the rows of a probe. A pair
of a vertical costs VERTICAL_COST, one of a diagonal 1, as that is the time that they take. What has
a price above a limit is chosen, so that all heads get the most mass for their time. Rows are even
and odd in turns. What one half would choose is tried on the other, so that the recall that a limit
gives is known for rows that nobody looked at.

Prices become codes, a byte each with steps of 7 %. The twins (naive.py) have the same signatures.
"""

from titan_sparse.kernels.prices.inputs import (
    ALWAYS,
    CODES,
    CODES_PER_OCTAVE,
    LEVELS,
    MASS_UNITS,
    PSEUDO_ROWS,
    VERTICAL_COST,
    AlwaysOn,
    codes_of,
)
from titan_sparse.kernels.prices.kernel import (
    diagonal_gains,
    diagonal_prices,
    final_prices,
    first_prices,
)
from titan_sparse.kernels.prices.naive import (
    diagonal_gains_naive,
    diagonal_prices_naive,
    final_prices_naive,
    first_prices_naive,
)

__all__ = [
    "ALWAYS",
    "CODES",
    "CODES_PER_OCTAVE",
    "LEVELS",
    "MASS_UNITS",
    "PSEUDO_ROWS",
    "VERTICAL_COST",
    "AlwaysOn",
    "codes_of",
    "diagonal_gains",
    "diagonal_gains_naive",
    "diagonal_prices",
    "diagonal_prices_naive",
    "final_prices",
    "final_prices_naive",
    "first_prices",
    "first_prices_naive",
]
