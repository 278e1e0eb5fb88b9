"""Attention over whole chunks of keys that single queries chose (MoBA), and over lists of blocks.

The queries of each chunk are gathered into dense tiles, which no mask cuts.

forward(q, plan) -> out, lse
backward(d_out, q, out, lse, plan) -> dq, dk, dv
"""

from titan_sparse.kernels.gathered.attention import backward, forward
from titan_sparse.kernels.gathered.lists import (
    Choices,
    Plan,
    chosen_pairs,
    gather_queries,
    tile_table,
)
