"""What prices are made from and given in: what is on in any case, levels, and codes."""

import math
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
"""Rows without mass that each element is seen by besides. Few rows see the last keys of a span, and
a single one may give a key much mass by chance."""

LEVELS = 16
"""Prices at which the gain of a diagonal is known; between two of them it is interpolated."""

CODES = 256
CODES_PER_OCTAVE = 10
"""Steps of 7 %. Codes 1 to 254 are prices of 2**-25.4 to 1."""
ALWAYS = CODES - 1
"""The code of what is on in any case."""

MASS_UNITS = 2.0**32
"""Masses are summed as integers, so that no order of additions shows. These many are a mass of
1."""


class AlwaysOn(NamedTuple):
    """What is selected in any case, and therefore has no price.

    local: the nearest block diagonals.
    start, behind_sinks, stop: int32 [B, n], where each span begins, where its sinks end, and where
        it ends.
    """

    local: int
    start: Tensor
    behind_sinks: Tensor
    stop: Tensor


def octaves_between_levels(seq_len: int) -> float:
    """Levels are prices 2**-1, 2**-(1 + this), ... down to an eighth of a pair's mean mass."""
    return (math.log2(seq_len) + 2) / (LEVELS - 1)


def level_prices(seq_len: int, like: Tensor) -> Tensor:
    """The prices of all levels, descending, [L] in the dtype of `like`."""
    level = torch.arange(LEVELS, dtype=like.dtype, device=like.device)
    return torch.exp2(-1 - octaves_between_levels(seq_len) * level)


def codes_of(prices: Tensor) -> Tensor:
    """uint8 codes of prices, 0 for those below all codes; infinite prices are always on."""
    code = torch.floor(prices.log2() * CODES_PER_OCTAVE) + ALWAYS
    code = code.clamp(0, ALWAYS - 1)
    return torch.where(prices == torch.inf, ALWAYS, code).to(torch.uint8)
