"""The requested recall, and how many heads the caps keep below it."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_sparse.attention.recorder import counting_caps
from titan_sparse.config import Attention


class Capped(NamedTuple):
    """Shares of heads that caps kept below the recall, over sequences, forwards and ranks: float64
    [layers] each, on the CPU.
    """

    verticals: Tensor
    slashes: Tensor
    both: Tensor

    def of_budgets(self) -> Tensor:
        return (self.verticals + self.slashes) / 2

    def spread(self, selecting: list[int], layers: int) -> "Capped":
        """The same for all `layers`. Only `selecting` have budgets: nothing is cut in others."""
        spread = []
        for shares in self:
            of_all = shares.new_zeros(layers)
            of_all[selecting] = shares
            spread.append(of_all)
        return Capped(*spread)

    def of_heads(self, budget: str) -> Tensor:
        """Shares of heads that keep less of the probe's mass than was asked, [layers]. Of two
        independent budgets each has to reach the recall, so one without its cap is enough.
        """
        if budget == "independent":
            return self.both
        return self.verticals + self.slashes - self.both


class CapCount:
    """What caps cut in all selections since the last read(). Until then it stays on the device."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.forwards = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        with counting_caps() as shares:
            yield
        if not shares:
            return
        # [layers, 3]
        by_layer = torch.stack(shares)
        self.sums = by_layer if self.sums is None else self.sums + by_layer
        self.forwards += 1

    def read(self) -> Capped | None:
        """The means over all forwards since the last call and over all ranks' data.

        None for patterns without budgets. Collective; waits for the device.
        """
        if self.sums is None:
            return None
        means = self.sums / self.forwards
        dist.all_reduce(means)
        means = means.cpu() / dist.get_world_size()
        self.sums = None
        self.forwards = 0
        return Capped(*means.unbind(1))


def asked_recall(attention: Attention) -> float | None:
    """The recall that selection has to reach. None for patterns without one, and where the numbers of
    verticals and slashes are both fixed.
    """
    if attention.pattern != "vertical_slash":
        return None
    budgets = attention.vertical_slash
    has_fixed_verticals = budgets.min_verticals == budgets.max_verticals
    # A maximum of 0 is none.
    has_fixed_slashes = 0 < budgets.max_slashes == budgets.min_slashes
    if has_fixed_verticals and has_fixed_slashes:
        return None
    return budgets.recall


def percent(share: Tensor | float) -> str:
    """A share in percent with one decimal. What is above 0 never looks like 0."""
    share = float(share)
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %"
