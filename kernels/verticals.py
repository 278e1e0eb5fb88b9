"""Verticals: gathering their keys and values, and adding their gradients to where these came from.

Each is one launch. The gradients are added in place and in a fixed order.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import rows_of, slice_of

_GATHERED_ROWS = 32
"""Verticals of a head that a program gathers."""

_ROWS = 16
"""Rows of a program: few, as verticals cluster, and those of one program are added one by one."""


def gather_verticals_naive(k: Tensor, v: Tensor, verticals: Tensor, local: Tensor) -> Tensor:
    """The twin of gather_verticals(), for any dtype."""
    length = len(local) - 1
    head_dim = k.shape[-1]
    group = verticals.shape[1] // k.shape[1]
    # [B, Hq, C]
    row = local[verticals.clamp(max=length)]
    is_held = (row >= 0)[..., None]
    # [B, Hkv, group, C, D]
    rows = row.clamp(min=0).unflatten(1, (-1, group))[..., None]
    rows = rows.expand(-1, -1, -1, -1, head_dim)
    gathered = []
    for x in (k, v):
        # Heads are expanded, not repeated: all query heads of a group read one KV head's rows.
        # [B, Hkv, group, S_local, D]
        by_group = x[:, :, None].expand(-1, -1, group, -1, -1)
        # [B, Hq, C, D]
        picked = by_group.gather(3, rows).flatten(1, 2)
        gathered.append(torch.where(is_held, picked, 0))
    return torch.stack(gathered)


@triton.jit
def _gather_kernel(
    k, v, verticals, local, gathered, length, group, count,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """ROWS verticals of one query head. length: of the sequence. count: C.

    group: query heads of a KV head. D: HEAD_DIM rounded up to a power of two.
    """
    i_chunk = tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    heads = tl.num_programs(1)
    batches = tl.num_programs(2)
    o_vertical = i_chunk * ROWS + tl.arange(0, ROWS)
    o_dim = tl.arange(0, D)[None, :]
    inside = o_vertical < count
    head_row = (i_b.to(tl.int64) * heads + i_h) * count
    position = tl.load(verticals + head_row + o_vertical, mask=inside, other=length)
    # The last entry is for no token.
    row = tl.load(local + tl.minimum(position, length))
    is_read = (row >= 0)[:, None] & (o_dim < HEAD_DIM)
    row = tl.maximum(row, 0).to(tl.int64)[:, None]

    # [ROWS, D]
    k_head = slice_of(k, i_b, i_h // group)
    v_head = slice_of(v, i_b, i_h // group)
    k_rows = tl.load(k_head + row * k.stride[2] + o_dim, mask=is_read, other=0.0)
    v_rows = tl.load(v_head + row * v.stride[2] + o_dim, mask=is_read, other=0.0)
    is_written = inside[:, None] & (o_dim < HEAD_DIM)
    k_at = gathered + (head_row + o_vertical)[:, None] * HEAD_DIM + o_dim
    v_at = k_at + batches.to(tl.int64) * heads * count * HEAD_DIM
    tl.store(k_at, k_rows, mask=is_written)
    tl.store(v_at, v_rows, mask=is_written)


def gather_verticals(k: Tensor, v: Tensor, verticals: Tensor, local: Tensor) -> Tensor:
    """Keys and values of the verticals that a rank holds, and zeros for the rest: [2, B, Hq, C, D].

    k, v: [B, Hkv, S_local, D], one dtype, any floating one but fp64; Hq is a multiple of Hkv.
    verticals: int32 [B, Hq, C], global positions; S or more for none.
    local: int64 [S + 1], where the rank holds each position, -1 where it does not; the last is -1.
    """
    batch, heads, count = verticals.shape
    _, kv_heads, _, dim = k.shape
    gathered = k.new_empty(2, batch, heads, count, dim)
    inputs = (rows_of(k), rows_of(v), verticals.contiguous(), local)
    sizes = (len(local) - 1, heads // kv_heads, count)
    options = dict(ROWS=_GATHERED_ROWS, HEAD_DIM=dim, D=triton.next_power_of_2(dim), num_warps=4)
    grid = (triton.cdiv(count, _GATHERED_ROWS), heads, batch)
    _gather_kernel[grid](*inputs, gathered, *sizes, **options)
    return gathered


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
def _first_from(verticals, rows, inside, count, wanted, steps):
    """The number of verticals below `wanted` in each ascending row of `count`.

    rows: where each row begins. inside: the rows to look at. steps: halvings of count + 1 to 1.
    """
    low = tl.zeros_like(rows)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        is_open = inside & (low < high)
        below = is_open & (tl.load(verticals + rows + middle, mask=is_open, other=0) < wanted)
        low = tl.where(below, middle + 1, low)
        high = tl.where(is_open & (below == 0), middle, high)
    return low


@triton.jit
def _add_kernel(
    dk, dv, dk_part, dv_part, verticals, blocks, heads, group, count, steps,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Add the verticals that lie in a tile of ROWS keys of one KV head.

    group: query heads of a KV head, GROUP a power of two from it on. count: C. steps: as in
    _first_from(). D: HEAD_DIM rounded up to a power of two.
    """
    TILES: tl.constexpr = BLOCK // ROWS
    i_tile = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    tiles = tl.num_programs(0)
    kv_heads = tl.num_programs(1)
    block = tl.load(blocks + i_tile // TILES).to(tl.int32)
    first = block * BLOCK + i_tile % TILES * ROWS

    # [GROUP]: verticals ascend and differ, so that a tile's are at most ROWS neighbors.
    o_member = tl.arange(0, GROUP)
    is_member = o_member < group
    first_row = (i_b * heads + i_kv * group) * count
    rows = first_row + o_member.to(tl.int64) * count
    begin = _first_from(verticals, rows, is_member, count, first, steps)
    # [GROUP, ROWS]: the row of the tile that each is, ROWS or more for none.
    o_row = tl.arange(0, ROWS)
    place = begin[:, None] + o_row[None, :]
    is_vertical = is_member[:, None] & (place < count)
    vertical_at = verticals + rows[:, None] + place
    row = tl.load(vertical_at, mask=is_vertical, other=first + ROWS) - first

    # Most tiles hold no vertical, and are not touched.
    if tl.min(tl.min(row, 1), 0) < ROWS:
        o_dim = tl.arange(0, D)[None, :]
        # [ROWS, D]
        row_at = ((i_b * kv_heads + i_kv) * tiles + i_tile) * ROWS + o_row
        at = row_at[:, None] * HEAD_DIM + o_dim
        in_dim = (o_dim < HEAD_DIM) & (o_row >= 0)[:, None]
        b_dk = tl.load(dk + at, mask=in_dim, other=0.0).to(tl.float32)
        b_dv = tl.load(dv + at, mask=in_dim, other=0.0).to(tl.float32)
        # Head by head: the order of the additions is fixed.
        for member in range(group):
            # [ROWS]: the member's verticals, and where they begin.
            is_this = o_member == member
            here = tl.min(tl.where(is_this[:, None], row, ROWS), 0)
            start = tl.min(tl.where(is_this, begin, count), 0)
            # [ROWS]: for each row of the tile which of them lies there, ROWS for none.
            is_row = here[:, None] == o_row[None, :]
            slot = tl.min(tl.where(is_row, o_row[:, None], ROWS), 0)
            part_row = first_row + member * count + start + slot
            part_at = part_row[:, None] * HEAD_DIM + o_dim
            is_read = in_dim & (slot < ROWS)[:, None]
            b_dk += tl.load(dk_part + part_at, mask=is_read, other=0.0).to(tl.float32)
            b_dv += tl.load(dv_part + part_at, mask=is_read, other=0.0).to(tl.float32)
        tl.store(dk + at, b_dk.to(dk.dtype.element_ty), mask=in_dim)
        tl.store(dv + at, b_dv.to(dv.dtype.element_ty), mask=in_dim)


def add_verticals(
    totals: Sequence[Tensor],
    parts: Sequence[Tensor],
    verticals: Tensor,
    blocks: Tensor,
    block_size: int,
) -> None:
    """Add each vertical's row of `parts` (dk and dv) to the row of its total that is its key.

    In place, the same to the bit every time.
    totals: two of [B, Hkv, n * block_size, D], contiguous, any floating dtype but fp64; of a rank's
        keys.
    parts: two of [B, Hq, C, D], Hq a multiple of Hkv.
    verticals: int32 [B, Hq, C], global positions, ascending, each once in a head but for those that
        lie in no block.
    blocks: int [n], the global blocks of the totals, which hold only some of the verticals.
    block_size: a multiple of 16.
    """
    dk, dv = totals
    dk_part, dv_part = parts
    batch, heads, count = verticals.shape
    _, kv_heads, keys, dim = dk.shape
    group = heads // kv_heads
    inputs = (dk_part.contiguous(), dv_part.contiguous(), verticals.contiguous(), blocks)
    sizes = dict(GROUP=triton.next_power_of_2(group), HEAD_DIM=dim, D=triton.next_power_of_2(dim))
    options = dict(BLOCK=block_size, ROWS=_ROWS, **sizes, num_warps=4)
    _add_kernel[(keys // _ROWS, kv_heads, batch)](
        dk, dv, *inputs, heads, group, count, count.bit_length(), **options
    )
