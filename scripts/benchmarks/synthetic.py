"""Queries and keys that look like real attention.

The model is that of MTraining, appendix A. Under RoPE the mean of a query and the mean of a key
give a logit that depends only on their distance: slashes. A few outlier keys are large in a pair of
dims that hardly turns, so all queries see them: verticals. For query head h

    logit(n, m) = sum_i a[h, i] cos((n - m) theta_i) + noise,    or  v[h] + noise if m is an outlier

Here i runs over the pairs of dims that turn once in 256 tokens up to half the sequence. a is drawn
log-normally. v is set so that the outliers hold a share of the attention mass, which is drawn too.
Large a make near slashes and, where the strongest pairs are in phase again, far ones.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.models.decoder import apply_rope, inverse_frequencies, rope_tables
from titan_sparse.models.flavours import RopeConfig

_KEY_MEAN = 2.0
_OUTLIER = 16.0
"""Lengths of a pair of dims, in the mean of ordinary keys and of outliers."""

_KEY_NOISE = 0.15
_QUERY_NOISE = 0.3
"""Standard deviations of the noise that is added to the means."""

_STRENGTH = (9.0, 22.0)
"""Range that each head draws its largest logit of slashes from."""
_SPREAD = (0.3, 2.0)
"""Range that each head draws the inequality of its pairs from. Equal pairs make near slashes, and a
few strong ones make periodic slashes."""
_VERTICAL_SHARE = (0.05, 0.7)
"""Range that each head draws the outliers' share of its mass from."""

_RUN = 4096
"""Tokens whose noise is drawn together."""


class Heads(NamedTuple):
    """Rotated queries and keys in fp32, and what they are made of.

    q: [1, Hq, S, D]. k: [1, Hkv, S, D].
    outliers: int64 [Hkv, m], ascending positions of keys.
    strengths: float64 [Hq, D / 2], a of the module's formula.
    frequency: float64 [D / 2], radians per token.
    """

    q: Tensor
    k: Tensor
    outliers: Tensor
    strengths: Tensor
    frequency: Tensor


def draw_heads(
    seq_len: int, heads: int = 16, kv_heads: int = 2, head_dim: int = 128, seed: int = 0
) -> Heads:
    """Heads of one layer for sequences of `seq_len` tokens.

    Raises ValueError if the sequence is too short to hold slashes, or heads cannot be grouped.
    """
    if seq_len < 2048 or heads % kv_heads:
        raise ValueError(
            f"draw_heads(seq_len={seq_len}, heads={heads}, kv_heads={kv_heads}): write 2048 tokens or more, "
            "and heads as a multiple of kv_heads"
        )
    generator = torch.Generator().manual_seed(seed)
    frequency = inverse_frequencies(RopeConfig(1e6, "none", 1.0, seq_len), head_dim)[0].double()

    # Means are complex128: pair i of a head is dims i and i + D / 2.
    # [Hkv, D / 2]: ordinary keys use all pairs but the last, which hardly turns; outliers use that
    # one alone.
    angle = torch.rand(kv_heads, head_dim // 2, generator=generator, dtype=torch.float64)
    angle = angle * 2 * math.pi
    phase = torch.polar(torch.ones_like(angle), angle)
    key_mean = _KEY_MEAN * phase
    key_mean[:, -1] = 0
    to_outlier = -key_mean
    to_outlier[:, -1] = _OUTLIER * phase[:, -1]

    # [Hq, D / 2]: a query head is in phase with its key head.
    strengths = _slash_strengths(frequency, heads, seq_len, generator)
    outliers_a_head = 16 + seq_len // 4096
    outliers = torch.stack(
        [torch.randperm(seq_len, generator=generator)[:outliers_a_head] for _ in range(kv_heads)]
    )
    # share / (1 - share) = m exp(v) / sum over all distances of exp(logit of slashes).
    share = _uniform(_VERTICAL_SHARE, heads, generator)
    # The sum over distances is taken from at most 65,536 of them.
    stride = max(1, seq_len // 65536)
    logits = expected_logits(strengths, frequency, torch.arange(0, seq_len, stride))
    slashes = logits.logsumexp(-1) + math.log(stride)
    of_verticals = (share / (1 - share)).log() + slashes - math.log(outliers_a_head)
    query_phase = phase.repeat_interleave(heads // kv_heads, 0) * head_dim**0.5
    query_mean = query_phase * strengths / _KEY_MEAN
    query_mean[:, -1] = query_phase[:, -1] * of_verticals / _OUTLIER

    # Queries take the even seeds, keys the odd ones.
    q = _with_noise(query_mean, _QUERY_NOISE, seq_len, 2 * seed)
    k = _with_noise(key_mean, _KEY_NOISE, seq_len, 2 * seed + 1)
    outliers = outliers.sort(-1).values
    for head, positions in enumerate(outliers):
        k[head, positions] += _real_dims(to_outlier)[head]
    # float64 angles: in float32 a position beyond 2^20 tokens is already off by a tenth of a
    # radian. The tables themselves need no more than fp32.
    tables = rope_tables(frequency, 1.0, torch.arange(seq_len)[None], torch.float64)
    q, k = (apply_rope(x[None], *(table.float() for table in tables)) for x in (q, k))
    return Heads(q, k, outliers, strengths, frequency)


def _slash_strengths(
    frequency: Tensor, heads: int, seq_len: int, generator: torch.Generator
) -> Tensor:
    """a[h, i] of the module's formula, float64 [Hq, D / 2]."""
    # [Hq, D / 2]: log-normal weights of the pairs of dims.
    spread = _uniform(_SPREAD, heads, generator)
    normal = torch.randn(heads, len(frequency), generator=generator, dtype=torch.float64)
    weight = torch.exp(spread[:, None] * normal)
    # [D / 2]: tokens in which a pair turns once. Only pairs in this range make slashes.
    period = 2 * math.pi / frequency
    weight *= (period > 256) & (period < seq_len / 2)
    strength = _uniform(_STRENGTH, heads, generator)
    return strength[:, None] * weight / weight.sum(-1, keepdim=True)


def _uniform(bounds: tuple[float, float], count: int, generator: torch.Generator) -> Tensor:
    """Numbers drawn uniformly between two bounds, float64 [count]."""
    low, high = bounds
    return low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)


def expected_logits(strengths: Tensor, frequency: Tensor, distance: Tensor) -> Tensor:
    """Expected logit of an ordinary key at each distance (MTraining, theorem A.1).

    distance: int64 [n]. Returns float64 [Hq, n]. The theorem's sines are missing because the means
    of a query head and its key head are in phase.
    """
    # Many pairs of dims have no strength: leave out their cosines.
    used = strengths.amax(0) > 0
    # [used, n]
    angle = distance.double() * frequency[used, None]
    return strengths[:, used] @ angle.cos()


def _with_noise(mean: Tensor, deviation: float, seq_len: int, seed: int) -> Tensor:
    """Means with normal noise, fp32 [H, S, D]."""
    means = _real_dims(mean)[:, None]
    drawn = []
    for run in range(-(-seq_len // _RUN)):
        generator = torch.Generator().manual_seed((seed << 32) + run)
        drawn.append(torch.randn(len(mean), _RUN, means.shape[-1], generator=generator))
    return means + deviation * torch.cat(drawn, dim=1)[:, :seq_len]


def _real_dims(mean: Tensor) -> Tensor:
    """Complex pairs [H, D / 2] as dims, fp32 [H, D]: pair i is dims i and i + D / 2."""
    return torch.cat([mean.real, mean.imag], dim=-1).float()
