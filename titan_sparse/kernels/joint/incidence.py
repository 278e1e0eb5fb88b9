"""Which diagonals each vertical meets, and what both cost."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

VERTICAL_COST = 2.0
"""Time of a pair of tokens in gathered verticals over that of a pair in blocks, forward and
backward.

At 131,072 tokens on an H200 (docs/benchmarks.md, where the time goes): 1.5 with Triton's kernels,
2.4 with flex's.
"""

ROUNDS = 3
"""Of the search for each diagonal's price: more than two changed no choice that was tried."""

COST_UNITS = 2.0**32
"""Costs are summed as integers too: these many are the cost of a diagonal."""


def mass_scale(most_mass: float) -> float:
    """Units in a mass of 1, chosen so that sums of them are exact in fp64."""
    # fp64 has 53 bits.
    bits_before_the_point = math.ceil(math.log2(most_mass))
    return 2.0 ** (52 - bits_before_the_point)


class Incidence(NamedTuple):
    """Which diagonals each vertical meets in the probe's rows, the same for every layer.

    Of B sequences.
    tile: int64 [B, E U], the tiles (block, span touching it, blocks back) that make up each
        diagonal, K T U for none.
    diagonal: int64 [B, K, T, U], the diagonal of each tile, E for none.
    slot: int64 [B, K, b], which of its block's spans holds a vertical.
    segment: int64 [B, S + E], the span of each vertical and diagonal, n for none.
    always: bool [B, S + E], what is always on.
    free_verticals: int32 [B, n, 5], bounds as in Segments, of each span's verticals that are not
        always on.
    """

    tile: Tensor
    diagonal: Tensor
    slot: Tensor
    segment: Tensor
    always: Tensor
    free_verticals: Tensor

    def of_rows(self, sequence: Tensor) -> "Incidence":
        """The same for each of N rows, which belong to the sequences int64 [N]."""
        fields = []
        for field in self:
            if len(field) > 1:
                fields.append(field[sequence])
            else:
                # A single sequence: a view takes no memory.
                fields.append(field.expand((len(sequence), *field.shape[1:])))
        return Incidence._make(fields)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of verticals [., S] and of diagonals [., E], from [., S + E]."""
        # S = K b
        vertical_count = self.slot[0].numel()
        return values.tensor_split([vertical_count], dim=1)

    def diagonal_sums(self, values: Tensor) -> Tensor:
        """Sums [N, E] over each diagonal's verticals, of values by block back [N, K, U, b]."""
        _, _, touching, back = self.diagonal.shape
        # [N, K, T, U]
        if touching == 1:
            tiles = values.sum(-1)[:, :, None]
        else:
            numbers = torch.arange(touching, device=values.device)
            in_slot = self.slot[:, :, None] == numbers[:, None]  # [N, K, T, b]
            tiles = (values[:, :, None] * in_slot[:, :, :, None]).sum(-1)
        # The tile behind the last stands for none.
        tiles = F.pad(tiles.flatten(1), (0, 1))
        # [N, E, U]
        tiles = tiles.gather(1, self.tile).unflatten(1, (-1, back))
        return tiles.sum(-1)

    def of_verticals(self, values: Tensor) -> Tensor:
        """Values of diagonals, [N, E], by vertical and block back, [N, K, U, b].

        0 where there is no diagonal.
        """
        _, _, touching, back = self.diagonal.shape
        # [N, E + 1]
        values = F.pad(values, (0, 1))
        # [N, K, T, U] -> [N, K, U, T]
        tiles = values.gather(1, self.diagonal.flatten(1))
        tiles = tiles.view(len(values), -1, touching, back).mT

        # [N, K, U, b]
        if touching == 1:
            return tiles.expand(-1, -1, -1, self.slot.shape[2])
        slot = self.slot[:, :, None].expand(-1, -1, back, -1)
        return tiles.gather(3, slot)
