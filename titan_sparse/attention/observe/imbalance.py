"""How evenly work is spread over ranks and steps: the degrees of imbalance that MTraining reports.

Every function takes work [..., ranks, steps]: pairs of tokens counted by visits.py, or measured
times of kernels.
"""

import torch
from torch import Tensor

_TINY = 1e-300
"""Smallest divisor: keeps a division by zero out of the branch that torch.where() drops."""


def worker_imbalance(work: Tensor) -> Tensor:
    """Worker-level imbalance degree, float64 [...] (MTraining, figure 7).

    work: [..., ranks, steps]. The sum over steps is taken for each rank, then max / mean over
    ranks. 1 is perfect; all the time above 1 is waiting for the slowest rank.
    """
    return _max_over_mean(work.double().sum(-1))


def worker_imbalance_per_step(work: Tensor) -> Tensor:
    """Mean over steps of max / mean over ranks within the step, float64 [...].

    It is what imbalance costs if ranks wait for each other at every step (MTraining, figures 12
    and 13, left). work: [..., ranks, steps].
    """
    ranks_of_step = work.double().transpose(-1, -2)
    return _max_over_mean(ranks_of_step).mean(-1)


def step_imbalance(work: Tensor) -> Tensor:
    """Step-level imbalance degree, float64 [...]: mean over ranks of max / mean over their steps.

    It says how much the load of one worker fluctuates across its steps (MTraining, section 3.3;
    figures 12 and 13, right; table 3). work: [..., ranks, steps].
    """
    return _max_over_mean(work.double()).mean(-1)


def lockstep_imbalance(work: Tensor) -> Tensor:
    """The slowdown if no rank may run ahead, float64 [...].

    The sum over steps of the slowest rank's work, divided by the mean over ranks of their sums.
    That is worker_imbalance_per_step() with every step weighted by its length.
    work: [..., ranks, steps].
    """
    work = work.double()
    ranks = work.shape[-2]
    mean_of_ranks = work.sum((-1, -2)) / ranks
    slowest = work.amax(-2).sum(-1)
    return torch.where(mean_of_ranks > 0, slowest / mean_of_ranks.clamp(min=_TINY), 1.0)


def computation_ratio(compute: Tensor, elapsed: Tensor) -> Tensor:
    """Mean over ranks and steps of computing time / time of the step, float64 [...].

    compute, elapsed: times [..., ranks, steps]. MTraining's table 3 gives this ratio without a
    formula. This is the one that its figure 3 draws: what is not computing is bubble. Steps that
    took no time are left out.
    """
    compute = compute.double()
    elapsed = elapsed.double()
    ratio = torch.where(elapsed > 0, compute / elapsed.clamp(min=_TINY), torch.nan)
    return ratio.flatten(-2).nanmean(-1)


def _max_over_mean(work: Tensor) -> Tensor:
    """max / mean over the last dim; 1 where there is no work."""
    mean = work.mean(-1)
    return torch.where(mean > 0, work.amax(-1) / mean.clamp(min=_TINY), 1.0)
