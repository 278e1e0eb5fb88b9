"""FlexAttention over Tiles: its two higher-order ops, compiled once a shape, as Triton or FlashAttention-4 kernels.

The ops are used without the public flex_attention(), because only the backward op itself takes the out and lse of the
whole attention, with which pieces add up exactly. They are traced with the mask's tensors as operands and given to
inductor without Dynamo: Dynamo takes neither op in this form on every torch version, and counts shapes against a limit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import (
    create_fw_bw_graph,
    flex_attention,
    flex_attention_backward,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, _identity

from titan_sparse.attention.backends import flash, triton
from titan_sparse.attention.merge import add, merge
from titan_sparse.attention.tiles.blocks import BlockLists, Tiles, list_width
from titan_sparse.kernels.bits import unpack

BLOCK_SIZE = 128
LSE_UNIT = {"TRITON": math.log(2), "FLASH": 1.0}
"""What one unit of the op's lse is as a natural logarithm: Triton kernels count in base 2."""

_compiled: dict[tuple, Callable[..., tuple[Tensor, ...]]] = {}
_compile = torch._inductor.compile


READS_BY_KEY = True
"""Whether backward reads Tiles.by_key."""
SERVES_SLICES = False
"""Whether it takes Tiles of a mask of slices."""
COMPILES_BY_LENGTH = True
"""Whether a number of keys that it has not seen takes seconds to compile."""


def refusal(device_type: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why this backend cannot serve such a case, None if it can."""
    if device_type != "cuda":
        return 'flex needs CUDA; write attention.backend = "eager"'
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return (
            f'flex computes in bf16, fp16 or fp32, not {dtype}; write attention.backend = "eager"'
        )
    if block_size != BLOCK_SIZE:
        return f"flex takes blocks of {BLOCK_SIZE} tokens, not {block_size}; write attention.block_size = {BLOCK_SIZE}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f'flex needs a head_dim of 16 to 256 in steps of 16, not {head_dim}; write attention.backend = "eager"'
    return None


def describe() -> str:
    """Which kernels compute, and why, in words for the start banner."""
    missing = flash.missing()
    if missing:
        return f"flex: Triton kernels ({missing})"
    head_dims = ", ".join(map(str, flash.HEAD_DIMS))
    return f"flex: FlashAttention-4 kernels for bf16 and fp16 with head_dim {head_dims}, Triton kernels otherwise"


def serves_causal(q: Tensor) -> bool:
    """Whether forward_causal(), forward_full() and their backwards take these inputs."""
    return _kernel(q) == "FLASH"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    scale: float,
    dtype: torch.dtype | None = None,
    total: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D] over the tiles of k, v [B, Hkv, Sk, D], all alike bf16, fp16 or fp32; with `total`
    = (out, lse) over other keys, over both.

    Returns out [B, Hq, Sq, D] in the memory `into` or in dtype (default q's; without a total in q's too where dtype is wider,
    as the kernel rounds) and natural-log lse [B, Hq, Sq], fp32; 0 and -inf for rows that see nothing.
    The first call with a shape compiles, which takes some ten seconds. Choices of single queries are looked up by our own
    kernels, a tile at a time.
    """
    if tiles.chosen is not None:
        return triton.forward(q, k, v, tiles, scale, dtype, total, into)
    kernel, size = _kernel(q), tiles.block_size

    def piece(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        block_mask = _block_mask(q, k, size, rest[:4], (None,) * 4)
        options = _options(kernel, q.shape[-1])
        return flex_attention(q, k, v, _identity, block_mask, scale, options, (), rest[4:])[:2]

    tables = _tables(tiles.by_query, k.shape[2] // size)
    out, lse = _call(
        ("forward", kernel, scale, size), piece, q, k, v, *tables, *_operands(tiles, q.shape[1])
    )
    return merge(total, out, lse * LSE_UNIT[kernel], dtype or q.dtype, into)


def forward_with_verticals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    k2: Tensor,
    v2: Tensor,
    tiles2: Tiles,
    scale: float,
    dtype: torch.dtype | None = None,
    total: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """forward() over blocks, then over gathered verticals k2, v2 [B, Hq, C, D] with their own tiles.

    Columns are for our own kernels: in FlexAttention's every single pair of a vertical tile looks up whether it is
    covered, which takes two to three times as long, and the results would have to be merged.
    """
    blocks = tuple(x.contiguous() for x in forward(q, k, v, tiles, scale, torch.float32, total))
    return triton.forward(q, k2, v2, tiles2, scale, dtype or q.dtype, blocks, into)


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    scale: float,
    dtype: torch.dtype | None = None,
    dq: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these tiles; dq is added to the one given.

    out and natural-log lse are those of the whole attention, over all tiles of all chunks. Needs tiles.by_key.
    Returns dq, in the memory `into` if there is some, dk and dv in dtype (default q's; in q's too where that is wider, as the
    kernels round, but for a sum).
    """
    if tiles.chosen is not None:
        return triton.backward(d_out, q, k, v, out, lse, tiles, scale, dtype, dq, into)
    by_query = _tables(tiles.by_query, k.shape[2] // tiles.block_size)
    by_key = _tables(tiles.by_key, q.shape[2] // tiles.block_size)
    rows = (q, out.to(q.dtype), lse.float() / LSE_UNIT[_kernel(q)], d_out.to(q.dtype))
    dq_piece, dk, dv = _backward(
        rows, k, v, (*by_query, *by_key), _operands(tiles, q.shape[1]), scale, tiles.block_size
    )
    return add(dq, dq_piece, dtype or q.dtype, into), dk, dv


def backward_with_verticals(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    k2: Tensor,
    v2: Tensor,
    tiles2: Tiles,
    scale: float,
    dtype: torch.dtype | None = None,
    dq: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv as backward() through blocks and verticals, then dk and dv of the verticals, fp32."""
    dq, dk, dv = backward(d_out, q, k, v, out, lse, tiles, scale, torch.float32, dq)
    dq = dq.contiguous()
    if into is None and dq.dtype == (dtype or q.dtype):
        into = dq
    dq, *d_verticals = triton.backward(
        d_out, q, k2, v2, out, lse, tiles2, scale, torch.float32, dq, into
    )
    return dq, dk, dv, *d_verticals


def _backward(
    rows: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    tables: Sequence[Tensor],
    operands: Sequence[Tensor],
    scale: float,
    size: int,
) -> tuple[Tensor, ...]:
    """dq, dk and dv from rows (q, out, lse, d_out), tables by query and by key, and the mask's operands."""
    kernel = _kernel(rows[0])

    def piece(*arguments: Tensor) -> tuple[Tensor, ...]:
        q, out, lse, d_out, k, v, *rest = arguments
        block_mask = _block_mask(q, k, size, rest[:4], rest[4:8])
        graphs, options = _score_graphs(q), _options(kernel, q.shape[-1])
        return flex_attention_backward(
            q, k, v, out, lse, d_out, None, *graphs, block_mask, scale, options, (), tuple(rest[8:])
        )[:3]

    return _call(("backward", kernel, scale, size), piece, *rows, k, v, *tables, *operands)


# Kernels ------------------------------------------------------------------------------------------------------------


def _kernel(q: Tensor) -> str:
    """ "FLASH" or "TRITON", as FlexAttention names them."""
    return "FLASH" if flash.serves(q.dtype, q.shape[-1]) else "TRITON"


def _options(kernel: str, head_dim: int) -> dict[str, Any]:
    """The ops' kernel options, all of those that the public flex_attention() would fill in."""
    options = {
        "BACKEND": kernel,
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
    }
    if kernel == "TRITON" and head_dim == 64:
        # By default keys come in tiles of 128, for which the mask's operands do not fit into shared memory.
        options |= {"fwd_BLOCK_N": 64}
    return options


# Operands of the ops ------------------------------------------------------------------------------------------------


def _seen(
    b: Tensor, h: Tensor, i: Tensor, j: Tensor, start: Tensor, stop: Tensor, position: Tensor
) -> Tensor:
    """The mask of one pair in a partial tile: start, stop [B, Hq, Sq]; position [B, Hq, 1 or nq, Sk]."""
    key = position[b, h, i // (start.shape[2] // position.shape[2]), j]
    return (start[b, h, i] <= key) & (key < stop[b, h, i])


def _operands(tiles: Tiles, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """What _seen() looks up, all int32. Covered keys are nowhere, for the query block that they are covered for: one
    look-up less in the inner loop of the kernels."""
    shape = (len(tiles.start), heads, -1)
    start, stop, position = (
        x.expand(shape) for x in (tiles.start[:, None], tiles.stop[:, None], tiles.k_positions)
    )
    position = position[:, :, None]
    if tiles.covered is not None:
        covered = unpack(tiles.covered, position.shape[-1])
        position = torch.where(covered, torch.iinfo(torch.int32).max, position)
    return start, stop, position


def _tables(lists: BlockLists, blocks: int) -> tuple[Tensor, ...]:
    """Counts and numbers of partial tiles, then of full ones, as wide as list_width() wants them."""
    missing = list_width(lists.partial.shape[-1], blocks) - lists.partial.shape[-1]
    partial, full = (
        torch.nn.functional.pad(x, (0, missing)) if missing else x
        for x in (lists.partial, lists.full)
    )
    return lists.partial_count, partial, lists.full_count, full


def _block_mask(
    q: Tensor, k: Tensor, size: int, by_query: Sequence[Tensor], by_key: Sequence[Tensor | None]
) -> tuple:
    """What the ops take as block_mask. BlockMask lays it out, as that differs between torch versions."""
    names = [
        f"{side}_{what}"
        for side in ("kv", "full_kv", "q", "full_q")
        for what in ("num_blocks", "indices")
    ]
    tables = dict(zip(names, (*by_query, *by_key)))
    lengths = (q.shape[2], k.shape[2])
    return BlockMask(
        seq_lengths=lengths, BLOCK_SIZE=(size, size), mask_mod=_seen, **tables
    ).as_tuple()


def _score_graphs(q: Tensor) -> tuple[Callable, Callable]:
    """Scores are left as they are: the forward and the joint graph that the backward op wants of that."""
    example = (
        q.new_zeros((), requires_grad=True),
        *(q.new_zeros((), dtype=torch.int) for _ in range(4)),
    )
    return create_fw_bw_graph(_identity, example, ())


@torch.no_grad()
def _call(
    key: tuple, piece: Callable[..., tuple[Tensor, ...]], *operands: Tensor
) -> tuple[Tensor, ...]:
    """piece(*operands), compiled for `key` and the operands' shapes and dtypes if it is not yet."""
    # Kernels compute addresses as if the tables were contiguous, and one layout compiles once.
    operands = [x.detach().contiguous() for x in operands]
    key = (*key, operands[0].device, *((x.shape, x.dtype) for x in operands))
    if key not in _compiled:
        _compiled[key] = _compile(make_fx(piece, tracing_mode="fake")(*operands), operands)
    return _compiled[key](*operands)
