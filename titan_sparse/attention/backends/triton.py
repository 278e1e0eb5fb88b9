"""Our own Triton kernels over the block lists. Blocks and verticals are computed in one fused pass.

The kernels need CUDA. On the CPU they run in Triton's interpreter, for tests.
"""

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import (
    Backend,
    Case,
    Gradients,
    Partial,
    Queries,
    Sum,
    not_served,
)
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import Piece

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_SIZES = (64, 128)
HEAD_DIMS = range(16, 257, 16)


class Triton(Backend):
    """Blocks and verticals in one launch. The same kernel continues from a total."""

    SERVES_SLICES = True
    GATHERS_QUERIES = True

    def refusal(self, case: Case) -> str | None:
        if block_sparse.INTERPRETED and case.device_type == "cpu":
            # The interpreter computes bf16 wrongly. Small blocks are for tests, which are short.
            dtypes = (torch.float16, torch.float32)
            sizes = (16, 32, *BLOCK_SIZES)
            return not_served("triton", case, ("cuda", "cpu"), dtypes, sizes, HEAD_DIMS)
        return not_served("triton", case, ("cuda",), DTYPES, BLOCK_SIZES, HEAD_DIMS)

    def describe(self) -> str:
        return "triton: own block-sparse kernels, blocks and verticals in one pass"

    def forward(self, q: Tensor, pieces: list[Piece], scale: float, total: Sum[Partial]) -> Partial:
        return Partial(*block_sparse.forward(q, pieces, scale, total.dtype, total.before))

    def backward(
        self, queries: Queries, pieces: list[Piece], scale: float, total: Sum[Tensor]
    ) -> Gradients:
        q, d_out, out, lse = queries
        # fp32, because the gradients of verticals are still to be summed over heads and ranks.
        dtypes = [total.dtype, total.dtype, torch.float32][: 1 + len(pieces)]
        return block_sparse.backward(d_out, q, out, lse, pieces, scale, dtypes, total.before)
