"""Pictures of inspection.py's layers, as matplotlib figures; needs pip install -e ".[eval]".

matplotlib is loaded by the first picture, so its types are Any here.
"""

from typing import Any

import numpy as np
import torch

from titan_sparse.evaluation.inspection import TOP_K, Layer


def layer_figure(number: int, layer: Layer, seq_len: int) -> Any:
    """Heads down; mass by position of the key, and by distance in blocks. Colors are logarithmic."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    heads = len(layer.vertical_mass)
    figure = Figure(figsize=(12, 1.6 + 0.2 * heads), layout="constrained")
    panels = figure.subplots(1, 2)
    masses = (layer.vertical_mass, layer.diagonal_mass)
    labels = ("position of the key (tokens)", "distance (blocks)")
    ends = (seq_len, layer.diagonal_mass.shape[1])
    for axes, mass, label, right in zip(panels, masses, labels, ends):
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


def curves_figure(layers: list[Layer]) -> Any:
    """Recall against density, means over layers and heads.

    A curve for each pattern, and the largest keys of each row to compare with.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(point["pattern"] for point in layers[0].curves):
        densities = []
        recalls = []
        for number, point in enumerate(layers[0].curves):
            if point["pattern"] == name:
                densities.append(np.mean([layer.curves[number]["density"] for layer in layers]))
                recalls.append(np.mean([layer.curves[number]["recall"] for layer in layers]))
        axes.plot(densities, recalls, marker="o", markersize=3, label=name)
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


def top_k_figure(layers: dict[int, Layer]) -> Any:
    """Recall of a row's largest keys.

    Two panels for 64 and 1024 keys, layers down and heads to the right; and the means over k.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2 + 0.18 * len(layers)), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, count in zip(panels, (64, 1024)):
        # [layers, Hq]
        table = torch.stack([layer.top_k[:, TOP_K.index(count)] for layer in layers.values()])
        image = axes.imshow(table, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=f"recall of the {count} largest keys", xlabel="head", ylabel="layer")
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
    """Over layers and heads, for each of TOP_K."""
    by_layer = [layer.top_k.mean(0) for layer in layers]
    return torch.stack(by_layer).mean(0).tolist()
