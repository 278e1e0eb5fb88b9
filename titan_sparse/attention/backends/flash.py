"""FlashAttention-4 called directly, over tiles and for dense attention without holes.

Dense attention through tiles would cost 10 %. This is not a backend: flex.py calls it.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import DenseShape, Partial, Queries
from titan_sparse.kernels.block_sparse import BlockLists, Piece, Tiles

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128)
ENOUGH_BLOCKS = 4096
"""So many key blocks, counted for each query head, keep all of a GPU busy."""


def missing() -> str | None:
    """The reason why FlashAttention-4 cannot be used here; None if it can."""
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
    """The reason why the kernels cannot be imported, one line. A wrong wheel leaves out their CUDA
    part."""
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


def kv_heads_at_once(kv_heads: int, group: int, blocks: int) -> int:
    """The number of KV heads, each with `group` query heads and `blocks` key blocks, that a
    backward takes.

    FlashAttention-4 sums the gradients of all heads that it is given in fp32.
    """
    divisors = [count for count in range(1, kv_heads) if kv_heads % count == 0]
    enough = [count for count in divisors if count * group * blocks >= ENOUGH_BLOCKS]
    return min(enough, default=kv_heads)


def blocks_forward(q: Tensor, piece: Piece, scale: float) -> Partial:
    """Attention of q [B, Hq, Sq, D] over blocks of keys; out in q's dtype, lse in fp32.

    piece: of keys that all heads share; verticals are those of a head.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    _flash_attn_fwd(
        *(x.transpose(1, 2) for x in (q, piece.k, piece.v)),
        softmax_scale=scale,
        return_lse=True,
        out=out.transpose(1, 2),
        lse=lse,
        **_tables(piece.tiles, piece.tiles.by_query),
    )
    return Partial(out, lse)


def blocks_backward(queries: Queries, piece: Piece, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of blocks_forward(), in q's dtype. out and lse are those of all keys."""
    q, d_out, out = (x.to(queries.q.dtype) for x in queries[:3])
    tensors = [x.transpose(1, 2) for x in (q, piece.k, piece.v, out, d_out)]
    # By head in memory, as our own kernels add to them.
    gradients = [x.new_empty(x.shape) for x in (q, piece.k, piece.v)]
    by_token = [x.transpose(1, 2) for x in gradients]
    options = functools.partial(_tables, piece.tiles, piece.tiles.by_key)
    _write_gradients(by_token, (*tensors, queries.lse.float()), scale, options)
    return tuple(gradients)


def _write_gradients(
    gradients: list[Tensor],
    tensors: tuple[Tensor, ...],
    scale: float,
    options: Callable[[slice], dict[str, Any]],
) -> None:
    """Write dq, dk and dv [..., tokens, H, D] to `gradients`, some KV heads at a time.

    tensors: q, k, v, out and d_out [..., tokens, H, D], and lse [..., Hq, tokens].
    options: further arguments, for the query heads of a slice.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v, out, d_out, lse = tensors
    kv_heads = k.shape[-2]
    group = q.shape[-2] // kv_heads
    at_once = kv_heads_at_once(kv_heads, group, k[..., 0, 0].numel() // 128)
    for first in range(0, kv_heads, at_once):
        kv = slice(first, first + at_once)
        query = slice(group * first, group * (first + at_once))
        dq, dk, dv = (x[..., heads, :] for x, heads in zip(gradients, (query, kv, kv)))
        _flash_attn_bwd(
            q[..., query, :],
            k[..., kv, :],
            v[..., kv, :],
            out[..., query, :],
            d_out[..., query, :],
            lse[..., query, :].contiguous(),
            scale,
            dq=dq,
            dk=dk,
            dv=dv,
            **options(query),
        )


def _tables(tiles: Tiles, lists: BlockLists, heads: slice = slice(None)) -> dict[str, Any]:
    """FlashAttention-4's arguments for the tiles of some query heads, from one of the two lists."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    tables = (lists.partial_count, lists.partial, lists.full_count, lists.full)
    of_heads = (x[:, heads].contiguous() for x in tables)
    size = (tiles.block_size, tiles.block_size)
    return {
        "block_sparse_tensors": BlockSparseTensorsTorch(*of_heads, block_size=size),
        "mask_mod": _is_visible(),
        "aux_tensors": [tiles.start, tiles.stop, tiles.k_positions[0, 0]],
    }


@functools.cache
def _is_visible() -> Callable:
    """True if a query sees a key of a partial tile, for the kernels to inline."""
    from cutlass import Int32, cute
    from flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

    @cute.jit
    def is_visible(b, h, i, j, seqlen, operands):
        # int32: [B, Sq], [B, Sq] and [Sk]
        start, stop, position = operands
        batch, query = ssa_to_scalar(b), ssa_to_scalar(i)
        place = scalar_to_ssa(position[ssa_to_scalar(j)], Int32)
        from_start = scalar_to_ssa(start[batch, query], Int32) <= place
        return from_start & (place < scalar_to_ssa(stop[batch, query], Int32))

    return is_visible


def dense_forward(q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float) -> Partial:
    """Attention of q [B, Hq, Sq, D] to k, v [B, Hkv, Sk, D]; out in q's dtype, lse in fp32."""
    from flash_attn.cute.interface import _flash_attn_fwd

    by_token = [_by_token(x, shape) for x in (q, k, v)]
    # In the layout of q, which spares copies.
    out = torch.empty_like(by_token[0])
    lse = _flash_attn_fwd(
        *by_token,
        softmax_scale=scale,
        return_lse=True,
        out=out,
        **_options(shape),
    )[1]
    if shape.offsets is not None:
        # [B * S, Hq, D] and [Hq, B * S]
        out = out.unflatten(0, (len(q), -1))
        lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1)
    return Partial(out.transpose(1, 2), lse)


def dense_backward(
    queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv through these keys, in q's dtype.

    out and lse may be those of more keys: then the gradients are the share of these keys.
    """
    q, d_out, out, lse = queries
    if shape.offsets is not None:
        lse = lse.transpose(0, 1).flatten(1)
    by_token = [_by_token(x, shape) for x in (q, k, v, out, d_out)]
    gradients = [torch.empty_like(x) for x in by_token[:3]]
    _write_gradients(gradients, (*by_token, lse), scale, lambda heads: _options(shape))
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
