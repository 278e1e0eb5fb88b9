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
    """Means of the heads before rotation, complex128: pair i of a head is dims i and i + D / 2.

    query_mean: [Hq, D / 2]. key_mean: [Hkv, D / 2].
    outlier: [Hkv, D / 2], the mean of the keys at `outliers` instead of key_mean.
    outliers: int64 [Hkv, m], ascending positions.
    frequency: float64 [D / 2], radians per token. seed: of the noise.
    """

    query_mean: Tensor
    key_mean: Tensor
    outlier: Tensor
    outliers: Tensor
    frequency: Tensor
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
    """Heads of one layer for sequences of `seq_len` tokens. theta: base of the rotary frequencies.

    Raises ValueError if the sequence is too short to hold slashes, or heads cannot be grouped.
    """
    if seq_len < 2048 or heads % kv_heads:
        raise ValueError(
            f"draw_heads(seq_len={seq_len}, heads={heads}, kv_heads={kv_heads}): write 2048 tokens or more, "
            "and heads as a multiple of kv_heads"
        )
    generator = torch.Generator().manual_seed(seed)
    rope = RopeConfig(theta, "none", 1.0, seq_len)
    frequency = inverse_frequencies(rope, head_dim)[0].double()

    # [Hkv, D / 2]: ordinary keys use all pairs of dims but the last, which hardly turns; outliers
    # use that one alone.
    angle = torch.rand(kv_heads, head_dim // 2, generator=generator, dtype=torch.float64)
    angle = angle * 2 * math.pi
    phase = torch.polar(torch.ones_like(angle), angle)
    key_mean = _KEY_MEAN * phase
    key_mean[:, -1] = 0
    outlier = torch.zeros_like(phase)
    outlier[:, -1] = _OUTLIER * phase[:, -1]

    # [Hq, D / 2]: a query head is in phase with its key head.
    query_phase = phase.repeat_interleave(heads // kv_heads, 0)
    strengths = _slash_strengths(frequency, heads, seq_len, generator)
    query_mean = query_phase * strengths * head_dim**0.5 / _KEY_MEAN

    outliers_a_head = 16 + seq_len // 4096
    outliers = []
    for _ in range(kv_heads):
        outliers.append(torch.randperm(seq_len, generator=generator)[:outliers_a_head])
    drawn = Heads(
        query_mean=query_mean,
        key_mean=key_mean,
        outlier=outlier,
        outliers=torch.stack(outliers).sort(-1).values,
        frequency=frequency,
        seq_len=seq_len,
        seed=seed,
    )
    # The logits of the slashes are known now, so v can be set for its share of the mass.
    strength = _vertical_strengths(drawn, generator)
    query_mean[:, -1] = query_phase[:, -1] * strength * head_dim**0.5 / _OUTLIER
    return drawn


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


def _vertical_strengths(heads: Heads, generator: torch.Generator) -> Tensor:
    """v[h] of the module's formula, float64 [Hq].

    share / (1 - share) = m exp(v) / sum over all distances of exp(logit of slashes).
    """
    share = _uniform(_VERTICAL_SHARE, len(heads.query_mean), generator)
    # The sum over distances is taken from at most 65,536 of them.
    stride = max(1, heads.seq_len // 65536)
    logits = expected_logits(heads, torch.arange(0, heads.seq_len, stride))
    slashes = logits.logsumexp(-1) + math.log(stride)
    odds = share / (1 - share)
    return odds.log() + slashes - math.log(heads.outliers.shape[1])


def expected_logits(heads: Heads, distance: Tensor) -> Tensor:
    """Expected logit of an ordinary key at each distance (MTraining, theorem A.1).

    distance: int64 [n]. Returns float64 [Hq, n]. The theorem's sines are missing because the means
    of a query head and its key head are in phase.
    """
    # [Hq, D / 2]
    group_size = len(heads.query_mean) // len(heads.key_mean)
    key_mean = heads.key_mean.conj().repeat_interleave(group_size, 0)
    amplitude = (heads.query_mean * key_mean).real
    amplitude *= (2 * len(heads.frequency)) ** -0.5
    # Many pairs of dims have no amplitude: leave out their cosines.
    used = amplitude.abs().amax(0) > 0
    # [used, n]
    angle = distance.double() * heads.frequency[used, None]
    return amplitude[:, used] @ angle.cos()


def queries(heads: Heads, dtype: torch.dtype = torch.float32) -> Tensor:
    """q of the whole sequence, [1, Hq, S, D]."""
    # Queries take the even seeds, keys the odd ones.
    q = _with_noise(heads.query_mean, _QUERY_NOISE, heads.seq_len, 2 * heads.seed)
    return _rotated(q, heads).to(dtype)


def keys(heads: Heads, dtype: torch.dtype = torch.float32) -> Tensor:
    """k of the whole sequence, [1, Hkv, S, D]."""
    k = _with_noise(heads.key_mean, _KEY_NOISE, heads.seq_len, 2 * heads.seed + 1)
    # [Hkv, D]: what makes an ordinary key an outlier.
    to_outlier = _real_dims(heads.outlier - heads.key_mean)
    for head, positions in enumerate(heads.outliers):
        k[head, positions] += to_outlier[head]
    return _rotated(k, heads).to(dtype)


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


def _rotated(x: Tensor, heads: Heads) -> Tensor:
    """x [H, S, D], rotated, [1, H, S, D]."""
    # float64 angles: in float32 a position beyond 2^20 tokens is already off by a tenth of a radian.
    position = torch.arange(heads.seq_len)[None]
    cos, sin = rope_tables(heads.frequency, 1.0, position, torch.float64)
    # The tables themselves need no more than fp32.
    return apply_rope(x[None], cos.float(), sin.float())
