"""Adding the gradients of gathered verticals to the keys and values that they came from, in place and in a fixed order."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_verticals_naive(
    totals: Sequence[Tensor],
    parts: Sequence[Tensor],
    verticals: Tensor,
    blocks: Tensor,
    block_size: int,
) -> None:
    """The twin of add_verticals(), for any floating dtype."""
    place = torch.full((int(blocks.max()) + 1,), -1, dtype=torch.long, device=verticals.device)
    place[blocks.long()] = torch.arange(len(blocks), device=verticals.device)
    block = verticals.long() // block_size
    place = torch.where(block < len(place), place[block.clamp(max=len(place) - 1)], -1)
    # Columns of other ranks, and padding, go to one row more, which is dropped.
    local = torch.where(
        place < 0, len(blocks) * block_size, place * block_size + verticals % block_size
    )
    for total, part in zip(totals, parts):
        _add_naive(total, part, local)


def _add_naive(total: Tensor, parts: Tensor, local: Tensor) -> None:
    batch, kv_heads, length, dim = total.shape
    local = local.view(batch, kv_heads, -1, 1).expand(-1, -1, -1, dim)
    padded = torch.nn.functional.pad(total, (0, 0, 0, 1)).to(
        torch.promote_types(total.dtype, parts.dtype)
    )
    padded.scatter_add_(2, local, parts.reshape(batch, kv_heads, -1, dim).to(padded.dtype))
    total.copy_(padded[:, :, :length])


_ROWS = 16  # a few rows a program: verticals cluster, and those of one program are added one after the other


@triton.jit
def _add_kernel(
    total, parts, verticals, begin, end, starts, heads, group, count, n,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    i_tile, i_kv, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_head = i_b * heads + i_kv * group
    found = 0
    for member in range(group):
        run = (first_head + member) * n + i_tile
        found += tl.load(end + run) - tl.load(begin + run)
    if found > 0:
        o_row, o_dim = tl.arange(0, ROWS), tl.arange(0, D)
        at = ((i_b * tl.num_programs(1) + i_kv) * n + i_tile) * ROWS + o_row
        at = total + at[:, None] * HEAD_DIM + o_dim[None, :]
        inside = (o_dim < HEAD_DIM)[None, :] & (o_row >= 0)[:, None]
        b_total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        first = tl.load(starts + i_tile)
        for member in range(group):
            run = (first_head + member) * n + i_tile
            for i_c in range(tl.load(begin + run), tl.load(end + run)):
                vertical = (first_head + member) * count + i_c
                row = tl.load(verticals + vertical) - first
                b_part = tl.load(
                    parts + vertical * HEAD_DIM + o_dim, mask=o_dim < HEAD_DIM, other=0.0
                )
                b_total += tl.where((o_row == row)[:, None], b_part.to(tl.float32)[None, :], 0.0)
        tl.store(at, b_total.to(total.dtype.element_ty), mask=inside)


def add_verticals(
    totals: Sequence[Tensor],
    parts: Sequence[Tensor],
    verticals: Tensor,
    blocks: Tensor,
    block_size: int,
) -> None:
    """Add each vertical's row of each of `parts` (dk and dv) to the row of its total that is the vertical's key; in place, the
    same to the bit every time.

    totals: [B, Hkv, n * block_size, D], contiguous, any floating dtype but fp64; of a rank's keys. parts: [B, Hq, C, D], Hq
    a multiple of Hkv, contiguous. verticals: int32 [B, Hq, C], global positions, ascending. blocks: int32 [n], the
    global blocks of the totals, which hold only some of the verticals. block_size: a multiple of 16.
    """
    batch, heads, count = verticals.shape
    kv_heads, dim = totals[0].shape[1], totals[0].shape[3]
    verticals = verticals.contiguous()
    offsets = torch.arange(0, block_size, _ROWS, device=blocks.device, dtype=torch.int32)
    starts = (blocks[:, None] * block_size + offsets).flatten()
    wanted = starts.expand(batch, heads, -1).contiguous()
    begin, end = (
        torch.searchsorted(verticals, wanted + rows, out_int32=True) for rows in (0, _ROWS)
    )
    for total, part in zip(totals, parts):
        _add_kernel[len(starts), kv_heads, batch](
            total, part.contiguous(), verticals, begin, end, starts, heads, heads // kv_heads, count, len(starts),
            ROWS=_ROWS, HEAD_DIM=dim, D=triton.next_power_of_2(dim), num_warps=2,
        )  # fmt: skip
