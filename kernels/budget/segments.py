"""What a budget is spent on: runs of neighboring elements, each with bounds on what is chosen."""

from typing import NamedTuple

from torch import Tensor


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
