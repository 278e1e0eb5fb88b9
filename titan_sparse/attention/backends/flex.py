"""FlexAttention over Tiles: its two higher-order ops, compiled once for each shape, as Triton or FlashAttention-4 kernels.

The ops are used without the public flex_attention(), because only the backward op itself takes the out and lse of the
whole attention, with which pieces add up exactly. They are traced with the mask's tensors as operands and given to
inductor without Dynamo: Dynamo takes neither op in this form on every torch version, and counts shapes against a limit.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import create_fw_bw_graph, flex_attention, flex_attention_backward
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, _identity

from titan_sparse.attention.tiles import BlockLists, Tiles

BLOCK_SIZE = 128
FLASH_HEAD_DIMS = (64, 96, 128)
LSE_UNIT = {"TRITON": math.log(2), "FLASH": 1.0}
"""What one unit of the op's lse is as a natural logarithm: Triton kernels count in base 2."""

_compiled: dict[tuple, Callable[..., tuple[Tensor, ...]]] = {}
_compile = torch._inductor.compile


def refusal(device_type: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why this backend cannot serve such a case, None if it can."""
    if device_type != "cuda":
        return 'flex needs CUDA; write attention.backend = "eager"'
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f'flex computes in bf16, fp16 or fp32, not {dtype}; write attention.backend = "eager"'
    if block_size != BLOCK_SIZE:
        return f"flex computes blocks of {BLOCK_SIZE} tokens, not {block_size}; write attention.block_size = {BLOCK_SIZE}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f'flex needs a head_dim of 16 to 256 in steps of 16, not {head_dim}; write attention.backend = "eager"'
    return None


def describe() -> str:
    """Which kernels compute, and why, in words for the start banner."""
    missing = _flash_missing()
    if missing:
        return f"flex: Triton kernels ({missing})"
    head_dims = ", ".join(map(str, FLASH_HEAD_DIMS))
    return f"flex: FlashAttention-4 kernels for bf16 and fp16 with head_dim {head_dims}, Triton kernels otherwise"


def forward(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D] over the tiles of k, v [B, Hkv, Sk, D], all alike bf16, fp16 or fp32.

    Returns out [B, Hq, Sq, D] in q's dtype and natural-log lse [B, Hq, Sq], fp32; 0 and -inf for rows that see nothing.
    The first call with a shape compiles, which takes some ten seconds.
    """
    kernel, operands = _kernel(q), _operands(tiles, q.shape[1])

    def piece(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        block_mask = _block_mask(q, k, tiles.block_size, rest[:4], (None,) * 4)
        options = _options(kernel, q.shape[-1])
        return flex_attention(q, k, v, _identity, block_mask, scale, options, (), rest[4:])[:2]

    key = ("forward", kernel, scale, tiles.block_size)
    out, lse = _call(key, piece, q, k, v, *_tables(tiles.by_query, k.shape[2] // tiles.block_size), *operands)
    return out, lse * LSE_UNIT[kernel]


def backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
             scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these tiles, in the shapes and dtype of q, k and v.

    out and natural-log lse are those of the whole attention, over all tiles of all chunks. Needs tiles.by_key.
    """
    kernel, operands = _kernel(q), _operands(tiles, q.shape[1])

    def piece(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        block_mask = _block_mask(q, k, tiles.block_size, rest[:4], rest[4:8])
        score, options = _score_graphs(q), _options(kernel, q.shape[-1])
        return flex_attention_backward(q, k, v, out, lse, d_out, None, *score, block_mask, scale, options, (), rest[8:])[:3]

    key = ("backward", kernel, scale, tiles.block_size)
    tables = (*_tables(tiles.by_query, k.shape[2] // tiles.block_size), *_tables(tiles.by_key, q.shape[2] // tiles.block_size))
    whole = (out.to(q.dtype), lse.float() / LSE_UNIT[kernel], d_out.to(q.dtype))
    return _call(key, piece, q, k, v, *whole, *tables, *operands)


# Kernels ------------------------------------------------------------------------------------------------------------


def _flash_missing() -> str | None:
    """Why FlashAttention-4 cannot be used, in words."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    # Its block lists have other block sizes from Blackwell on, and none of them before Hopper.
    if torch.cuda.get_device_capability()[0] != 9:
        return "FlashAttention-4 takes block lists of 128 tokens on Hopper GPUs only"
    if not _flash_installed():
        return "flash-attn-4 is not installed"
    if torch.are_deterministic_algorithms_enabled():
        return "the backward of FlashAttention-4 is not deterministic"
    return None


@functools.cache
def _flash_installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def _kernel(q: Tensor) -> str:
    """"FLASH" or "TRITON", as FlexAttention names them."""
    suits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in FLASH_HEAD_DIMS
    return "FLASH" if suits and _flash_missing() is None else "TRITON"


def _options(kernel: str, head_dim: int) -> dict[str, Any]:
    """The ops' kernel options, all of those that the public flex_attention() would fill in."""
    options = {"BACKEND": kernel, "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
               "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
    if kernel == "TRITON" and head_dim == 64:
        # By default keys come in tiles of 128, for which the mask's operands do not fit into shared memory.
        options |= {"fwd_BLOCK_N": 64}
    return options


# Operands of the ops ------------------------------------------------------------------------------------------------


def _seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, start: Tensor, stop: Tensor, position: Tensor) -> Tensor:
    """The mask of one pair in a partial tile: start, stop [B, Sq]; position [B, Hq, 1 or nq, Sk]."""
    key = position[b, h, i // (start.shape[1] // position.shape[2]), j]
    return (start[b, i] <= key) & (key < stop[b, i])


def _operands(tiles: Tiles, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """What _seen() looks up, all int32. Covered keys are nowhere, for the query block that they are covered for: one
    look-up less in the inner loop of the kernels."""
    position = tiles.k_positions.expand(len(tiles.start), heads, -1)[:, :, None]
    if tiles.covered is not None:
        position = torch.where(tiles.covered, torch.iinfo(torch.int32).max, position)
    return tiles.start, tiles.stop, position


def _tables(lists: BlockLists, blocks: int) -> tuple[Tensor, ...]:
    """Counts and numbers of partial tiles, then of full ones, with the numbers widened for `blocks` on the other side.

    Widths that follow the data would compile anew all the time: they are powers of two, or `blocks` where that is less.
    """
    width = min(blocks, max(32, 1 << (lists.partial.shape[-1] - 1).bit_length()))
    partial, full = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (lists.partial, lists.full))
    return lists.partial_count, partial, lists.full_count, full


def _block_mask(q: Tensor, k: Tensor, block_size: int, by_query: tuple[Tensor, ...],
                by_key: tuple[Tensor | None, ...]) -> tuple:
    """What the ops take as block_mask. BlockMask lays it out, as that differs between torch versions."""
    names = ("num_blocks", "indices")
    tables = {f"{side}_{name}": table for side, pair in (
        ("kv", by_query[:2]), ("full_kv", by_query[2:]), ("q", by_key[:2]), ("full_q", by_key[2:])
    ) for name, table in zip(names, pair)}
    return BlockMask(seq_lengths=(q.shape[2], k.shape[2]), BLOCK_SIZE=(block_size, block_size), mask_mod=_seen, **tables).as_tuple()


def _score_graphs(q: Tensor) -> tuple[Callable, Callable]:
    """Scores are left as they are: the forward and the joint graph that the backward op wants of that."""
    example = (q.new_zeros((), requires_grad=True), *(q.new_zeros((), dtype=torch.int) for _ in range(4)))
    return create_fw_bw_graph(_identity, example, ())


@torch.no_grad()
def _call(key: tuple, piece: Callable[..., tuple[Tensor, ...]], *operands: Tensor) -> tuple[Tensor, ...]:
    """piece(*operands), compiled for `key` and the operands' shapes and dtypes if it is not yet."""
    # Kernels compute addresses as if the tables were contiguous, and one layout compiles once.
    operands = [x.detach().contiguous() for x in operands]
    key = (*key, operands[0].device, *((x.shape, x.dtype) for x in operands))
    if key not in _compiled:
        _compiled[key] = _compile(make_fx(piece, tracing_mode="fake")(*operands), operands)
    return _compiled[key](*operands)
