"""Causal squares and full rectangles by cuDNN, which torch includes; the rest as in triton.py.

Packed documents go by tiles too: cuDNN plans by shape, and planning takes longer than most
documents do. torch's ops are called directly, because only the backward op itself takes the out and
lse of the whole attention.
"""

import functools

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import (
    Case,
    DenseShape,
    Partial,
    Queries,
    merge,
    not_served,
)
from titan_sparse.attention.backends.triton import BLOCK_SIZES, Triton

HEAD_DIMS = (*range(16, 129, 16), 256)
"""Those with a backward on Hopper GPUs, as far as the Triton kernels take them too."""
_NOTHING_SEEN = 1e30
"""The lse of a row that sees nothing, for the backward: exp(score - 1e30) is 0 for any score, even
-inf."""


class Cudnn(Triton):
    SERVES_SLICES = False
    SERVES_DENSE = True
    DENSE_BY_CHUNK = True
    GATHERS_QUERIES = False

    def refusal(self, case: Case) -> str | None:
        dtypes = (torch.bfloat16, torch.float16)
        return not_served("cudnn", case, ("cuda",), dtypes, BLOCK_SIZES, HEAD_DIMS)

    def missing(self, case: Case) -> str | None:
        return missing() or _failure(case.dtype, case.head_dim)

    def describe(self) -> str:
        version = torch.backends.cudnn.version()
        return f"cudnn: cuDNN {version} for causal attention, own Triton kernels for other masks"

    def serves_dense(self, shape: DenseShape) -> bool:
        """Padding is allowed. Its rows are computed like all others, and the caller drops them."""
        return not shape.has_documents and shape.window is None

    def dense_forward(
        self, q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float
    ) -> Partial:
        """With fewer queries than keys, the keys before the queries' own are computed as a full
        rectangle and the others a causal square: cuDNN would count positions from the first key.
        """
        before = k.shape[2] - q.shape[2]
        if not shape.causal or before == 0:
            return _square_or_rectangle(q, k, v, shape.causal, scale)
        earlier = _square_or_rectangle(q, k[:, :, :before], v[:, :, :before], False, scale)
        own = _square_or_rectangle(q, k[:, :, before:], v[:, :, before:], True, scale)
        return merge(earlier, own.out, own.lse, q.dtype)

    def dense_backward(
        self, queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        before = k.shape[2] - queries.q.shape[2]
        if not shape.causal or before == 0:
            return _gradients(queries, k, v, shape.causal, scale)
        dq, dk, dv = _gradients(queries, k[:, :, :before], v[:, :, :before], False, scale)
        own_dq, own_dk, own_dv = _gradients(
            queries, k[:, :, before:], v[:, :, before:], True, scale
        )
        return dq + own_dq, torch.cat([dk, own_dk], dim=2), torch.cat([dv, own_dv], dim=2)


def missing() -> str | None:
    """The reason why cuDNN's attention cannot be used here; None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.version.cuda is None or not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    if torch.cuda.get_device_capability()[0] < 8:
        return "cuDNN's attention needs Ampere GPUs or newer ones"
    if torch.are_deterministic_algorithms_enabled():
        return "the backward of cuDNN's attention is not deterministic"
    return None


@functools.cache
def _failure(dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why cuDNN does not compute this head_dim on this GPU, one line; None if it does.

    GPUs and versions of cuDNN differ in whether they take 256, so a small problem is tried.
    """
    q = torch.zeros(1, 2, 128, head_dim, dtype=dtype, device="cuda")
    kv = q[:, :1]
    try:
        out, lse = _square_or_rectangle(q, kv, kv, causal=True, scale=1.0)
        _gradients(Queries(q, q, out, lse), kv, kv, causal=True, scale=1.0)
    except RuntimeError as error:
        first_line = str(error).strip().partition("\n")[0]
        return f"cuDNN refuses head_dim {head_dim} in {dtype} ({first_line})"
    return None


def _square_or_rectangle(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Partial:
    """out [B, Hq, Sq, D] and lse [B, Hq, Sq] of one call of cuDNN."""
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q,
        k,
        v,
        attn_bias=None,
        compute_log_sumexp=True,
        dropout_p=0.0,
        is_causal=causal,
        scale=scale,
    )[:2]
    # The op gives lse as [B, Hq, Sq, 1].
    return Partial(out, lse.reshape(q.shape[:-1]))


def _gradients(
    queries: Queries, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len, _ = queries.q.shape
    kv_heads, k_len = k.shape[1:3]
    q, d_out, out = _laid_out_alike(queries.q, queries.d_out, queries.out)
    lse = queries.lse.contiguous()
    lse = torch.nan_to_num(lse, nan=torch.nan, posinf=_NOTHING_SEEN, neginf=_NOTHING_SEEN)
    # Without dropout its seed and offset are never read.
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _one_sequence(d_out),
        _with_plans_of_its_own(_one_sequence(q)),
        _one_sequence(k),
        _one_sequence(v),
        _one_sequence(out),
        lse.view(1, batch * heads, q_len, 1),
        philox_seed=seed,
        philox_offset=seed,
        attn_bias=None,
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q_len,
        max_k=k_len,
        dropout_p=0.0,
        is_causal=causal,
        scale=scale,
    )
    dq = dq[0].unflatten(0, (batch, heads))
    dk = dk[0].unflatten(0, (batch, kv_heads))
    dv = dv[0].unflatten(0, (batch, kv_heads))
    return dq, dk, dv


def _laid_out_alike(q: Tensor, d_out: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three with the same strides, copied if need be.

    torch keeps cuDNN's plans by the layout of q, k and v. A plan that was made for another layout
    of out or d_out would read the wrong numbers, with no error.
    """
    if q.stride() == d_out.stride() == out.stride():
        return q, d_out, out
    return q.contiguous(), d_out.contiguous(), out.contiguous()


def _one_sequence(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [1, B * H, S, D]; each group of query heads still meets its own KV head."""
    return x.flatten(0, 1)[None]


def _with_plans_of_its_own(q: Tensor) -> Tensor:
    """q [1, H, S, D] with a unique stride between sequences (there is only one sequence).

    So no plan is shared with torch's own attention, whose d_out may be laid out in another way.
    """
    between, *inside = q.stride()
    return q.as_strided(q.shape, (2 * between, *inside))
