"""The probe: some queries of each span, and the blocks of keys that they look at."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import rows_of, slice_of


class Probe(NamedTuple):
    """P queries of each of n spans; a span shorter than P has rows that see nothing.

    q: [B, Hq, n, P, D] in its own dtype.
    start, stop: int32 [B, n, P], the keys that each row sees.
    row_block: int32 [B, n, P], the block of queries that each row lies in.
    group: int32 [B, n, P], which of `groups` groups each row belongs to. The rows of a group lie in
        one block. Where there are P groups, row i is group i.
    groups: U.
    scale: of the scores.
    """

    q: Tensor
    start: Tensor
    stop: Tensor
    row_block: Tensor
    group: Tensor
    groups: int
    scale: float


class KeyBlocks(NamedTuple):
    """The blocks of keys that a rank holds.

    k: [B, Hkv, n_local * block_size, D].
    blocks: int32 [n_local], their global numbers.
    slot: int32 [B, n_local, T], the spans that touch them, -1 for none.
    block_size: tokens of a block.
    """

    k: Tensor
    blocks: Tensor
    slot: Tensor
    block_size: int


class ProbeOperand(NamedTuple):
    """A Probe and its KeyBlocks as kernels get them, all contiguous.

    heads: query heads. group: query heads of a KV head. n: spans. local: blocks of keys.
    """

    q: Tensor
    k: Tensor
    start: Tensor
    stop: Tensor
    slot: Tensor
    blocks: Tensor
    row_block: Tensor
    group_of_row: Tensor
    scale: float
    heads: int
    group: int
    n: int
    local: int
    dim: int


def operand(probe: Probe, keys: KeyBlocks) -> ProbeOperand:
    """The inputs of kernels that process blocks of keys."""
    heads, n, _, dim = probe.q.shape[1:]
    return ProbeOperand(
        q=probe.q.contiguous(),
        k=keys.k.contiguous(),
        start=probe.start.contiguous(),
        stop=probe.stop.contiguous(),
        slot=keys.slot.contiguous(),
        blocks=keys.blocks,
        row_block=probe.row_block.contiguous(),
        group_of_row=probe.group.contiguous(),
        scale=probe.scale,
        heads=heads,
        group=heads // keys.k.shape[1],
        n=n,
        local=keys.slot.shape[1],
        dim=dim,
    )


_ROWS = 16
"""Rows that a program copies."""


@triton.jit
def _rows_kernel(
    q, local, mine, held, count,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """ROWS of one query head. count: R. D: HEAD_DIM rounded up to a power of two."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    o_dim = tl.arange(0, D)[None, :]
    inside = o < count
    row = tl.load(local + i_b * count + o, mask=inside, other=0)
    is_mine = tl.load(mine + i_b * count + o, mask=inside, other=0) != 0
    in_dim = o_dim < HEAD_DIM
    # [ROWS, D]
    q_at = slice_of(q, i_b, i_h) + row[:, None] * q.stride[2] + o_dim
    b_q = tl.load(q_at, mask=is_mine[:, None] & in_dim, other=0.0)
    held_at = ((i_b * tl.num_programs(1) + i_h) * count + o)[:, None] * HEAD_DIM + o_dim
    tl.store(held + held_at, b_q, mask=inside[:, None] & in_dim)


def held_rows(q: Tensor, local: Tensor, mine: Tensor) -> Tensor:
    """These rows of q, and zeros for those that the rank does not hold: [B, Hq, R, D].

    q: [B, Hq, S_local, D], any floating dtype but fp64.
    local: int64 [B, R], where the rank holds each row; 0 where it does not. mine: bool [B, R].
    """
    batch, heads, _, dim = q.shape
    count = local.shape[1]
    held = q.new_empty(batch, heads, count, dim)
    mine = mine.view(torch.int8)
    options = dict(ROWS=_ROWS, HEAD_DIM=dim, D=triton.next_power_of_2(dim), num_warps=4)
    _rows_kernel[(triton.cdiv(count, _ROWS), heads, batch)](
        rows_of(q), local, mine, held, count, **options
    )
    return held
