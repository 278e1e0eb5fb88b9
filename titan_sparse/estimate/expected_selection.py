"""The index of vertical_slash that synthetic heads (synthetic.py) lead to, from expected masses.

The sequence is one causal document. Tensors of D dims are not needed, so that millions of tokens take
seconds. What a row gives to an ordinary key depends on their distance in blocks, and what it gives to
an outlier on nothing. All rows of a block are alike, and so are its keys but for their noise.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.patterns.vertical_slash.budget import compact
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlash
from titan_sparse.estimate.synthetic import (
    Heads,
    draw_key_factors,
    expected_logits,
    expected_outlier_logit,
)
from titan_sparse.kernels.prices import ALWAYS, CODES_PER_OCTAVE, PSEUDO_ROWS, VERTICAL_COST


class Masses(NamedTuple):
    """What the probe's rows give to K = S / b blocks of keys; float64, in units of its own for each
    head.

    ordinary: [Hq, K], what a row gives an ordinary key, by their distance in blocks.
    outlier: [Hq, 1], what it gives an outlier.
    factor: float32 [Hq, S], by what noise multiplies the mass of a key.
    is_outlier: bool [Hq, S].
    rows: [K], the probe's rows in each block. weight: [Hq, K], rows over the sum of what each gives.
    """

    ordinary: Tensor
    outlier: Tensor
    factor: Tensor
    is_outlier: Tensor
    rows: Tensor
    weight: Tensor

    def of_keys(self, is_used: Tensor) -> Tensor:
        """Masses of all keys on the diagonals that are used, bool [Hq, K]: float32 [Hq, S]."""
        ordinary = over_diagonals(self.ordinary * is_used, self.weight)
        outlier = self.outlier * over_diagonals(is_used.double(), self.weight)
        block_size = self.factor.shape[1] // len(self.rows)
        by_block = torch.stack([ordinary, outlier]).float()
        of_ordinary, of_outlier = by_block.repeat_interleave(block_size, -1)
        return self.factor * torch.where(self.is_outlier, of_outlier, of_ordinary)

    def of_diagonals(self) -> Tensor:
        """Masses of all diagonals, the nearest first: float32 [Hq, K]."""
        block_size = self.factor.shape[1] // len(self.rows)
        outliers = self.is_outlier.unflatten(1, (-1, block_size)).sum(-1).double()
        of_outliers = self.outlier * over_diagonals(outliers, self.weight)
        of_ordinary = self.ordinary * _from_here_on(self.weight) * block_size
        return (of_ordinary + of_outliers).float()


def over_diagonals(value: Tensor, weight: Tensor) -> Tensor:
    """sum over d of value[d] weight[i + d], for all i: float64 [..., K] each."""
    count = value.shape[-1]
    product = torch.fft.rfft(value, 2 * count).conj() * torch.fft.rfft(weight, 2 * count)
    return torch.fft.irfft(product, 2 * count)[..., :count].clamp(min=0)


def _from_here_on(value: Tensor) -> Tensor:
    """Sums of [..., K] from each element to the last."""
    return value.flip(-1).cumsum(-1).flip(-1)


def expected_masses(heads: Heads, pattern: VerticalSlash, block_size: int) -> Masses:
    """Masses as the probe of `pattern` sees them. seq_len is a multiple of block_size."""
    blocks = heads.seq_len // block_size
    # 16 distances stand for a block.
    stride = max(1, block_size // 16)
    logits = expected_logits(heads, torch.arange(0, heads.seq_len, stride))
    outlier_logit = expected_outlier_logit(heads)[:, None]
    largest = torch.maximum(logits.amax(-1, keepdim=True), outlier_logit)
    mass = (logits - largest).exp().unflatten(-1, (blocks, -1))
    # [Hq, K]. A row anywhere in its block sees a key that is d blocks away at d - 1 to d + 1 blocks.
    count = mass.shape[-1]
    part = (torch.arange(count) + 0.5) / count
    beyond = (mass * (1 - part)).mean(-1)
    before = (mass * part).mean(-1)
    ordinary = beyond + F.pad(before[:, :-1], (1, 0))
    outlier = (outlier_logit - largest).exp()

    positions = heads.outliers.repeat_interleave(heads.group_size, 0)
    is_outlier = torch.zeros(len(ordinary), heads.seq_len, dtype=torch.bool)
    is_outlier.scatter_(1, positions, True)
    outliers = is_outlier.unflatten(1, (blocks, -1)).sum(-1)
    # [Hq, K]: what a row of each block gives to all keys.
    total = ordinary.cumsum(-1) * block_size + outlier * outliers.cumsum(-1)

    queries = pattern.probe_queries(block_size)
    rows = torch.zeros(blocks, dtype=torch.float64)
    last = {"spread": 0, "both": queries // 4, "last": queries}[pattern.probe_rows]
    rows += (queries - last) / blocks
    rows[-1] += last
    return Masses(ordinary, outlier, draw_key_factors(heads), is_outlier, rows, rows / total)


def expected_selection(heads: Heads, pattern: VerticalSlash, block_size: int = 128) -> list[Tensor]:
    """What pattern.select() would choose for these heads: the tensors that pattern.index() takes.

    seq_len has to be a multiple of block_size.
    """
    masses = expected_masses(heads, pattern, block_size)
    if pattern.budget == "independent":
        chosen = _independent(masses, pattern)
    else:
        chosen = _priced(masses, pattern)
    (verticals, verticals_capped), (slashes, slashes_capped) = chosen
    capacity = pattern.vertical_capacity(heads.seq_len, block_size, False)
    positions = compact(verticals, capacity, heads.seq_len)
    capped = torch.stack([verticals_capped, slashes_capped], dim=-1)
    return [slashes[None], positions[None], capped[None]]


_Chosen = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Verticals bool [Hq, S] and diagonals bool [Hq, K], each with whether its cap cut it, bool [Hq]."""


def _independent(masses: Masses, pattern: VerticalSlash) -> _Chosen:
    """As vertical_slash/independent.py chooses."""
    of_diagonals = masses.of_diagonals()
    of_keys = masses.of_keys(torch.ones_like(of_diagonals, dtype=torch.bool))
    verticals = _bounded(
        of_keys,
        _reaching(of_keys, pattern.recall),
        pattern.min_columns,
        pattern.max_columns,
        pattern.sinks,
    )
    slashes = _bounded(
        of_diagonals,
        _reaching(of_diagonals, pattern.recall),
        pattern.min_slashes,
        pattern.max_slashes or of_diagonals.shape[1],
        pattern.local_diagonals,
    )
    return verticals, slashes


def _priced(masses: Masses, pattern: VerticalSlash) -> _Chosen:
    """As vertical_slash/priced.py chooses: above the highest price that leaves the recall."""
    blocks = len(masses.rows)
    block_size = masses.factor.shape[1] // blocks
    local = pattern.local_diagonals
    seen_by = _from_here_on(masses.rows) + PSEUDO_ROWS
    of_diagonal = masses.ordinary * _from_here_on(masses.weight) / seen_by
    # What is on in any case has no price.
    of_diagonal[:, :local] = 0

    def left_at(limit: Tensor) -> tuple[Tensor, Tensor]:
        """Masses that diagonals of lower prices leave to keys, and prices of those: [Hq, S]."""
        is_off = of_diagonal < limit
        is_off[:, :local] = False
        mass = masses.of_keys(is_off)
        mass[:, : pattern.sinks] = 0
        rows = over_diagonals(is_off.double(), masses.rows) + PSEUDO_ROWS
        per_mass = (1 / (VERTICAL_COST * rows)).float()
        return mass, mass * per_mass.repeat_interleave(block_size, -1)

    def of_heads(mass: Tensor) -> Tensor:
        """Sums of [Hq, S]; with one price for the layer, their mean for each head: float64 [Hq, 1]."""
        of_head = mass.sum(-1, keepdim=True, dtype=torch.float64)
        return of_head.mean(0).expand_as(of_head) if pattern.budget == "layer" else of_head

    def lost_at(limit: Tensor) -> Tensor:
        mass, price = left_at(limit)
        return of_heads(mass * (price < limit))

    counted = masses.of_keys(torch.ones_like(of_diagonal, dtype=torch.bool))
    if not pattern.count_sinks:
        counted[:, : pattern.sinks] = 0
    held = of_heads(counted)
    limit = _highest_price(lost_at, (1 - pattern.recall) * held)
    _, price = left_at(limit)
    slashes = _bounded(
        of_diagonal,
        of_diagonal >= limit,
        pattern.min_slashes,
        pattern.max_slashes or blocks,
        local,
    )
    verticals = _bounded(
        price, price >= limit, pattern.min_columns, pattern.max_columns, pattern.sinks
    )
    return verticals, slashes


def _highest_price(lost: Callable[[Tensor], Tensor], allowed: Tensor) -> Tensor:
    """The highest price, [Hq, 1], at which no more is lost than allowed, [Hq, 1]; 0 if there is none.

    In the steps of kernels/prices, by bisection.
    """
    low = torch.zeros_like(allowed, dtype=torch.int64)
    high = torch.full_like(low, ALWAYS)
    while (low < high).any():
        middle = (low + high + 1) // 2
        is_enough = lost(_price(middle)) <= allowed
        low = torch.where(is_enough, middle, low)
        high = torch.where(is_enough, high, middle - 1)
    return _price(low)


def _price(code: Tensor) -> Tensor:
    """The least price of a code (kernels.prices.codes_of)."""
    price = torch.exp2((code - ALWAYS) / CODES_PER_OCTAVE)
    return torch.where(code > 0, price, 0.0)


def _reaching(mass: Tensor, recall: float) -> Tensor:
    """bool [Hq, L]: of each row of `mass`, the fewest elements that hold this share of it."""
    order = mass.sort(dim=-1, descending=True, stable=True)
    descending = order.values.double()
    # In fp64, because fp32 sums over a million keys lose the small ones.
    before = descending.cumsum(-1) - descending
    target = recall * descending.sum(-1, keepdim=True)
    wanted = (before < target) & (descending > 0)
    return torch.zeros_like(wanted).scatter_(1, order.indices, wanted)


def _bounded(
    value: Tensor, wanted: Tensor, least: int, most: int, always: int
) -> tuple[Tensor, Tensor]:
    """What is wanted, bool [Hq, L], within bounds; and whether `most` kept it short, bool [Hq].

    value: [Hq, L]; the largest are chosen first. least, most: bounds on the count. always: so
    many first ones are selected besides.
    """
    order = value.argsort(dim=-1, descending=True, stable=True)
    wanted = wanted.gather(1, order)
    place = torch.arange(value.shape[1])
    within_most = place < most
    chosen = (wanted | (place < least)) & within_most
    capped = (wanted & ~within_most).any(-1)
    selected = torch.zeros_like(chosen).scatter_(1, order, chosen)
    return selected | (place < always), capped
