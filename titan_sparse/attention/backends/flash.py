"""FlashAttention-4 called directly, for dense attention without holes: tables of blocks would cost 10 % there."""

import functools
import importlib.util

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128)


def missing() -> str | None:
    """Why FlashAttention-4 cannot be used here, in words; None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    # Its block lists have other block sizes from Blackwell on, and none of them before Hopper.
    if torch.cuda.get_device_capability()[0] != 9:
        return "FlashAttention-4 takes block lists of 128 tokens on Hopper GPUs only"
    if not _installed():
        return "flash-attn-4 is not installed"
    if torch.are_deterministic_algorithms_enabled():
        return "the backward of FlashAttention-4 is not deterministic"
    return None


@functools.cache
def _installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def serves(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention-4 is here and computes with such inputs."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim in HEAD_DIMS and missing() is None


def forward_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Dense causal attention: out [B, Hq, S, D] in q's dtype and natural-log lse fp32 [B, Hq, S]."""
    return _forward(q, k, v, scale, causal=True)


def forward_full(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every query to every key, of which there may be another number; as forward_causal()."""
    return _forward(q, k, v, scale, causal=False)


def backward_causal(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of forward_causal(). out and lse may be those of more keys: then the gradients are these keys' part."""
    return _backward(d_out, q, k, v, out, lse, scale, causal=True)


def backward_full(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of forward_full(), as backward_causal()."""
    return _backward(d_out, q, k, v, out, lse, scale, causal=False)


def forward_packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, offsets: Tensor, longest: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Dense causal attention inside documents, as packed.Packing has them: out [B, Hq, S, D] and lse fp32 [B, Hq, S]."""
    from flash_attn.cute.interface import _flash_attn_fwd

    batch, heads, length, dim = q.shape
    out = q.new_empty(
        heads, batch * length, dim
    )  # as attend() wants it, where there is one sequence
    lse = _flash_attn_fwd(
        *_in_a_row(q, k, v),
        softmax_scale=scale,
        return_lse=True,
        out=out.transpose(0, 1),
        **_documents(offsets, longest, window),
    )[1]
    return tuple(x.unflatten(1, (batch, length)).transpose(0, 1) for x in (out, lse))


def backward_packed(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    offsets: Tensor,
    longest: int,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of forward_packed()."""
    from flash_attn.cute.interface import _flash_attn_bwd

    batch, _, length, _ = q.shape
    q, k, v, out, d_out = _in_a_row(q, k, v, out, d_out)
    lse = lse.transpose(0, 1).flatten(1).contiguous()
    found = _flash_attn_bwd(
        q, k, v, out, d_out, lse, scale, **_documents(offsets, longest, window)
    )[:3]
    return tuple(x.unflatten(0, (batch, length)).transpose(1, 2) for x in found)


def _documents(offsets: Tensor, longest: int, window: int | None) -> dict:
    """FlashAttention-4's arguments. A window takes the place of `causal`: so many keys back, none ahead."""
    ranges = (
        {"causal": True}
        if window is None
        else {"window_size_left": window - 1, "window_size_right": 0}
    )
    return ranges | {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _in_a_row(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B * S, H, D] of [B, H, S, D]; views for one sequence."""
    return tuple(x.flatten(0, 1) for x in _by_token(*tensors))


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out = q.new_empty(q.shape)  # given, as its own would be ordered by token and copied
    lse = _flash_attn_fwd(
        *_by_token(q, k, v),
        softmax_scale=scale,
        causal=causal,
        return_lse=True,
        out=out.transpose(1, 2),
    )[1]
    return out, lse


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, d_out = _by_token(q, k, v, out, d_out)
    return tuple(
        x.transpose(1, 2)
        for x in _flash_attn_bwd(q, k, v, out, d_out, lse.contiguous(), scale, causal)[:3]
    )


def _by_token(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, S, H, D] of [B, H, S, D], as views."""
    return tuple(x.detach().transpose(1, 2) for x in tensors)
