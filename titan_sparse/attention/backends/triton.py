"""Our own Triton kernels over the block lists. Blocks and verticals are computed in one fused pass.

The kernels need CUDA. On the CPU they run in Triton's interpreter, for tests.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import Backend, Partial, Queries
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import Piece


class Triton(Backend):
    """Blocks and verticals in one launch. The same kernel continues from a total."""

    SERVES_SLICES = True
    GATHERS_QUERIES = True

    def refusal(
        self, device_type: str, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> str | None:
        interpreted = block_sparse.INTERPRETED
        if device_type != "cuda" and not interpreted:
            return f'attention.backend = "triton" needs CUDA, not {device_type}; write "eager"'

        # The interpreter computes bf16 wrongly.
        if dtype == torch.float64 or (interpreted and dtype == torch.bfloat16):
            where = " in Triton's interpreter" if interpreted else ""
            return f'attention.backend = "triton" does not compute {dtype}{where}; write "eager"'

        # Small blocks are for the interpreter; tests with them are short.
        block_sizes = (16, 32, 64, 128) if interpreted else (64, 128)
        if block_size not in block_sizes:
            return f'attention.backend = "triton" takes attention.block_size 64 or 128, not {block_size}'
        if head_dim % 16 or not 16 <= head_dim <= 256:
            return (
                'attention.backend = "triton" takes head_dim 16 to 256 in steps of 16, '
                f'not {head_dim}; write "eager"'
            )
        return None

    def describe(self) -> str:
        return "triton: own block-sparse kernels, blocks and verticals in one pass"

    def forward(
        self,
        q: Tensor,
        pieces: Sequence[Piece],
        total: Partial | None,
        scale: float,
        dtype: torch.dtype | None = None,
        into: Tensor | None = None,
    ) -> Partial:
        out, lse = block_sparse.forward(q, pieces, scale, dtype, total, into)
        return Partial(out, lse)

    def backward(
        self,
        queries: Queries,
        pieces: Sequence[Piece],
        dq: Tensor | None,
        scale: float,
        dtype: torch.dtype | None = None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        if dtype is None:
            dtype = queries.q.dtype
        # fp32, because the gradients of verticals are still to be summed over heads and ranks.
        kv_dtypes = [dtype, torch.float32][: len(pieces)]
        return block_sparse.backward(
            queries.d_out,
            queries.q,
            queries.out,
            queries.lse,
            pieces,
            scale,
            block_sparse.GradientOutput(dtype, kv_dtypes, before=dq, into=into),
        )
