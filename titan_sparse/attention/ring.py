"""Runs a schedule over a backend: the attention of this rank's queries over everybody's KV, forward and backward.

Block pairs follow the schedule, KV chunk by KV chunk. Columns do not: their keys and values are gathered once and met in
one rectangular piece, and their gradients go home in one reduction. Pieces are merged in fp32 by log-sum-exp; the
backward of every piece takes the global out and lse, which makes the sum exact.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import slash_tiles, tiles
from titan_sparse.attention.backends.eager import accumulation_dtype
from titan_sparse.attention.context_parallel import ContextParallel
from titan_sparse.attention.masks import Rows
from titan_sparse.attention.memo import once_per_mask
from titan_sparse.attention.patterns import BlockIndex
from titan_sparse.attention.patterns.vertical_slash import VerticalSlashIndex
from titan_sparse.attention.tiles import Tiles
from titan_sparse.kernels import merge as merge_kernel


class Run(NamedTuple):
    """What one attention call computes with: rows and index are global, the same on every rank. pattern: its key."""

    rows: Rows
    pattern: str
    index: BlockIndex
    cp: ContextParallel
    backend: ModuleType
    scale: float

    @property
    def seq_len(self) -> int:
        """Global tokens, padding included."""
        return self.rows.start.shape[1]

    def blocks(self, rank: int | None = None) -> Tensor:
        """Global blocks of `rank` (default: this rank) on the data's device."""
        return self.cp.blocks(self.seq_len, rank, self.rows.start.device)

    def tiles(self, source: int, batch: int, transpose: bool = False) -> Tiles:
        """Tiles of this rank's queries and the KV chunk of rank `source`; by_key too if `transpose`."""
        if self._has_table_kernels():
            return slash_tiles.block_tiles(self._query_side(batch), self.index, self.blocks(source), transpose)
        return tiles.block_tiles(self.rows, self.index, self.blocks(), self.blocks(source), batch, transpose)

    def column_tiles(self, batch: int, transpose: bool = False) -> Tiles:
        """Tiles of this rank's queries and the gathered columns."""
        if self._has_table_kernels():
            return slash_tiles.column_tiles(self._query_side(batch), self.index, transpose)
        return tiles.column_tiles(self.rows, self.index, self.blocks(), transpose)

    def _has_table_kernels(self) -> bool:
        return self.rows.start.is_cuda and isinstance(self.index, VerticalSlashIndex)

    def _query_side(self, batch: int) -> slash_tiles.QuerySide:
        key = ("query side", self.pattern, self.cp.key, batch)
        return once_per_mask(self.rows, key, lambda: slash_tiles.query_side(self.rows, self.index, self.blocks(), batch))


def merge(out: Tensor, lse: Tensor, out_piece: Tensor, lse_piece: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attentions over each; out in `dtype`, lse as it comes."""
    if out.is_cuda and lse.dtype == torch.float32:
        return merge_kernel.merge(out, lse, out_piece, lse_piece, dtype)
    merged, total = merge_kernel.merge_naive(out, lse, out_piece, lse_piece)
    return merged.to(dtype), total


def forward(run: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D] and lse [B, Hq, S_local], and the gathered columns' KV.

    With several ranks the running sum over pieces is fp32 (fp64 for fp64): rounding it at every step would add up.
    """
    column_kv = gather_columns(run, k, v)
    dtype = q.dtype if run.cp.size == 1 else accumulation_dtype(q.dtype)
    total = None
    for source, kv in _circulate(run.cp, _travelling(run.cp, k, v)):
        tiles = run.tiles(source, len(q))
        if total is None:
            total = _first_forward(run, q, kv, tiles, column_kv, dtype)
        else:
            total = merge(*total, *run.backend.forward(q, kv[0], kv[1], tiles, run.scale), dtype)
    return *total, column_kv


def _first_forward(run: Run, q: Tensor, kv, tiles: Tiles, column_kv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first chunk's blocks together with the columns, in one launch where the backend can."""
    if column_kv.shape[3] == 0:
        out, lse = run.backend.forward(q, kv[0], kv[1], tiles, run.scale)
        return out.to(dtype), lse
    columns = (column_kv[0], column_kv[1], run.column_tiles(len(q)))
    if hasattr(run.backend, "forward_with_columns"):
        out, lse = run.backend.forward_with_columns(q, kv[0], kv[1], tiles, *columns, run.scale)
        return out.to(dtype), lse
    pieces = (run.backend.forward(q, *piece, run.scale) for piece in ((kv[0], kv[1], tiles), columns))
    return merge(*next(pieces), *next(pieces), dtype)


def backward(run: Run, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             column_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in the accumulation dtype or, from a single piece, the backend's."""
    dq, d_columns = [], None

    def piece(source: int, kv) -> list[Tensor]:
        nonlocal d_columns
        tiles = run.tiles(source, len(q), transpose=run.backend.READS_BY_KEY)
        if dq or column_kv.shape[3] == 0:
            dq_piece, *d_kv = run.backend.backward(d_out, q, kv[0], kv[1], out, lse, tiles, run.scale)
        else:
            dq_piece, d_kv, d_columns = _first_backward(run, d_out, q, kv, out, lse, tiles, column_kv)
        dq[:] = [dq_piece if not dq else dq[0].to(accumulation_dtype(q.dtype)) + dq_piece]
        return d_kv

    d_kv = _reverse(run.cp, _travelling(run.cp, k, v), piece)
    if d_columns is not None:
        d_kv = _add_columns(run, d_kv, d_columns)
    return dq[0], d_kv[0], d_kv[1]


def _first_backward(run: Run, d_out: Tensor, q: Tensor, kv, out: Tensor, lse: Tensor, tiles: Tiles,
                    column_kv: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """dq of the first chunk and the columns together, [dk, dv] of the chunk, [dk, dv] of the columns."""
    columns = (column_kv[0], column_kv[1], run.column_tiles(len(q), transpose=run.backend.READS_BY_KEY))
    if hasattr(run.backend, "backward_with_columns"):
        dq, dk, dv, *d_columns = run.backend.backward_with_columns(
            d_out, q, kv[0], kv[1], out, lse, tiles, *columns, run.scale
        )
        return dq, [dk, dv], d_columns
    dq, dk, dv = run.backend.backward(d_out, q, kv[0], kv[1], out, lse, tiles, run.scale)
    dq_columns, *d_columns = run.backend.backward(d_out, q, columns[0], columns[1], out, lse, columns[2], run.scale)
    return dq + dq_columns, [dk, dv], d_columns


# Schedules ----------------------------------------------------------------------------------------------------------


def _travelling(cp: ContextParallel, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """K and V as one tensor to be sent, or as they are where nothing is."""
    return (k, v) if cp.size == 1 else torch.stack([k, v])


def _circulate(cp: ContextParallel, kv) -> Iterator[tuple[int, Tensor]]:
    """(source rank, its KV) in the schedule's order; the next transfers run while the caller computes."""
    if cp.schedule == "all_gather" and cp.size > 1:
        chunks = cp.all_gather(kv)
        yield from ((source, chunks[source]) for window in cp.windows for source in window)
        return
    for number, window in enumerate(cp.windows):
        outer = cp.shift(kv, "outer") if number + 1 < len(cp.windows) else None
        for step, source in enumerate(window):
            inner = cp.shift(kv, "inner") if step + 1 < len(window) else None
            yield source, kv
            kv = inner.wait() if inner else kv
        kv = outer.wait() if outer else kv


def _reverse(cp: ContextParallel, kv, piece) -> list[Tensor]:
    """[dk, dv] of this rank's KV; piece(source, its KV) gives this rank's share of a chunk's [dk, dv]."""
    if cp.size == 1:
        return piece(0, kv)

    def stacked(source: int, kv: Tensor) -> Tensor:
        return torch.stack(piece(source, kv)).to(accumulation_dtype(kv.dtype))

    d_kv = (_all_gather_backward if cp.schedule == "all_gather" else _ring_backward)(cp, kv, stacked)
    return [x.clone() for x in d_kv]  # outputs of an op may not share memory


def _ring_backward(cp: ContextParallel, kv: Tensor, piece) -> Tensor:
    """Gradient of this rank's KV. Gradients travel with the chunk they belong to, one step behind it.

    After a window's last step a chunk's gradient makes the hop that brings it back to the rank that holds the chunk in
    this node; from there it goes on to the next node, and after the last window home.
    """
    home = None
    for number, window in enumerate(cp.windows):
        outer = cp.shift(kv, "outer") if number + 1 < len(cp.windows) else None
        gradient = None
        for step, source in enumerate(window):
            inner = cp.shift(kv, "inner") if step + 1 < len(window) else None
            d_kv = piece(source, kv)
            if gradient is not None:
                d_kv += gradient.wait()
            gradient = cp.shift(d_kv, "inner_gradient")
            kv = inner.wait() if inner else kv
        arrived = gradient.wait()
        home = cp.shift(arrived if home is None else arrived + home.wait(), "outer_gradient")
        kv = outer.wait() if outer else kv
    return home.wait()


def _all_gather_backward(cp: ContextParallel, kv: Tensor, piece) -> Tensor:
    """Gradient of this rank's KV when all chunks were gathered: every rank's share is summed where the chunk lives."""
    chunks = cp.all_gather(kv)
    gradients = {source: piece(source, chunks[source]) for window in cp.windows for source in window}
    return cp.reduce_scatter(torch.stack([gradients[source] for source in range(cp.size)])).view_as(kv)


# Columns ------------------------------------------------------------------------------------------------------------


def _local_columns(run: Run) -> tuple[Tensor, Tensor]:
    """Where this rank holds each column, int64 [B, Hq, C] (0 where it does not), and whether it does."""
    local = run.cp.local_position(run.index.columns.clamp(max=run.seq_len), run.seq_len)
    return local.clamp(min=0), local >= 0


def gather_columns(run: Run, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values of all columns, [2, B, Hq, C, D], on every rank, in one exchange of fixed size."""
    local, mine = _local_columns(run)
    group = run.index.heads // k.shape[1]
    if run.index.columns.shape[-1] == 0:
        return k.new_empty(2, *local.shape, k.shape[-1])
    # Heads are expanded, not repeated: one KV head's rows are read for all query heads of its group.
    rows = local.unflatten(1, (-1, group))[..., None].expand(-1, -1, -1, -1, k.shape[-1])
    picked = torch.stack([x[:, :, None].expand(-1, -1, group, -1, -1).gather(3, rows).flatten(1, 2) for x in (k, v)])
    # Absent columns are added as zeros, which is exact in any dtype and needs no counts on the host.
    return run.cp.all_reduce(picked * mine[..., None])


def _add_columns(run: Run, d_kv: list[Tensor], d_columns: list[Tensor]) -> list[Tensor]:
    """[dk, dv] [B, Hkv, S_local, D] with those of the columns [B, Hq, C, D] added where the columns came from."""
    dtype = accumulation_dtype(d_columns[0].dtype)
    local, mine = _local_columns(run)
    gathered = run.cp.all_reduce(torch.stack(d_columns).to(dtype)) * mine[..., None]
    # Query heads of one group add up in their KV head.
    kv_heads = d_kv[0].shape[1]
    rows = local.unflatten(1, (kv_heads, -1)).flatten(2, 3)[..., None].expand(-1, -1, -1, d_kv[0].shape[-1])
    return [total.to(dtype, copy=True).scatter_add_(2, rows, part.unflatten(1, (kv_heads, -1)).flatten(2, 3))
            for total, part in zip(d_kv, gathered)]
