"""Tile sizes and launch options of the gathered kernels.

They are fixed, like those of block_sparse, so that results are bitwise equal in every run.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from titan_sparse.kernels.block_sparse.launch import key_tile, options, query_tile
from titan_sparse.kernels.block_sparse.piece import INTERPRETED

SORTED_ROWS = 64
"""Queries that a program of the lists compares with each other. With more the comparisons take
long, with fewer the counts of all programs."""

_PROGRAMS = 2048
"""Number of programs that fill a GPU, whether a chunk has many queries or few."""

_MOST_SPLITS = 8

_SHORT_CHUNK = 1024
"""Keys of a chunk up to which two programs share an SM."""

_TWO_PROGRAMS = (128, 32)
"""Queries and keys of a tile with which they do, at head_dim 128."""

_LIST_BYTES = 1 << 28
"""Lists that are made at a time, for some of the heads."""

_TOTAL_BYTES = 1 << 28
"""fp32 sums that are kept at a time, for some of the heads. A launch of fewer tiles would end with
most of a GPU idle."""


T = TypeVar("T", bound=Any)


class Share(NamedTuple):
    """Some sequences and heads of a tensor [B, Hq, ...]: all of them, or some heads of one
    sequence, so that they are contiguous in memory."""

    batches: slice
    heads: slice
    kv_heads: slice

    def of(self, tables: T) -> T:
        """The share's part of a NamedTuple of tensors [B, n] or [B, Hq, ...], as views."""
        views = []
        for field in tables:
            if isinstance(field, Tensor):
                at = self.batches if field.dim() == 2 else (self.batches, self.heads)
                field = field[at]
            views.append(field)
        return tables._make(views)


def row_tile(head_dim: int, block_size: int, element_size: int, chunk: int) -> tuple[int, int]:
    """Gathered queries, and keys, of a tile of the forward and of the dq kernel.

    A program gathers its queries and adds to their sums once for every chunk. Where that is not
    little beside the chunk's products, small tiles of keys leave room for a second program, which
    computes meanwhile.
    """
    queries, keys = query_tile(head_dim, _rows_of_blocks(block_size), element_size)
    # With short chunks, two programs on a multiprocessor are faster.
    if queries == 128 and 64 < head_dim <= 128 and chunk <= _SHORT_CHUNK:
        return _TWO_PROGRAMS
    return queries, keys


def forward_keys(tile: tuple[int, int], head_dim: int) -> int:
    """Keys of a tile of the forward; tile: row_tile()'s."""
    queries, keys = tile
    if queries == 128 and keys == 64 < head_dim <= 128:
        # The forward holds fewer sums than dq does.
        return 128
    return keys


def chunk_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Gathered queries, and keys, of a tile of the dk and dv kernel."""
    return key_tile(head_dim, _rows_of_blocks(block_size), element_size)


def _rows_of_blocks(block_size: int) -> int:
    """The largest tile. Lists of queries know no blocks; tests in the
    interpreter want small ones."""
    return block_size if INTERPRETED else 128


def row_options(tile: tuple[int, int], head_dim: int, device: torch.device) -> dict[str, int]:
    """Sizes, num_warps, and num_stages of the forward and of the dq kernel, and what limits
    registers."""
    chosen = options(tile, head_dim, device)
    if tile == _TWO_PROGRAMS and chosen["D"] == 128:
        # Two programs of 8 warps share the registers of an SM.
        return chosen | {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
    # No number of a block is loaded ahead of its keys, which takes the other stages elsewhere.
    return chosen | {"num_stages": min(chosen["num_stages"], 3)}


def chunk_options(tile: tuple[int, int], head_dim: int, device: torch.device) -> dict[str, int]:
    """Sizes, num_warps, and num_stages of the dk and dv kernel.

    It loads the numbers of queries before their rows, which takes one of the stages.
    """
    chosen = options(tile, head_dim, device)
    return chosen | {"num_stages": min(chosen["num_stages"], 4)}


def list_splits(programs: int) -> int:
    """The number of parts into which the list of each chunk is cut.

    programs: how many there are without cutting. All queries may have chosen one chunk, which one
    program would work on long after the others.
    """
    if INTERPRETED:
        return 1
    return min(max(1, _PROGRAMS // max(1, programs)), _MOST_SPLITS)


def list_shares(shape: tuple[int, ...], kv_heads: int, chunks: int, slots: int) -> list[Share]:
    """The heads whose lists are made at a time. shape: B, Hq and S of the queries."""
    batch, heads, q_len = shape
    # Pairs and queries, and how many there are of each kind, twice.
    entries = 2 * slots * q_len
    counts = 2 * (chunks + 1) * slots * -(-q_len // SORTED_ROWS)
    return _shares(batch, heads, kv_heads, _LIST_BYTES // (4 * (entries + counts)))


def total_shares(shape: tuple[int, ...], kv_heads: int) -> list[Share]:
    """The heads whose sums are kept at a time. shape: of the queries."""
    batch, heads, q_len, dim = shape
    return _shares(batch, heads, kv_heads, _TOTAL_BYTES // (4 * q_len * dim))


def _shares(batch: int, heads: int, kv_heads: int, fitting: int) -> list[Share]:
    """Shares of up to `fitting` heads, but of one head at least."""
    if fitting >= batch * heads:
        return [Share(slice(0, batch), slice(0, heads), slice(0, kv_heads))]

    # Whole groups of heads, or equal parts of a group.
    group = heads // kv_heads
    if fitting >= group:
        step = fitting // group * group
    else:
        step = 1
        for size in range(1, fitting + 1):
            if group % size == 0:
                step = size
    shares = []
    for sequence in range(batch):
        for first in range(0, heads, step):
            last = min(first + step, heads)
            some_kv_heads = slice(first // group, -(-last // group))
            shares.append(Share(slice(sequence, sequence + 1), slice(first, last), some_kv_heads))
    return shares
