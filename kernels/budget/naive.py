"""The plain-torch twin of kernel.py: the smallest sets, by sorting."""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels.budget.segments import Segments


def smallest_sets_naive(mass: Tensor, segments: Segments, recall: float) -> tuple[Tensor, Tensor]:
    """The twin of smallest_sets(): by sorting, sums in fp64, of masses of any floating dtype.

    It needs no bound on the masses.
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
