"""Tile sizes and launch options, measured on an H200 at 128K tokens.

A fixed choice for each shape, no tuning at run time: sums are taken in the same order on every run, hence results are
the same to the bit, and a short search on a cold GPU was seen to pick slower options.
"""

import torch

from .piece import INTERPRETED

_HOPPER_SHARED_MEMORY = (
    232448  # bytes a program can have; smaller GPUs take the shallow prefetching
)

_VERTICAL_TILE = (128, 32)


def _tile(wanted: tuple[int, int], block_size: int, element_size: int) -> tuple[int, int]:
    # fp32 has no tensor cores at full precision: large tiles would only spill.
    largest = min(block_size, 32) if element_size == 4 and not INTERPRETED else block_size
    return min(wanted[0], largest), min(wanted[1], largest)


def forward_tile(
    head_dim: int, block_size: int, element_size: int, verticals_only: bool = False
) -> tuple[int, int]:
    """Queries and keys of a forward tile. Columns alone are few tiles a program, which then mostly starts and ends:
    small tiles let several programs share an SM and hide each other's latency."""
    if verticals_only and 64 < head_dim <= 128:
        return _tile(_VERTICAL_TILE, block_size, element_size)
    return _tile((128, 128) if 64 < head_dim <= 128 else (128, 64), block_size, element_size)


def query_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Queries and keys of a tile of the dq kernel."""
    return _tile((128, 64) if head_dim <= 128 else (64, 32), block_size, element_size)


def key_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Queries and keys of a tile of the dk and dv kernel."""
    if head_dim > 128:
        return _tile((32, 64), block_size, element_size)
    return _tile((64, 128) if head_dim > 64 else (64, 64), block_size, element_size)


def options(m: int, n: int, padded_dim: int, device: torch.device) -> dict[str, int]:
    """num_warps and num_stages for a tile of m queries and n keys. The index load takes two of the stages."""
    if (m, n) == _VERTICAL_TILE:
        return {"num_warps": 4, "num_stages": 4}
    warps = 4 if max(m, n) * padded_dim <= 8192 else 8
    # At head_dim 128 two programs of 4 warps share an SM, which hides more than a third buffer; at 256 it has no room.
    deep = padded_dim <= 64 or (padded_dim == 128 and warps == 8)
    return {
        "num_warps": warps,
        "num_stages": 5 if deep and _shared_memory(device) >= _HOPPER_SHARED_MEMORY else 3,
    }


def forward_options(
    m: int, n: int, padded_dim: int, device: torch.device, choices: bool
) -> dict[str, int]:
    """options() of the forward. The bits of queries' choices are prefetched as well: with all stages head_dim 128 would need
    24 bytes more shared memory than there are."""
    chosen = options(m, n, padded_dim, device)
    return chosen | {"num_stages": min(chosen["num_stages"], 4)} if choices else chosen


def _shared_memory(device: torch.device) -> int:
    return (
        0 if INTERPRETED else torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    )


def key_splits(programs: int) -> int:
    """Into how many parts to cut the query lists of each KV block, so that few KV blocks still fill a GPU."""
    return 1 if INTERPRETED else min(max(1, 1024 // max(1, programs)), 16)
