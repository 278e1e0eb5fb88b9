"""XAttention's scores: sums along antidiagonals of q k, and what is chosen by them.

visible_tiles(), block_sums() and chosen_blocks() follow one another.
Queries and keys are cut into cells of `stride` tokens. The twins have the same signatures, but know
no tiles.
"""

from titan_sparse.kernels.antidiagonals.kernel import (
    HOPPER,
    MOST_BLOCKS,
    SMALLER,
    BlockSums,
    QueryBlocks,
    TileShape,
    VisibleTiles,
    block_sums,
    chosen_blocks,
    shape_for,
    visible_tiles,
)
from titan_sparse.kernels.antidiagonals.naive import (
    block_sums_naive,
    chosen_blocks_naive,
    document_masses,
    fewest,
)
