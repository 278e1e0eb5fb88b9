"""Inspection of a layer: its attention mass, what selections of several sizes keep of it, and
pictures.

Rows are sampled, so that no table of all pairs of tokens is made. matplotlib is loaded by the first
picture, so its types are Any here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import MoBA, Pattern, VerticalSlash, XAttention
from titan_sparse.config import Attention
from titan_sparse.evaluation.pictures import new_figure
from titan_sparse.evaluation.scorer import attention_replaced
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.models.decoder import Decoder

SHARES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Recall targets of the patterns that have one."""
TOP_K = (16, 64, 256, 1024, 4096)
"""Keys per row; MTraining's figure 2b has 1024."""
_BINS = 256
"""Most bins of Layer.vertical_mass."""


class Layer(NamedTuple):
    """Measurements of one layer, float64 on the CPU, for each of Hq query heads.

    vertical_mass: [Hq, bins], share of the mass by position of the key, of the last rows, by which
    vertical_slash chooses. slash_mass: [Hq, K], share of the last and random rows' mass by distance
    in blocks. top_k: [Hq, len(TOP_K)], mean share that a random row's k largest keys hold.
    top_k_density: [len(TOP_K)], these keys as a share of all that the random rows may see. curves:
    what curve() returns for each pattern and setting.
    """

    vertical_mass: Tensor
    slash_mass: Tensor
    top_k: Tensor
    top_k_density: Tensor
    curves: list[dict[str, Any]]


def inspect_layers(
    model: Decoder,
    forward: Callable[[], Any],
    layers: list[int],
    inspect: Callable[[Tensor, Tensor, MaskRanges], Layer],
) -> dict[int, Layer]:
    """Run forward() once and inspect() q, k and mask of these layers of `model`."""
    inspected: dict[int, Layer] = {}

    def replace(number: int, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend_and_inspect(q: Tensor, k: Tensor, v: Tensor, mask: MaskRanges) -> Tensor:
            inspected[number] = inspect(q, k, mask)
            return attend(q, k, v, mask)

        # Other layers attend as ever.
        return attend_and_inspect if number in layers else attend

    with attention_replaced(model, replace):
        forward()
    return inspected


def inspect_layer(
    q: Tensor,
    k: Tensor,
    ranges: MaskRanges,
    attention: Attention,
    cp: ContextParallel,
    samples: int,
    seed: int,
) -> Layer:
    """Inspect q [1, Hq, S, D] and k [1, Hkv, S, D], one sequence of whole blocks. cp: of one rank.

    samples: how many random rows, the same ones in all layers.
    """
    block_size = attention.block_size
    tokens = int((ranges.start < ranges.stop).sum())
    probe = min(attention.vertical_slash.probe or block_size, tokens)
    last = torch.arange(tokens - probe, tokens, device=q.device)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    chosen = order[:samples].sort().values.to(q.device)

    # [Hq, n, S], of the last rows and of the random ones
    mass_of_last = probabilities(q, k, ranges, last)
    mass = probabilities(q, k, ranges, chosen)
    slashes = by_distance(mass_of_last, last, block_size) + by_distance(mass, chosen, block_size)
    # Sums over neighborhoods of equal size.
    seq_len = mass.shape[2]
    bins = min(_BINS, seq_len)
    bin_of_key = torch.arange(seq_len, device=mass.device) * bins // seq_len
    verticals = mass.new_zeros(len(mass), bins).index_add_(1, bin_of_key, mass_of_last.mean(1))
    # [Hq, n, most]: what the 1, 2, ... largest keys of a row hold
    most = min(max(TOP_K), seq_len)
    held = mass.topk(most, dim=-1).values.cumsum(-1).cpu().double()

    allowed = (ranges.stop - ranges.start)[0, chosen, None].cpu().double()
    curves = []
    for name, setting, pattern in patterns(attention, tokens):
        point = curve(pattern, q, k, ranges, cp, chosen, mass)
        curves.append({"pattern": name, "setting": setting} | point)
    return Layer(
        vertical_mass=verticals.cpu().double(),
        slash_mass=slashes.cpu().double() / (len(last) + len(chosen)),
        top_k=torch.stack([held[..., min(k, most) - 1].mean(1) for k in TOP_K], dim=1),
        top_k_density=allowed.minimum(torch.tensor(TOP_K)).mean(0) / allowed.mean(),
        curves=curves,
    )


def probabilities(q: Tensor, k: Tensor, ranges: MaskRanges, at: Tensor) -> Tensor:
    """Dense softmax of the queries at positions `at`, int64 [n]: fp32 (fp64 for fp64) [Hq, n, S].

    q: [1, Hq, S, D]. k: [1, Hkv, S, D].
    """
    dtype = accumulation_dtype(q.dtype)
    keys = k[0].to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=0)
    scores = (q[0, :, at].to(dtype) @ keys.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~allowed_keys(ranges, at), -torch.inf).softmax(-1)


def by_distance(mass: Tensor, at: Tensor, size: int) -> Tensor:
    """Sums of [Hq, n, S] by the distance in blocks from the rows at `at`, int64
    [n]: [Hq, S / size]."""
    # [Hq, n, S / size]
    blocks = mass.unflatten(2, (-1, size)).sum(-1)
    number = torch.arange(blocks.shape[2], device=at.device)
    # Blocks behind the row's own hold no mass: it does not matter where they count.
    distance = ((at // size)[:, None] - number).clamp(min=0)
    sums = blocks.new_zeros(len(blocks), len(number))
    return sums.index_add_(1, distance.flatten(), blocks.flatten(1))


def patterns(attention: Attention, tokens: int) -> Iterator[tuple[str, float, Pattern]]:
    """(name, setting, pattern) of what is compared: the choices of `attention` with other targets.

    vertical_slash has no caps and floors. With independent budgets its probe, sinks and local
    slashes are the published ones.
    """
    size = attention.block_size
    section = attention.vertical_slash
    free = {"min_verticals": 0, "max_verticals": tokens, "min_slashes": 0, "max_slashes": 0}
    free["dense_below"] = max(size, section.probe)
    joint = VerticalSlash(**vars(section) | free | {"budget": "joint"})
    published = dataclasses.replace(
        joint,
        budget="independent",
        probe_rows="last",
        sinks=30,
        count_sinks=True,
        local_slashes=2,
    )
    for pattern in (joint, published):
        for share in SHARES:
            with_share = dataclasses.replace(pattern, recall=share)
            yield f"vertical_slash {pattern.budget}", share, with_share
    stride = math.gcd(attention.xattention.stride, size)
    for share in SHARES:
        yield "xattention", share, XAttention(stride, share, dense_below=size)
    chunk = max(size, min(attention.moba.chunk_size, -(-tokens // 32)))
    for top_k in (1, 2, 3, 4, 6, 8, 12, 16):
        if top_k * chunk < tokens:
            yield f"moba, chunks of {chunk}", top_k, MoBA(chunk, top_k)


def curve(
    pattern: Pattern,
    q: Tensor,
    k: Tensor,
    ranges: MaskRanges,
    cp: ContextParallel,
    at: Tensor,
    mass: Tensor,
) -> dict[str, Any]:
    """The selection of a pattern for the rows at `at`, int64 [n]; lists over heads: density, the
    selected share of the allowed pairs; recall, the mean share of a row's mass; how many verticals
    and slashes.

    mass: [Hq, n, S], the dense softmax of these rows.
    """
    index = pattern.select(q, k, ranges, cp)
    # [n, S]
    is_allowed = allowed_keys(ranges, at)
    allowed = is_allowed.sum().item()
    point: dict[str, Any] = {"density": [], "recall": []}
    for head, of_head in enumerate(mass):
        of_one = index.of_heads(slice(head, head + 1))
        is_selected = of_one.selected_keys(at)[0, 0] & is_allowed
        point["density"].append(is_selected.sum().item() / allowed)
        point["recall"].append((of_head * is_selected).sum(-1).mean().item())
    return point | index.counts()


def allowed_keys(ranges: MaskRanges, at: Tensor) -> Tensor:
    """Keys that the mask allows the queries at `at`, int64 [n], of the first
    sequence: bool [n, S]."""
    key = torch.arange(ranges.start.shape[1], device=at.device)
    return (key >= ranges.start[0, at, None]) & (key < ranges.stop[0, at, None])


def summary(layers: dict[int, Layer]) -> dict[str, Any]:
    """Everything but the masses, for JSON."""
    records = []
    for number, layer in layers.items():
        of_rows = {name: getattr(layer, name).tolist() for name in ("top_k", "top_k_density")}
        records.append({"layer": number, "curves": layer.curves, **of_rows})
    return {"shares": SHARES, "top_k": TOP_K, "layers": records}


def figures(layers: dict[int, Layer], seq_len: int) -> dict[str, Any]:
    """matplotlib figures by the names of their files."""
    found = {}
    for number, layer in layers.items():
        found[f"layer-{number}.png"] = _layer_figure(number, layer, seq_len)
    # Means over layers and heads, for each of TOP_K.
    top_k = torch.stack([layer.top_k for layer in layers.values()]).mean((0, 1)).tolist()
    found["curves.png"] = _curves_figure(list(layers.values()), top_k)
    found["top_k.png"] = _top_k_figure(layers)
    return found


def _layer_figure(number: int, layer: Layer, seq_len: int) -> Any:
    """Heads down; mass by position of the key, and by distance in blocks.
    Colors are logarithmic."""
    from matplotlib.colors import LogNorm

    heads, blocks = layer.slash_mass.shape
    figure, panels = new_figure((12, 1.6 + 0.2 * heads), 2)
    for axes, mass, right, label, title in (
        (panels[0], layer.vertical_mass, seq_len, "position of the key (tokens)", "last"),
        (panels[1], layer.slash_mass, blocks, "distance (blocks)", "all sampled"),
    ):
        image = axes.imshow(
            mass.clamp(min=1e-6),
            norm=LogNorm(1e-6, 1),
            aspect="auto",
            interpolation="nearest",
            extent=(0, right, heads - 0.5, -0.5),
        )
        axes.set(xlabel=label, ylabel="head")
        axes.set_title(f"layer {number}: share of the {title} queries' mass", fontsize=9)
    figure.colorbar(image, ax=panels)
    return figure


def _curves_figure(layers: list[Layer], top_k: list[float]) -> Any:
    """Recall against density, means over layers and heads: a curve for each pattern."""
    figure, axes = new_figure((7, 5))
    points: dict[str, list[tuple[float, float]]] = {}
    for of_layers in zip(*(layer.curves for layer in layers)):
        density = fmean(x for point in of_layers for x in point["density"])
        recall = fmean(x for point in of_layers for x in point["recall"])
        points.setdefault(of_layers[0]["pattern"], []).append((density, recall))
    for name, of_pattern in points.items():
        axes.plot(*zip(*of_pattern), marker="o", markersize=3, label=name)
    label = "largest keys, as many in each row"
    axes.plot(layers[0].top_k_density, top_k, "k--", marker=".", label=label)
    axes.set(xlabel="density (share of the pairs allowed)", ylabel="recall (share of the mass)")
    axes.set(xscale="log", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _top_k_figure(layers: dict[int, Layer]) -> Any:
    """Recall of a row's k largest keys, means over heads: a curve for each layer."""
    figure, axes = new_figure((7, 5))
    for number, layer in layers.items():
        axes.plot(TOP_K, layer.top_k.mean(0), marker="o", markersize=3, label=f"layer {number}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="keys a row", ylabel="recall (share of the mass)", ylim=(0, 1.02))
    axes.legend(fontsize="x-small", ncols=2)
    return figure
