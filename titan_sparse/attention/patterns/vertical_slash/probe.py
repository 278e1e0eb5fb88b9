"""What the probe sees: scores of some of a span's rows with all of its keys.

MTraining, section 4 and appendix B.1, where these are the last rows. No collective waits for the
host. There are two: the probe's queries are sent to all ranks, and the normalizers are gathered.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.spans import (
    Spans,
    entries,
    lookup,
    spans_of_blocks,
)
from titan_sparse.attention.patterns.vertical_slash.rows import ProbedRows
from titan_sparse.kernels import probe as kernels
from titan_sparse.kernels.probe import KeyBlocks, Probe


class Geometry(NamedTuple):
    """What a probe needs to know about rows, spans and layout. It is the same for every layer.

    int32 where a kernel reads it.
    rows: the probe's.
    blocks: int32 [n_local], the global blocks of this rank.
    slot: int32 [B, n_local, T], the spans that touch them, -1 for none.
    run: int32 [B, n, 2], the first local block that touches a span and the one behind the last.
    order: int64 [ranks * n_local], brings the blocks of all ranks into global order.
    local: int64 [B, n P], where this rank holds each probe row.
    mine: bool [B, n P], whether it does.
    start, stop, row_block, group: int32 [B, n, P], as in Probe.
    """

    rows: ProbedRows
    blocks: Tensor
    slot: Tensor
    run: Tensor
    order: Tensor
    local: Tensor
    mine: Tensor
    start: Tensor
    stop: Tensor
    row_block: Tensor
    group: Tensor


def probe_geometry(
    ranges: MaskRanges, spans: Spans, rows: ProbedRows, cp: ContextParallel
) -> Geometry:
    """The Geometry of these rows of a resolved mask's spans."""
    batch, n = spans.start.shape
    # [n_local], and [B, n_local, T]
    blocks = cp.blocks(ranges)
    slot = spans_of_blocks(spans, blocks, cp.block_size)
    # [B, n, P]
    start = lookup(ranges.start.expand(batch, -1), rows.position)
    stop = lookup(ranges.stop.expand(batch, -1), rows.position)
    # [B, n P]
    local = cp.local_position(rows.position.flatten(1), ranges)
    return Geometry(
        rows=rows,
        blocks=blocks.int(),
        slot=slot.int(),
        run=_runs(slot, n),
        order=torch.argsort(cp.table(ranges).flatten()),
        local=local.clamp(min=0),
        mine=local >= 0,
        start=start,
        stop=torch.where(rows.exists, stop, start),
        row_block=(rows.position // cp.block_size).int(),
        group=rows.group.int(),
    )


def _runs(slot: Tensor, n: int) -> Tensor:
    """int32 [B, n, 2]: from the first to behind the last local block that touches each span.

    slot: int64 [B, n_local, T], the spans that touch each local block, -1 for none.
    """
    batch, local = slot.shape[:2]
    # [n_local, 1] -> [B, n_local T]
    block = torch.arange(local, device=slot.device)[:, None]
    block = block.expand_as(slot).flatten(1)
    # [B, n_local T]
    span = torch.where(slot >= 0, slot, n).flatten(1)

    # [B, n + 1]: the last entry collects the blocks that no span touches, and is cut off.
    shape = (batch, n + 1)
    no_first = torch.full(shape, local, device=slot.device)
    no_last = torch.full(shape, -1, device=slot.device)
    first = no_first.scatter_reduce(1, span, block, "amin")
    last = no_last.scatter_reduce(1, span, block, "amax")

    # [B, n, 2]
    run = torch.stack([first, last + 1], dim=-1)[:, :n]
    return run.int().contiguous()


def diagonals_of_entries(spans: Spans, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The span and the distance in blocks of each entry of the list of all spans' slashes.

    blocks: K, of the sequence. Returns int64 [N, E] each; the span is n for none.
    """
    rows, n = spans.start.shape
    count = entries(blocks * block_size, block_size, n)
    entry = torch.arange(count, device=spans.start.device)
    entry = entry.expand(rows, -1).contiguous()
    span = torch.searchsorted(spans.offset + spans.diagonals, entry, right=True)
    offset = spans.offset.gather(1, span.clamp(max=n - 1))
    return span, entry - offset


def look(
    q: Tensor, k: Tensor, geometry: Geometry, cp: ContextParallel, scale: float
) -> tuple[Probe, KeyBlocks, Tensor]:
    """The probe's rows on every rank, this rank's keys, and the rows' normalizers over all keys.

    Collective over cp: the rows, then the normalizers.
    q, k: [B, Hq, S_local, D] and [B, Hkv, S_local, D], whole blocks. The normalizers are [B, Hq, n,
    P], in fp32 (fp64 for fp64 inputs).
    """
    probe = _gather_probe(q, geometry, cp, scale)
    keys = KeyBlocks(k, geometry.blocks, geometry.slot, cp.block_size)
    return probe, keys, _normalizer(probe, keys, geometry.run, cp)


def _gather_probe(q: Tensor, geometry: Geometry, cp: ContextParallel, scale: float) -> Probe:
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


def _normalizer(probe: Probe, keys: KeyBlocks, run: Tensor, cp: ContextParallel) -> Tensor:
    """Log of the softmax sum over all ranks' keys, [B, Hq, n, P].

    -inf for rows that see nothing. run: as in Geometry.
    """
    module = kernels if by_kernels(keys) else kernels.naive
    local_lse = module.span_lse(module.block_lse(probe, keys), keys.slot, run)

    # [ranks, B, Hq, n, P]
    all_lse = cp.all_gather(local_lse)
    if len(all_lse) == 1:
        return all_lse[0]
    return all_lse.logsumexp(0)


def by_kernels(keys: KeyBlocks) -> bool:
    """Whether Triton's kernels take these keys.

    They take no fp64, and of fp32 no more than head_dim 128: a block of larger keys and the probe's
    rows would need 256 KiB of shared memory.
    """
    k = keys.k
    is_too_large = k.dtype == torch.float32 and k.shape[-1] > 128
    return k.is_cuda and k.dtype != torch.float64 and not is_too_large
