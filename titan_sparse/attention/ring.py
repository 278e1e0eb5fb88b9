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

from titan_sparse.attention.backends.eager import accumulation_dtype
from titan_sparse.attention.context_parallel import ContextParallel
from titan_sparse.attention.masks import Rows
from titan_sparse.attention.patterns import BlockIndex
from titan_sparse.attention.tiles import Tiles, block_tiles, column_tiles


class Run(NamedTuple):
    """What one attention call computes with: rows and index are global, the same on every rank."""

    rows: Rows
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
        return self.cp.blocks(self.seq_len, rank).to(self.rows.start.device)

    def tiles(self, source: int, batch: int, transpose: bool = False) -> Tiles:
        """Tiles of this rank's queries and the KV chunk of rank `source`; by_key too if `transpose`."""
        return block_tiles(self.rows, self.index, self.blocks(), self.blocks(source), batch, transpose)

    def column_tiles(self, transpose: bool = False) -> Tiles:
        """Tiles of this rank's queries and the gathered columns."""
        return column_tiles(self.rows, self.index, self.blocks(), transpose)


def merge(out: Tensor, lse: Tensor, out_piece: Tensor, lse_piece: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attentions over each; rows that see nothing yet have lse -inf."""
    total = torch.logaddexp(lse, lse_piece)
    finite = total.clamp(min=torch.finfo(total.dtype).min)
    return out * (lse - finite).exp()[..., None] + out_piece * (lse_piece - finite).exp()[..., None], total


def forward(run: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D] and lse [B, Hq, S_local] in the accumulation dtype, and the gathered columns' KV."""
    column_kv = gather_columns(run, k, v)
    out, lse = _column_forward(run, q, column_kv)
    for source, kv in _circulate(run.cp, torch.stack([k, v])):
        piece = run.backend.forward(q, kv[0], kv[1], run.tiles(source, len(q)), run.scale)
        out, lse = merge(out, lse, *piece)
    return out, lse, column_kv


def backward(run: Run, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
             column_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in the accumulation dtype."""
    dq, d_kv = _column_backward(run, d_out, q, k, out, lse, column_kv)

    def piece(source: int, kv: Tensor) -> Tensor:
        dq_piece, *d_piece = run.backend.backward(d_out, q, kv[0], kv[1], out, lse, run.tiles(source, len(q), True), run.scale)
        dq.add_(dq_piece)
        return torch.stack(d_piece)

    reverse = _all_gather_backward if run.cp.schedule == "all_gather" else _ring_backward
    d_kv += reverse(run.cp, torch.stack([k, v]), piece)
    return dq, d_kv[0], d_kv[1]


# Schedules ----------------------------------------------------------------------------------------------------------


def _circulate(cp: ContextParallel, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(source rank, its KV) in the schedule's order; the next transfers run while the caller computes."""
    if cp.schedule == "all_gather":
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
    rows = local[..., None].expand(*local.shape, k.shape[-1])
    picked = torch.stack([x.repeat_interleave(group, 1).gather(2, rows) for x in (k, v)])
    # Absent columns are added as zeros, which is exact in any dtype and needs no counts on the host.
    return run.cp.all_reduce(picked * mine[..., None])


def _column_forward(run: Run, q: Tensor, column_kv: Tensor) -> tuple[Tensor, Tensor]:
    if column_kv.shape[3] == 0:
        dtype = accumulation_dtype(q.dtype)
        return (torch.zeros(q.shape, dtype=dtype, device=q.device),
                torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device))
    return run.backend.forward(q, column_kv[0], column_kv[1], run.column_tiles(), run.scale)


def _column_backward(run: Run, d_out: Tensor, q: Tensor, k: Tensor, out: Tensor, lse: Tensor,
                     column_kv: Tensor) -> tuple[Tensor, Tensor]:
    """dq [B, Hq, S_local, D] and d_kv [2, B, Hkv, S_local, D] through the columns."""
    dtype = accumulation_dtype(q.dtype)
    d_kv = torch.zeros(2, *k.shape, dtype=dtype, device=k.device)
    if column_kv.shape[3] == 0:
        return torch.zeros(q.shape, dtype=dtype, device=q.device), d_kv
    tiles = run.column_tiles(transpose=True)
    dq, *pieces = run.backend.backward(d_out, q, column_kv[0], column_kv[1], out, lse, tiles, run.scale)
    local, mine = _local_columns(run)
    gathered = run.cp.all_reduce(torch.stack(pieces)) * mine[..., None]
    # Query heads of one group add up in their KV head.
    kv_heads = k.shape[1]
    rows = local.unflatten(1, (kv_heads, -1)).flatten(2, 3)[..., None].expand(-1, -1, -1, k.shape[-1])
    for total, piece in zip(d_kv, gathered):
        total.scatter_add_(2, rows, piece.unflatten(1, (kv_heads, -1)).flatten(2, 3))
    return dq, d_kv
