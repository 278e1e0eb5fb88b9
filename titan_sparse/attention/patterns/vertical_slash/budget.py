"""How many verticals or slashes are enough: the smallest sets that reach the recall."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels import compact as compact_kernels


class Segments(NamedTuple):
    """What is chosen from: n runs of neighbors among the L elements of each of B sequences.

    There are N rows of masses.
    sequence: int32 [N], the sequence of each row.
    segment: int32 [B, L], the segment of each element, n for none.
    bounds: int32 [B, n, 5]: the segment's first position, the one behind its last, the least and
        the most elements chosen, and how many of its first elements are always on. Of the two
        bounds on the count the most wins. Elements that are always on are chosen in addition.
    """

    sequence: Tensor
    segment: Tensor
    bounds: Tensor


def smallest_sets(
    mass: Tensor, segments: Segments, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each segment of each row, the fewest elements that hold `recall` of its mass.

    MTraining, appendix B.1 i.
    mass: float [N, L], not negative, at most most_mass (1 or more) in a segment. The element that
    crosses the target is included. Equal masses are taken in order of position, so that every rank
    and world size chooses the same.
    Returns selected bool [N, L] and capped bool [N, n]: whether the most kept a segment below its
    target.

    Masses are summed as integers, so that the order of additions does not matter. Their units are
    most_mass * 2**-61, or up to twice as much. Each mass is rounded up, so that any mass above 0
    counts and recall 1 takes all.
    """
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

    # [N, L]: the mass in front of each element, and the target. The sum over all of a row may
    # overflow, but not the differences inside of a segment.
    scale = 2.0 ** (61 - math.ceil(math.log2(most_mass)))
    units = (mass.gather(1, order).double() * scale).ceil().long()
    up_to = units.cumsum(-1)
    base = (up_to - units).gather(1, first)
    before = up_to - units - base
    total = up_to.gather(1, last) - base
    target = total
    if recall < 1:
        # fp64 rounds large totals, so that the share may come out above the total.
        target = (total.double() * recall).ceil().long().minimum(total)
    wanted = (before < target) & (units > 0)

    # [N, L]: the bounds of each element's segment.
    begin = bounds[..., 0].gather(1, segment)
    least = bounds[..., 2].gather(1, segment)
    most = bounds[..., 3].gather(1, segment)
    always = bounds[..., 4].gather(1, segment)
    chosen = (wanted | (rank < least)) & (rank < most)
    chosen |= order < begin + always
    chosen &= segment < n
    # In order of position again. Flat, as a GPU has no deterministic scatter over more dims.
    row = torch.arange(len(mass), device=mass.device)[:, None]
    selected = torch.zeros_like(chosen)
    selected.view(-1).scatter_(0, (row * mass.shape[1] + order).flatten(), chosen.flatten())

    # [N, n + 1]: how many wanted elements the cap left out.
    left_out = torch.zeros_like(bounds[..., 0])
    is_left_out = wanted & (rank >= most)
    place = row * (n + 1) + segment
    left_out.view(-1).scatter_add_(0, place.flatten(), is_left_out.flatten().long())
    return selected, left_out[:, :n] > 0


def compact(selected: Tensor, capacity: int, fill: int) -> Tensor:
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending.

    What is left of the capacity is filled up with `fill`.
    """
    if selected.is_cuda:
        return compact_kernels.compact(selected, capacity, fill)
    return compact_kernels.compact_naive(selected, capacity, fill)
