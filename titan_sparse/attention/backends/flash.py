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
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    # From Blackwell on its block lists have other block sizes; before Hopper it has none.
    if torch.cuda.get_device_capability()[0] != 9:
        return "FlashAttention-4 takes block lists of 128 tokens on Hopper GPUs only"
    failure = _import_failure()
    if failure:
        return failure
    if torch.are_deterministic_algorithms_enabled():
        return "the backward of FlashAttention-4 is not deterministic"
    return None


@functools.cache
def _import_failure() -> str | None:
    """Why the kernels cannot be imported, in one line. A wrong wheel leaves out their CUDA part."""
    try:
        if importlib.util.find_spec("flash_attn.cute") is None:
            return "flash-attn-4 is not installed"
    except ImportError:
        return "flash-attn-4 is not installed"
    try:
        importlib.import_module("flash_attn.cute.interface")
        # The libraries in which kernels are compiled, which come in a package of their own.
        importlib.import_module("cutlass.cute")
    except Exception as error:  # whatever a half installation raises
        first_line = str(error).partition("\n")[0]
        return f"flash-attn-4 is installed in part ({type(error).__name__}: {first_line})"
    return None


def serves(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention-4 is here and computes with such inputs."""
    if dtype not in (torch.bfloat16, torch.float16) or head_dim not in HEAD_DIMS:
        return False
    return missing() is None


def dense_forward(q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float) -> Partial:
    """Attention of q [B, Hq, Sq, D] to k, v [B, Hkv, Sk, D]; out in q's dtype, lse in fp32."""
    from flash_attn.cute.interface import _flash_attn_fwd

    # Its own output would be ordered by token, and would have to be copied. For packed documents of
    # a single sequence the result is a view too.
    if shape.offsets is None:
        out = q.new_empty(q.shape)
        out_by_token = out.transpose(1, 2)
    else:
        by_head = q.new_empty(q.shape[1], len(q) * q.shape[2], q.shape[3])
        out = by_head.unflatten(1, (len(q), -1)).transpose(0, 1)
        out_by_token = by_head.transpose(0, 1)
    lse = _flash_attn_fwd(
        *(_by_token(x, shape) for x in (q, k, v)),
        softmax_scale=scale,
        return_lse=True,
        out=out_by_token,
        **_options(shape),
    )[1]
    if shape.offsets is not None:
        # [Hq, B * S]
        lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1)
    return Partial(out, lse)


def dense_backward(
    queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv through these keys, in q's dtype.

    out and lse may be those of more keys: then the gradients are the share of these keys.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    q, d_out, out, lse = queries
    if shape.offsets is not None:
        lse = lse.transpose(0, 1).flatten(1)
    gradients = _flash_attn_bwd(
        *(_by_token(x, shape) for x in (q, k, v, out, d_out)),
        lse.contiguous(),
        scale,
        **_options(shape),
    )[:3]
    if shape.offsets is not None:
        # [B * S, H, D]
        gradients = (x.unflatten(0, (len(q), -1)) for x in gradients)
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


def _options(shape: DenseShape) -> dict[str, Any]:
    if shape.offsets is None:
        return {"causal": shape.causal}
    options = {
        "cu_seqlens_q": shape.offsets,
        "cu_seqlens_k": shape.offsets,
        "max_seqlen_q": shape.longest,
        "max_seqlen_k": shape.longest,
    }
    if shape.window is None:
        return options | {"causal": True}
    # A window replaces `causal`: that many keys back, the query's own included, and none ahead.
    return options | {"window_size_left": shape.window - 1, "window_size_right": 0}


def _by_token(x: Tensor, shape: DenseShape) -> Tensor:
    """[B, H, S, D] -> [B, S, H, D] as a view, or [B * S, H, D] for packed documents."""
    by_token = x.detach().transpose(1, 2)
    return by_token if shape.offsets is None else by_token.flatten(0, 1)
