"""Tile sizes and launch options, measured on an H200."""

import triton

from .piece import INTERPRETED

# num_warps and num_stages to try once per shape. Tiles are fixed, not tuned: sums are taken in the same order on every run.
_OPTIONS = {
    "forward": [(8, 2), (8, 3), (4, 3)],
    "query": [(8, 2), (8, 3), (4, 2)],
    "key": [(8, 2), (8, 3), (4, 2)],
}


def candidates(kernel: str) -> list[triton.Config]:
    """What triton.autotune tries for "forward", "query" (dq) and "key" (dk and dv); the interpreter cannot choose."""
    options = _OPTIONS[kernel][:1] if INTERPRETED else _OPTIONS[kernel]
    return [triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in options]


def _tile(wanted: tuple[int, int], block_size: int, element_size: int) -> tuple[int, int]:
    largest = min(block_size, 32) if element_size == 4 and not INTERPRETED else block_size
    return min(wanted[0], largest), min(wanted[1], largest)


def forward_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Queries and keys of a forward tile."""
    return _tile((128, 128) if head_dim <= 128 else (64, 64), block_size, element_size)


def query_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Queries and keys of a tile of the dq kernel."""
    return _tile((128, 64), block_size, element_size)


def key_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Queries and keys of a tile of the dk and dv kernel."""
    return _tile((64, 128), block_size, element_size)


def key_splits(programs: int) -> int:
    """Into how many parts to cut the query lists of each KV block, so that few KV blocks still fill a GPU."""
    return 1 if INTERPRETED else min(max(1, 1024 // programs), 16)
