"""Where one layer's attention mass lies, and what selections of several sizes keep of it.

From sampled rows, so that no table of all pairs of tokens is made.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import BlockIndex, MoBA, Pattern, VerticalSlash, XAttention
from titan_sparse.config import Attention
from titan_sparse.kernels.chunks import chosen_keys
from titan_sparse.models.decoder import Decoder

SHARES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Shares of attention mass: the recall targets of the patterns that have one, and those of which it
is told how many verticals, diagonals and blocks hold them."""
TOP_K = (16, 64, 256, 1024, 4096)
"""Keys per row; MTraining's figure 2b has 1024."""
_BINS = 256
"""Most bins of Layer.vertical_mass."""


class Layer(NamedTuple):
    """What was measured of one layer, float64 on the CPU, for each of Hq query heads.

    verticals, diagonals, blocks: how many of the largest hold each of SHARES.
    """

    vertical_mass: Tensor
    """[Hq, bins], share of the last rows' mass by position of the key"""
    diagonal_mass: Tensor
    """[Hq, K], share of all sampled rows' mass by distance in blocks"""
    top_k: Tensor
    """[Hq, len(TOP_K)], mean share that a row's k largest keys hold"""
    top_k_density: Tensor
    """[len(TOP_K)], these keys as a share of all that the random rows may see"""
    verticals: Tensor
    """[Hq, len(SHARES)], of the last rows' verticals"""
    diagonals: Tensor
    """[Hq, len(SHARES)], of the last rows' diagonals"""
    blocks: Tensor
    """[Hq, len(SHARES)], of a random row's blocks (mean)"""
    curves: list[dict[str, Any]]
    """what curve() returns for each pattern and setting"""


class _Head(NamedTuple):
    """Of one query head what Layer holds of all."""

    vertical_mass: Tensor
    diagonal_mass: Tensor
    top_k: Tensor
    verticals: Tensor
    diagonals: Tensor
    blocks: Tensor


def inspect_layers(
    model: Decoder,
    forward: Callable[[], Any],
    attention: Attention,
    cp: ContextParallel,
    layers: list[int],
    samples: int,
    seed: int,
) -> dict[int, Layer]:
    """Run forward() once and inspect the attention of these layers of `model`. cp: of one rank.

    samples: how many random rows, the same ones in all layers. The last rows are those that
    vertical_slash chooses by.
    """
    inspected: dict[int, Layer] = {}

    def observed(number: int, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend_and_inspect(q: Tensor, k: Tensor, v: Tensor, mask: MaskRanges) -> Tensor:
            inspected[number] = inspect_layer(q, k, mask, attention, cp, samples, seed)
            return attend(q, k, v, mask)

        return attend_and_inspect

    modules = {number: model.layers[str(number)].self_attn for number in layers}
    plain = {number: module.attend for number, module in modules.items()}
    for number, module in modules.items():
        module.attend = observed(number, plain[number])
    try:
        forward()
    finally:
        for number, module in modules.items():
            module.attend = plain[number]
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
    """Of q [1, Hq, S, D] and k [1, Hkv, S, D], one sequence of whole blocks."""
    block_size = attention.block_size
    tokens = int((ranges.start < ranges.stop).sum())
    probe = min(attention.vertical_slash.probe or block_size, tokens)
    last = torch.arange(tokens - probe, tokens, device=q.device)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    chosen = order[:samples].sort().values.to(q.device)

    heads = []
    chosen_mass = []
    for head in range(q.shape[1]):
        # [S, D], of one head
        head_q = q[0, head]
        head_k = k[0, head * k.shape[1] // q.shape[1]]
        # [n, S], of the last rows and of the random ones
        mass_of_last = probabilities(head_q, head_k, ranges, last)
        mass = probabilities(head_q, head_k, ranges, chosen)
        chosen_mass.append(mass)
        heads.append(_inspect_head(mass_of_last, last, mass, chosen, block_size))

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(head, name) for head in heads])

    allowed = (ranges.stop - ranges.start)[0, chosen, None].cpu().double()
    curves = [
        curve(pattern, q, k, ranges, cp, chosen, torch.stack(chosen_mass))
        for pattern in patterns(attention, tokens)
    ]
    return Layer(
        vertical_mass=stacked("vertical_mass"),
        diagonal_mass=stacked("diagonal_mass"),
        top_k=stacked("top_k"),
        top_k_density=allowed.minimum(torch.tensor(TOP_K)).mean(0) / allowed.mean(),
        verticals=stacked("verticals"),
        diagonals=stacked("diagonals"),
        blocks=stacked("blocks"),
        curves=curves,
    )


def _inspect_head(
    mass_of_last: Tensor, last: Tensor, mass: Tensor, chosen: Tensor, block_size: int
) -> _Head:
    """mass_of_last, mass: [n, S], softmax of the rows at `last` and at `chosen`, int64 [n]."""
    shares = torch.tensor(SHARES, dtype=torch.float64)
    # [S], [S / block_size]
    verticals = mass_of_last.mean(0)
    diagonals = by_distance(mass_of_last, last, block_size) / len(last)
    diagonal_sums = diagonals * len(last) + by_distance(mass, chosen, block_size)
    diagonal_mass = diagonal_sums / (len(last) + len(chosen))
    # [n, S / block_size]
    blocks = mass.unflatten(1, (-1, block_size)).sum(-1)
    return _Head(
        vertical_mass=_pooled(verticals),
        diagonal_mass=diagonal_mass.cpu().double(),
        top_k=_top_k(mass),
        verticals=count_to_hold(verticals[None], shares)[0],
        diagonals=count_to_hold(diagonals[None], shares)[0],
        blocks=count_to_hold(blocks, shares).mean(0),
    )


def probabilities(q: Tensor, k: Tensor, ranges: MaskRanges, at: Tensor) -> Tensor:
    """Dense softmax of the queries at positions `at`, int64 [n]: fp32 (fp64 for fp64) [n, S].

    q and k: [S, D], of one head.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    key = torch.arange(len(k), device=k.device)
    # [n, S]
    is_seen = (key >= ranges.start[0, at, None]) & (key < ranges.stop[0, at, None])
    scores = (q[at].to(dtype) @ k.to(dtype).T) * q.shape[-1] ** -0.5
    return scores.masked_fill(~is_seen, -torch.inf).softmax(-1)


def by_distance(mass: Tensor, at: Tensor, size: int) -> Tensor:
    """Sums of [n, S] by the distance in blocks from the rows at `at`, int64 [n]: [S / size]."""
    # [n, S / size]
    blocks = mass.unflatten(1, (-1, size)).sum(-1)
    number = torch.arange(blocks.shape[1], device=at.device)
    distance = (at // size)[:, None] - number
    # Blocks behind the row's own hold no mass: it does not matter where they count.
    distance = distance.clamp(min=0)
    sums = blocks.new_zeros(blocks.shape[1])
    return sums.index_add_(0, distance.flatten(), blocks.flatten())


def count_to_hold(mass: Tensor, shares: Tensor) -> Tensor:
    """The fewest elements of each row of [n, m] that hold these shares of it: float64 [n,
    len(shares)]."""
    up_to = mass.cpu().double().sort(-1, descending=True).values.cumsum(-1)
    wanted = (up_to[:, -1:] * shares).contiguous()
    count = torch.searchsorted(up_to, wanted) + 1
    return count.clamp(max=mass.shape[1]).double()


def _top_k(mass: Tensor) -> Tensor:
    """The mean share of [n, S] that each row's k largest keys hold: [len(TOP_K)]."""
    most = min(max(TOP_K), mass.shape[1])
    # [n, most]: what the 1, 2, ... largest keys hold
    held = mass.topk(most, dim=-1).values.cumsum(-1).cpu().double()
    means = [held[:, min(k, most) - 1].mean() for k in TOP_K]
    return torch.stack(means)


def _pooled(mass: Tensor) -> Tensor:
    """Sums of [S] over at most _BINS neighborhoods of equal size."""
    count = min(_BINS, len(mass))
    bins = torch.arange(len(mass), device=mass.device) * count // len(mass)
    sums = mass.new_zeros(int(bins[-1]) + 1)
    return sums.index_add_(0, bins, mass).cpu().double()


def patterns(attention: Attention, tokens: int) -> Iterator[tuple[str, float, Pattern]]:
    """(name, setting, pattern) of what is compared: the choices of `attention`, but other targets.

    vertical_slash has no caps and floors; with independent budgets its probe, sinks and local diagonals
    are the published ones. MoBA's chunks have its chunk_size or a 32nd of the
    sequence, whichever is shorter.
    """
    size = attention.block_size
    section = attention.vertical_slash
    joint = VerticalSlash(
        budget="joint",
        probe=section.probe,
        probe_rows=section.probe_rows,
        sinks=section.sinks,
        count_sinks=section.count_sinks,
        local_slashes=section.local_slashes,
        max_verticals=tokens,
        dense_below=max(size, section.probe),
    )
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
    named: tuple[str, float, Pattern],
    q: Tensor,
    k: Tensor,
    ranges: MaskRanges,
    cp: ContextParallel,
    at: Tensor,
    mass: Tensor,
) -> dict[str, Any]:
    """What a pattern selects of the rows at `at`, int64 [n]; lists over heads.

    mass: [Hq, n, S], the dense softmax of these rows. Returns density, the selected share of the
    pairs allowed; recall, the mean share of a row's mass; and verticals and diagonals, how many, where
    the pattern has such.
    """
    name, setting, pattern = named
    index = pattern.select(q, k, ranges, cp)
    allowed = (ranges.stop - ranges.start)[0, at].sum().item()
    density = []
    recall = []
    for head in range(len(mass)):
        # [n, S]
        is_selected = keys_of_rows(index.of_heads(slice(head, head + 1)), ranges, at)
        density.append(is_selected.sum().item() / allowed)
        recall.append((mass[head] * is_selected).sum(-1).mean().item())
    point = {"pattern": name, "setting": setting, "density": density, "recall": recall}
    if isinstance(pattern, VerticalSlash):
        point["columns"] = (index.verticals[0] < index.seq_len).sum(-1).tolist()
        point["diagonals"] = index.slashes[0].sum(-1).tolist()
    return point


def keys_of_rows(index: BlockIndex, ranges: MaskRanges, at: Tensor) -> Tensor:
    """Keys that the queries at `at`, int64 [n], see of the first sequence: bool [n, S].

    index: of one head.
    """
    position = torch.arange(index.seq_len, device=at.device)
    chosen = index.chosen_chunks(at)
    if chosen is not None:
        is_selected = chosen_keys(chosen, position.view(1, 1, -1))[0, 0]
    else:
        size = index.block_size
        blocks = torch.arange(index.seq_len // size, device=at.device)
        is_selected = index.selects(at // size, blocks)[0, 0].repeat_interleave(size, 1)
        # One place more: unused verticals are filled up with seq_len.
        is_vertical = torch.zeros(index.seq_len + 1, dtype=torch.bool, device=at.device)
        is_vertical[index.verticals[0, 0].long()] = True
        is_selected = is_selected | is_vertical[:-1]
    is_allowed = (position >= ranges.start[0, at, None]) & (position < ranges.stop[0, at, None])
    return is_selected & is_allowed


def summary(layers: dict[int, Layer]) -> dict[str, Any]:
    """Everything but the masses, for JSON."""
    records = []
    for number, layer in layers.items():
        record = {
            "layer": number,
            "top_k": layer.top_k.tolist(),
            "top_k_density": layer.top_k_density.tolist(),
            "columns": layer.verticals.tolist(),
            "diagonals": layer.diagonals.tolist(),
            "blocks": layer.blocks.tolist(),
            "curves": layer.curves,
        }
        records.append(record)
    return {"shares": SHARES, "top_k": TOP_K, "layers": records}
