"""XAttention (Xu et al. 2025, arXiv 2503.16428): block pairs scored by sums along antidiagonals.

Queries and keys are cut into cells of `stride` tokens. A pair of cells scores the sum over its
antidiagonal, which is one dot product of all the cell's keys with all its queries in reverse
order. The softmax is taken over the cells of a row and summed up by blocks: each query block
takes the fewest key blocks that hold the threshold's share. In a packed sequence each document is
scored separately. A cell across the border of two documents counts as the first one's for
queries, and as the last one's for keys. What this leaves out is seen only in a query's own block,
which is always selected.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask
from titan_sparse.attention.patterns.base import gather_blocks
from titan_sparse.attention.patterns.blocks import BlockPattern
from titan_sparse.attention.patterns.spans import (
    Spans,
    find_spans,
    lookup,
    span_of_tokens,
    spans_of_blocks,
)
from titan_sparse.kernels import antidiagonals as kernels
from titan_sparse.kernels.antidiagonals import QueryBlocks, VisibleTiles
from titan_sparse.options.patterns import XAttentionOptions

_CHUNK_ELEMENTS = 1 << 26
"""Scores held at a time, with kernels their sums by block: 256 MiB in fp32."""


class XAttention(BlockPattern, XAttentionOptions):
    """Blocks of keys chosen by antidiagonal scores. XAttentionOptions has the parameters.

    Blocks are those of attention; the paper has block_size 128.
    """

    def select_tensors(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        batch, heads = q.shape[:2]
        kv_heads = k.shape[1]
        group = heads // kv_heads
        by_kernels = _by_kernels(q, cp, self.stride)
        plan = once_per_mask(
            ranges,
            ("xattention", self, cp.key, batch, group, by_kernels),
            lambda: self._scoring(ranges, cp, batch, group, by_kernels),
        )
        # [B, Hq, n_local, block, D]
        q_blocks = q.unflatten(2, (-1, cp.block_size))
        chosen = []
        # Keys of all ranks are gathered for one KV head at a time, to save memory.
        for head in range(kv_heads):
            # [B, 1, n_local, block, D] -> [B, S, D]
            k_blocks = k[:, head : head + 1].unflatten(2, (-1, cp.block_size))
            k_blocks = _where_counted(k_blocks, plan.keys[:, None, :, :, None])
            keys = gather_blocks(k_blocks, cp, ranges).flatten(1, 3)
            of_head = []
            for part in plan.parts:
                # [B, G, m block, D]
                queries = q_blocks[:, head * group : (head + 1) * group, part.where]
                counted = plan.queries[:, None, part.where, :, None]
                queries = _where_counted(queries, counted).flatten(2, 3)
                of_head.append(self._choose(queries, keys, part, cp.block_size, scale))
            chosen.append(torch.cat(of_head, dim=2))
        return [gather_blocks(torch.cat(chosen, dim=1), cp, ranges)]

    def _scoring(
        self, ranges: MaskRanges, cp: ContextParallel, batch: int, group: int, by_kernels: bool
    ) -> "Scoring":
        """The cells that this rank scores, the same for every layer."""
        spans = find_spans(ranges, batch, self.dense_below, cp.block_size)
        own_blocks = cp.blocks(ranges)
        # On the host, which waits for the device only where the layout follows from the mask.
        table = cp.table(ranges) if cp.depends_on_mask else cp.block_table(ranges.start.shape[1])
        numbers = table[cp.rank].tolist()
        key_cells = ranges.start.shape[1] // self.stride
        blocks = _query_blocks(ranges, spans, own_blocks, cp.block_size, self.stride)
        keys, queries = _counted(spans, own_blocks, cp.block_size, self.stride, key_cells)

        # Scores, or with kernels only their sums by block, of one query block.
        per_block = blocks.first.shape[2]
        columns = key_cells // per_block if by_kernels else key_cells
        shape = kernels.shape_for(ranges.start.device)
        step = max(1, _CHUNK_ELEMENTS // (batch * group * per_block * columns))
        if by_kernels:
            # Whole tiles.
            of_tile = max(1, shape.query_cells // per_block)
            step = max(of_tile, step // of_tile * of_tile)
        parts = []
        for first in range(0, len(numbers), step):
            part = slice(first, first + step)
            of_part = blocks.part(part)
            tiles = None
            if by_kernels:
                tiles = kernels.visible_tiles(of_part, key_cells, group, shape)
            # Blocks of the future are never chosen, so they are not scored.
            parts.append(Part(part, of_part, max(numbers[part]) + 1, tiles))
        return Scoring(keys, queries, parts)

    def _choose(
        self, q: Tensor, keys: Tensor, part: "Part", block_size: int, scale: float
    ) -> Tensor:
        """int32 [B, G, m, words]: the blocks chosen by the query heads of one KV head.

        q: [B, G, m block, D]. keys: [B, S, D], of all ranks. The sums are freed as it returns, so
        that those of one part are held.
        """
        blocks = part.blocks
        count = keys.shape[1] // block_size
        # Of the sums along antidiagonals.
        scale = scale / self.stride
        if part.tiles is not None:
            sums = kernels.block_sums(q, keys, blocks, self.stride, scale, part.tiles)
            return kernels.chosen_blocks(sums, blocks, self.threshold, part.visible, count)
        seen = keys[:, : part.visible * block_size]
        sums = kernels.block_sums_naive(q, seen, blocks, self.stride, scale)
        return kernels.chosen_blocks_naive(sums, blocks, self.threshold, part.visible, count)


class Part(NamedTuple):
    """Query blocks that are looked at together."""

    where: slice  # of this rank's blocks
    blocks: QueryBlocks
    visible: int  # no block of keys of this number or above is seen
    tiles: VisibleTiles | None  # None without kernels


class Scoring(NamedTuple):
    """The inputs of scoring that depend on mask and layout, the same for every layer."""

    keys: Tensor  # bool [B, n_local, block], which of this rank's tokens count in their cell
    queries: Tensor  # the same for queries
    parts: list[Part]


def _by_kernels(q: Tensor, cp: ContextParallel, stride: int) -> bool:
    """True if Triton's kernels take these queries [B, Hq, S_local, D]; plain torch takes all."""
    cells = cp.block_size // stride
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[3] % 16 == 0
        # Sums by blocks of fewer cells would take the memory that scores do.
        and cells in (4, 8, 16, 32, 64, 128)
        and q.shape[2] * cp.size <= kernels.MOST_BLOCKS * cp.block_size
    )


def _where_counted(x: Tensor, counted: Tensor) -> Tensor:
    return torch.mul(x, counted, out=x.new_empty(x.shape))


def _counted(
    spans: Spans, own_blocks: Tensor, block_size: int, stride: int, cells: int
) -> tuple[Tensor, Tensor]:
    """The tokens of this rank's blocks that count in their cell, as keys and as queries.

    bool [B, n_local, block] each. cells: of the sequence.
    """
    # [B, cells, stride]
    span = span_of_tokens(spans.start, spans.stop, cells * stride).unflatten(1, (-1, stride))
    known = span < spans.start.shape[1]
    # Of a cell across a border those of its last document count as keys, of its first as queries.
    keys = known & (span == span[..., -1:])
    queries = known & (span == span[..., :1])
    # [B, blocks, block]
    keys, queries = (x.flatten(1).unflatten(1, (-1, block_size)) for x in (keys, queries))
    return keys[:, own_blocks], queries[:, own_blocks]


def _query_blocks(
    ranges: MaskRanges, spans: Spans, own_blocks: Tensor, block_size: int, stride: int
) -> QueryBlocks:
    batch, span_count = spans.start.shape
    seq_len = ranges.start.shape[1]
    per_block = block_size // stride
    # [n_local, c], then [B, n_local c]: the global numbers of this rank's cells, their first
    # tokens, and the spans and keys that these see.
    number = own_blocks[:, None] * per_block + torch.arange(per_block, device=own_blocks.device)
    number = number.flatten().expand(batch, -1)
    token = number * stride
    span = span_of_tokens(spans.start, spans.stop, seq_len).gather(1, token)
    start = ranges.start.expand(batch, -1).gather(1, token)

    # [B, n_local c]: a key cell is that of its last token's document. It is seen if not all of it
    # is before the mask's start, and if it is not later than the query's.
    known = span.clamp(max=span_count - 1)
    first = lookup(spans.start, known).maximum(start) // stride
    stop = (lookup(spans.stop, known) // stride).minimum(number + 1)
    sees = (span < span_count) & (first < stop)

    # [B, n_local, T]: the spans that touch each block. [B, n_local, c]: which of them is a cell's.
    touching = spans_of_blocks(spans, own_blocks, block_size)
    by_block = span.unflatten(1, (-1, per_block))
    is_of = by_block[..., None] == touching[:, :, None]
    slot = is_of.int().argmax(-1)
    first_block = lookup(spans.first_block, touching.clamp(min=0))
    return QueryBlocks(
        first=torch.where(sees, first, 0).unflatten(1, (-1, per_block)).int(),
        stop=torch.where(sees, stop, 0).unflatten(1, (-1, per_block)).int(),
        slot=slot.int(),
        number=own_blocks.int(),
        first_block=torch.where(touching >= 0, first_block, -1).int(),
        dense_from=spans.dense_from[:, own_blocks].int(),
    )
