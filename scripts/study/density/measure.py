"""What patterns and oracles keep of the real model's attention on one text."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scripts.study.density import kernels
from scripts.study.density.inputs import Inputs
from scripts.study.density.mass import BLOCK, Kept, attention_mass, causal_mask, kept
from scripts.study.density.oracles import ORACLES, Curve, oracles
from scripts.study.density.patterns import Spec
from titan_sparse.attention.patterns import Pattern
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex


class Timing(NamedTuple):
    """What is timed.

    recalls: at which times are wanted. repeats: timed calls, of which the median counts.
    """

    recalls: tuple[float, ...]
    repeats: int


class Choice(NamedTuple):
    """One pattern at one value of its knob, and what it chose, layers being the batch."""

    spec: Spec
    value: float
    pattern: Pattern
    index: BlockIndex

    def of_layer(self, layer: int) -> BlockIndex:
        """What it chose in one layer."""
        index = self.index
        tensors = [tensor[layer : layer + 1] for tensor in index.tensors()]
        mask = causal_mask(index.seq_len, index.verticals.device)
        return self.pattern.index(tensors, mask, 1, index.heads, BLOCK)


def choices(specs: Iterable[Spec], inputs: Inputs) -> list[Choice]:
    """What each pattern chooses at each value, layers taken as a batch."""
    mask = causal_mask(inputs.q.shape[2], inputs.q.device)
    chosen = []
    for spec in specs:
        for value in spec.values:
            pattern = spec.pattern(value)
            index = pattern.select(inputs.q, inputs.k, mask, block_size=BLOCK)
            chosen.append(Choice(spec, value, pattern, index))
    return chosen


def measure(inputs: Inputs, specs: Iterable[Spec], timing: Timing | None) -> dict[str, Any]:
    """Rows of patterns, and curves of oracles. timing: None for no times."""
    chosen = choices(specs, inputs)
    kept_by_choice: list[list[Kept]] = [[] for _ in chosen]
    curves_by_oracle: dict[str, list[Curve]] = {name: [] for name in ORACLES}
    for layer, (q, k) in enumerate(zip(inputs.q, inputs.k)):
        mass = attention_mass(q, k)
        for choice, of_layers in zip(chosen, kept_by_choice):
            of_layers.append(kept(choice.of_layer(layer), mass))
        for name, curve in oracles(q, k, mass.by_key).items():
            curves_by_oracle[name].append(curve)
    measured: dict[str, Any] = {
        "rows": [_row(choice, of_layers) for choice, of_layers in zip(chosen, kept_by_choice)],
        "oracles": [],
    }
    for name, curves in curves_by_oracle.items():
        measured["oracles"] += _oracle_rows(name, curves)
    if timing is not None:
        tensors = kernels.draw(inputs.q, inputs.k)
        measured["dense_ms"] = kernels.dense_times(tensors, timing.repeats)
        _add_times(measured["rows"], chosen, tensors, timing)
    return measured


def _add_times(
    rows: list[dict[str, Any]], chosen: list[Choice], tensors: list[Tensor], timing: Timing
) -> None:
    """Put times into the rows next to the recalls at which they are wanted.

    rows: a row for each of `chosen`. tensors: of kernels.draw().
    """
    q = tensors[0].detach()
    k = tensors[1].detach()
    for name in dict.fromkeys(row["name"] for row in rows):
        numbers = [number for number, row in enumerate(rows) if row["name"] == name]
        recalls = [rows[number]["recall"] for number in numbers]
        for place in sorted(kernels.worth_timing(recalls, timing.recalls)):
            row = rows[numbers[place]]
            choice = chosen[numbers[place]]
            row["selection_ms"] = kernels.selection_time(choice.pattern, q, k, timing.repeats)
            row["kernel_ms"] = kernels.pattern_times(
                choice.pattern, choice.index.tensors(), tensors, timing.repeats
            )


def _row(choice: Choice, of_layers: list[Kept]) -> dict[str, Any]:
    """What is written of one choice. of_layers: a Kept for each layer."""
    # [layers, H]
    recall = torch.stack([layer.recall for layer in of_layers]).cpu()
    density = torch.stack([layer.density for layer in of_layers]).cpu()
    row = {
        "name": choice.spec.name,
        "knob": choice.spec.knob,
        "value": choice.value,
        **_means(recall.mean(1), density.mean(1)),
        "recall_of_worst_head": round(recall.min().item(), 4),
        "recall_of_5_percent_of_heads": round(np.percentile(recall.numpy(), 5).item(), 4),
    }
    return row | _budgets(choice.index)


def _budgets(index: BlockIndex) -> dict[str, float]:
    """Means over layers and heads of the counts that the index has.

    capped: share of budgets that a cap cut.
    """
    found = {}
    if index.verticals.shape[-1]:
        is_vertical = index.verticals < index.seq_len
        found["verticals"] = round(is_vertical.sum(-1).double().mean().item(), 1)
    if isinstance(index, VerticalSlashIndex):
        found["diagonals"] = round(index.slashes.sum(-1).double().mean().item(), 2)
        found["capped"] = round(index.capped.double().mean().item(), 4)
    return found


def _oracle_rows(name: str, curves: list[Curve]) -> list[dict[str, Any]]:
    """A row for each price. curves: of each layer, at the same prices."""
    rows = []
    for of_layers in zip(*curves, strict=True):
        recall = torch.tensor([point.recall for point in of_layers], dtype=torch.float64)
        density = torch.tensor([point.density for point in of_layers], dtype=torch.float64)
        rows.append({"name": name} | _means(recall, density))
    return rows


def _means(recall: Tensor, density: Tensor) -> dict[str, Any]:
    """Of fp64 [layers] each."""
    return {
        "recall": round(recall.mean().item(), 5),
        "density": round(density.mean().item(), 5),
        "recall_by_layer": [round(value, 4) for value in recall.tolist()],
        "density_by_layer": [round(value, 4) for value in density.tolist()],
    }
