"""How many columns or diagonals are enough: the smallest sets whose mass reaches the recall target."""

import torch
from torch import Tensor


def smallest_sets(mass: Tensor, segment: Tensor, recall: float, minimum: int, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """For each segment of each row, the fewest elements that hold `recall` of the segment's mass (MTraining, B.1 i).

    mass: float [N, L], not negative. segment: int64 [N, L], which of n segments an element belongs to, n for none.
    minimum, maximum (int64 [N, n]): bounds on the count, the maximum winning. The element that crosses the target is
    included; equal masses are taken in order of position, so that every rank and world size chooses the same.
    Returns selected bool [N, L] and capped bool [N]: whether the maximum kept some segment below its target.
    """
    order = mass.sort(dim=-1, descending=True, stable=True).indices
    by_segment = segment.gather(1, order).sort(dim=-1, stable=True)
    order, segment = order.gather(1, by_segment.indices), by_segment.values
    sorted_mass = mass.gather(1, order).double()
    up_to = sorted_mass.cumsum(-1)
    first = torch.searchsorted(segment, segment)
    last = torch.searchsorted(segment, segment, right=True) - 1
    base = (up_to - sorted_mass).gather(1, first)
    # The total is read off the same running sum, so that elements without mass never look as if they were missing.
    target = recall * (up_to.gather(1, last) - base)
    wanted = (up_to - sorted_mass - base < target) & (sorted_mass > 0)
    rank = torch.arange(mass.shape[1], device=mass.device) - first
    limit = torch.nn.functional.pad(maximum, (0, 1)).gather(1, segment)
    chosen = (wanted | (rank < minimum)) & (rank < limit)
    capped = (wanted & (rank >= limit) & (segment < maximum.shape[1])).any(-1)
    return torch.zeros_like(chosen).scatter_(1, order, chosen), capped


def compact(selected: Tensor, capacity: int, fill: int) -> Tensor:
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending, filled up with `fill`."""
    rank = selected.long().cumsum(-1) - 1
    slot = torch.where(selected & (rank < capacity), rank, capacity)
    positions = torch.arange(selected.shape[1], dtype=torch.int32, device=selected.device).expand_as(slot)
    out = torch.full((len(selected), capacity + 1), fill, dtype=torch.int32, device=selected.device)
    out.scatter_(1, slot, positions)
    return out[:, :capacity].contiguous()
