"""How many verticals or diagonals are enough: the smallest sets that reach the recall.

On a GPU, fp32 masses go to titan_sparse/kernels/budget.py, which sorts nothing; the plain-torch
twins are here.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels import budget as kernels


class Segments(NamedTuple):
    """What is chosen from: n runs of neighbors among the L elements of each of B sequences.

    There are N rows of masses.
    sequence: int32 [N], the sequence of each row.
    segment: int32 [B, L], the segment of each element, n for none.
    bounds: int32 [B, n, 5]: the segment's first position, the one behind its last, the least and
        the most elements chosen, and how many of its first elements are always on.
    """

    sequence: Tensor
    segment: Tensor
    bounds: Tensor


def smallest_sets(
    mass: Tensor, segments: Segments, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each segment of each row, the fewest elements that hold `recall` of its mass.

    MTraining, appendix B.1 i.
    mass: float [N, L], not negative, at most most_mass in a segment. The element that crosses the
    target is included. Equal masses are taken in order of position, so that every rank and world
    size chooses the same. Of the two bounds on the count the most wins. Elements that are always on
    are chosen in addition.
    Returns selected bool [N, L] and capped bool [N, n]: whether the most kept a segment below its
    target.
    """
    if mass.is_cuda and mass.dtype == torch.float32:
        return kernels.smallest_sets(
            mass, segments.sequence, segments.segment, segments.bounds, recall, most_mass
        )
    return smallest_sets_naive(mass, segments, recall)


def smallest_sets_naive(mass: Tensor, segments: Segments, recall: float) -> tuple[Tensor, Tensor]:
    """The twin of kernels.smallest_sets(): by sorting, sums in fp64."""
    n = segments.bounds.shape[1]
    # [N, L]
    row_segment = segments.segment.long()[segments.sequence]
    # [N, n + 1, 5]: the last segment is that of elements without one.
    bounds = F.pad(segments.bounds.long(), (0, 0, 0, 1))
    bounds = bounds[segments.sequence]

    # By mass, then stably by segment: each segment's elements lie together, the largest first. All
    # [N, L].
    by_mass = mass.sort(dim=-1, descending=True, stable=True).indices
    by_segment = row_segment.gather(1, by_mass).sort(dim=-1, stable=True)
    order = by_mass.gather(1, by_segment.indices)
    segment = by_segment.values

    # [N, L]: where each element's segment begins and ends in this order.
    first = torch.searchsorted(segment, segment)
    last = torch.searchsorted(segment, segment, right=True) - 1
    rank = torch.arange(mass.shape[1], device=mass.device) - first

    # [N, L]: the mass up to each element, and in front of its segment.
    sorted_mass = mass.gather(1, order).double()
    up_to = sorted_mass.cumsum(-1)
    base = (up_to - sorted_mass).gather(1, first)
    # The total is read off the same running sum, so that elements without mass never look as if
    # they were missing.
    total = up_to.gather(1, last) - base
    target = recall * total
    wanted = (up_to - sorted_mass - base < target) & (sorted_mass > 0)

    # [N, L]: the bounds of each element's segment.
    begin = bounds[..., 0].gather(1, segment)
    least = bounds[..., 2].gather(1, segment)
    most = bounds[..., 3].gather(1, segment)
    always = bounds[..., 4].gather(1, segment)
    chosen = (wanted | (rank < least)) & (rank < most)
    chosen |= order < begin + always
    chosen &= segment < n
    # In order of position again.
    selected = torch.zeros_like(chosen).scatter_(1, order, chosen)

    # [N, n + 1]: how many wanted elements the cap left out.
    left_out = torch.zeros_like(bounds[..., 0])
    left_out.scatter_add_(1, segment, (wanted & (rank >= most)).long())
    return selected, left_out[:, :n] > 0


def compact(selected: Tensor, capacity: int, fill: int) -> Tensor:
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending.

    What is left of the capacity is filled up with `fill`.
    """
    if selected.is_cuda:
        return kernels.compact(selected, capacity, fill)
    return compact_naive(selected, capacity, fill)


def compact_naive(selected: Tensor, capacity: int, fill: int) -> Tensor:
    """The twin of kernels.compact()."""
    # [N, L]
    rank = selected.long().cumsum(-1) - 1
    slot = torch.where(selected & (rank < capacity), rank, capacity)
    # [L]
    position = torch.arange(selected.shape[1], dtype=torch.int32, device=selected.device)

    # [N, capacity + 1]: the last slot takes what is not selected, or does not fit, and is cut off.
    shape = (len(selected), capacity + 1)
    positions = torch.full(shape, fill, dtype=torch.int32, device=selected.device)
    positions.scatter_(1, slot, position.expand_as(slot))
    return positions[:, :capacity].contiguous()
