"""FlashAttention-4 called directly, for dense attention without holes.

Going through tables of blocks would cost 10 % there. This is not a backend: flex.py calls it.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import DenseShape, Partial, Queries

HEAD_DIMS = (64, 96, 128)


def missing() -> str | None:
    """Why FlashAttention-4 cannot be used here; None if it can."""
    wrong_gpu = _wrong_gpu()
    if wrong_gpu:
        return wrong_gpu
    if not _installed():
        return "flash-attn-4 is not installed"
    failure = _import_failure()
    if failure:
        return failure
    if torch.are_deterministic_algorithms_enabled():
        return "the backward of FlashAttention-4 is not deterministic"
    return None


def _wrong_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    # From Blackwell on its block lists have other block sizes; before Hopper it has none.
    if torch.cuda.get_device_capability()[0] != 9:
        return "FlashAttention-4 takes block lists of 128 tokens on Hopper GPUs only"
    return None


@functools.cache
def _import_failure() -> str | None:
    """Why the kernels cannot be imported, in one line. A wrong wheel leaves out their CUDA part."""
    try:
        importlib.import_module("flash_attn.cute.interface")
        # The libraries in which kernels are compiled, which come in a package of their own.
        importlib.import_module("cutlass.cute")
    except Exception as error:  # whatever a half installation raises
        first_line = str(error).partition("\n")[0]
        return f"flash-attn-4 is installed in part ({type(error).__name__}: {first_line})"
    return None


@functools.cache
def _installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def serves(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention-4 is here and computes with such inputs."""
    if dtype not in (torch.bfloat16, torch.float16) or head_dim not in HEAD_DIMS:
        return False
    return missing() is None


def dense_forward(q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float) -> Partial:
    """Attention of q [B, Hq, Sq, D] to k, v [B, Hkv, Sk, D]; Sq and Sk differ only for full shapes.

    Returns out [B, Hq, Sq, D] in q's dtype and natural-log lse [B, Hq, Sq], fp32.
    """
    if shape.offsets is not None:
        return _packed_forward(q, k, v, shape, scale)
    from flash_attn.cute.interface import _flash_attn_fwd

    # Its own output would be ordered by token, and would have to be copied.
    out = q.new_empty(q.shape)
    lse = _flash_attn_fwd(
        _by_token(q),
        _by_token(k),
        _by_token(v),
        softmax_scale=scale,
        causal=shape.causal,
        return_lse=True,
        out=out.transpose(1, 2),
    )[1]
    return Partial(out, lse)


def dense_backward(
    queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv through these keys, in q's dtype.

    out and lse may be those of more keys: then the gradients are the share of these keys.
    """
    if shape.offsets is not None:
        return _packed_backward(queries, k, v, shape, scale)
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = _flash_attn_bwd(
        _by_token(queries.q),
        _by_token(k),
        _by_token(v),
        _by_token(queries.out),
        _by_token(queries.d_out),
        queries.lse.contiguous(),
        scale,
        shape.causal,
    )[:3]
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float) -> Partial:
    from flash_attn.cute.interface import _flash_attn_fwd

    batch, heads, length, dim = q.shape
    # By head, as the caller wants it; for a single sequence the result below is a view.
    out = q.new_empty(heads, batch * length, dim)
    # lse: [Hq, B * S]
    lse = _flash_attn_fwd(
        _in_a_row(q),
        _in_a_row(k),
        _in_a_row(v),
        softmax_scale=scale,
        return_lse=True,
        out=out.transpose(0, 1),
        **_documents(shape.offsets, shape.longest, shape.window),
    )[1]
    out = out.unflatten(1, (batch, length)).transpose(0, 1)
    lse = lse.unflatten(1, (batch, length)).transpose(0, 1)
    return Partial(out, lse)


def _packed_backward(
    queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    batch, _, length, _ = queries.q.shape
    # [Hq, B * S]
    lse = queries.lse.transpose(0, 1).flatten(1).contiguous()
    # [B * S, H, D]
    dq, dk, dv = _flash_attn_bwd(
        _in_a_row(queries.q),
        _in_a_row(k),
        _in_a_row(v),
        _in_a_row(queries.out),
        _in_a_row(queries.d_out),
        lse,
        scale,
        **_documents(shape.offsets, shape.longest, shape.window),
    )[:3]
    dq = dq.unflatten(0, (batch, length)).transpose(1, 2)
    dk = dk.unflatten(0, (batch, length)).transpose(1, 2)
    dv = dv.unflatten(0, (batch, length)).transpose(1, 2)
    return dq, dk, dv


def _documents(offsets: Tensor, longest: int, window: int | None) -> dict[str, Any]:
    arguments = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    if window is None:
        return arguments | {"causal": True}
    # A window replaces `causal`: that many keys back, the query's own included, and none ahead.
    return arguments | {"window_size_left": window - 1, "window_size_right": 0}


def _by_token(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B, S, H, D], as a view."""
    return x.detach().transpose(1, 2)


def _in_a_row(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B * S, H, D]; a view for a single sequence."""
    return _by_token(x).flatten(0, 1)
