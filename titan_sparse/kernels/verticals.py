"""Adding the gradients of gathered verticals to the keys and values that they came from.

It is done in place and in a fixed order.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Rows of a program: few, as verticals cluster, and those of one program are added one by one."""


def add_verticals_naive(
    totals: Sequence[Tensor],
    parts: Sequence[Tensor],
    verticals: Tensor,
    blocks: Tensor,
    block_size: int,
) -> None:
    """The twin of add_verticals(), for any floating dtype."""
    # The place of each global block among the local ones, -1 for none.
    place = torch.full((int(blocks.max()) + 1,), -1, dtype=torch.long, device=verticals.device)
    place[blocks.long()] = torch.arange(len(blocks), device=verticals.device)
    # [B, Hq, C]
    block = verticals.long() // block_size
    known = block.clamp(max=len(place) - 1)
    block_place = torch.where(block < len(place), place[known], -1)
    row = block_place * block_size + verticals % block_size
    # Verticals of other ranks, and padding, go to one row more, which is dropped.
    row = torch.where(block_place < 0, len(blocks) * block_size, row)
    for total, part in zip(totals, parts):
        _add_naive(total, part, row)


def _add_naive(total: Tensor, part: Tensor, row: Tensor) -> None:
    """Add part [B, Hq, C, D] to the rows [B, Hq, C] of total [B, Hkv, S, D]; row S is dropped."""
    batch, kv_heads, length, dim = total.shape
    # [B, Hkv, G C, D]: the query heads of a KV head, one after the other.
    row = row.view(batch, kv_heads, -1, 1).expand(-1, -1, -1, dim)
    dtype = torch.promote_types(total.dtype, part.dtype)
    # [B, Hkv, S + 1, D]
    padded = F.pad(total, (0, 0, 0, 1)).to(dtype)
    padded.scatter_add_(2, row, part.reshape(batch, kv_heads, -1, dim).to(dtype))
    total.copy_(padded[:, :, :length])


@triton.jit
def _add_kernel(
    total,
    part,
    verticals,
    begin,
    end,
    starts,
    heads,
    group,
    count,
    n,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Add the verticals that lie in a tile of ROWS keys of one KV head.

    begin, end: int32 [B, Hq, n], where each head's verticals in each of n tiles begin and end.
    starts: int32 [n], the global position of each tile's first key. count: C. group: query heads of
    a KV head. D: HEAD_DIM rounded up to a power of two.
    """
    i_tile = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    first_head = i_b * heads + i_kv * group
    # Most tiles hold no vertical, and are not touched.
    in_tile = 0
    for member in range(group):
        run = (first_head + member) * n + i_tile
        in_tile += tl.load(end + run) - tl.load(begin + run)
    if in_tile > 0:
        o_row = tl.arange(0, ROWS)
        o_dim = tl.arange(0, D)
        # [ROWS, D]
        row_at = ((i_b * kv_heads + i_kv) * n + i_tile) * ROWS + o_row
        at = total + row_at[:, None] * HEAD_DIM + o_dim[None, :]
        inside = (o_dim < HEAD_DIM)[None, :] & (o_row >= 0)[:, None]
        b_total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        first = tl.load(starts + i_tile)
        # One vertical after the other, head by head: the order of the additions is fixed.
        for member in range(group):
            run = (first_head + member) * n + i_tile
            for i_c in range(tl.load(begin + run), tl.load(end + run)):
                vertical = (first_head + member) * count + i_c
                row = tl.load(verticals + vertical) - first
                part_at = part + vertical * HEAD_DIM + o_dim
                b_part = tl.load(part_at, mask=o_dim < HEAD_DIM, other=0.0).to(tl.float32)
                b_total += tl.where((o_row == row)[:, None], b_part[None, :], 0.0)
        tl.store(at, b_total.to(total.dtype.element_ty), mask=inside)


def add_verticals(
    totals: Sequence[Tensor],
    parts: Sequence[Tensor],
    verticals: Tensor,
    blocks: Tensor,
    block_size: int,
) -> None:
    """Add each vertical's row of `parts` (dk and dv) to the row of its total that is its key.

    In place, the same to the bit every time.
    totals: [B, Hkv, n * block_size, D] each, contiguous, any floating dtype but fp64; of a rank's
        keys.
    parts: [B, Hq, C, D] each, Hq a multiple of Hkv, contiguous.
    verticals: int32 [B, Hq, C], global positions, ascending.
    blocks: int32 [n], the global blocks of the totals, which hold only some of the verticals.
    block_size: a multiple of 16.
    """
    batch, heads, count = verticals.shape
    _, kv_heads, _, dim = totals[0].shape
    verticals = verticals.contiguous()
    # [n block_size / ROWS]: the first key of each tile.
    offsets = torch.arange(0, block_size, _ROWS, device=blocks.device, dtype=torch.int32)
    starts = (blocks[:, None] * block_size + offsets).flatten()
    tiles = len(starts)
    # [B, Hq, tiles]: verticals ascend, so that those of a tile are neighbors.
    wanted = starts.expand(batch, heads, -1).contiguous()
    begin = torch.searchsorted(verticals, wanted, out_int32=True)
    end = torch.searchsorted(verticals, wanted + _ROWS, out_int32=True)
    for total, part in zip(totals, parts):
        _add_kernel[(tiles, kv_heads, batch)](
            total,
            part.contiguous(),
            verticals,
            begin,
            end,
            starts,
            heads,
            heads // kv_heads,
            count,
            tiles,
            ROWS=_ROWS,
            HEAD_DIM=dim,
            D=triton.next_power_of_2(dim),
            num_warps=2,
        )
