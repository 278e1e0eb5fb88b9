"""Independent dense references: plain softmax attention over a boolean mask, and
brute-force selection."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_sparse.models.flavours import DecoderConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of tests that run on either."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse over bool [B, Hq, S, S]; rows that see nothing give 0 and -inf."""
    scores, values = _scores_and_values(q, k, v, seen, scale)
    lse = scores.logsumexp(-1)
    finite_lse = lse.clamp(min=-1e300)[..., None]
    probability = torch.where(seen, (scores - finite_lse).exp(), 0)
    return probability @ values, lse


def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """dense_attention() with learned sinks [Hq]: a column of the scores that has no value."""
    scores, values = _scores_and_values(q, k, v, seen, scale)
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., :-1] @ values, scores.logsumexp(-1)


def _scores_and_values(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """[B, Hq, S, S] and [B, Hq, S, D]"""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, 1)
    scores = (q @ keys.mT * scale).masked_fill(~seen, -torch.inf)
    return scores, v.repeat_interleave(group, 1)


def by_token(x: Tensor) -> Tensor:
    """The same numbers with [B, S, H, D] in memory, as a model's projections give them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def gradients(function, d_out: Tensor, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """function(*inputs) and the gradients of its inputs for the upstream gradient d_out."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), list(torch.autograd.grad(out, leaves, d_out))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in fp64."""
    want = want.double()
    difference = got.double() - want
    # Of what has to be 0, any other number is a large error.
    return (difference.norm() / want.norm().clamp(min=1e-30)).item()


def tiles_of(pairs: Tensor, size: int) -> Tensor:
    """[..., S, S] cut into tiles: [..., blocks, blocks, size, size]."""
    # [..., blocks, size, blocks, size]
    cut = pairs.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return cut.transpose(-2, -3)


def structured_qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    dim: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """q, k, v that look like attention under RoPE (MTraining, appendix A).

    Means that are not zero give slashes, outliers give verticals.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = draw(batch, heads, seq_len, dim) * 0.7 + 1.5 * draw(batch, heads, 1, dim)
    k = draw(batch, kv_heads, seq_len, dim) * 0.7 + 1.5 * draw(batch, kv_heads, 1, dim)
    # [S, dim / 2]
    position = torch.arange(seq_len, dtype=torch.float64)[:, None]
    frequency = 100.0 ** (-torch.arange(dim // 2) / (dim // 2))
    angle = position * frequency
    q = _rotate(q, angle)
    k = _rotate(k, angle)
    outliers = torch.randperm(seq_len, generator=generator)[: max(1, seq_len // 40)]
    k[:, :, outliers] *= 2.5
    v = draw(batch, kv_heads, seq_len, dim)
    return [q.to(dtype), k.to(dtype), v.to(dtype)]


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def attention_bytes(config: DecoderConfig, tokens: int, dtype: torch.dtype) -> int:
    """What one layer's attention keeps of `tokens` local tokens.

    That is out in `dtype`, and lse in fp32 (fp64 for fp64).
    """
    out_bytes = config.head_dim * dtype.itemsize
    lse_bytes = max(dtype.itemsize, 4)
    return tokens * config.heads * (out_bytes + lse_bytes)


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that is made inside of it."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out
