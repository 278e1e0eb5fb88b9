"""Attention by FlashAttention-4: over tiles with a mask in partial ones, and dense without tables
of tiles, which would cost 10 %."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import (
    Case,
    DenseShape,
    Gradients,
    Partial,
    Queries,
    Sum,
    add,
    merge,
    not_served,
)
from titan_sparse.attention.backends.triton import Triton
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import BlockLists, Piece, Tiles

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128)
ENOUGH_BLOCKS = 4096
"""So many key blocks, counted for each query head, keep all of a GPU busy."""


class Flex(Triton):
    """FlashAttention-4 for blocks; verticals and what single queries chose
    by the Triton kernels."""

    SERVES_SLICES = False
    SERVES_DENSE = True

    def refusal(self, case: Case) -> str | None:
        return not_served("flex", case, ("cuda",), DTYPES, (128,), HEAD_DIMS)

    def missing(self, case: Case) -> str | None:
        return missing()

    def describe(self) -> str:
        return "flex: FlashAttention-4 kernels for blocks, own Triton kernels for verticals"

    def forward(self, q: Tensor, pieces: list[Piece], scale: float, total: Sum[Partial]) -> Partial:
        """Verticals, the second piece, are left to our own kernels. FlashAttention-4 would look up
        for each single pair of a vertical tile whether it is covered, which takes two to three
        times as long, and its results would have to be merged.
        """
        blocks, *verticals = pieces
        if not verticals:
            return self._blocks_forward(q, blocks, scale, total)
        over_blocks = self._blocks_forward(q, blocks, scale, Sum(torch.float32, total.before))
        return super().forward(q, verticals, scale, Sum(total.dtype, over_blocks))

    def _blocks_forward(
        self, q: Tensor, piece: Piece, scale: float, total: Sum[Partial]
    ) -> Partial:
        """forward() over the blocks of one chunk of keys, which all heads share."""
        if piece.tiles.chosen is not None:
            # What single queries chose: our own kernels look that up once a tile, not once a pair.
            return super().forward(q, [piece], scale, total)
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
        return merge(total.before, out, lse, total.dtype)

    def backward(
        self, queries: Queries, pieces: list[Piece], scale: float, total: Sum[Tensor]
    ) -> Gradients:
        blocks, *verticals = pieces
        over_blocks = Sum(torch.float32, total.before) if verticals else total
        dq, d_blocks = self._blocks_backward(queries, blocks, scale, over_blocks)
        if not verticals:
            return dq, [d_blocks]
        # fp32, because the gradients of verticals are still to be summed over heads and ranks.
        dtypes = [total.dtype, torch.float32]
        q, d_out, out, lse = queries
        dq, d_verticals = block_sparse.backward(d_out, q, out, lse, verticals, scale, dtypes, dq)
        return dq, [d_blocks, *d_verticals]

    def _blocks_backward(
        self, queries: Queries, piece: Piece, scale: float, total: Sum[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tiles = piece.tiles
        if tiles.chosen is not None:
            dq, [d_blocks] = super().backward(queries, [piece], scale, total)
            return dq, d_blocks
        assert tiles.by_key is not None
        q, d_out, out = (x.to(queries.q.dtype) for x in queries[:3])
        tensors = [x.transpose(1, 2) for x in (q, piece.k, piece.v, out, d_out)]
        # By head in memory, as our own kernels add to them.
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, piece.k, piece.v))
        by_token = [x.transpose(1, 2) for x in (dq, dk, dv)]
        options = functools.partial(_tables, tiles, tiles.by_key)
        _write_gradients(by_token, (*tensors, queries.lse.float()), scale, options)
        return add(total.before, dq, total.dtype), (dk, dv)

    def serves_dense(self, shape: DenseShape) -> bool:
        return True

    def dense_forward(
        self, q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float
    ) -> Partial:
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
        self, queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, d_out, out, lse = queries
        if shape.offsets is not None:
            lse = lse.transpose(0, 1).flatten(1)
        by_token = [_by_token(x, shape) for x in (q, k, v, out, d_out)]
        gradients = [torch.empty_like(x) for x in by_token[:3]]
        _write_gradients(gradients, (*by_token, lse), scale, lambda heads: _options(shape))
        if shape.offsets is not None:
            # [B * S, H, D]
            gradients = [x.unflatten(0, (len(q), -1)) for x in gradients]
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        return dq, dk, dv


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
