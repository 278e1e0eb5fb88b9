"""How evenly work is spread over ranks and steps: the degrees of imbalance that MTraining reports.

For the planner and the benchmarks. Every function takes work [..., ranks, steps]: pairs of tokens
counted by visits.py, or measured times of kernels. The degree of whole ranks is in statistics.py.
"""

import torch
from torch import Tensor

_TINY = 1e-300
"""Smallest divisor: keeps a division by zero out of the branch that torch.where() drops."""


def worker_imbalance_per_step(work: Tensor) -> Tensor:
    """Mean over steps of max / mean over ranks within the step, float64 [...].

    It is what imbalance costs if ranks wait for each other at every step (MTraining, figures 12
    and 13, left). work: [..., ranks, steps].
    """
    # [..., steps, ranks]
    ranks_of_step = work.double().transpose(-1, -2)
    # [..., steps]
    imbalance = _max_over_mean(ranks_of_step)
    return imbalance.mean(-1)


def step_imbalance(work: Tensor) -> Tensor:
    """Step-level imbalance degree, float64 [...]: mean over ranks of max / mean over their steps.

    It says how much the load of one worker fluctuates across its steps (MTraining, section 3.3;
    figures 12 and 13, right; table 3). work: [..., ranks, steps].
    """
    # [..., ranks]
    imbalance = _max_over_mean(work.double())
    return imbalance.mean(-1)


def computation_ratio(compute: Tensor, elapsed: Tensor) -> Tensor:
    """Mean over ranks and steps of computing time / time of the step, float64 [...].

    compute, elapsed: times [..., ranks, steps]. MTraining's table 3 gives this ratio without a
    formula. This is the one that its figure 3 draws: what is not computing is bubble. Steps that
    took no time are left out.
    """
    compute = compute.double()
    elapsed = elapsed.double()
    took_time = elapsed > 0
    ratio = compute / elapsed.clamp(min=_TINY)
    # nanmean() leaves the other steps out.
    ratio = torch.where(took_time, ratio, torch.nan)
    # [..., ranks * steps]
    ratio = ratio.flatten(-2)
    return ratio.nanmean(-1)


def _max_over_mean(work: Tensor) -> Tensor:
    """max / mean over the last dim; 1 where there is no work."""
    mean = work.mean(-1)
    largest = work.amax(-1)
    has_work = mean > 0
    ratio = largest / mean.clamp(min=_TINY)
    return torch.where(has_work, ratio, 1.0)
