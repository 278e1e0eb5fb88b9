"""Pictures of inspection.py's layers, as matplotlib figures; needs pip install -e ".[eval]"."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from titan_sparse.evaluation.inspection import TOP_K, Layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def layer_figure(number: int, layer: Layer, seq_len: int) -> "Figure":
    """Heads down; mass by position of the key, and by distance in blocks; the colour is logarithmic."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    heads = len(layer.column_mass)
    figure = Figure(figsize=(12, 1.6 + 0.2 * heads), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, mass, label, right in (
        (panels[0], layer.column_mass, "position of the key (tokens)", seq_len),
        (panels[1], layer.diagonal_mass, "distance (blocks)", layer.diagonal_mass.shape[1]),
    ):
        image = axes.imshow(
            mass.clamp(min=1e-6),
            norm=LogNorm(1e-6, 1),
            aspect="auto",
            interpolation="nearest",
            extent=(0, right, heads - 0.5, -0.5),
        )
        axes.set(xlabel=label, ylabel="head")
    panels[0].set_title(f"layer {number}: share of the last queries' mass", fontsize=9)
    panels[1].set_title("share of all sampled queries' mass", fontsize=9)
    figure.colorbar(image, ax=panels)
    return figure


def curves_figure(layers: list[Layer]) -> "Figure":
    """Recall against density, means over layers and heads: a curve a pattern, and the largest keys of each row to
    compare with."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(point["pattern"] for point in layers[0].curves):
        at = [i for i, point in enumerate(layers[0].curves) if point["pattern"] == name]
        mean = lambda key: [np.mean([layer.curves[i][key] for layer in layers]) for i in at]
        axes.plot(mean("density"), mean("recall"), marker="o", markersize=3, label=name)
    axes.plot(
        layers[0].top_k_density,
        _mean_top_k(layers),
        "k--",
        marker=".",
        label="largest keys, as many in each row",
    )
    axes.set_xscale("log")
    axes.set(
        xlabel="density (share of the pairs allowed)",
        ylabel="recall (share of the mass)",
        ylim=(0, 1.02),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def top_k_figure(layers: dict[int, Layer]) -> "Figure":
    """Layers down, heads to the right, in two panels: recall of the 64 and the 1024 largest keys of a row; and the
    means over k."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2 + 0.18 * len(layers)), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, which in zip(panels, (TOP_K.index(64), TOP_K.index(1024))):
        table = torch.stack([layer.top_k[:, which] for layer in layers.values()])
        image = axes.imshow(table, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=f"recall of the {TOP_K[which]} largest keys", xlabel="head", ylabel="layer")
        axes.set_yticks(range(len(layers)), list(layers))
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=panels[:2])
    panels[2].plot(TOP_K, _mean_top_k(list(layers.values())), marker="o")
    panels[2].set_xscale("log", base=2)
    panels[2].set(
        title="mean over layers and heads", xlabel="keys a row", ylabel="recall", ylim=(0, 1.02)
    )
    return figure


def _mean_top_k(layers: list[Layer]) -> list[float]:
    return torch.stack([layer.top_k.mean(0) for layer in layers]).mean(0).tolist()
