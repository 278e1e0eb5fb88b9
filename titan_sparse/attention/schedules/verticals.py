"""The gathered verticals of a vertical-slash index: their keys and values to every rank, their gradients back home.

Both exchanges run beside the blocks' work: a ring wants keys and values after the first step of the forward, gradients
leave before the last step of the backward. In between verticals are dealt out over the steps, block by block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_sparse.attention.backends.eager import accumulation_dtype
from titan_sparse.attention.call import Run
from titan_sparse.attention.context_parallel.group import Pending
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.tiles.blocks import Tiles
from titan_sparse.kernels import verticals as kernel


def gather_verticals(run: Run, k: Tensor, v: Tensor) -> Pending:
    """Start to bring keys and values of all verticals, [2, B, Hq, C, D], to every rank, in one exchange of fixed size."""
    if run.vertical_kv is not None:
        return Pending(run.vertical_kv)
    lookup = once_per_mask(
        run.rows, ("local position", run.cp.key), lambda: run.cp.local_lookup(run.rows)
    )
    local = lookup[run.index.verticals.clamp(max=run.seq_len)]
    group = run.index.heads // k.shape[1]
    if run.index.verticals.shape[-1] == 0:
        return Pending(k.new_empty(2, *local.shape, k.shape[-1]))
    # Heads are expanded, not repeated: one KV head's rows are read for all query heads of its group.
    rows = (
        local.clamp(min=0).unflatten(1, (-1, group))[..., None].expand(-1, -1, -1, -1, k.shape[-1])
    )
    picked = torch.stack(
        [x[:, :, None].expand(-1, -1, group, -1, -1).gather(3, rows).flatten(1, 2) for x in (k, v)]
    )
    # Absent verticals are added as zeros, which is exact in any dtype and needs no counts on the host.
    return run.cp.start_all_reduce(picked * (local >= 0)[..., None])


def vertical_part(
    run: Run, vertical_kv: Tensor, part: int, parts: int, transpose: bool = False
) -> tuple[Tensor, Tensor, Tiles]:
    """Keys, values [B, Hq, n, D] and tiles of every parts-th block of the gathered verticals, from block `part` on.

    Whole blocks are dealt out, not single verticals: runs of verticals stay as short, and the mask cuts no more tiles.
    """
    deal = lambda x, dim: _dealt(x, dim, part, parts, run.index.block_size).flatten(dim, dim + 1)
    index = run.index.with_verticals(deal(run.index.verticals, 2))
    return *deal(vertical_kv, 3), run._replace(index=index).vertical_tiles(
        vertical_kv.shape[1], transpose
    )


def new_gradients(vertical_kv: Tensor) -> Tensor:
    """For dk and dv of all verticals, [2, B, Hq, C, D] in the dtype that they are summed in; not yet filled."""
    return vertical_kv.new_empty(vertical_kv.shape, dtype=accumulation_dtype(vertical_kv.dtype))


def put_part(
    d_verticals: Tensor, found: list[Tensor], part: int, parts: int, block_size: int
) -> None:
    """Write dk and dv [B, Hq, n, D] of vertical_part() where they belong in [2, B, Hq, C, D]."""
    for whole, x in zip(d_verticals, found):
        _dealt(whole, 2, part, parts, block_size).copy_(x.unflatten(2, (-1, block_size)))


def _dealt(x: Tensor, dim: int, part: int, parts: int, block_size: int) -> Tensor:
    """A view of every parts-th block along `dim`, which becomes two: blocks and their tokens."""
    return x.unflatten(dim, (-1, block_size))[(slice(None),) * dim + (slice(part, None, parts),)]


def reduce_verticals(run: Run, d_verticals: Tensor) -> Pending:
    """Start to sum dk and dv of the verticals, [2, B, Hq, C, D], over ranks in place."""
    return run.cp.start_all_reduce(d_verticals)


def add_verticals(run: Run, d_kv: Sequence[Tensor], d_verticals: Tensor) -> None:
    """Add dk and dv of the verticals to dk and dv [B, Hkv, S_local, D] where the verticals came from, in place."""
    on_kernels = d_kv[0].is_cuda and d_kv[0].dtype != torch.float64
    add = kernel.add_verticals if on_kernels else kernel.add_verticals_naive
    add(d_kv, d_verticals, run.index.verticals, run.blocks().int(), run.index.block_size)
