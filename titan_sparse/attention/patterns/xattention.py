"""XAttention (Xu et al. 2025, arXiv 2503.16428): block pairs scored by sums along antidiagonals.

Queries and keys are cut into cells of `stride` tokens. A pair of cells scores the sum over its
antidiagonal, which is one dot product of all the cell's keys with all its queries in reverse order.
The softmax is taken over the cells of a row and summed up by blocks: each query block takes the
fewest key blocks that hold the threshold's share. In a packed sequence each document is scored by
itself. A cell across the border of two documents counts as the first one's for queries, and as the
last one's for keys. What is left out that way is seen in a query's own block alone, which is always
on.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import Pattern
from titan_sparse.attention.patterns.bitsets import BlockSets, gather_blocks
from titan_sparse.attention.patterns.spans import (
    Spans,
    lookup,
    once_per_selection,
    span_of_tokens,
    spans_of_blocks,
    spans_of_mask,
)
from titan_sparse.kernels.bits import pack

_CHUNK_ELEMENTS = 1 << 26
"""Scores held at a time: 256 MiB in fp32."""


@dataclasses.dataclass(frozen=True)
class XAttention(Pattern):
    """Parameters of the selection. Blocks are those of attention; the paper has block_size 128.

    stride: tokens of a cell, a divisor of block_size.
    threshold: share of each query block's score to reach, in (0, 1]. The first block of the
        document and the query's own are always on, and they count (as in the authors' code).
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
        """ValueError if cells do not fill blocks, or a block could touch three documents."""
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
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        batch, heads = q.shape[:2]
        kv_heads, _, dim = k.shape[1:]
        group = heads // kv_heads
        cells = once_per_selection(
            ranges,
            "cells",
            self,
            cp,
            (batch,),
            lambda: _find_cells(
                ranges,
                spans_of_mask(ranges, batch, self.dense_below, cp.block_size),
                cp,
                self.stride,
            ),
        )
        # On the host, so that no layer but the first waits for the device.
        own_blocks = once_per_mask(
            ranges, ("own blocks", cp.key), lambda: cp.blocks(ranges).tolist()
        )
        chosen = []
        # Keys of all ranks are gathered for one KV head at a time, to save memory.
        for head in range(kv_heads):
            # [B, 1, n_local, block, D] -> [B, cells, stride D]
            k_blocks = k[:, head : head + 1].unflatten(2, (-1, cp.block_size))
            k_blocks = k_blocks * cells.keys[:, None, :, :, None]
            key_cells = gather_blocks(k_blocks, cp, ranges).view(batch, -1, self.stride * dim)
            q_group = q[:, head * group : (head + 1) * group]
            chosen.append(
                self._choose(q_group, key_cells, cells, own_blocks, cp, scale / self.stride)
            )
        return [gather_blocks(torch.cat(chosen, dim=1), cp, ranges)]

    def _choose(
        self,
        q: Tensor,
        key_cells: Tensor,
        cells: "Cells",
        own_blocks: list[int],
        cp: ContextParallel,
        scale: float,
    ) -> Tensor:
        """int32 [B, G, n_local, words]: the blocks chosen by the query heads of one KV head.

        q: [B, G, S_local, D]. key_cells: [B, cells, stride D], of all ranks. own_blocks: this
        rank's. scale: of the sums along antidiagonals.
        """
        batch, group, _, dim = q.shape
        per_block = cp.block_size // self.stride
        block_count = key_cells.shape[1] // per_block
        step = max(1, _CHUNK_ELEMENTS // (batch * group * per_block * key_cells.shape[1]))
        # [B, G, n_local, block, D]
        q_blocks = q.unflatten(2, (-1, cp.block_size))
        chosen = []
        for first in range(0, len(own_blocks), step):
            part = slice(first, first + step)

            # Blocks of the future are never chosen, so they are not scored.
            visible = max(own_blocks[part]) + 1

            # [B, G m cells, stride D]: m query blocks, the tokens of each cell in reverse order.
            q_part = q_blocks[:, :, part] * cells.queries[:, None, part, :, None]
            query_cells = q_part.unflatten(3, (-1, self.stride))
            query_cells = query_cells.flip(4)
            query_cells = query_cells.reshape(batch, -1, self.stride * dim)

            # [B, G, m, cells a block, key cells]
            scores = _products(query_cells, key_cells[:, : visible * per_block])
            scores = scores.unflatten(1, (group, -1, per_block)) * scale

            # [B, G, m, T, visible]: for each span that touches the query block.
            mass = _masses(scores, cells, part, visible, per_block)
            forced = cells.forced[:, None, part, :, :visible]
            picked = _fewest(mass, forced, self.threshold)
            picked &= cells.exists[:, None, part, :, None]

            # [B, G, m, visible]
            selected = picked.any(3) | cells.dense[:, None, part, :visible]
            selected = F.pad(selected, (0, block_count - visible))
            chosen.append(pack(selected))
        return torch.cat(chosen, dim=2)

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        blocks = seq_len // block_size
        words = -(-blocks // 32)
        # [B, Hq, blocks, words]
        return [q.new_empty(batch, heads, blocks, words, dtype=torch.int32)]

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> BlockSets:
        # [B, Hq, blocks, words]
        [words] = tensors
        return BlockSets(words, ranges.start.shape[1], block_size)


class Cells(NamedTuple):
    """What scoring needs to know of the mask and the layout, the same for every layer.

    T = 1 or 2 spans touch a block.
    keys, queries: bool [B, n_local, block], which of this rank's tokens count in their cell.
    span: int64 [B, n_local, cells a block], the span of each of this rank's query cells, -1 for
        none.
    key_span: int64 [B, all cells], the span of each key cell, -2 for none.
    start: int32 like span, the first key that the cell sees.
    number: int64 [n_local, cells a block], global number of each cell.
    slot: bool [B, n_local, cells a block, T], which of the block's spans the cell belongs to.
    exists: bool [B, n_local, T], whether there is such a span.
    forced: bool [B, n_local, T, blocks], blocks that are always on.
    dense: bool [B, n_local, blocks], those that are on for short documents.
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


def _find_cells(ranges: MaskRanges, spans: Spans, cp: ContextParallel, stride: int) -> Cells:
    seq_len = ranges.start.shape[1]
    size = cp.block_size
    device = ranges.start.device
    batch, span_count = spans.start.shape
    blocks = seq_len // size
    own_blocks = cp.blocks(ranges)

    def of_own_blocks(values: Tensor) -> Tensor:
        """This rank's part [B, n_local, ...] of values [B, cells] or [B, cells, stride]."""
        # [B, blocks, ...]
        by_block = values.reshape(batch, blocks, -1)
        return by_block[:, own_blocks]

    # A cell across a border is the first span's for queries, the last one's for keys: [B, cells]
    # each.
    token_span = span_of_tokens(spans.start, spans.stop, seq_len).unflatten(1, (-1, stride))
    known = token_span < span_count
    query_span = token_span[..., 0].where(known[..., 0], -1)
    key_span = token_span[..., -1].where(known[..., -1], -2)
    own_query_span = of_own_blocks(query_span)
    cell_start = ranges.start.expand(batch, -1).unflatten(1, (-1, stride))[..., 0]
    per_block = size // stride
    number = own_blocks[:, None] * per_block + torch.arange(per_block, device=device)

    # [B, n_local, T], and [B, n_local, T, blocks]: the first block of the document and the query's
    # own.
    touching = spans_of_blocks(spans, own_blocks, size)
    first_block = lookup(spans.first_block, touching.clamp(min=0))
    block = torch.arange(blocks, device=device)
    is_first = block == first_block[..., None]
    is_own = block == own_blocks[:, None, None]
    is_dense = block >= spans.dense_from[:, own_blocks, None]
    return Cells(
        keys=of_own_blocks(token_span == key_span[..., None]),
        queries=of_own_blocks(token_span == query_span[..., None]),
        span=own_query_span,
        key_span=key_span,
        start=of_own_blocks(cell_start),
        number=number,
        slot=own_query_span[..., None] == touching[:, :, None],
        exists=touching >= 0,
        forced=is_first | is_own,
        dense=is_dense & (block <= own_blocks[:, None]),
    )


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Dot products of rows, [B, n, L] and [B, m, L] -> [B, n, m], fp32 (fp64 for fp64)."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        # Summed in fp32, and not rounded to 16 bits afterwards.
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    dtype = torch.promote_types(a.dtype, torch.float32)
    a = a.to(dtype)
    b = b.to(dtype)
    return a @ b.mT


def _masses(scores: Tensor, cells: Cells, part: slice, visible: int, per_block: int) -> Tensor:
    """Softmax over the key cells seen, summed by blocks: [B, G, m, T, visible].

    It is also summed over the query cells of each of the T spans that touch the query block.
    scores: [B, G, m, cells a block, key cells], of the query blocks `part` with all cells of
        `visible` blocks.
    """
    count = scores.shape[-1]
    stride = cells.keys.shape[2] // cells.number.shape[1]
    key_cell = torch.arange(count, device=scores.device)

    # [B, m, cells a block, key cells]: in the same document, not later, and not all of it before
    # the mask's start.
    seen = cells.span[:, part, :, None] == cells.key_span[:, None, None, :count]
    seen &= key_cell <= cells.number[part, :, None]
    seen &= (key_cell + 1) * stride > cells.start[:, part, :, None]

    # [B, G, m, cells a block, key cells]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    # Cells that see nothing have a finite maximum too, so that their weights are 0, not NaN.
    largest = scores.amax(-1, keepdim=True)
    largest = largest.clamp(min=torch.finfo(scores.dtype).min)
    weight = (scores - largest).exp()

    # [B, G, m, cells a block, 1]
    total = weight.sum(-1, keepdim=True)
    # [B, G, m, cells a block, visible]
    block_weight = weight.unflatten(-1, (visible, per_block)).sum(-1)
    share = block_weight / torch.where(total > 0, total, 1)

    # [B, 1, m, T, cells a block] @ [B, G, m, cells a block, visible]
    in_span = cells.slot[:, None, part].mT
    return in_span.to(share.dtype) @ share


def _fewest(mass: Tensor, forced: Tensor, threshold: float) -> Tensor:
    """bool like mass [..., n]: the forced elements and the fewest others that reach the target.

    The target is the threshold's share of the sum of all; equal elements are taken in order of
    position.
    """
    # [..., n]: the forced ones come first.
    ranked = mass.masked_fill(forced.expand_as(mass), torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices

    # In this order, each at its own mass: what all before it hold together.
    sorted_mass = mass.gather(-1, order)
    up_to = sorted_mass.cumsum(-1)
    before = F.pad(up_to[..., :-1], (1, 0))

    # [..., 1]
    target = threshold * up_to[..., -1:]
    wanted = (before < target) & (sorted_mass > 0)
    # Back in order of position.
    picked = torch.zeros_like(wanted).scatter_(-1, order, wanted)
    return picked | forced
