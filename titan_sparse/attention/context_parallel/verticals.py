"""Gather the verticals of an index: send keys and values to every rank, and gradients home.

Both exchanges run during the work on blocks (loop.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_sparse.attention.call import AttentionCall, every_nth_block
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.masks.ranges import once_per_mask
from titan_sparse.kernels import verticals as kernel
from titan_sparse.kernels.dtypes import accumulation_dtype


def gather(call: AttentionCall, k: Tensor, v: Tensor) -> Pending:
    """Start to send keys and values of all verticals to every rank: [2, B, Hq, C, D].

    k, v: [B, Hkv, S_local, D]. This is one exchange, and its size follows from the shapes.
    """
    if call.vertical_kv is not None:
        return Pending(call.vertical_kv)
    # [B, Hq, C], global positions; seq_len where a head has fewer
    positions = call.index.verticals
    key = ("local position", call.cp.key)
    lookup = once_per_mask(call.mask, key, lambda: call.cp.local_lookup(call.mask))
    gather_here = kernel.gather_verticals if _has_kernels(k) else kernel.gather_verticals_naive
    # What a rank does not hold it adds as zeros. That is exact in any dtype, and the host need not
    # know any counts.
    gathered_here = gather_here(k, v, positions, lookup)
    return call.cp.start_all_reduce(gathered_here)


@dataclass
class Gradients:
    """Gradients of the verticals, share by share, and their sum over ranks.

    vertical_kv: [2, B, Hq, C, D], their keys and values.
    missing: shares that are still to come. The sum begins with the last of them, and travels behind
    the steps that remain.
    sums: [2, B, Hq, C, D], made for several ranks with the first share.
    """

    call: AttentionCall
    vertical_kv: Tensor
    missing: int
    sums: Tensor | None = None
    reduced: Pending | None = None

    def put(self, gradients: Sequence[Tensor], heads: slice, share: int, shares: int) -> None:
        """dk and dv [B, H, n, D] of call.vertical_piece(), for the query heads `heads`."""
        if self.call.cp.size == 1:
            # They come in one share.
            self.reduced = Pending(gradients)
            return
        if self.sums is None:
            sum_dtype = accumulation_dtype(self.vertical_kv.dtype)
            self.sums = torch.empty_like(self.vertical_kv, dtype=sum_dtype)
        block_size = self.call.cp.block_size
        for whole, gradient in zip(self.sums[:, :, heads], gradients, strict=True):
            # [B, H, blocks of the share, block, D], a view
            place = every_nth_block(whole, block_size, share, shares)
            place.copy_(gradient.unflatten(2, (-1, block_size)))
        self.missing -= 1
        if self.missing == 0:
            self.reduced = self.call.cp.start_all_reduce(self.sums)


def add_gradients(
    call: AttentionCall, d_kv: Sequence[Tensor], d_verticals: Sequence[Tensor]
) -> None:
    """Add dk and dv [B, Hq, C, D] of the verticals to those of this rank's keys, in place.

    d_kv: dk and dv, [B, Hkv, S_local, D] each.
    """
    add = kernel.add_verticals if _has_kernels(d_kv[0]) else kernel.add_verticals_naive
    add(d_kv, d_verticals, call.index.verticals, call.key_blocks(), call.index.block_size)


def _has_kernels(x: Tensor) -> bool:
    """True if kernels take such keys or gradients. Where there is no GPU their twins do."""
    return x.is_cuda and x.dtype != torch.float64
