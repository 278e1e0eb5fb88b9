"""Which rows of each span the probe looks at."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.patterns.spans import Spans

_FRACTION_BITS = 16

_seed = 0


def set_probe_seed(seed: int) -> None:
    """Set the number that determines the offsets of spread rows.

    A trainer sets a new one before each step. All ranks must set the same one.
    """
    global _seed
    _seed = seed


def probe_seed() -> int:
    """The seed last given to set_probe_seed(); 0 at first."""
    return _seed


class ProbedRows(NamedTuple):
    """P rows of each of n spans, in U groups. The rows of a group lie in one block.

    position: int64 [B, n, P], global; also valid for rows that do not exist.
    exists: bool [B, n, P].
    group: int64 [B, n, P]. Where U = P, row i is group i.
    group_block: int64 [B, n, U], each group's block, which may lie before the span.
    group_rows: int64 [B, n, U], how many rows of the group exist.
    """

    position: Tensor
    exists: Tensor
    group: Tensor
    group_block: Tensor
    group_rows: Tensor


def last_rows(spans: Spans, queries: int, seq_len: int, block_size: int) -> ProbedRows:
    """The last P = `queries` rows of each span. Group u is the block u before the span's last.

    With blocks of 4 and P = 6, a span that ends at 10: rows 4 to 9 are in the groups
    1, 1, 1, 1, 0, 0.
    """
    device = spans.start.device
    # As many blocks as if the first row were the last token of its block.
    groups = (queries + block_size - 2) // block_size + 1
    # [B, n, P]. A row before the span's start sees nothing, its position only has to be legal.
    position = spans.stop[..., None] - queries + torch.arange(queries, device=device)
    used = (spans.start < spans.stop)[..., None]
    exists = (position >= spans.start[..., None]) & used
    position = position.clamp(min=0, max=seq_len - 1)
    group = (spans.last_block[..., None] - position // block_size).clamp(min=0, max=groups - 1)

    # [B, n, U]
    number = torch.arange(groups, device=device)
    group_block = spans.last_block[..., None] - number
    in_group = (group[..., None] == number) & exists[..., None]
    return ProbedRows(position, exists, group, group_block, in_group.sum(2))


def spread_rows(
    spans: Spans, queries: int, seq_len: int, block_size: int, seed: int, last: int = 0
) -> ProbedRows:
    """P = `queries` rows of each span: its `last` rows, and one of each equal part before them.

    Offsets in the parts are drawn from `seed`, the same on every world size. Each row is a group. A
    span of P tokens or fewer has all of them looked at.
    With P = 2, a span of 8 tokens from 4 on has one row of 4 to 7 and one of 8 to 11. With P = 3
    and last = 1, a span of 9 has row 12 too.
    """
    device = spans.start.device
    n = spans.start.shape[1]
    row = torch.arange(queries, device=device)
    length = (spans.stop - spans.start)[..., None]

    # [n, P]: how far into its part each row lies, in 1 / 2**16.
    number = torch.arange(n, device=device)[:, None] * queries + row
    fraction = _random_bits(number, seed)
    # [B, n, P]
    parts = (row << _FRACTION_BITS) + fraction
    spread = queries - last
    offset = (parts * (length - last)) // (spread << _FRACTION_BITS)
    offset = torch.where(row < spread, offset, length - queries + row)
    is_short = length <= queries
    offset = torch.where(is_short, row, offset)
    exists = offset < length
    position = (spans.start[..., None] + offset).clamp(max=seq_len - 1)
    return ProbedRows(
        position=position,
        exists=exists,
        group=row.expand_as(position),
        group_block=position // block_size,
        group_rows=exists.long(),
    )


def _random_bits(number: Tensor, seed: int) -> Tensor:
    """16 bits for each number int64, the same on every device: an integer hash of 32 bits."""
    mask = 0xFFFFFFFF
    x = (number + (seed & 0xFFFF) * 0x9E3779B1 + (seed >> 16)) & mask
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x045D9F3B) & mask
    return (x ^ (x >> 16)) & ((1 << _FRACTION_BITS) - 1)
