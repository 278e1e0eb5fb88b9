"""How many verticals or slashes are enough: the smallest sets that reach the recall.

On a GPU, fp32 masses go to the kernels of titan_sparse/kernels/budget, which sort nothing. All
others go to their plain-torch twin there.
"""

import torch
from torch import Tensor

from titan_sparse.kernels import budget as budget_kernels
from titan_sparse.kernels import compact as compact_kernels
from titan_sparse.kernels.budget import Segments


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
        return budget_kernels.smallest_sets(mass, segments, recall, most_mass)
    return budget_kernels.smallest_sets_naive(mass, segments, recall)


def compact(selected: Tensor, capacity: int, fill: int) -> Tensor:
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending.

    What is left of the capacity is filled up with `fill`.
    """
    if selected.is_cuda:
        return compact_kernels.compact(selected, capacity, fill)
    return compact_kernels.compact_naive(selected, capacity, fill)
