"""Attention over tiles by FlashAttention-4's block-sparse kernels, with a mask in partial tiles."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_sparse.attention.backends import flash
from titan_sparse.attention.backends.base import Case, DenseShape, Partial, Queries, Served, Sum
from titan_sparse.attention.backends.triton import Triton
from titan_sparse.attention.merge import add, merge
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import Piece


class Flex(Triton):
    """FlashAttention-4 for blocks; verticals and what single queries chose by the Triton kernels."""

    SERVES_SLICES = False
    SERVES_DENSE = True

    def refusal(self, case: Case) -> str | None:
        served = Served(("cuda",), flash.DTYPES, (128,), flash.HEAD_DIMS)
        return served.refusal("flex", case)

    def missing(self, case: Case) -> str | None:
        reason = flash.missing()
        if reason is not None:
            return f'attention.backend = "flex" cannot run: {reason}; write "triton"'
        return None

    def describe(self) -> str:
        return "flex: FlashAttention-4 kernels for blocks, own Triton kernels for verticals"

    def forward(self, q: Tensor, pieces: Sequence[Piece], scale: float, total: Sum) -> Partial:
        """Verticals, the second piece, are left to our own kernels. FlashAttention-4 would look up for
        each single pair of a vertical tile whether it is covered, which takes two to three times as long,
        and its results would have to be merged.
        """
        if len(pieces) == 1:
            return self._blocks_forward(q, pieces[0], scale, total)
        blocks, verticals = pieces
        over_blocks = self._blocks_forward(q, blocks, scale, Sum(torch.float32, total.before))
        return super().forward(q, [verticals], scale, total._replace(before=over_blocks))

    def _blocks_forward(self, q: Tensor, piece: Piece, scale: float, total: Sum) -> Partial:
        """forward() over the blocks of one chunk of keys."""
        if piece.tiles.chosen is not None:
            # What single queries chose: our own kernels look that up once a tile, not once a pair.
            return super().forward(q, [piece], scale, total)
        out, lse = flash.blocks_forward(q, piece, scale)
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
        dtypes = [total.dtype, torch.float32]
        q, d_out, out, lse = queries
        dq, d_verticals = block_sparse.backward(d_out, q, out, lse, [verticals], scale, dtypes, dq)
        return dq, [d_blocks, *d_verticals]

    def _blocks_backward(
        self, queries: Queries, piece: Piece, scale: float, total: Sum
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if piece.tiles.chosen is not None:
            dq, [d_blocks] = super().backward(queries, [piece], scale, total)
            return dq, d_blocks
        dq, dk, dv = flash.blocks_backward(queries, piece, scale)
        return add(total.before, dq, total.dtype), (dk, dv)

    def serves_dense(self, q: Tensor, shape: DenseShape) -> bool:
        return True

    dense_forward = staticmethod(flash.dense_forward)
    dense_backward = staticmethod(flash.dense_backward)
