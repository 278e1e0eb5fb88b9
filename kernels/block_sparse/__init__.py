"""Block-sparse attention over lists of blocks: Triton kernels.

The attention goes over one piece of keys, or over two in the same launch.

forward(q, pieces, scale) -> out, lse
backward(d_out, q, out, lse, pieces, scale, dtypes, before) -> dq, [(dk, dv) of each piece]
query_side(), query_gradient() and key_gradient() are the parts of backward().
"""

from titan_sparse.kernels.block_sparse.backward import (
    QuerySide,
    backward,
    key_gradient,
    query_gradient,
    query_side,
)
from titan_sparse.kernels.block_sparse.forward import forward
from titan_sparse.kernels.block_sparse.piece import (
    INTERPRETED,
    BlockLists,
    ChosenChunks,
    Piece,
    Tiles,
    chosen_bits,
    chosen_keys,
)
