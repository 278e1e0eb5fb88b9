"""Tile sizes and launch options of the gathered kernels.

They are fixed, as those of block_sparse are, so that results are equal to the bit in every run.
"""

import torch

from titan_sparse.kernels.block_sparse.launch import key_tile, options, query_tile
from titan_sparse.kernels.block_sparse.piece import INTERPRETED

_PROGRAMS = 2048
"""So many programs fill a GPU, though the queries of a chunk are many or few."""

_MOST_SPLITS = 8

_TOTAL_BYTES = 1 << 28
"""fp32 sums that are kept at a time, for some of the heads."""


def row_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Gathered queries, and keys, of a tile of the forward and of the dq kernel."""
    return query_tile(head_dim, block_size, element_size)


def chunk_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Gathered queries, and keys, of a tile of the dk and dv kernel."""
    return key_tile(head_dim, block_size, element_size)


def row_options(m: int, n: int, padded_dim: int, device: torch.device) -> dict[str, int]:
    """num_warps and num_stages of the forward and of the dq kernel.

    A program gathers its queries and adds to their sums once for every chunk. Buffers for two tiles
    of keys leave room for a second program, which computes meanwhile.
    """
    chosen = options(m, n, padded_dim, device)
    chosen["num_stages"] = min(chosen["num_stages"], 3)
    return chosen


def chunk_options(m: int, n: int, padded_dim: int, device: torch.device) -> dict[str, int]:
    """num_warps and num_stages of the dk and dv kernel.

    It loads the numbers of queries before their rows, which takes one of the stages.
    """
    chosen = options(m, n, padded_dim, device)
    chosen["num_stages"] = min(chosen["num_stages"], 4)
    return chosen


def list_splits(programs: int) -> int:
    """How many parts the list of each chunk is cut into.

    programs: how many there are without cutting. All queries may have chosen one chunk, which one
    program would work on long after the others.
    """
    if INTERPRETED:
        return 1
    return min(max(1, _PROGRAMS // max(1, programs)), _MOST_SPLITS)


def parts(
    batch: int, heads: int, kv_heads: int, row_bytes: int
) -> list[tuple[slice, slice, slice]]:
    """Which sequences, query heads and KV heads are computed at a time.

    row_bytes: of the sums of one head. They are all sequences, or some heads of one: contiguous in
    memory.
    """
    fitting = max(1, _TOTAL_BYTES // row_bytes)
    every_kv_head = slice(0, kv_heads)
    if fitting >= batch * heads:
        return [(slice(0, batch), slice(0, heads), every_kv_head)]

    # Whole groups of heads, or parts of a group that are equally large.
    group = heads // kv_heads
    if fitting >= group:
        step = fitting // group * group
    else:
        step = max(size for size in range(1, fitting + 1) if group % size == 0)
    some = []
    for sequence in range(batch):
        for first in range(0, heads, step):
            last = min(first + step, heads)
            some_kv_heads = slice(first // group, -(-last // group))
            some.append((slice(sequence, sequence + 1), slice(first, last), some_kv_heads))
    return some
