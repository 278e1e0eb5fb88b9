"""What FlashAttention-4 and cuDNN compute without tiles, in plain PyTorch over a boolean mask."""

import pytest
import torch
from torch import Tensor

from tests.reference import dense_attention
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import DenseShape, Partial, Queries

eager = BACKENDS["eager"]


def let_eager_serve_dense(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eager, "SERVES_DENSE", True)
    patch.setattr(eager, "serves_dense", lambda shape: True)
    patch.setattr(eager, "dense_forward", dense_forward)
    patch.setattr(eager, "dense_backward", dense_backward)


def seen_pairs(shape: DenseShape, batch: int, q_len: int, k_len: int) -> Tensor:
    """bool [B, 1, Sq, Sk]"""
    if not shape.causal:
        return torch.ones(batch, 1, q_len, k_len, dtype=torch.bool)
    distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
    seen = (distance >= 0) & (distance < (shape.window or k_len))
    seen = seen.expand(batch, 1, -1, -1)
    if shape.offsets is None:
        return seen
    lengths = shape.offsets.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).view(batch, 1, -1)
    return seen & (document[..., :, None] == document[..., None, :])


def dense_forward(q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float) -> Partial:
    seen = seen_pairs(shape, len(q), q.shape[2], k.shape[2])
    return Partial(*dense_attention(q, k, v, seen, scale))


def dense_backward(
    queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, d_out, out, lse = queries
    heads_of_kv = (k.shape[1], q.shape[1] // k.shape[1])
    keys = k.repeat_interleave(heads_of_kv[1], 1)
    values = v.repeat_interleave(heads_of_kv[1], 1)
    seen = seen_pairs(shape, len(q), q.shape[2], k.shape[2])
    scores = (q @ keys.mT * scale).masked_fill(~seen, -torch.inf)
    p = (scores - lse[..., None]).exp()
    d_scores = p * (d_out @ values.mT - (d_out * out).sum(-1, keepdim=True)) * scale
    dk = (d_scores.mT @ q).unflatten(1, heads_of_kv).sum(2)
    dv = (p.mT @ d_out).unflatten(1, heads_of_kv).sum(2)
    return d_scores @ keys, dk, dv
