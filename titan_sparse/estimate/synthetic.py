"""Queries and keys that look like real attention, and the index that they lead to (MTraining, appendix A).

Under RoPE the mean of a query and the mean of a key give a logit that depends on their distance d alone: slashes. A few
outlier keys, large in a pair of dims that hardly turns, are seen from everywhere: verticals. For query head h

    logit(n, m) = sum_i a[h, i] cos((n - m) theta_i) + noise,    or  v[h] + noise if m is an outlier

with i over the pairs of dims that turn once in 256 tokens up to half the sequence, a drawn log-normally, and v set so that
the outliers hold a share of the attention mass that is drawn too. Large a make near diagonals and, where the strongest
pairs come round together, far ones. Nothing here depends on a model or on data. Besides, lengths of packed documents.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns.vertical_slash.budget import compact
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlash
from titan_sparse.models.flavours import RopeConfig
from titan_sparse.models.rope import apply_rope, inverse_frequencies, rope_tables

_KEY_MEAN, _OUTLIER = 2.0, 16.0
_KEY_NOISE, _QUERY_NOISE = 0.15, 0.3
_STRENGTH, _SPREAD, _VERTICAL_SHARE = (9.0, 22.0), (0.3, 2.0), (0.05, 0.7)
"""Ranges that each head draws from: its largest logit of slashes; how unequal its pairs are, from all alike, which makes
near diagonals, to a few that lead, which makes periodic ones; the outliers' share of its mass."""
_RUN = 4096
"""Tokens whose noise is drawn together, so that any part of a sequence can be made alone."""


class Heads(NamedTuple):
    """Means of the heads before rotation, complex128: pair i of a head is dims i and i + D / 2.

    query_mean: [Hq, D / 2]. key_mean: [Hkv, D / 2]. outlier: [Hkv, D / 2], the mean of the keys at `outliers` instead,
    int64 [Hkv, m] ascending. frequency: float64 [D / 2], radians per token. rope: the rotary embedding. seed: of the noise.
    """

    query_mean: Tensor
    key_mean: Tensor
    outlier: Tensor
    outliers: Tensor
    frequency: Tensor
    rope: RopeConfig
    seq_len: int
    seed: int


def draw_heads(
    seq_len: int,
    heads: int = 16,
    kv_heads: int = 2,
    head_dim: int = 128,
    seed: int = 0,
    theta: float = 1e6,
) -> Heads:
    """Heads of one layer for sequences of `seq_len` tokens; theta: base of the rotary frequencies.

    Raises ValueError if the sequence is too short to hold slashes, or heads cannot be grouped.
    """
    if seq_len < 2048 or heads % kv_heads:
        raise ValueError(
            f"draw_heads(seq_len={seq_len}, heads={heads}, kv_heads={kv_heads}): write 2048 tokens or more, "
            "and heads as a multiple of kv_heads"
        )
    g = torch.Generator().manual_seed(seed)
    rope = RopeConfig(theta, "none", 1.0, seq_len)
    frequency = inverse_frequencies(rope, head_dim)[0].double()
    turn = torch.rand(kv_heads, head_dim // 2, generator=g, dtype=torch.float64) * 2 * math.pi
    phase = torch.polar(torch.ones_like(turn), turn)
    key_mean, outlier = _KEY_MEAN * phase, torch.zeros_like(phase)
    key_mean[:, -1], outlier[:, -1] = 0, _OUTLIER * phase[:, -1]
    of_query = phase.repeat_interleave(heads // kv_heads, 0)
    query_mean = (
        of_query * _slash_strengths(frequency, heads, seq_len, g) * head_dim**0.5 / _KEY_MEAN
    )
    outliers = torch.stack(
        [torch.randperm(seq_len, generator=g)[: 16 + seq_len // 4096] for _ in range(kv_heads)]
    )
    drawn = Heads(
        query_mean, key_mean, outlier, outliers.sort(-1).values, frequency, rope, seq_len, seed
    )
    strength = _vertical_strengths(drawn, g)
    query_mean[:, -1] = of_query[:, -1] * strength * head_dim**0.5 / _OUTLIER
    return drawn


def _slash_strengths(frequency: Tensor, heads: int, seq_len: int, g: torch.Generator) -> Tensor:
    """a[h, i] of the module's formula, float64 [Hq, D / 2]."""
    period = 2 * math.pi / frequency
    draw = lambda low, high: (
        low + (high - low) * torch.rand(heads, 1, generator=g, dtype=torch.float64)
    )
    weight = torch.exp(
        draw(*_SPREAD) * torch.randn(heads, len(frequency), generator=g, dtype=torch.float64)
    )
    weight *= (period > 256) & (period < seq_len / 2)
    return draw(*_STRENGTH) * weight / weight.sum(-1, keepdim=True)


def _vertical_strengths(heads: Heads, g: torch.Generator) -> Tensor:
    """v[h], float64 [Hq]: share / (1 - share) = m exp(v) / sum over all distances of exp(logit of slashes)."""
    low, high = _VERTICAL_SHARE
    share = low + (high - low) * torch.rand(len(heads.query_mean), generator=g, dtype=torch.float64)
    step = max(1, heads.seq_len // 65536)
    slashes = expected_logits(heads, torch.arange(0, heads.seq_len, step)).logsumexp(-1) + math.log(
        step
    )
    return (share / (1 - share)).log() + slashes - math.log(heads.outliers.shape[1])


def expected_logits(heads: Heads, distance: Tensor) -> Tensor:
    """Expected logit of an ordinary key at each distance, float64 [Hq, n] for int64 [n] (MTraining, theorem A.1). Its sines
    are missing because the means of a query head and its key head are in phase."""
    group = len(heads.query_mean) // len(heads.key_mean)
    product = (heads.query_mean * heads.key_mean.conj().repeat_interleave(group, 0)).real
    product *= (2 * len(heads.frequency)) ** -0.5
    used = product.abs().amax(0) > 0
    return product[:, used] @ (distance.double() * heads.frequency[used, None]).cos()


# Documents ----------------------------------------------------------------------------------------------------------


def ragged_lengths(seq_len: int, seed: int) -> list[int]:
    """Documents of a packed sequence: 71 % of at most 1K tokens, 87 % of 2K, 97.4 % of 8K, the longest 196,608 or a quarter of
    the sequence (the law that MagiAttention's benchmarks draw from)."""
    g, found = np.random.default_rng(seed), []
    limits, shares = np.array([16, 1024, 2048, 8192, 196_608]), np.array([0.71, 0.16, 0.104, 0.026])
    while sum(found) < seq_len:
        part = g.choice(4, p=shares)
        length = int(np.exp(g.uniform(*np.log(limits[part : part + 2]))))
        found.append(min(length, seq_len // 4, seq_len - sum(found)))
    return found


# Tensors ------------------------------------------------------------------------------------------------------------


def queries(heads: Heads, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """q [1, Hq, stop - start, D] of the tokens start .. stop - 1, the same whatever part is asked for."""
    noise = _noise(len(heads.query_mean), start, stop, heads, 2 * heads.seed)
    return _rotated(_flat(heads.query_mean)[:, None] + _QUERY_NOISE * noise, heads, start).to(dtype)


def keys(heads: Heads, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """k [1, Hkv, stop - start, D] of the tokens start .. stop - 1, the same whatever part is asked for."""
    noise = _noise(len(heads.key_mean), start, stop, heads, 2 * heads.seed + 1)
    k = _flat(heads.key_mean)[:, None] + _KEY_NOISE * noise
    for head, positions in enumerate(heads.outliers):
        here = positions[(positions >= start) & (positions < stop)]
        k[head, here - start] += _flat(heads.outlier - heads.key_mean)[head]
    return _rotated(k, heads, start).to(dtype)


def _noise(heads: int, start: int, stop: int, of: Heads, seed: int) -> Tensor:
    runs = range(start // _RUN, -(-stop // _RUN))
    generator = lambda run: torch.Generator().manual_seed((seed << 32) + run)
    drawn = [
        torch.randn(heads, _RUN, 2 * len(of.frequency), generator=generator(run)) for run in runs
    ]
    return torch.cat(drawn, dim=1)[:, start - runs[0] * _RUN : stop - runs[0] * _RUN]


def _flat(mean: Tensor) -> Tensor:
    return torch.cat([mean.real, mean.imag], dim=-1).float()


def _rotated(x: Tensor, heads: Heads, start: int) -> Tensor:
    # float64 angles: in float32 a position beyond 2^20 tokens is already off by a tenth of a radian.
    position = torch.arange(start, start + x.shape[1])[None]
    cos, sin = rope_tables(heads.frequency, 1.0, position, torch.float64)
    return apply_rope(x[None], cos.float(), sin.float())


# Indexes ------------------------------------------------------------------------------------------------------------


def select(heads: Heads, pattern: VerticalSlash, block_size: int = 128) -> list[Tensor]:
    """What pattern.select() chooses for a causal sequence of these heads, as the tensors that pattern.index() takes.

    One query head at a time and only the probe's queries, so that 512K tokens need about 1 GiB.
    """
    seq_len, group = heads.seq_len, len(heads.query_mean) // len(heads.key_mean)
    probe = pattern.probe_queries(block_size)
    last = queries(heads, seq_len - probe, seq_len)
    k, chosen = keys(heads, 0, seq_len), []
    for head in range(len(heads.query_mean)):
        q = torch.zeros(1, 1, seq_len, k.shape[-1])
        q[:, :, -probe:] = last[:, head]
        own = k[:, head // group, None]
        chosen.append(pattern.select(q, own, Causal(), block_size=block_size).tensors())
    return [torch.cat(parts, dim=1) for parts in zip(*chosen)]


def expected_selection(heads: Heads, pattern: VerticalSlash, block_size: int = 128) -> list[Tensor]:
    """As select(), but from expected masses, with no tensors of D dims: seconds for millions of tokens.

    seq_len has to be a multiple of block_size. A key's mass is exp(expected logit) of its distance from the last block,
    times log-normal noise; an outlier's is exp(v). Raises ValueError for budget = "joint", which needs more than these masses.
    """
    if pattern.budget == "joint":
        raise ValueError(
            'attention.vertical_slash.budget = "joint" cannot be planned with; write "independent", or plan with '
            "indexes that were recorded"
        )
    verticals = _vertical_masses(heads, block_size)
    diagonals = verticals.unflatten(-1, (-1, block_size)).sum(-1).flip(-1)
    vertical, cut_verticals = _fill(
        verticals, pattern.recall, pattern.min_columns, pattern.max_columns, pattern.sinks
    )
    most = pattern.max_slashes or diagonals.shape[1]
    slashes, cut_slashes = _fill(
        diagonals, pattern.recall, pattern.min_slashes, most, pattern.local_diagonals
    )
    capacity = pattern.vertical_capacity(heads.seq_len, block_size, False)
    capped = torch.stack([cut_verticals, cut_slashes], dim=-1)
    return [slashes[None], compact(vertical, capacity, heads.seq_len)[None], capped[None]]


def _vertical_masses(heads: Heads, block_size: int) -> Tensor:
    """What the last block's queries give to each key, relative to the head's largest; float32 [Hq, S]."""
    group, step = len(heads.query_mean) // len(heads.key_mean), max(1, block_size // 16)
    distance = torch.arange(0, heads.seq_len, step)
    logits = expected_logits(heads, distance).flip(-1)
    # A vertical is seen by a whole block of queries: the mean over as many distances.
    logits = logits.unflatten(-1, (-1, block_size // step)).logsumexp(-1) - math.log(
        block_size // step
    )
    logits = logits.repeat_interleave(block_size, -1).float()
    outlier = (heads.query_mean * heads.outlier.conj().repeat_interleave(group, 0)).real.sum(-1)
    outlier = (outlier * (2 * len(heads.frequency)) ** -0.5).float()
    logits.scatter_(
        1,
        heads.outliers.repeat_interleave(group, 0),
        outlier[:, None].expand(-1, heads.outliers.shape[1]),
    )
    noise = (
        heads.query_mean.abs().square().sum(-1, keepdim=True).float()
        * _KEY_NOISE**2
        / (2 * len(heads.frequency))
    )
    g = torch.Generator().manual_seed(heads.seed)
    logits += noise.sqrt() * torch.randn(logits.shape, generator=g)
    return (logits - logits.amax(-1, keepdim=True)).exp()


def _fill(mass: Tensor, recall: float, least: int, most: int, always: int) -> tuple[Tensor, Tensor]:
    """Selected bool [Hq, L] and capped bool [Hq], as patterns/budget.py does it, for one unpacked sequence."""
    order = mass.sort(dim=-1, descending=True, stable=True)
    before = order.values.double().cumsum(-1) - order.values
    wanted = (before < recall * mass.double().sum(-1, keepdim=True)) & (order.values > 0)
    rank = torch.arange(mass.shape[1])
    chosen = (wanted | (rank < least)) & (rank < most)
    selected = torch.zeros_like(chosen).scatter_(1, order.indices, chosen)
    return selected | (rank < always), (wanted & (rank >= most)).any(-1)
