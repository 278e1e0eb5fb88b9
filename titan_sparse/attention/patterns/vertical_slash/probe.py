"""The probe: which rows of each span it looks at, and their scores with all keys of the span.

MTraining, section 4 and appendix B.1, where these are the last rows. No collective waits for the
host. There are two: the probe's queries are sent to all ranks, and the normalizers are gathered.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.spans import Spans, entries, lookup, spans_of_blocks
from titan_sparse.kernels import probe as kernels
from titan_sparse.kernels.block_tables import takes_blocks
from titan_sparse.kernels.probe import KeyBlocks, Probe

_FRACTION_BITS = 16


class ProbedRows(NamedTuple):
    """P rows of each of n spans, in U groups. The rows of a group lie in one block."""

    position: Tensor  # int64 [B, n, P], global; also valid for rows that do not exist
    exists: Tensor  # bool [B, n, P]
    group: Tensor  # int64 [B, n, P]; where U = P, row i is group i
    group_block: Tensor  # int64 [B, n, U], each group's block, which may lie before the span
    group_rows: Tensor  # int64 [B, n, U], how many rows of the group exist


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
    exists = (position >= spans.start[..., None]) & (spans.start < spans.stop)[..., None]
    position = position.clamp(min=0, max=seq_len - 1)
    group = (spans.last_block[..., None] - position // block_size).clamp(min=0, max=groups - 1)

    # [B, n, U]
    number = torch.arange(groups, device=device)
    group_block = spans.last_block[..., None] - number
    in_group = (group[..., None] == number) & exists[..., None]
    return ProbedRows(position, exists, group, group_block, in_group.sum(2))


def spread_rows(
    spans: Spans, queries: int, seq_len: int, block_size: int, seed: int | Tensor, last: int = 0
) -> ProbedRows:
    """P = `queries` rows of each span: its `last` rows, and one of each equal part before them.

    Offsets in the parts are drawn from `seed` (int64 scalar, below 2**32), the same on every world
    size. Each row is a group. A span of P tokens or fewer has all of them looked at.
    With P = 2, a span of 8 tokens from 4 on has one row of 4 to 7 and one of 8 to 11. With P = 3
    and last = 1, a span of 9 has row 12 too.
    """
    device = spans.start.device
    n = spans.start.shape[1]
    row = torch.arange(queries, device=device)
    length = (spans.stop - spans.start)[..., None]

    # [n, P]: how far into its part each row lies, in 1 / 2**16.
    number = torch.arange(n, device=device)[:, None] * queries + row
    parts = (row << _FRACTION_BITS) + _random_bits(number, seed)
    # [B, n, P]
    spread = queries - last
    offset = (parts * (length - last)) // (spread << _FRACTION_BITS)
    offset = torch.where(row < spread, offset, length - queries + row)
    offset = torch.where(length <= queries, row, offset)
    exists = offset < length
    position = (spans.start[..., None] + offset).clamp(max=seq_len - 1)
    return ProbedRows(
        position=position,
        exists=exists,
        group=row.expand_as(position),
        group_block=position // block_size,
        group_rows=exists.long(),
    )


def _random_bits(number: Tensor, seed: int | Tensor) -> Tensor:
    """16 bits for each number int64, the same on every device: an integer hash of 32 bits."""
    mask = 0xFFFFFFFF
    x = (number + (seed & 0xFFFF) * 0x9E3779B1 + (seed >> 16)) & mask
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x045D9F3B) & mask
    return (x ^ (x >> 16)) & ((1 << _FRACTION_BITS) - 1)


class ProbeGeometry(NamedTuple):
    """The inputs of a probe: rows, spans, and layout. They are the same for every layer.

    int32 where a kernel reads it.
    """

    rows: ProbedRows
    blocks: Tensor  # int32 [n_local], the global blocks of this rank
    slot: Tensor  # int32 [B, n_local, T], the spans that touch them, -1 for none
    run: Tensor  # int32 [B, n, 2], first local block that touches a span, and the one behind the last
    order: Tensor  # int64 [ranks * n_local], brings the blocks of all ranks into global order
    local: Tensor  # int64 [B, n P], where this rank holds each probe row
    mine: Tensor  # bool [B, n P], whether it does
    start: Tensor  # int32 [B, n, P], like the next three as in Probe
    stop: Tensor
    row_block: Tensor
    group: Tensor


def probe_geometry(
    ranges: MaskRanges, spans: Spans, rows: ProbedRows, cp: ContextParallel
) -> ProbeGeometry:
    """The ProbeGeometry of these rows of a resolved mask's spans."""
    batch, n = spans.start.shape
    # [n_local], and [B, n_local, T]
    blocks = cp.blocks(ranges)
    slot = spans_of_blocks(spans, blocks, cp.block_size)
    # [B, n, P]
    start = lookup(ranges.start.expand(batch, -1), rows.position)
    stop = lookup(ranges.stop.expand(batch, -1), rows.position)
    # [B, n P]
    local = cp.local_lookup(ranges)[rows.position.flatten(1).long()]
    # [B, n, n_local]
    touches = (slot[:, None] == torch.arange(n, device=slot.device)[:, None, None]).any(-1)
    local_block = torch.arange(len(blocks), device=slot.device)
    first = torch.where(touches, local_block, len(blocks)).amin(-1)
    behind_last = torch.where(touches, local_block + 1, 0).amax(-1)
    return ProbeGeometry(
        rows=rows,
        blocks=blocks.int(),
        slot=slot.int(),
        run=torch.stack([first, behind_last], dim=-1).int(),
        order=torch.argsort(cp.table(ranges).flatten()),
        local=local.clamp(min=0),
        mine=local >= 0,
        start=start,
        stop=torch.where(rows.exists, stop, start),
        row_block=(rows.position // cp.block_size).int(),
        group=rows.group.int(),
    )


class SlashTiles(NamedTuple):
    """The tiles of masses that make up each entry of the list of all spans' slashes."""

    span: Tensor  # int64 [B, E], the slash's span, n for none
    distance: Tensor  # int64 [B, E], in blocks
    rows: Tensor  # int64 [B, U, E], how many rows of each group meet a block of keys on the slash
    tile: Tensor
    """int64 [B, U, E], the tile that they meet there, -1 for none. Tiles are numbered (local block,
    span touching it, group of rows)."""


def slash_tiles(spans: Spans, geometry: ProbeGeometry, seq_len: int, block_size: int) -> SlashTiles:
    """The SlashTiles of the blocks in a geometry."""
    n, groups = geometry.rows.group_rows.shape[1:]
    n_local, touching = geometry.slot.shape[1:]
    blocks = seq_len // block_size
    device = spans.start.device
    # [B, E]
    entry = torch.arange(entries(seq_len, block_size, n), device=device)
    entry = entry.expand(len(spans.start), -1).contiguous()
    span = torch.searchsorted(spans.offset + spans.diagonals, entry, right=True)
    known = span.clamp(max=n - 1)
    distance = entry - spans.offset.gather(1, known)

    # [B, U, E]: the block of keys that each group meets.
    by_group = known[:, None].expand(-1, groups, -1)
    block = geometry.rows.group_block.mT.gather(2, by_group) - distance[:, None]
    exists = (span < n)[:, None] & (block >= lookup(spans.first_block, known)[:, None])
    rows = geometry.rows.group_rows.mT.gather(2, by_group).where(exists, 0)

    # [blocks], then [B, U, E]
    local_number = torch.full((blocks,), -1, device=device)
    local_number[geometry.blocks.long()] = torch.arange(n_local, device=device)
    number = local_number[block.clamp(0, blocks - 1)]
    # Spans that touch a block are consecutive, so that the span's place among them is a difference.
    slot = known[:, None] - lookup(geometry.slot[..., 0].long(), number.clamp(min=0))
    group = torch.arange(groups, device=device)[:, None]
    tile = (number * touching + slot) * groups + group
    return SlashTiles(span, distance, rows, tile.where((number >= 0) & (rows > 0), -1))


def look(
    q: Tensor, k: Tensor, geometry: ProbeGeometry, cp: ContextParallel, scale: float
) -> tuple[Probe, KeyBlocks, Tensor]:
    """The probe's rows on every rank, this rank's keys, and the rows' normalizers over all keys.

    Collective over cp: the rows, then the normalizers.
    q, k: [B, Hq, S_local, D] and [B, Hkv, S_local, D], whole blocks. The normalizers are the log of
    the softmax sums [B, Hq, n, P], in fp32 (fp64 for fp64 inputs), -inf for rows that see nothing.
    """
    probe = _gather_probe(q, geometry, cp, scale)
    keys = KeyBlocks(k, geometry.blocks, geometry.slot, cp.block_size)
    module = kernels if by_kernels(k, cp.block_size) else kernels.naive
    local_lse = module.span_lse(module.block_lse(probe, keys), keys.slot, geometry.run)
    # [ranks, B, Hq, n, P]
    all_lse = cp.all_gather(local_lse)
    return probe, keys, all_lse[0] if len(all_lse) == 1 else all_lse.logsumexp(0)


def _gather_probe(q: Tensor, geometry: ProbeGeometry, cp: ContextParallel, scale: float) -> Probe:
    """The probe's rows of q [B, Hq, S_local, D], on every rank."""
    batch, heads, _, dim = q.shape
    has_kernels = q.is_cuda and q.dtype != torch.float64
    # [B, Hq, n P, D]
    held = (kernels if has_kernels else kernels.naive).held_rows(q, geometry.local, geometry.mine)
    # Each row is held by one rank and is 0 elsewhere, so that the sum over ranks is exact.
    held = cp.all_reduce(held)
    # [B, Hq, n, P, D]
    return Probe(
        q=held.view(batch, heads, *geometry.start.shape[1:], dim),
        start=geometry.start,
        stop=geometry.stop,
        row_block=geometry.row_block,
        group=geometry.group,
        groups=geometry.rows.group_block.shape[-1],
        scale=scale,
    )


def by_kernels(k: Tensor, block_size: int) -> bool:
    """True if Triton's kernels take these keys in such blocks.

    They take no fp64, and of fp32 no more than head_dim 128: a block of larger keys and the probe's
    rows would need 256 KiB of shared memory.
    """
    is_too_large = k.dtype == torch.float32 and k.shape[-1] > 128
    takes_keys = k.is_cuda and k.dtype != torch.float64 and not is_too_large
    return takes_keys and takes_blocks(block_size)
