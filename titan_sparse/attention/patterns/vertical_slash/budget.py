"""How many verticals or diagonals are enough: the smallest sets whose mass reaches the recall target.

On a GPU, fp32 masses go to titan_sparse/kernels/budget.py, which sorts nothing; the plain-torch twins are here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.kernels import budget as kernels


class Segments(NamedTuple):
    """What is chosen from: n runs of neighbours among the L elements of each of B sequences; N rows of masses.

    sequence: int32 [N], of each row. segment: int32 [B, L], of each element, n for none. bounds: int32 [B, n, 5]: first
    position, the one behind the last, least and most elements chosen, and how many of the first are always on.
    """

    sequence: Tensor
    segment: Tensor
    bounds: Tensor


def smallest_sets(
    mass: Tensor, segments: Segments, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each segment of each row, the fewest elements that hold `recall` of the segment's mass (MTraining, B.1 i).

    mass: float [N, L], not negative, at most most_mass in a segment. The element that crosses the target is included;
    equal masses are taken in order of position, so that every rank and world size chooses the same. Of the bounds on
    the count the most wins. What is always on comes besides.
    Returns selected bool [N, L] and capped bool [N, n]: whether the most kept a segment below its target.
    """
    if mass.is_cuda and mass.dtype == torch.float32:
        return kernels.smallest_sets(mass, *segments, recall, most_mass)
    return smallest_sets_naive(mass, segments, recall)


def smallest_sets_naive(mass: Tensor, segments: Segments, recall: float) -> tuple[Tensor, Tensor]:
    """The twin of kernels.smallest_sets(): by sorting, sums in fp64."""
    n, position = segments.bounds.shape[1], torch.arange(mass.shape[1], device=mass.device)
    element_segment = segments.segment.long()[segments.sequence]
    bounds = torch.nn.functional.pad(segments.bounds.long(), (0, 0, 0, 1))[segments.sequence]
    order = mass.sort(dim=-1, descending=True, stable=True).indices
    by_segment = element_segment.gather(1, order).sort(dim=-1, stable=True)
    order, segment = order.gather(1, by_segment.indices), by_segment.values
    sorted_mass = mass.gather(1, order).double()
    up_to = sorted_mass.cumsum(-1)
    first = torch.searchsorted(segment, segment)
    last = torch.searchsorted(segment, segment, right=True) - 1
    base = (up_to - sorted_mass).gather(1, first)
    # The total is read off the same running sum, so that elements without mass never look as if they were missing.
    target = recall * (up_to.gather(1, last) - base)
    wanted = (up_to - sorted_mass - base < target) & (sorted_mass > 0)
    rank = position - first
    begin, _, least, most, always = (x.gather(1, segment) for x in bounds.unbind(-1))
    chosen = (wanted | (rank < least)) & (rank < most) | (order < begin + always)
    cut_off = torch.zeros_like(bounds[..., 0]).scatter_add_(
        1, segment, (wanted & (rank >= most)).long()
    )
    chosen &= segment < n
    return torch.zeros_like(chosen).scatter_(1, order, chosen), cut_off[:, :n] > 0


def compact(selected: Tensor, capacity: int, fill: int) -> Tensor:
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending, filled up with `fill`."""
    return (
        kernels.compact(selected, capacity, fill)
        if selected.is_cuda
        else compact_naive(selected, capacity, fill)
    )


def compact_naive(selected: Tensor, capacity: int, fill: int) -> Tensor:
    """The twin of kernels.compact()."""
    rank = selected.long().cumsum(-1) - 1
    slot = torch.where(selected & (rank < capacity), rank, capacity)
    positions = torch.arange(
        selected.shape[1], dtype=torch.int32, device=selected.device
    ).expand_as(slot)
    out = torch.full((len(selected), capacity + 1), fill, dtype=torch.int32, device=selected.device)
    out.scatter_(1, slot, positions)
    return out[:, :capacity].contiguous()
