"""What a run tells of recall: how much was asked for, and what kept selection below it."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from titan_sparse.attention.recorder import counting_caps
from titan_sparse.config import Attention
from titan_sparse.config.checking_attention import uses_xattention
from titan_sparse.config.sections import VerticalSlash

_TABLE = "attention.vertical_slash"

_SLACK = 0.02
"""A layer's measured recall may lie so far below what was asked: it is measured on a few rows."""

_WORSE = 2.0
"""A warning is repeated once things are this many times as bad as when it was given."""


class CapCount:
    """What caps cut in all selections since they were last read. Until then it stays on the device.

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
        by_layer = torch.stack(shares)
        self.sums = by_layer if self.sums is None else self.sums + by_layer
        self.forwards += 1

    def read(self) -> Tensor | None:
        """Shares of budgets that a cap kept below the recall, float64 [layers, 2] on the CPU.

        Those of verticals and of slashes, over all forwards since the last call and all ranks' data.
        None for patterns without budgets. Collective; waits for the device.
        """
        if self.sums is None:
            return None
        means = self.sums / self.forwards
        dist.all_reduce(means)
        self.sums = None
        self.forwards = 0
        return means.cpu() / dist.get_world_size()


def asked_recall(attention: Attention) -> float | None:
    """The recall that selection has to reach; None where nothing was asked for.

    That is with other patterns, and where the budgets of verticals and slashes are both fixed.
    """
    if attention.pattern != "vertical_slash" or uses_xattention(attention):
        return None
    budgets = attention.vertical_slash
    has_fixed_verticals = budgets.min_columns == budgets.max_columns
    # A maximum of 0 is none.
    has_fixed_slashes = 0 < budgets.max_slashes == budgets.min_slashes
    if has_fixed_verticals and has_fixed_slashes:
        return None
    return budgets.recall


class RecallWarnings:
    """Why attention keeps less than was asked for. Each reason is given once, and again when it is
    twice as bad."""

    def __init__(self, asked: float | None, budgets: VerticalSlash) -> None:
        self.asked = asked
        self.budgets = budgets
        # By reason: how bad it was when it was given.
        self.said: dict[str, float] = {}

    def lines(self, capped: Tensor | None, recall: list[Tensor]) -> list[str]:
        """The warnings of a logged step.

        capped: what CapCount.read() gave. recall: [Hq] a layer, empty where it was not measured.
        """
        if self.asked is None or capped is None:
            return []
        verticals, slashes = capped.unbind(1)
        lines = [
            self._of_cap("verticals", verticals, "columns"),
            self._of_cap("block diagonals", slashes, "slashes"),
        ]
        if recall:
            by_layer = torch.stack([heads.mean() for heads in recall])
            lines.append(self._of_recall(by_layer.cpu(), capped.sum(1) > 0))
        return [line for line in lines if line is not None]

    def _of_cap(self, what: str, shares: Tensor, name: str) -> str | None:
        """shares: [layers], of heads whose cap kept `what` below the recall."""
        most = getattr(self.budgets, f"max_{name}")
        is_fixed = most == getattr(self.budgets, f"min_{name}")
        if is_fixed or not self._is_news(what, shares.mean().item()):
            return None
        cut = shares > 0
        return (
            f"raise {_TABLE}.max_{name} = {most}: it keeps the {what} of {percent(shares[cut].mean())} "
            f"of the heads below recall = {self.asked:g} in {_layers(cut)}"
        )

    def _of_recall(self, by_layer: Tensor, is_cut: Tensor) -> str | None:
        """by_layer: [layers], measured. is_cut: bool [layers], whether a cap cuts there."""
        missing = self.asked - by_layer
        is_low = missing > _SLACK
        if not self._is_news("recall", missing[is_low].sum().item()):
            return None
        reasons = []
        if (is_low & is_cut).any():
            reasons.append(f"caps cut {_layers(is_low & is_cut)}")
        if (is_low & ~is_cut).any():
            reasons.append(
                f"the probe's queries want other keys than the rest in {_layers(is_low & ~is_cut)} "
                f"(raise {_TABLE}.recall or .probe)"
            )
        return (
            f"{_layers(is_low)} kept {percent(by_layer[is_low].min())} or more of the attention mass, "
            f"{percent(self.asked)} was asked for: {'; '.join(reasons)}"
        )

    def _is_news(self, reason: str, badness: float) -> bool:
        """Whether to tell it, which is then noted."""
        is_news = badness > _WORSE * self.said.get(reason, 0.0)
        if is_news:
            self.said[reason] = badness
        return is_news


def percent(share: Tensor | float) -> str:
    """With one decimal. What is not nothing never looks like it."""
    hundredths = 100 * float(share)
    return "< 0.1 %" if 0 < hundredths < 0.1 else f"{hundredths:.1f} %"


def _layers(chosen: Tensor) -> str:
    """Which layers a bool [layers] chooses: "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for layer in chosen.nonzero().flatten().tolist():
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    one = len(names) == 1 and names[0].isdecimal()
    return f"layer{'' if one else 's'} {', '.join(names)}"
