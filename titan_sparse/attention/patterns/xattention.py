"""XAttention (Xu et al. 2025, arXiv 2503.16428): block pairs scored by sums along antidiagonals.

Queries and keys are cut into cells of `stride` tokens. A pair of cells scores the sum over its antidiagonal, which is one
dot product of all the cell's keys with all its queries in reverse order. Softmax over the cells of a row, summed up by
blocks: each query block takes the fewest key blocks that hold the threshold's share. In a packed sequence each document is
scored by itself. A cell across the border of two documents counts as the first one's for queries, the last one's for keys:
what is left out that way is seen in a query's own block alone, which is always on.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import Pattern
from titan_sparse.attention.patterns.bitsets import BlockSets, gather_blocks
from titan_sparse.attention.patterns.vertical_slash.spans import (
    Spans,
    find_spans,
    span_of_tokens,
    spans_of_blocks,
)
from titan_sparse.kernels.bits import pack

if TYPE_CHECKING:
    from titan_sparse.attention.context_parallel.group import ContextParallel

_CHUNK_ELEMENTS = 1 << 26
"""Scores held at a time: 256 MiB in fp32."""


@dataclasses.dataclass(frozen=True)
class XAttention(Pattern):
    """Parameters of the selection. Blocks are those of attention; the paper has block_size 128.

    stride: tokens of a cell, a divisor of block_size. threshold: share of each query block's score to reach, in (0, 1];
    the first block of the document and the query's own are on in any case and count (as in the authors' code).
    dense_below: documents of a packed sequence with fewer tokens are computed whole.
    Raises ValueError for values out of range.
    """

    stride: int = 16
    threshold: float = 0.9
    dense_below: int = 4096
    name: ClassVar[str] = "xattention"

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(
                f"XAttention(threshold={self.threshold}): a share of the scores, above 0, at most 1"
            )
        if self.stride < 1 or self.dense_below < 1:
            raise ValueError(
                f"XAttention(stride={self.stride}, dense_below={self.dense_below}): write 1 or more"
            )
        super().__post_init__()

    def check_block_size(self, block_size: int) -> None:
        """ValueError if cells do not fill blocks, or a block could touch three selected documents."""
        if block_size % self.stride:
            raise ValueError(
                f"xattention.stride = {self.stride} does not divide block_size ({block_size}); "
                "write a divisor of it, for example 16"
            )
        if self.dense_below < block_size:
            raise ValueError(
                f"xattention.dense_below = {self.dense_below} is below block_size ({block_size}); "
                f"write dense_below = {block_size} or more"
            )

    def select_tensors(
        self, q: Tensor, k: Tensor, rows: MaskRanges, cp: "ContextParallel", scale: float
    ) -> list[Tensor]:
        batch, heads = q.shape[:2]
        group = heads // k.shape[1]
        key = ("xattention", self.key, cp.key, batch)
        cells = once_per_mask(
            rows,
            key,
            lambda: _cells(rows, self._spans(rows, batch, cp.block_size), cp, self.stride),
        )
        blocks = once_per_mask(rows, ("own blocks", cp.key), lambda: cp.blocks(rows).tolist())
        chosen = []
        for head in range(k.shape[1]):
            own = (
                k[:, head : head + 1].unflatten(2, (-1, cp.block_size))
                * cells.keys[:, None, :, :, None]
            )
            keys = gather_blocks(own, cp, rows).view(batch, -1, self.stride * k.shape[3])
            chosen.append(
                self._of_head(
                    q[:, head * group : (head + 1) * group],
                    keys,
                    cells,
                    blocks,
                    cp,
                    scale / self.stride,
                )
            )
        return [gather_blocks(torch.cat(chosen, dim=1), cp, rows)]

    def _of_head(
        self,
        q: Tensor,
        keys: Tensor,
        cells: "Cells",
        blocks: list[int],
        cp: "ContextParallel",
        scale: float,
    ) -> Tensor:
        """int32 [B, G, n_local, words], the blocks chosen by the query heads q [B, G, S_local, D] of one KV head, from
        the key cells [B, cells, stride D] of all ranks. blocks: this rank's."""
        batch, group, _, dim = q.shape
        per_block, count = (
            cp.block_size // self.stride,
            keys.shape[1] // (cp.block_size // self.stride),
        )
        step = max(1, _CHUNK_ELEMENTS // (batch * group * per_block * keys.shape[1]))
        q_blocks = q.unflatten(2, (-1, cp.block_size))
        chosen = []
        for first in range(0, len(blocks), step):
            some = slice(first, first + step)
            visible = max(blocks[some]) + 1
            reversed_cells = (
                q_blocks[:, :, some] * cells.queries[:, None, some, :, None]
            ).unflatten(3, (-1, self.stride))
            reversed_cells = reversed_cells.flip(4).reshape(batch, -1, self.stride * dim)
            scores = (
                _products(reversed_cells, keys[:, : visible * per_block]).unflatten(
                    1, (group, -1, per_block)
                )
                * scale
            )
            mass = _masses(scores, cells, some, visible, per_block)
            picked = _fewest(mass, cells.forced[:, None, some, :, :visible], self.threshold)
            picked = (picked & cells.exists[:, None, some, :, None]).any(3) | cells.dense[
                :, None, some, :visible
            ]
            chosen.append(pack(torch.nn.functional.pad(picked, (0, count - visible))))
        return torch.cat(chosen, dim=2)

    def _spans(self, rows: MaskRanges, batch: int, block_size: int) -> Spans:
        key = ("spans", batch, self.dense_below, block_size)
        return once_per_mask(
            rows, key, lambda: find_spans(rows, batch, self.dense_below, block_size)
        )

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        blocks = seq_len // block_size
        return [q.new_empty(*q.shape[:2], blocks, -(-blocks // 32), dtype=torch.int32)]

    def index(
        self, tensors: list[Tensor], rows: MaskRanges, batch: int, heads: int, block_size: int
    ) -> BlockSets:
        return BlockSets(*tensors, rows.start.shape[1], block_size)


class Cells(NamedTuple):
    """What scoring needs to know of the mask and the layout, for every layer the same; T = 1 or 2 spans touch a block.

    keys, queries: bool [B, n_local, block], which of this rank's tokens count in their cell. span, key_span: int64
    [B, n_local, cells a block], [B, all cells], the span of a cell, -1 and -2 for none. start: int32 like span, first key
    that the cell sees. number: int64 [n_local, cells a block], global. slot: bool [B, n_local, cells a block, T], which of
    the block's spans the cell belongs to. exists: bool [B, n_local, T]. forced: bool [B, n_local, T, blocks], blocks
    always on. dense: bool [B, n_local, blocks], those on for short documents.
    """

    keys: Tensor
    queries: Tensor
    span: Tensor
    key_span: Tensor
    start: Tensor
    number: Tensor
    slot: Tensor
    exists: Tensor
    forced: Tensor
    dense: Tensor


def _cells(rows: MaskRanges, spans: Spans, cp: "ContextParallel", stride: int) -> Cells:
    seq_len, size, device = rows.start.shape[1], cp.block_size, rows.start.device
    batch, own = len(spans.start), cp.blocks(rows)
    token = span_of_tokens(spans.start, spans.stop, seq_len).unflatten(1, (-1, stride))
    known = token < spans.start.shape[1]
    first, last = token[..., 0].where(known[..., 0], -1), token[..., -1].where(known[..., -1], -2)
    of_blocks = lambda x: x.reshape(batch, seq_len // size, -1)[:, own]
    number = own[:, None] * (size // stride) + torch.arange(size // stride, device=device)
    touching = spans_of_blocks(spans, own, size)
    block = torch.arange(seq_len // size, device=device)
    first_block = spans.first_block.gather(1, touching.clamp(min=0).flatten(1)).view_as(touching)
    return Cells(
        of_blocks(token == last[..., None]),
        of_blocks(token == first[..., None]),
        of_blocks(first),
        last,
        of_blocks(rows.start.expand(batch, -1).unflatten(1, (-1, stride))[..., 0]),
        number,
        of_blocks(first)[..., None] == touching[:, :, None],
        touching >= 0,
        (block == first_block[..., None]) | (block == own[:, None, None]),
        (block >= spans.dense_from[:, own, None]) & (block <= own[:, None]),
    )


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Dot products of rows, [B, n, L] and [B, m, L] -> [B, n, m], fp32 (fp64 for fp64)."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    dtype = torch.promote_types(a.dtype, torch.float32)
    return a.to(dtype) @ b.to(dtype).mT


def _masses(scores: Tensor, cells: Cells, some: slice, visible: int, per_block: int) -> Tensor:
    """Softmax of the scores [B, G, n, cells a block, key cells] over the cells seen, summed by blocks and by the span of
    the query cells: [B, G, n, T, visible blocks]."""
    key_cell = torch.arange(scores.shape[-1], device=scores.device)
    seen = cells.span[:, some, :, None] == cells.key_span[:, None, None, : scores.shape[-1]]
    seen &= (key_cell <= cells.number[some, :, None]) & (
        (key_cell + 1) * _stride(cells) > cells.start[:, some, :, None]
    )
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weight = (scores - top).exp()
    total = weight.sum(-1, keepdim=True)
    share = weight.unflatten(-1, (visible, per_block)).sum(-1) / torch.where(total > 0, total, 1)
    return cells.slot[:, None, some].mT.to(share.dtype) @ share


def _stride(cells: Cells) -> int:
    return cells.keys.shape[2] // cells.number.shape[1]


def _fewest(mass: Tensor, forced: Tensor, threshold: float) -> Tensor:
    """bool like mass [..., n]: the elements forced, and the fewest others with which their sum reaches the threshold's
    share of all; equal ones in order of position."""
    order = (
        mass.masked_fill(forced.expand_as(mass), torch.inf)
        .sort(dim=-1, descending=True, stable=True)
        .indices
    )
    in_order = mass.gather(-1, order)
    up_to = in_order.cumsum(-1)
    before = torch.nn.functional.pad(up_to[..., :-1], (1, 0))
    wanted = (before < threshold * up_to[..., -1:]) & (in_order > 0)
    return torch.zeros_like(wanted).scatter_(-1, order, wanted) | forced
