"""Our own Triton kernels over the block lists. Blocks and verticals are computed in one fused pass.

The kernels need CUDA. On the CPU they run in Triton's interpreter, for tests.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import DenseShape, Partial, Queries
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import Piece

READS_BY_KEY = True
"""Whether backward() reads Tiles.by_key."""
SERVES_SLICES = True
"""Whether it takes tiles of a mask of slices."""
COMPILES_BY_LENGTH = False
"""Whether a number of keys that it has not seen before takes seconds to compile."""
DENSE_BY_CHUNK = False
"""Whether dense_forward() on each rank's keys beats tiles over those of all ranks at once."""
GATHERS_QUERIES = True
"""Whether kernels.gathered computes chunks that single queries chose, on one rank."""


def refusal(device_type: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why this backend cannot train with such inputs, in one sentence; None if it can."""
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
        return (
            f'attention.backend = "triton" takes attention.block_size 64 or 128, not {block_size}'
        )
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return (
            'attention.backend = "triton" takes head_dim 16 to 256 in steps of 16, '
            f'not {head_dim}; write "eager"'
        )
    return None


def describe() -> str:
    """What computes, for the banner."""
    return "triton: own block-sparse kernels, blocks and verticals in one pass"


def forward(
    q: Tensor,
    pieces: Sequence[Piece],
    total: Partial | None,
    scale: float,
    dtype: torch.dtype | None = None,
    into: Tensor | None = None,
) -> Partial:
    """Attention of q [B, Hq, Sq, D] over one piece or two, in one launch, and over the keys of
    `total`.

    total: contiguous. The kernel goes on from it, and overwrites it where it has `dtype`.
    Returns out [B, Hq, Sq, D] in the memory `into` or in `dtype` (default: total's, else q's), and
    natural-log lse [B, Hq, Sq], fp32. Rows that see nothing: out 0, lse -inf.
    """
    out, lse = block_sparse.forward(q, pieces, scale, dtype, total, into)
    return Partial(out, lse)


def backward(
    queries: Queries,
    pieces: Sequence[Piece],
    dq: Tensor | None,
    scale: float,
    dtype: torch.dtype | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """dq through all pieces in one launch, and (dk, dv) of each piece. Needs Tiles.by_key.

    dq: contiguous, what came through other keys, which is added; overwritten where it has `dtype`.
    `dtype` is of dq and of the first piece's dk and dv (default: q's); those of a second piece, the
    verticals, are fp32. into: contiguous memory for dq, whose dtype wins.
    """
    if dtype is None:
        dtype = queries.q.dtype
    # The gradients of verticals are yet to be summed over heads and ranks, hence fp32.
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


def serves_dense(q: Tensor, shape: DenseShape) -> bool:
    """Whether dense attention without tiles is the faster way: it has no kernel of its own."""
    return False


def dense_forward(q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float) -> Partial:
    """Not there: see serves_dense()."""
    raise NotImplementedError("the triton backend computes dense attention over tiles")


def dense_backward(
    queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Not there: see serves_dense()."""
    raise NotImplementedError("the triton backend computes dense attention over tiles")
