"""FlexAttention over tiles: its two higher-order ops, compiled once per shape, as Triton or
FlashAttention-4 kernels.

The ops are used without the public flex_attention(): only the backward op itself takes the out and
lse of the whole attention, with which the gradients of pieces add up exactly. They are traced with
the mask's tensors as operands and handed to inductor without Dynamo: Dynamo does not take both ops
in this form on every torch version, and it counts shapes against a limit.
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

from titan_sparse.attention.backends import flash
from titan_sparse.attention.backends.base import Case, DenseShape, Partial, Queries, Served, Sum
from titan_sparse.attention.backends.triton import DTYPES, HEAD_DIMS, Triton
from titan_sparse.attention.merge import add, merge
from titan_sparse.attention.tiles import list_width
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import BlockLists, Piece, Tiles
from titan_sparse.kernels.compact import unpack

LSE_UNIT = {"TRITON": math.log(2), "FLASH": 1.0}
"""One unit of the op's lse as a natural logarithm: Triton kernels count in base 2."""

_compiled: dict[tuple, Callable[..., tuple[Tensor, ...]]] = {}
_compile = torch._inductor.compile


class Flex(Triton):
    """FlexAttention for blocks; verticals and what single queries chose by the Triton kernels."""

    SERVES_SLICES = False
    COMPILES_BY_LENGTH = True

    def refusal(self, case: Case) -> str | None:
        return Served(("cuda",), DTYPES, (128,), HEAD_DIMS).refusal("flex", case)

    def describe(self) -> str:
        missing = flash.missing()
        if missing:
            return f"flex: Triton kernels ({missing})"
        head_dims = ", ".join(map(str, flash.HEAD_DIMS))
        return (
            "flex: FlashAttention-4 kernels for bf16 and fp16 "
            f"with head_dim {head_dims}, Triton kernels otherwise"
        )

    def forward(self, q: Tensor, pieces: Sequence[Piece], scale: float, total: Sum) -> Partial:
        """The first call with a shape compiles, which takes about ten seconds.

        Verticals, the second piece, are left to our own kernels. FlexAttention's would look up for each
        single pair of a vertical tile whether it is covered, which takes two to three times as long,
        and their results would have to be merged.
        """
        if len(pieces) == 1:
            return self._blocks_forward(q, pieces[0], scale, total)
        blocks, verticals = pieces
        over_blocks = self._blocks_forward(q, blocks, scale, Sum(torch.float32, total.before))
        # Our kernel goes on from the blocks, and reads contiguous memory.
        before = Partial(over_blocks.out.contiguous(), over_blocks.lse.contiguous())
        return super().forward(q, [verticals], scale, total._replace(before=before))

    def _blocks_forward(self, q: Tensor, piece: Piece, scale: float, total: Sum) -> Partial:
        """forward() over the blocks of one chunk of keys."""
        tiles = piece.tiles
        if tiles.chosen is not None:
            # What single queries chose: our own kernels look that up once a tile, not once a pair.
            return super().forward(q, [piece], scale, total)
        kernel = _kernel(q)
        size = tiles.block_size
        options = _options(kernel, q.shape[-1])

        def compute(*operands: Tensor) -> tuple[Tensor, ...]:
            q, k, v = operands[:3]
            block_mask = _block_mask(q, k, size, by_query=operands[3:7], by_key=(None,) * 4)
            mask_operands = operands[7:]
            results = flex_attention(
                q, k, v, _identity, block_mask, scale, options, (), mask_operands
            )
            return results[:2]

        tables = _tables(tiles.by_query, piece.k.shape[2] // size)
        operands = [q, piece.k, piece.v, *tables, *_mask_operands(tiles, q.shape[1])]
        out, lse = _call(("forward", kernel, scale, size), compute, operands)

        if LSE_UNIT[kernel] != 1:
            lse = lse * LSE_UNIT[kernel]
        return Partial(*merge(total.before, out, lse, total.dtype))

    def backward(
        self, queries: Queries, pieces: Sequence[Piece], scale: float, total: Sum
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        if len(pieces) == 1:
            dq, d_blocks = self._blocks_backward(queries, pieces[0], scale, total)
            return dq, [d_blocks]
        blocks, verticals = pieces
        over_blocks = Sum(torch.float32, total.before)
        dq, d_blocks = self._blocks_backward(queries, blocks, scale, over_blocks)
        # fp32, because the gradients of verticals are still to be summed over heads and ranks.
        output = block_sparse.GradientOutput(total.dtype, [torch.float32], dq.contiguous())
        q, d_out, out, lse = queries
        dq, d_verticals = block_sparse.backward(d_out, q, out, lse, [verticals], scale, output)
        return dq, [d_blocks, *d_verticals]

    def _blocks_backward(
        self, queries: Queries, piece: Piece, scale: float, total: Sum
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tiles = piece.tiles
        if tiles.chosen is not None:
            dq, [d_blocks] = super().backward(queries, [piece], scale, total)
            return dq, d_blocks
        q, d_out, out, lse = queries
        kernel = _kernel(q)
        size = tiles.block_size
        options = _options(kernel, q.shape[-1])

        def compute(*operands: Tensor) -> tuple[Tensor, ...]:
            q, out, lse, d_out, k, v = operands[:6]
            block_mask = _block_mask(q, k, size, by_query=operands[6:10], by_key=operands[10:14])
            mask_operands = operands[14:]
            score_forward, score_joint = _score_graphs(q)
            gradients = flex_attention_backward(
                q,
                k,
                v,
                out,
                lse,
                d_out,
                None,  # no gradient comes through lse
                score_forward,
                score_joint,
                block_mask,
                scale,
                options,
                (),
                mask_operands,
            )
            return gradients[:3]

        by_query = _tables(tiles.by_query, piece.k.shape[2] // size)
        by_key = _tables(tiles.by_key, q.shape[2] // size)
        op_lse = lse.float()
        if LSE_UNIT[kernel] != 1:
            op_lse = op_lse / LSE_UNIT[kernel]
        operands = [q, out.to(q.dtype), op_lse, d_out.to(q.dtype), piece.k, piece.v]
        operands += [*by_query, *by_key, *_mask_operands(tiles, q.shape[1])]
        piece_dq, dk, dv = _call(("backward", kernel, scale, size), compute, operands)

        return add(total.before, piece_dq, total.dtype), (dk, dv)

    def serves_dense(self, q: Tensor, shape: DenseShape) -> bool:
        return _kernel(q) == "FLASH"

    dense_forward = staticmethod(flash.dense_forward)
    dense_backward = staticmethod(flash.dense_backward)


def _kernel(q: Tensor) -> str:
    head_dim = q.shape[-1]
    if flash.serves(q.dtype, head_dim):
        return "FLASH"
    return "TRITON"


def _options(kernel: str, head_dim: int) -> dict[str, Any]:
    """The ops' kernel options: all those that the public flex_attention() would fill in."""
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
        # The default is tiles of 128 keys, for which the mask's operands do not fit into shared
        # memory.
        options["fwd_BLOCK_N"] = 64
    return options


def _is_visible(
    b: Tensor, h: Tensor, i: Tensor, j: Tensor, start: Tensor, stop: Tensor, position: Tensor
) -> Tensor:
    """Whether query i sees key j in a partial tile. FlexAttention calls this a mask_mod.

    start, stop: [B, Sq]. position: [Sk], [B, Hq, 1, Sk], or [B, Hq, nq, Sk] by query block.
    """
    if position.dim() == 1:
        key = position[j]
    else:
        queries_per_row = start.shape[1] // position.shape[2]
        key = position[b, h, i // queries_per_row, j]
    from_start = start[b, i] <= key
    return from_start & (key < stop[b, i])


def _mask_operands(tiles: Tiles, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """start, stop and position for _is_visible(), all int32.

    What batches and heads share is there once: copies would be made in each layer.
    Covered keys get a position that no query sees, for the query block that they are covered for:
    that saves one look-up in the inner loop of the kernels.
    """
    position = tiles.k_positions
    if tiles.covered is None and position.shape[:2] == (1, 1):
        return tiles.start, tiles.stop, position[0, 0]
    # [B, Hq, 1, Sk]
    position = position.expand(len(tiles.start), heads, -1)[:, :, None]
    if tiles.covered is not None:
        # [B, Hq, nq, Sk]
        covered = unpack(tiles.covered, position.shape[-1])
        nowhere = torch.iinfo(torch.int32).max
        position = torch.where(covered, nowhere, position)
    return tiles.start, tiles.stop, position


def _tables(lists: BlockLists, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts and numbers of partial tiles, then of full ones; as wide as list_width() says.

    blocks: how many there are on the side that the numbers count.
    """
    partial = lists.partial
    full = lists.full
    missing = list_width(partial.shape[-1], blocks) - partial.shape[-1]
    if missing:
        partial = torch.nn.functional.pad(partial, (0, missing))
        full = torch.nn.functional.pad(full, (0, missing))
    return lists.partial_count, partial, lists.full_count, full


def _block_mask(
    q: Tensor, k: Tensor, size: int, by_query: Sequence[Tensor], by_key: Sequence[Tensor | None]
) -> tuple:
    """What the ops take as block_mask, from tables as _tables() gives them.

    BlockMask puts them in order, since the order differs between torch versions.
    """
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices = by_query
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices = by_key
    block_mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(size, size),
        mask_mod=_is_visible,
    )
    return block_mask.as_tuple()


def _score_graphs(q: Tensor) -> tuple[Callable, Callable]:
    """The forward and the joint graph of the score function, which the backward op wants.

    The score function changes nothing.
    """
    score = q.new_zeros((), requires_grad=True)
    # b, h, i, j
    indices = [q.new_zeros((), dtype=torch.int) for _ in range(4)]
    return create_fw_bw_graph(_identity, (score, *indices), ())


@torch.no_grad()
def _call(
    key: tuple, compute: Callable[..., tuple[Tensor, ...]], operands: list[Tensor]
) -> tuple[Tensor, ...]:
    """compute(*operands), compiled the first time that `key` meets these shapes and dtypes."""
    # The kernels compute addresses as if the tables were contiguous. Also, a single layout
    # compiles once.
    operands = [operand.detach().contiguous() for operand in operands]
    shapes = [(operand.shape, operand.dtype) for operand in operands]
    key = (*key, operands[0].device, *shapes)
    if key not in _compiled:
        graph = make_fx(compute, tracing_mode="fake")(*operands)
        _compiled[key] = _compile(graph, operands)
    return _compiled[key](*operands)
