"""The tables of blocks that a backend computes on.

They are the contract between masks and patterns on one side and backends on the other.
"""

from typing import NamedTuple

from torch import Tensor

from titan_sparse.kernels.chunks import ChosenChunks


class BlockLists(NamedTuple):
    """For each of n blocks of one side, the blocks of the other side that it meets.

    All int32; of one sequence and head contiguous. Of a full tile every pair is seen. In a partial
    one Tiles' start, stop and covered decide. No tile is in both lists.

    full_count, partial_count: [B, Hq, n].
    full, partial: [B, Hq, n, K], local block numbers, ascending, filled up with 0.
    partial_slice: like partial, the slice of the mask that is meant (slices.py), which alone
        decides what is seen. A tile is in `partial` once for each of its slices. None where the
        mask has no slices.
    """

    full_count: Tensor
    full: Tensor
    partial_count: Tensor
    partial: Tensor
    partial_slice: Tensor | None = None


class Tiles(NamedTuple):
    """Which KV blocks each query block meets, and which pairs inside them are seen.

    by_query: KV blocks of each query block.
    by_key: query blocks of each KV block, where asked for (backward).
    start, stop: int32 [B, Sq]; the query sees keys at positions start <= p < stop.
    k_positions: int32 [B, Hq, Sk] where every head has keys of its own, else [1, 1, Sk].
    covered: int32 [B, Hq, nq, ceil(Sk / 32)] or None: a bit (kernels/bits.py) for each key that the
        query block already met elsewhere, not to be counted again.
    block_size: tokens in a block of queries and of keys.
    chosen: what each query chose itself, for patterns that let it. Full tiles are those that all of
        their queries chose.
    slices: int32 [B, N, 6] that partial_slice counts, as in MaskRanges; None without slices.
    q_positions: int32 [Sq], global; None without slices.
    """

    by_query: BlockLists
    by_key: BlockLists | None
    start: Tensor
    stop: Tensor
    k_positions: Tensor
    covered: Tensor | None
    block_size: int
    chosen: ChosenChunks | None = None
    slices: Tensor | None = None
    q_positions: Tensor | None = None
