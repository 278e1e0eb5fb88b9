"""What prices are made from and given in: costs, levels, and codes."""

from typing import NamedTuple

import torch
from torch import Tensor

VERTICAL_COST = 2.0
"""Time of a pair of tokens in gathered verticals over that of a pair in blocks, forward and
backward.

At 131,072 tokens on an H200 (docs/benchmarks.md, where the time goes): 1.5 with Triton's kernels,
2.4 with flex's.
"""

PSEUDO_ROWS = 4.0
"""Rows without mass that are counted for each element besides those that see it. Few rows see the
last keys of a span, and a single one may give a key much mass by chance."""

HELD_OUT = 2 / 3
"""Weight of what half of the rows choose, tried on the other half. The rest is the weight of what
all rows choose, tried on themselves.

The loss that is wanted is that of all rows' choice on rows that nobody looked at. Say it is L + d,
where the best choice loses L. Half of the rows, tried on the others, lose about L + 2 d. All rows,
tried on themselves, lose about L - d. Two thirds of the one and one third of the other are L + d.
"""

SEEN_ONCE = 1 / 8
"""What the price of a vertical that half of the rows know nothing of is worth beside a diagonal.

On a narrow diagonal each row looks at a key of its own. As verticals, those keys cost less than the
diagonal, and none of them is of any use to the rows that the probe does not have.
"""

LEVELS = 16
OCTAVES_BETWEEN_LEVELS = 1.6
"""Levels are prices 2**-1, 2**-2.6, ... 2**-25. The gain of a diagonal is known at each, and
interpolated between two."""

CODES = 256
CODES_PER_OCTAVE = 10
"""Steps of 7 %. Codes 1 to 254 are prices of 2**-25.4 to 1."""
ALWAYS = CODES - 1
"""The code of what is on in any case."""


class SpanTokens(NamedTuple):
    """Where spans begin and end, int32 [B, n] each."""

    start: Tensor
    stop: Tensor


class FinalPrices(NamedTuple):
    """What final_prices() returns, of a rank's keys.

    codes: uint8 [B, Hq, n_local, b], of verticals.
    held: fp32 [B, Hq, n_local, 3, b], mass that verticals hold: of the probe's even rows, of its
        odd rows, and of all. They weigh HELD_OUT, HELD_OUT and 1 - HELD_OUT.
    held_codes: uint8 [B, Hq, n_local, 3, b], from which code on down they do: that of the odd rows,
        that of the even rows, and that of all.
    tiles: fp32 [B, Hq, n_local, T, U], mass by group of rows that diagonals hold, weighed alike.
    """

    codes: Tensor
    held: Tensor
    held_codes: Tensor
    tiles: Tensor


def level_prices(like: Tensor) -> Tensor:
    """The prices of all levels, descending, [L] in the dtype of `like`."""
    level = torch.arange(LEVELS, dtype=like.dtype, device=like.device)
    return torch.exp2(-1 - OCTAVES_BETWEEN_LEVELS * level)


def codes_of(prices: Tensor) -> Tensor:
    """uint8 codes of prices, 0 for those below all codes; infinite prices are always on."""
    code = torch.floor(prices.log2() * CODES_PER_OCTAVE) + ALWAYS
    code = code.clamp(0, ALWAYS - 1)
    return torch.where(prices == torch.inf, ALWAYS, code).to(torch.uint8)
