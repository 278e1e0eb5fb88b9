"""Where one layer's attention mass lies, and what selections of several sizes keep of it; from sampled rows, so that no
table of all pairs of tokens is made."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import BlockIndex, MoBA, Pattern, VerticalSlash, XAttention
from titan_sparse.kernels.chunks import chosen_keys
from titan_sparse.models.decoder import Decoder

if TYPE_CHECKING:
    from titan_sparse.config import Attention

SHARES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Targets of the patterns that have one; shares of mass of which is told how many columns, diagonals, blocks hold them."""
TOP_K = (16, 64, 256, 1024, 4096)
"""Keys a row; MTraining's figure 2b has 1024."""
_BINS = 256


class Layer(NamedTuple):
    """What was measured of one layer, float64 on the CPU, for each of Hq query heads.

    column_mass: [Hq, bins], share of the last rows' mass by position of the key. diagonal_mass: [Hq, K], share of all sampled
    rows' mass by distance in blocks. top_k: [Hq, len(TOP_K)], mean share that a row's k largest keys hold.
    top_k_density: [len(TOP_K)], these keys of all that the random rows may see. columns, diagonals, blocks: [Hq,
    len(SHARES)], how many of the largest hold these shares: of the last rows' columns, of their diagonals, of a random
    row's blocks (mean). curves: a dict of each pattern and setting.
    """

    column_mass: Tensor
    diagonal_mass: Tensor
    top_k: Tensor
    top_k_density: Tensor
    columns: Tensor
    diagonals: Tensor
    blocks: Tensor
    curves: list[dict[str, Any]]


def inspect_layers(
    model: Decoder,
    forward: Callable[[], Any],
    attention: "Attention",
    cp: ContextParallel,
    layers: list[int],
    samples: int,
    seed: int,
) -> dict[int, Layer]:
    """Run forward() once, with an eye on the attention of these layers of `model`. cp: of one rank.

    samples: random rows, drawn alike for all layers; the last rows are those that vertical_slash looks with."""
    found: dict[int, Layer] = {}
    for number in layers:
        module = model.layers[str(number)].self_attn
        module.attend = functools.partial(
            _observed, module.attend, found, number, attention, cp, samples, seed
        )
    try:
        forward()
    finally:
        for number in layers:
            module = model.layers[str(number)].self_attn
            module.attend = module.attend.args[0]
    return found


def _observed(
    attend: Callable[..., Tensor],
    found: dict[int, Layer],
    number: int,
    attention: "Attention",
    cp: ContextParallel,
    samples: int,
    seed: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskRanges,
) -> Tensor:
    found[number] = inspect_layer(q, k, mask, attention, cp, samples, seed)
    return attend(q, k, v, mask)


def inspect_layer(
    q: Tensor,
    k: Tensor,
    rows: MaskRanges,
    attention: "Attention",
    cp: ContextParallel,
    samples: int,
    seed: int,
) -> Layer:
    """Of q [1, Hq, S, D] and k [1, Hkv, S, D], one sequence of whole blocks."""
    size, device = attention.block_size, q.device
    tokens = int((rows.start < rows.stop).sum())
    probe = min(attention.vertical_slash.probe or size, tokens)
    last = torch.arange(tokens - probe, tokens, device=device)
    chosen = (
        torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[:samples]
        .sort()
        .values.to(device)
    )
    shares = torch.tensor(SHARES, dtype=torch.float64)
    heads, kept = [], []
    for head in range(q.shape[1]):
        attend = lambda at: probabilities(
            q[0, head], k[0, head * k.shape[1] // q.shape[1]], rows, at
        )
        seen, random = attend(last), attend(chosen)
        kept.append(random)
        columns, diagonals = seen.mean(0), by_distance(seen, last, size) / len(last)
        both = (diagonals * len(last) + by_distance(random, chosen, size)) / (
            len(last) + len(chosen)
        )
        blocks = random.unflatten(1, (-1, size)).sum(-1)
        heads.append(
            (
                _pooled(columns),
                both.cpu().double(),
                _top_k(random),
                count_to_hold(columns[None], shares)[0],
                count_to_hold(diagonals[None], shares)[0],
                count_to_hold(blocks, shares).mean(0),
            )
        )
    *parts, needed_columns, needed_diagonals, needed_blocks = (
        torch.stack(part) for part in zip(*heads)
    )
    allowed = (rows.stop - rows.start)[0, chosen, None].cpu().double()
    top_k_density = allowed.minimum(torch.tensor(TOP_K)).mean(0) / allowed.mean()
    curves = [
        curve(pattern, q, k, rows, cp, chosen, torch.stack(kept))
        for pattern in patterns(attention, tokens)
    ]
    return Layer(*parts, top_k_density, needed_columns, needed_diagonals, needed_blocks, curves)


def probabilities(q: Tensor, k: Tensor, rows: MaskRanges, at: Tensor) -> Tensor:
    """fp32 (fp64 for fp64) [n, S]: dense softmax of the queries at positions int64 [n]; q and k [S, D] of one head."""
    dtype, key = torch.promote_types(q.dtype, torch.float32), torch.arange(len(k), device=k.device)
    seen = (key >= rows.start[0, at, None]) & (key < rows.stop[0, at, None])
    scores = (q[at].to(dtype) @ k.to(dtype).T) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def by_distance(mass: Tensor, at: Tensor, size: int) -> Tensor:
    """Sums of [n, S] by the distance in blocks from the rows at `at`, int64 [n]: [S / size]."""
    blocks = mass.unflatten(1, (-1, size)).sum(-1)
    distance = (at // size)[:, None] - torch.arange(blocks.shape[1], device=at.device)
    return blocks.new_zeros(blocks.shape[1]).index_add_(
        0, distance.clamp(min=0).flatten(), blocks.flatten()
    )


def count_to_hold(mass: Tensor, shares: Tensor) -> Tensor:
    """float64 [n, len(shares)]: the fewest elements of each row of [n, m] that hold these shares of it."""
    up_to = mass.cpu().double().sort(-1, descending=True).values.cumsum(-1)
    wanted = (up_to[:, -1:] * shares).contiguous()
    return (torch.searchsorted(up_to, wanted) + 1).clamp(max=mass.shape[1]).double()


def _top_k(mass: Tensor) -> Tensor:
    largest = mass.topk(min(max(TOP_K), mass.shape[1]), dim=-1).values.cumsum(-1).cpu().double()
    return torch.stack([largest[:, min(k, largest.shape[1]) - 1].mean() for k in TOP_K])


def _pooled(mass: Tensor) -> Tensor:
    """Sums over at most _BINS neighbourhoods of equal size."""
    bins = torch.arange(len(mass), device=mass.device) * min(_BINS, len(mass)) // len(mass)
    return mass.new_zeros(int(bins[-1]) + 1).index_add_(0, bins, mass).cpu().double()


# Patterns -----------------------------------------------------------------------------------------------------------


def patterns(attention: "Attention", tokens: int) -> Iterator[tuple[str, float, Pattern]]:
    """(name, setting, pattern) of what is compared, with the choices of `attention` but for targets and caps.

    vertical_slash has no caps and floors. MoBA's chunks are the shorter ones of its chunk_size and a 32nd of the sequence.
    """
    size, own = attention.block_size, attention.vertical_slash
    for budget in ("independent", "joint"):
        for share in SHARES:
            yield (
                f"vertical_slash {budget}",
                share,
                VerticalSlash(
                    share,
                    own.probe,
                    own.sinks,
                    own.local_diagonals,
                    max_columns=tokens,
                    dense_below=max(size, own.probe),
                    budget=budget,
                ),
            )
    for share in SHARES:
        yield (
            "xattention",
            share,
            XAttention(math.gcd(attention.xattention.stride, size), share, dense_below=size),
        )
    chunk = max(size, min(attention.moba.chunk_size, -(-tokens // 32)))
    for top_k in (1, 2, 3, 4, 6, 8, 12, 16):
        if top_k * chunk < tokens:
            yield f"moba, chunks of {chunk}", top_k, MoBA(chunk, top_k)


def curve(
    named: tuple[str, float, Pattern],
    q: Tensor,
    k: Tensor,
    rows: MaskRanges,
    cp: ContextParallel,
    at: Tensor,
    mass: Tensor,
) -> dict[str, Any]:
    """What a pattern selects of the rows at `at`, int64 [n], whose dense softmax is mass [Hq, n, S]; lists over heads.

    density: selected of the pairs allowed. recall: mean share of a row's mass. columns, diagonals: how many, where it has
    such."""
    name, setting, pattern = named
    index = pattern.select(q, k, rows, cp)
    allowed = (rows.stop - rows.start)[0, at].sum().item()
    density, recall = [], []
    for head in range(len(mass)):
        on = keys_of_rows(index.of_heads(slice(head, head + 1)), rows, at)
        density.append(on.sum().item() / allowed)
        recall.append((mass[head] * on).sum(-1).mean().item())
    point = {"pattern": name, "setting": setting, "density": density, "recall": recall}
    if isinstance(pattern, VerticalSlash):
        point["columns"] = (index.verticals[0] < index.seq_len).sum(-1).tolist()
        point["diagonals"] = index.slashes[0].sum(-1).tolist()
    return point


def keys_of_rows(index: BlockIndex, rows: MaskRanges, at: Tensor) -> Tensor:
    """bool [n, S]: keys that the queries at `at`, int64 [n], see of the first sequence's index of one head."""
    position = torch.arange(index.seq_len, device=at.device)
    chosen = index.chosen_chunks(at)
    if chosen is None:
        blocks = torch.arange(index.seq_len // index.block_size, device=at.device)
        on = index.selects(at // index.block_size, blocks)[0, 0].repeat_interleave(
            index.block_size, 1
        )
        columns = torch.zeros(index.seq_len + 1, dtype=torch.bool, device=at.device)
        columns[index.verticals[0, 0].long()] = True
        on = on | columns[:-1]
    else:
        on = chosen_keys(chosen, position.view(1, 1, -1))[0, 0]
    return on & (position >= rows.start[0, at, None]) & (position < rows.stop[0, at, None])


def summary(layers: dict[int, Layer]) -> dict[str, Any]:
    """Everything but the masses, for JSON."""
    about = {"shares": SHARES, "top_k": TOP_K}
    plain = lambda x: x.tolist() if isinstance(x, Tensor) else x
    fields = ("top_k", "top_k_density", "columns", "diagonals", "blocks", "curves")
    return about | {
        "layers": [
            {"layer": number} | {name: plain(getattr(layer, name)) for name in fields}
            for number, layer in layers.items()
        ]
    }
