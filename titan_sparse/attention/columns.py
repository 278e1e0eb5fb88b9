"""The gathered columns of a vertical-slash index: their keys and values to every rank, their gradients back home.

Both exchanges run beside the blocks' work: keys and values are wanted with the last chunk of the forward, gradients
leave with the first chunk of the backward.
"""

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import Pending
from titan_sparse.attention.run import Run
from titan_sparse.kernels import columns as kernel


def gather_columns(run: Run, k: Tensor, v: Tensor) -> Pending:
    """Start to bring keys and values of all columns, [2, B, Hq, C, D], to every rank, in one exchange of fixed size."""
    if run.column_kv is not None:
        return Pending(run.column_kv)
    local = run.cp.local_position(run.index.columns.clamp(max=run.seq_len), run.seq_len)
    group = run.index.heads // k.shape[1]
    if run.index.columns.shape[-1] == 0:
        return Pending(k.new_empty(2, *local.shape, k.shape[-1]))
    # Heads are expanded, not repeated: one KV head's rows are read for all query heads of its group.
    rows = local.clamp(min=0).unflatten(1, (-1, group))[..., None].expand(-1, -1, -1, -1, k.shape[-1])
    picked = torch.stack([x[:, :, None].expand(-1, -1, group, -1, -1).gather(3, rows).flatten(1, 2) for x in (k, v)])
    # Absent columns are added as zeros, which is exact in any dtype and needs no counts on the host.
    return run.cp.start_all_reduce(picked * (local >= 0)[..., None])


def reduce_columns(run: Run, d_columns: Tensor) -> Pending:
    """Start to sum dk and dv of the columns, [2, B, Hq, C, D], over ranks in place."""
    return run.cp.start_all_reduce(d_columns)


def add_columns(run: Run, d_kv: list[Tensor], d_columns: Tensor) -> None:
    """Add dk and dv of the columns to [dk, dv] [B, Hkv, S_local, D] where the columns came from, in place."""
    for total, parts in zip(d_kv, d_columns):
        arguments = (total, parts, run.index.columns, run.blocks().int(), run.index.block_size)
        if total.is_cuda and total.dtype != torch.float64:
            kernel.add_columns(*arguments)
        else:
            kernel.add_columns_naive(*arguments)
