"""FlexAttention over Tiles: its two higher-order ops, compiled once a shape, as Triton or FlashAttention-4 kernels.

The ops are used without the public flex_attention(), because only the backward op itself takes the out and lse of the
whole attention, with which pieces add up exactly. They are traced with the mask's tensors as operands and given to
inductor without Dynamo: Dynamo takes neither op in this form on every torch version, and counts shapes against a limit.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
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


READS_BY_KEY = True
"""Whether backward reads Tiles.by_key."""


def refusal(device_type: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why this backend cannot serve such a case, None if it can."""
    if device_type != "cuda":
        return 'flex needs CUDA; write attention.backend = "eager"'
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f'flex computes in bf16, fp16 or fp32, not {dtype}; write attention.backend = "eager"'
    if block_size != BLOCK_SIZE:
        return f"flex takes blocks of {BLOCK_SIZE} tokens, not {block_size}; write attention.block_size = {BLOCK_SIZE}"
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
    kernel, size = _kernel(q), tiles.block_size

    def piece(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        block_mask = _block_mask(q, k, size, rest[:4], (None,) * 4)
        options = _options(kernel, q.shape[-1])
        return flex_attention(q, k, v, _identity, block_mask, scale, options, (), rest[4:])[:2]

    tables = _tables(tiles.by_query, k.shape[2] // size)
    out, lse = _call(("forward", kernel, scale, size), piece, q, k, v, *tables, *_operands(tiles, q.shape[1]))
    return out, lse * LSE_UNIT[kernel]


def backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
             scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these tiles, in the shapes and dtype of q, k and v.

    out and natural-log lse are those of the whole attention, over all tiles of all chunks. Needs tiles.by_key.
    """
    groups, by_key = _query_groups(q, k, tiles), tiles.by_key
    split = functools.partial(_split_queries, groups=groups)
    by_query = [split(x) for x in _tables(tiles.by_query, k.shape[2] // tiles.block_size)]
    rows = [split(x) for x in (q, out.to(q.dtype), lse.float() / LSE_UNIT[_kernel(q)], d_out.to(q.dtype))]
    operands = [split(x) for x in _operands(tiles, q.shape[1])]
    if groups > 1:
        by_key = _split_lists(by_key, q.shape[2] // tiles.block_size, groups)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    by_key = _tables(by_key, rows[0].shape[2] // tiles.block_size)
    dq, *d_kv = _backward(rows, k, v, (*by_query, *by_key), operands, scale, tiles.block_size)
    if groups > 1:
        d_kv = [x.unflatten(1, (-1, groups)).sum(2, dtype=torch.float32).to(x.dtype) for x in d_kv]
    return dq.view(q.shape), d_kv[0], d_kv[1]


def _backward(rows: Sequence[Tensor], k: Tensor, v: Tensor, tables: Sequence[Tensor], operands: Sequence[Tensor],
              scale: float, size: int) -> tuple[Tensor, ...]:
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


# Queries in groups --------------------------------------------------------------------------------------------------
# The backward kernels give the query blocks of one KV block to one multiprocessor. Columns make few KV blocks, so their
# queries are cut into groups, each taken for a head of its own.

KV_BLOCKS = 1024
"""So many KV blocks, over all heads, keep every multiprocessor busy."""
GROUP_BLOCKS = 8
"""A group's query blocks at the least."""


def _query_groups(q: Tensor, k: Tensor, tiles: Tiles) -> int:
    """Groups to cut the queries into, a power of two; 1 where heads share keys or every head has enough of them."""
    groups, kv_blocks, q_blocks = 1, k[..., 0].numel() // tiles.block_size, q.shape[2] // tiles.block_size
    if tiles.covered is None or q.shape[1] != k.shape[1]:
        return 1
    while kv_blocks * groups < KV_BLOCKS and q_blocks % (2 * groups) == 0 and q_blocks // (2 * groups) >= GROUP_BLOCKS:
        groups *= 2
    return groups


def _split_queries(x: Tensor, groups: int) -> Tensor:
    """[B, H, n, ...] -> [B, H * groups, n / groups, ...]."""
    return x.unflatten(2, (groups, -1)).flatten(1, 2) if groups > 1 else x


def _split_lists(by_key: BlockLists, q_blocks: int, groups: int) -> BlockLists:
    """Lists of all query blocks -> lists of each group's, [B, H * groups, n, at most q_blocks / groups]."""
    lists = (by_key.full_count, by_key.full), (by_key.partial_count, by_key.partial)
    return BlockLists(*(x for count, table in lists for x in _split_list(count, table, q_blocks, groups)))


def _split_list(count: Tensor, table: Tensor, q_blocks: int, groups: int) -> tuple[Tensor, Tensor]:
    size, width = q_blocks // groups, table.shape[-1]
    place, begin = (torch.arange(n, device=table.device, dtype=torch.int32) for n in (width, groups + 1))
    begin = begin * size
    ascending = torch.where(place < count[..., None], table, q_blocks)
    # Numbers ascend, so that a group's are a run of them.
    first = torch.searchsorted(ascending, begin.expand(*count.shape, -1).contiguous())
    place = place[: min(size, width)]
    run = (first[..., :-1, None] + place).clamp(max=width - 1)
    numbers = ascending[..., None, :].expand(*run.shape[:-1], -1).gather(-1, run) - begin[:-1, None]
    count = first.diff(dim=-1).int()
    numbers = torch.where(place < count[..., None], numbers, 0)
    return count.movedim(3, 2).flatten(1, 2), numbers.movedim(3, 2).flatten(1, 2)


# Operands of the ops ------------------------------------------------------------------------------------------------


def _seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, start: Tensor, stop: Tensor, position: Tensor) -> Tensor:
    """The mask of one pair in a partial tile: start, stop [B, Hq, Sq]; position [B, Hq, 1 or nq, Sk]."""
    key = position[b, h, i // (start.shape[2] // position.shape[2]), j]
    return (start[b, h, i] <= key) & (key < stop[b, h, i])


def _operands(tiles: Tiles, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """What _seen() looks up, all int32. Covered keys are nowhere, for the query block that they are covered for: one
    look-up less in the inner loop of the kernels."""
    shape = (len(tiles.start), heads, -1)
    start, stop, position = (x.expand(shape) for x in (tiles.start[:, None], tiles.stop[:, None], tiles.k_positions))
    position = position[:, :, None]
    if tiles.covered is not None:
        position = torch.where(tiles.covered, torch.iinfo(torch.int32).max, position)
    return start, stop, position


def _tables(lists: BlockLists, blocks: int) -> tuple[Tensor, ...]:
    """Counts and numbers of partial tiles, then of full ones, with the numbers widened for `blocks` on the other side.

    Widths that follow the data would compile anew all the time: they are powers of two, or `blocks` where that is less.
    """
    width = min(blocks, max(32, 1 << (lists.partial.shape[-1] - 1).bit_length()))
    partial, full = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (lists.partial, lists.full))
    return lists.partial_count, partial, lists.full_count, full


def _block_mask(q: Tensor, k: Tensor, size: int, by_query: Sequence[Tensor], by_key: Sequence[Tensor | None]) -> tuple:
    """What the ops take as block_mask. BlockMask lays it out, as that differs between torch versions."""
    names = [f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]
    tables = dict(zip(names, (*by_query, *by_key)))
    lengths = (q.shape[2], k.shape[2])
    return BlockMask(seq_lengths=lengths, BLOCK_SIZE=(size, size), mask_mod=_seen, **tables).as_tuple()


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
