"""cuDNN's two ops of torch in plain PyTorch, on the CPU and by the ops' own names and schemas."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Calls(list):
    """What the ops were called with: (name, queries, keys, is_causal)."""


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    """[B, Hq, Sq, Sk]. Unseen pairs are -inf. Positions count from the first query and the first key."""
    group = q.shape[1] // k.shape[1]
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check what cuDNN requires: four dimensions, and a contiguous last one."""
    for x in (q, k, v):
        assert x.ndim == 4 and x.stride(-1) == 1
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0


def _twin(calls: Calls) -> tuple:
    # The dispatcher leaves out arguments that have their default.
    def forward(
        q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
    ):
        _check(q, k, v)
        assert attn_bias is None and compute_log_sumexp and dropout_p == 0
        calls.append(("forward", q.shape[2], k.shape[2], is_causal))
        scores = _scores(q, k, is_causal, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        out = (scores - lse).exp() @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
        seed = torch.zeros((), dtype=torch.int64)
        return out, lse, None, None, q.shape[2], k.shape[2], seed, seed, None

    def backward(
        d_out, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p,
        is_causal, *, scale=None,
    ):  # fmt: skip
        _check(q, k, v)
        batch, heads, q_len, _ = q.shape
        assert lse.shape == (batch, heads, q_len, 1) and lse.is_contiguous()
        assert (max_q, max_k, dropout_p) == (q_len, k.shape[2], 0)
        assert bias is None and cum_q is None and cum_k is None
        # A plan is found by the layout of q, k and v alone.
        assert q.stride()[1:] == out.stride()[1:] == d_out.stride()[1:]
        # Nobody else has these strides.
        assert batch == 1 and q.stride(0) == 2 * heads * q.stride(1)
        calls.append(("backward", q_len, k.shape[2], is_causal))
        kv_heads = k.shape[1]
        values = v.repeat_interleave(heads // kv_heads, 1)
        keys = k.repeat_interleave(heads // kv_heads, 1)
        p = (_scores(q, k, is_causal, scale) - lse).exp()
        delta = (d_out * out).sum(-1, keepdim=True)
        d_scores = p * (d_out @ values.mT - delta) * (scale or q.shape[-1] ** -0.5)
        dk = (d_scores.mT @ q).unflatten(1, (kv_heads, -1)).sum(2)
        dv = (p.mT @ d_out).unflatten(1, (kv_heads, -1)).sum(2)
        return d_scores @ keys, dk, dv

    return forward, backward


@contextmanager
def on_the_cpu() -> Iterator[Calls]:
    """The ops have kernels for the CPU inside."""
    calls = Calls()
    forward, backward = _twin(calls)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
        yield calls
