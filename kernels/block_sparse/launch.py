"""Tile sizes, launch options and splits, measured on an H200 at 128K tokens.

Every shape has a fixed choice, and nothing is tuned at run time. So sums are taken in the same
order in every run, and results are bitwise equal. Also, a short search on a cold GPU was seen to
pick slower options.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import INTERPRETED

_HOPPER_SHARED_MEMORY = 232448
"""Bytes that one program can have on Hopper. Smaller GPUs prefetch fewer tiles ahead."""
_AMPERE_SHARED_MEMORY = 166912
"""And on an A100. GPUs for PCs have less, mostly 101,376, and no room for large
tiles at head_dim 256."""

_VERTICAL_TILE = (128, 32)
_SUMMED_AT_ONCE = 512
"""Elements that a program of sum_splits() sums."""


def _tile(
    wanted: tuple[int, int], head_dim: int, block_size: int, element_size: int
) -> tuple[int, int]:
    """Queries and keys of a tile: those wanted, or fewer."""
    largest = block_size
    if element_size == 4 and not INTERPRETED:
        # fp32 has no tensor cores at full precision: large tiles would only spill registers. With
        # tiles of 32 at head_dim 256 a thread spills 13 KB, and compiling takes minutes.
        largest = 32 if head_dim <= 128 else 16
    queries, keys = wanted
    if head_dim > 128 and not INTERPRETED and _shared_memory() < _AMPERE_SHARED_MEMORY:
        queries //= 2
        keys //= 2
    return min(queries, largest), min(keys, largest)


def forward_tile(
    head_dim: int, block_size: int, element_size: int, verticals_only: bool = False
) -> tuple[int, int]:
    """Queries and keys of a forward tile.

    With verticals alone a program has few tiles and mostly starts and ends. Small tiles let several
    programs share an SM, and hide each other's latency.
    """
    wanted = (128, 64)
    if 64 < head_dim <= 128:
        wanted = _VERTICAL_TILE if verticals_only else (128, 128)
    return _tile(wanted, head_dim, block_size, element_size)


def query_tile(
    head_dim: int, block_size: int, element_size: int, verticals_only: bool = False
) -> tuple[int, int]:
    """Queries and keys of a tile of the dq kernel; see forward_tile() for verticals alone."""
    wanted = (128, 64) if head_dim <= 128 else (64, 32)
    if verticals_only and 64 < head_dim <= 128:
        # A tenth faster on an H200.
        wanted = (64, 64)
    return _tile(wanted, head_dim, block_size, element_size)


def key_tile(head_dim: int, block_size: int, element_size: int) -> tuple[int, int]:
    """Queries and keys of a tile of the dk and dv kernel."""
    wanted = (32, 64) if head_dim > 128 else (64, 128) if head_dim > 64 else (64, 64)
    return _tile(wanted, head_dim, block_size, element_size)


def options(tile: tuple[int, int], head_dim: int, device: torch.device) -> dict[str, int]:
    """Sizes of a kernel with such tiles, M queries and N keys, its num_warps, and its num_stages.

    Loading the block number takes two of the stages.
    """
    padded_dim = triton.next_power_of_2(head_dim)
    sizes = dict(M=tile[0], N=tile[1], HEAD_DIM=head_dim, D=padded_dim)
    if tile == _VERTICAL_TILE:
        return sizes | dict(num_warps=4, num_stages=4)
    warps = 4 if max(tile) * padded_dim <= 8192 else 8
    # At head_dim 128 two programs of 4 warps share an SM, which hides more than a third buffer
    # does; at 256 there is no room for one.
    is_deep = padded_dim <= 64 or (padded_dim == 128 and warps == 8)
    stages = 5 if is_deep and _shared_memory(device) >= _HOPPER_SHARED_MEMORY else 3
    return sizes | dict(num_warps=warps, num_stages=stages)


def _shared_memory(device: torch.device | None = None) -> int:
    """Bytes of shared memory that a program can have, by default on the current device; 0 in the
    interpreter."""
    if INTERPRETED:
        return 0
    # Before torch 2.15 its type does not list this attribute.
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def key_splits(programs: int, group: int, q_blocks: int) -> tuple[int, int]:
    """Into how many parts the query heads of a group are cut, and the query list of each head.

    Few programs would not fill a GPU, nor share long lists evenly. But each part is written and
    added up, and with few tokens that takes longer than the work. Lists are cut last: most are
    short.
    programs: one for each tile of keys and KV head. group: query heads of a KV head. q_blocks: the
    most that a list can have.
    """
    if INTERPRETED:
        return 1, 1
    wanted_programs = min(max(2 * q_blocks, 128), 1024)
    wanted = min(max(1, wanted_programs // max(1, programs)), 16)
    of_heads = min(wanted, group)
    return of_heads, wanted // of_heads


@triton.jit
def _sum_one(parts, total, at, n, splits, SPLITS: tl.constexpr):
    """The sum of parts [splits, n] at `at`, rounded once."""
    # [SPLITS, chunk]: all at a time. One after the other, each would be waited for.
    o_split = tl.arange(0, SPLITS)[:, None]
    part_at = o_split.to(tl.int64) * n + at[None, :]
    b_parts = tl.load(parts + part_at, mask=(o_split < splits) & (at < n)[None, :], other=0.0)
    b_sum = tl.sum(b_parts, 0)
    tl.store(total + at, b_sum.to(total.dtype.element_ty), mask=at < n)


@triton.jit
def _sum_kernel(dk_parts, dv_parts, dk, dv, n, splits, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of dk, or in the second row of programs of dv. SPLITS: a power of two."""
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(1) == 0:
        _sum_one(dk_parts, dk, at, n, splits, SPLITS)
    else:
        _sum_one(dv_parts, dv, at, n, splits, SPLITS)


def sum_splits(dk_parts: Tensor, dv_parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dk and dv in `dtype` from their parts, both in one launch, in a fixed order.

    dk_parts, dv_parts: fp32 [splits, B, Hkv, Sk, D], contiguous.
    """
    splits = len(dk_parts)
    dk = dk_parts.new_empty(dk_parts.shape[1:], dtype=dtype)
    dv = torch.empty_like(dk)
    n = dk.numel()
    grid = (triton.cdiv(n, _SUMMED_AT_ONCE), 2)
    sizes = dict(SPLITS=triton.next_power_of_2(splits), CHUNK=_SUMMED_AT_ONCE)
    _sum_kernel[grid](dk_parts, dv_parts, dk, dv, n, splits, **sizes, num_warps=4)
    return dk, dv
