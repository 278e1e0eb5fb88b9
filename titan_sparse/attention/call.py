"""What one attention call computes with."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_sparse.attention import registry
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import Backend
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.inputs import mask_of_tensors, mask_of_whole_blocks
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.merge import accumulation_dtype
from titan_sparse.attention.patterns.base import BlockIndex, CallOptions, Pattern


@dataclass(frozen=True)
class AttentionCall:
    """One call of attend(). mask and index are global: the same on every rank.

    plain: the mask is causal and nothing else, and the pattern dense.
    first, last: on every rank the queries are the local blocks from `first` to before `last` (None
    for the end), and the keys are those before `last`. Between ranks that is a range of the
    sequence, its causal past and nothing else, in the layout "striped" only.
    vertical_kv: keys and values of the verticals [2, B, Hq, C, D], if they have been gathered.
    """

    mask: MaskRanges
    index: BlockIndex
    pattern: Pattern
    cp: ContextParallel
    backend: Backend
    scale: float
    plain: bool
    first: int = 0
    last: int | None = None
    vertical_kv: Tensor | None = None

    @property
    def seq_len(self) -> int:
        """Global tokens, padding included."""
        return self.mask.start.shape[1]

    @property
    def is_partial(self) -> bool:
        """Whether the queries are only a range of the sequence."""
        return self.first > 0 or self.last is not None

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries and keys [B, H, S_local, D] that this call is about, as views."""
        size = self.cp.block_size
        begin = self.first * size
        end = q.shape[2] if self.last is None else self.last * size
        return q[:, :, begin:end], k[:, :, :end], v[:, :, :end]

    def of_heads(self, heads: slice) -> "AttentionCall":
        """The call for some of the query heads."""
        return replace(self, index=self.index.of_heads(heads))

    def sum_dtype(self, q: Tensor) -> torch.dtype:
        """The dtype of sums over chunks: q's own if there is only one chunk."""
        if self.cp.size == 1:
            return q.dtype
        return accumulation_dtype(q.dtype)

    def key_blocks(self, rank: int | None = None) -> Tensor:
        """int64 [n]: global blocks of the keys of `rank` (default: this rank), on the device."""
        return self.cp.blocks(self.mask, rank)[: self.last]

    def query_blocks(self, rank: int | None = None) -> Tensor:
        """int64 [n]: global blocks of the queries of `rank` (default: this rank)."""
        return self.key_blocks(rank)[self.first :]

    def count_plain_ring(self, k: Tensor, backward: bool = False) -> None:
        """Add to cp.plain_ring_bytes what a ring sends in which each chunk visits every rank.

        k: [B, Hkv, S_local, D]. A backward sends the gradients too, in the dtype that they have
        between ranks.
        """
        element_bytes = k.element_size()
        if backward:
            gradient_dtype = self.cp.gradient_dtype or self.sum_dtype(k)
            element_bytes += gradient_dtype.itemsize
        # 2: keys and values.
        chunk_bytes = 2 * k.numel() * element_bytes
        self.cp.plain_ring_bytes += chunk_bytes * (self.cp.size - 1)


def bind(key: str, q: Tensor, index: list[Tensor], mask: list[Tensor]) -> AttentionCall:
    """Rebuild the call from the key and the tensors that an op receives.

    q: [B, Hq, S_local, D]. index, mask: the tensors of the index and of the mask. For the first of
    two shares the keys and values of the verticals are the last tensor of `index`.
    """
    options: CallOptions = registry.lookup(key)
    cp = options.cp()
    vertical_kv = None
    if options.end < 1:
        *index, vertical_kv = index
    batch, heads, seq_len, head_dim = q.shape
    first, last = options.block_range(seq_len)
    ranges = mask_of_tensors(options.mask, mask, options.plain)
    ranges = mask_of_whole_blocks(ranges, cp.block_size)
    return AttentionCall(
        mask=ranges,
        index=options.pattern.index(index, ranges, batch, heads, cp.block_size),
        pattern=options.pattern,
        cp=cp,
        backend=BACKENDS[options.backend],
        scale=head_dim**-0.5 if options.scale is None else options.scale,
        plain=ranges.plain and not options.pattern.dynamic,
        first=first,
        last=last,
        vertical_kv=vertical_kv,
    )
