"""The gathered columns of a vertical-slash index: their keys and values to every rank, their gradients back home.

Both exchanges run beside the blocks' work: a ring wants keys and values after the first step of the forward, gradients
leave before the last step of the backward. In between columns are dealt out over the steps, block by block.
"""

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import Pending
from titan_sparse.attention.run import Run
from titan_sparse.attention.tiles import Tiles
from titan_sparse.kernels import columns as kernel


def gather_columns(run: Run, k: Tensor, v: Tensor) -> Pending:
    """Start to bring keys and values of all columns, [2, B, Hq, C, D], to every rank, in one exchange of fixed size."""
    local = run.cp.local_position(run.index.columns.clamp(max=run.seq_len), run.seq_len)
    group = run.index.heads // k.shape[1]
    if run.index.columns.shape[-1] == 0:
        return Pending(k.new_empty(2, *local.shape, k.shape[-1]))
    # Heads are expanded, not repeated: one KV head's rows are read for all query heads of its group.
    rows = local.clamp(min=0).unflatten(1, (-1, group))[..., None].expand(-1, -1, -1, -1, k.shape[-1])
    picked = torch.stack([x[:, :, None].expand(-1, -1, group, -1, -1).gather(3, rows).flatten(1, 2) for x in (k, v)])
    # Absent columns are added as zeros, which is exact in any dtype and needs no counts on the host.
    return run.cp.start_all_reduce(picked * (local >= 0)[..., None])


def column_part(run: Run, column_kv: Tensor, part: int, parts: int,
                transpose: bool = False) -> tuple[Tensor, Tensor, Tiles]:
    """Keys, values [B, Hq, n, D] and tiles of every parts-th block of the gathered columns, from block `part` on.

    Whole blocks are dealt out, not single columns: runs of columns stay as short, and the mask cuts no more tiles.
    """
    every = slice(part, None, parts)
    deal = lambda x, dim: x.unflatten(dim, (-1, run.index.block_size))[(slice(None),) * dim + (every,)]
    index = run.index.with_columns(deal(run.index.columns, 2).flatten(2, 3))
    return *deal(column_kv, 3).flatten(3, 4), run._replace(index=index).column_tiles(column_kv.shape[1], transpose)


def join_columns(parts: list[Tensor], block_size: int) -> Tensor:
    """[B, Hq, C, D] from the parts of column_part()."""
    parts = [x.unflatten(2, (-1, block_size)) for x in parts]
    joined = parts[0].new_empty(*parts[0].shape[:2], sum(x.shape[2] for x in parts), *parts[0].shape[3:])
    for number, part in enumerate(parts):
        joined[:, :, number :: len(parts)] = part
    return joined.flatten(2, 3)


def reduce_columns(run: Run, d_columns: list[Tensor]) -> Pending:
    """Start to sum dk and dv [B, Hq, C, D] of the columns over ranks: [2, B, Hq, C, D]."""
    return run.cp.start_all_reduce(torch.stack(d_columns))


def add_columns(run: Run, d_kv: list[Tensor], d_columns: Tensor) -> None:
    """Add dk and dv of the columns to [dk, dv] [B, Hkv, S_local, D] where the columns came from, in place."""
    for total, parts in zip(d_kv, d_columns):
        arguments = (total, parts, run.index.columns, run.blocks().int(), run.index.block_size)
        if total.is_cuda and total.dtype != torch.float64:
            kernel.add_columns(*arguments)
        else:
            kernel.add_columns_naive(*arguments)
