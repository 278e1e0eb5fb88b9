"""Block-sparse attention over lists of blocks: Triton kernels and their twin in plain PyTorch.

The attention goes over one piece of keys, or over two in the same launch.

forward(q, pieces, start, stop, block_size, scale) -> out, lse
backward(d_out, q, out, lse, pieces, start, stop, block_size, scale, output)
    -> dq, [(dk, dv) of each piece]
query_side(), query_gradient() and key_gradient() are the parts of backward().
"""

from titan_sparse.kernels.block_sparse import naive
from titan_sparse.kernels.block_sparse.backward import (
    GradientOutput,
    QuerySide,
    backward,
    key_gradient,
    query_gradient,
    query_side,
)
from titan_sparse.kernels.block_sparse.forward import forward
from titan_sparse.kernels.block_sparse.piece import INTERPRETED, Lists, Piece

__all__ = [
    "INTERPRETED",
    "GradientOutput",
    "Lists",
    "Piece",
    "QuerySide",
    "backward",
    "forward",
    "key_gradient",
    "naive",
    "query_gradient",
    "query_side",
]
