"""The gathered verticals of an index: their keys and values to every rank, their gradients home.

Both exchanges run beside the work on blocks. A ring needs the keys and values after the first step
of its forward, and the gradients leave before the last step of its backward. In between the
verticals are dealt out over the steps, block by block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall, every_nth_block
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.merge import accumulation_dtype
from titan_sparse.kernels import verticals as kernel


def gather(call: AttentionCall, k: Tensor, v: Tensor) -> Pending:
    """Start to bring keys and values of all verticals to every rank: [2, B, Hq, C, D].

    k, v: [B, Hkv, S_local, D]. It is one exchange of a size known from the shapes.
    """
    if call.vertical_kv is not None:
        return Pending(call.vertical_kv)
    # [B, Hq, C], global positions; seq_len where a head has fewer
    positions = call.index.verticals
    head_dim = k.shape[-1]
    if positions.shape[-1] == 0:
        return Pending(k.new_empty(2, *positions.shape, head_dim))
    lookup = once_per_mask(
        call.mask,
        ("local position", call.cp.key),
        lambda: call.cp.local_lookup(call.mask),
    )
    # [B, Hq, C], where this rank holds them; -1 if it does not
    local = lookup[positions.clamp(max=call.seq_len)]
    group = call.index.heads // k.shape[1]
    # [B, Hkv, group, C, D]
    rows = local.clamp(min=0)
    rows = rows.unflatten(1, (-1, group))[..., None]
    rows = rows.expand(-1, -1, -1, -1, head_dim)
    # Heads are expanded, not repeated: all query heads of a group read one KV head's rows.
    # [B, Hkv, group, S_local, D]
    k_by_group = k[:, :, None].expand(-1, -1, group, -1, -1)
    v_by_group = v[:, :, None].expand(-1, -1, group, -1, -1)
    # [B, Hq, C, D]
    keys = k_by_group.gather(3, rows).flatten(1, 2)
    values = v_by_group.gather(3, rows).flatten(1, 2)
    # [2, B, Hq, C, D]
    picked = torch.stack([keys, values])
    # What a rank does not hold it adds as zeros. That is exact in any dtype, and the host need not
    # know any counts.
    is_held = (local >= 0)[..., None]
    return call.cp.start_all_reduce(picked * is_held)


def new_gradients(vertical_kv: Tensor) -> Tensor:
    """Memory for dk and dv of all verticals [2, B, Hq, C, D], in the dtype of their sum."""
    sum_dtype = accumulation_dtype(vertical_kv.dtype)
    return vertical_kv.new_empty(vertical_kv.shape, dtype=sum_dtype)


def put_share(
    d_verticals: Tensor,
    gradients: Sequence[Tensor],
    share: int,
    shares: int,
    block_size: int,
) -> None:
    """Write dk and dv [B, Hq, n, D] of AttentionCall.vertical_piece() into [2, B, Hq, C, D]."""
    for whole, gradient in zip(d_verticals, gradients, strict=True):
        # [B, Hq, blocks of the share, block, D], a view
        place = every_nth_block(
            whole,
            dim=2,
            block_size=block_size,
            first=share,
            n=shares,
        )
        blocks = gradient.unflatten(2, (-1, block_size))
        place.copy_(blocks)


def reduce_gradients(call: AttentionCall, d_verticals: Tensor) -> Pending:
    """Start to sum dk and dv of the verticals [2, B, Hq, C, D] over ranks, in place."""
    return call.cp.start_all_reduce(d_verticals)


def add_gradients(call: AttentionCall, d_kv: Sequence[Tensor], d_verticals: Tensor) -> None:
    """Add dk and dv of the verticals to dk and dv [B, Hkv, S_local, D] of this rank, in place."""
    dk = d_kv[0]
    has_kernel = dk.is_cuda and dk.dtype != torch.float64
    if has_kernel:
        add = kernel.add_verticals
    else:
        add = kernel.add_verticals_naive
    local_blocks = call.key_blocks().int()
    add(
        d_kv,
        d_verticals,
        call.index.verticals,
        local_blocks,
        call.index.block_size,
    )
