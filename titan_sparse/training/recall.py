"""Report the requested recall, the measured recall, and which cap caused the difference."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_sparse.attention.recorder import counting_caps
from titan_sparse.config import Attention
from titan_sparse.options import VerticalSlashOptions

_TABLE = "attention.vertical_slash"

_SLACK = 0.02
"""Tolerance of a layer's recall below the requested recall, because only a few rows are measured."""

_WORSE = 2.0
"""A warning is repeated once things are this many times as bad as when it was given."""


class Capped(NamedTuple):
    """Shares of heads that caps kept below the recall, float64 [layers] each, on the CPU.

    Over sequences, forwards and ranks; verticals, slashes, and both.
    """

    verticals: Tensor
    slashes: Tensor
    both: Tensor

    def of_budgets(self) -> Tensor:
        """Shares of all budgets, [layers]."""
        return (self.verticals + self.slashes) / 2

    def spread(self, selecting: list[int], layers: int) -> "Capped":
        """The same for all `layers`, of which only `selecting` have budgets: nothing is cut in
        others."""
        spread = []
        for shares in self:
            of_all = shares.new_zeros(layers)
            of_all[selecting] = shares
            spread.append(of_all)
        return Capped(*spread)

    def of_heads(self, budget: str) -> Tensor:
        """Shares of heads that keep less of the probe's mass than was asked, [layers].

        Of two independent budgets each has to reach the recall, so one without its cap is enough.
        """
        if budget == "independent":
            return self.both
        return self.verticals + self.slashes - self.both


class CapCount:
    """What caps cut in all selections since the last read(). Until then it stays on the device.

    Each forward selects once a layer, in the order of the layers.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.forwards = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the selections of one forward."""
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
    """The recall that selection has to reach; None where nothing was asked for.

    That is with other patterns, and where the budgets of verticals and slashes are both fixed.
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


class RecallWarnings:
    """Why attention keeps less than was asked for.

    Each reason is given once, and again when it is twice as bad.
    """

    def __init__(self, asked: float | None, budgets: VerticalSlashOptions) -> None:
        self.asked = asked
        self.budgets = budgets
        # By reason: how bad it was when it was given.
        self.said: dict[str, float] = {}

    def lines(self, capped: Capped | None, recall: list[Tensor]) -> list[str]:
        """The warnings of a logged step.

        capped: what CapCount.read() gave. recall: [Hq] a layer, empty where it was not measured.
        """
        if self.asked is None or capped is None:
            return []
        cut = capped.of_heads(self.budgets.budget)
        lines = []
        if self._is_news("caps", cut.mean().item()):
            keys = [
                f"{_TABLE}.max_{what} = {getattr(self.budgets, f'max_{what}')}"
                for what, shares in (("verticals", capped.verticals), ("slashes", capped.slashes))
                if (shares > 0).any()
            ]
            lines.append(
                f"caps keep {percent(cut[cut > 0].mean())} of the heads in {_layers(cut > 0)} below "
                f"recall = {self.asked:g}: raise {' or '.join(keys)}"
            )
        if recall:
            by_layer = torch.stack([heads.mean() for heads in recall]).cpu()
            is_low = by_layer < self.asked - _SLACK
            if self._is_news("recall", (self.asked - by_layer)[is_low].sum().item()):
                reason = (
                    f"the probe's queries want other keys than the rest (raise {_TABLE}.recall)"
                )
                if (cut[is_low] > 0).any():
                    reason = "caps cut"
                lines.append(
                    f"{_layers(is_low)} kept {percent(by_layer[is_low].min())} or more of the attention "
                    f"mass, {percent(self.asked)} was asked for: {reason}"
                )
        return lines

    def _is_news(self, reason: str, badness: float) -> bool:
        """Whether to report it. If so, it counts as reported."""
        is_news = badness > _WORSE * self.said.get(reason, 0.0)
        if is_news:
            self.said[reason] = badness
        return is_news


def percent(share: Tensor | float) -> str:
    """A share in percent with one decimal. What is above 0 never looks like 0."""
    share = float(share)
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %"


def _layers(chosen: Tensor) -> str:
    """Which layers a bool [layers] chooses: "layers 0, 5"."""
    return f"layers {', '.join(map(str, chosen.nonzero().flatten().tolist()))}"
