"""Vertical-slash selection (MTraining, section 4 and appendix B.1).

Every query head has its own choice, per sequence, or per document in a packed sequence. The probe,
some of a span's queries, looks at all its keys. Verticals are the single keys, and slashes the
block diagonals, that carry the target share of the attention mass. A slash is one entry of a 1-D
list per head, never a mask.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex, Pattern
from titan_sparse.attention.patterns.spans import (
    Spans,
    entries,
    lookup,
    once_per_selection,
    slots,
    span_of_tokens,
    spans_of_blocks,
    spans_of_mask,
)
from titan_sparse.attention.patterns.vertical_slash.independent import (
    Pairs,
    Segments,
    choose_independent,
    sequences_of_pairs,
    tiles_of_diagonals,
)
from titan_sparse.attention.patterns.vertical_slash.priced import (
    Limits,
    Priced,
    choose_priced,
    priced_geometry,
)
from titan_sparse.attention.patterns.vertical_slash.probe import (
    Geometry,
    last_rows,
    probe_geometry,
    probe_seed,
    spread_rows,
)
from titan_sparse.kernels.prices import loss_allowed
from titan_sparse.options import VerticalSlashOptions

T = TypeVar("T")


class VerticalSlashIndex(BlockIndex):
    """Slashes (block diagonals) per span and single keys (verticals), for every query head.

    slashes: bool [B, Hq, E]; entry spans.offset[d] + delta is the slash of block pairs at
        distance delta in span d.
    verticals: int32 [B, Hq, C].
    capped: bool [B, Hq, 2], whether the cap on verticals, and the cap on slashes, kept a budget
        short.
    most_blocks: bound on the KV blocks that a query block meets.
    """

    by_head = ("verticals", "slashes", "capped")

    def __init__(
        self,
        slashes: Tensor,
        verticals: Tensor,
        capped: Tensor,
        spans: Spans,
        seq_len: int,
        block_size: int,
        most_blocks: int,
    ):
        super().__init__(verticals.shape[1], seq_len, block_size, verticals)
        self.slashes = slashes
        self.capped = capped
        self.spans = spans
        self.most_blocks = most_blocks

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        spans = self.spans
        batch, heads = self.slashes.shape[:2]
        q_blocks = q_blocks.long()
        k_blocks = k_blocks.long()
        # [nq, nk]
        delta = q_blocks[:, None] - k_blocks
        past = delta >= 0
        # [B, 1, nq, nk]: short documents are seen whole.
        dense_from = spans.dense_from[:, q_blocks, None]
        selected = (k_blocks >= dense_from)[:, None] & past

        # [B, nq, T]: a query block touches one span or two.
        touching = spans_of_blocks(spans, q_blocks, self.block_size)
        for slot in touching.unbind(-1):
            # [B, nq, 1]
            known = slot.clamp(min=0)
            first_block = spans.first_block.gather(1, known)[..., None]
            offset = spans.offset.gather(1, known)[..., None]
            # [B, nq, nk]
            inside = (slot >= 0)[..., None] & past & (k_blocks >= first_block)
            # [B, nq, nk] -> [B, Hq, nq * nk]: the slash of each pair of blocks.
            entry = torch.where(inside, offset + delta, 0)
            entry = entry.view(batch, 1, -1).expand(-1, heads, -1)
            # [B, Hq, nq, nk]
            on = self.slashes.gather(2, entry)
            on = on.view(batch, heads, *delta.shape)
            selected = selected | (on & inside[:, None])
        return selected

    def tensors(self) -> list[Tensor]:
        return [self.slashes, self.verticals, self.capped]

    def block_spans(self, q_blocks: Tensor) -> Tensor:
        """int32 [B, nq, 5]: what selects() looks up for each query block.

        In the form that kernels/block_tables.py takes.
        That is offset (-1 for no span) and first block of the two spans that it touches, then its
        dense_from.
        """
        spans = self.spans
        slot = spans_of_blocks(spans, q_blocks, self.block_size)
        # [B, nq, 2]: two spans even where a sequence has room for one.
        slot = F.pad(slot, (0, 2 - slot.shape[-1]), value=-1)
        known = slot.clamp(min=0)
        offset = lookup(spans.offset, known)
        offset = offset.where(slot >= 0, -1)
        first_block = lookup(spans.first_block, known)

        # [B, nq, 4]
        fields = torch.stack([offset, first_block], dim=-1).flatten(2)
        # [B, nq, 1]
        dense_from = spans.dense_from[:, q_blocks, None]
        return torch.cat([fields, dense_from], dim=-1).int()


def heads_selecting(index: BlockIndex, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
    """How many heads compute each pair of global blocks: int32 [B or 1, 1, nq, nk].

    q_blocks: int64 [nq]. k_blocks: int64 [nk]. The slashes of a vertical-slash index are summed
    over heads before they are looked up, which is about Hq times cheaper.
    """
    if isinstance(index, VerticalSlashIndex):
        # [B, 1, E]
        heads_with_slash = index.slashes.sum(1, keepdim=True, dtype=torch.int32)
        return values_on_slashes(
            index, heads_with_slash, index.heads, q_blocks, k_blocks.view(1, 1, 1, -1)
        )
    # [B or 1, Hq or 1, nq, nk]
    selected = index.selects(q_blocks, k_blocks)
    # A pattern that treats all heads alike answers for one of them.
    heads_per_answer = index.heads // selected.shape[1]
    return selected.sum(1, keepdim=True, dtype=torch.int32) * heads_per_answer


def values_on_slashes(
    index: VerticalSlashIndex,
    values: Tensor,
    value_of_short: int,
    q_blocks: Tensor,
    k_blocks: Tensor,
) -> Tensor:
    """Look up `values` at the slash of each pair of blocks; 0 where there is none.

    values: [B, H, E], one for each entry of index.slashes. value_of_short: the value inside short
    documents, which are computed whole. q_blocks: int64 [nq]. k_blocks: [B or 1, H or 1, 1, m].
    Returns [B, H, nq, m].

    Two documents can meet in a query block. The later one adds only the tile on the main diagonal,
    and the earlier one has that tile already, because local_slashes is 1 or more. So the entries
    of the first span are enough.
    """
    # [B, 1, nq, 1] each: first entry of the span, its first block, the block from which on short
    # documents are computed whole.
    spans = index.block_spans(q_blocks)[:, None, :, None]
    begin, first_block, _, _, dense_from = spans.unbind(-1)
    # [B or 1, H or 1, nq, m]
    delta = q_blocks.int()[:, None] - k_blocks.int()
    in_span = (begin >= 0) & (delta >= 0) & (k_blocks >= first_block)
    # Entry 0 stands in outside of the span, where the product below removes its value.
    entry = ((begin + delta) * in_span).expand(*values.shape[:2], -1, -1)
    looked_up = values.gather(2, entry.flatten(2).long()).view(entry.shape) * in_span
    in_short = (k_blocks >= dense_from) & (delta >= 0)
    short = in_short * torch.tensor(value_of_short, dtype=values.dtype)
    return torch.maximum(looked_up, short)


class VerticalSlash(Pattern, VerticalSlashOptions):
    """Verticals and slashes chosen online from a probe. VerticalSlashOptions has the parameters."""

    def probe_queries(self, block_size: int) -> int:
        """Number of queries looked at per span."""
        return self.probe or block_size

    def vertical_capacity(self, seq_len: int, block_size: int, packed: bool) -> int:
        """The most verticals that a head can have, rounded up to whole blocks."""
        n = slots(seq_len, self.dense_below, packed)
        most = self.max_verticals + n * self.sinks
        if packed:
            # Shares of the maximum are rounded up, or up to the minimum.
            most += n * (self.min_verticals + 1)
        return -(-min(most, seq_len) // block_size) * block_size

    def select_tensors(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        batch, heads = q.shape[:2]
        seq_len = ranges.start.shape[1]
        capacity = self.vertical_capacity(seq_len, cp.block_size, ranges.document_start is not None)
        geometry = self._remembered(ranges, "probe", cp, (batch,), self._geometry)
        if self.budget == "independent":
            pairs = self._remembered(ranges, "pairs", cp, (batch, heads), self._pairs)
            chosen = choose_independent(q, k, geometry, pairs, cp, scale, self.recall, capacity)
        else:
            priced = self._remembered(ranges, "priced", cp, (batch,), self._priced)
            limits = self._remembered(ranges, "limits", cp, (batch,), self._limits)
            chosen = choose_priced(q, k, geometry, priced, limits, cp, scale, capacity)
        verticals, slashes, capped = chosen
        return [slashes, verticals, capped]

    # What follows from the mask and the rows alone is worked out once, not once a layer.

    def _remembered(
        self,
        ranges: MaskRanges,
        name: str,
        cp: ContextParallel,
        shape: tuple[int, ...],
        compute: Callable[[MaskRanges, ContextParallel, tuple[int, ...]], T],
    ) -> T:
        """compute(), remembered for the mask, and for the seed where rows are drawn.

        shape: batch size and, where it matters, query heads.
        """
        seed = 0 if self.probe_rows == "last" else probe_seed()
        return once_per_selection(
            ranges, name, self, cp, shape, lambda: compute(ranges, cp, shape), version=seed
        )

    def _spans(self, ranges: MaskRanges, batch: int, block_size: int) -> Spans:
        return spans_of_mask(ranges, batch, self.dense_below, block_size)

    def _geometry(
        self, ranges: MaskRanges, cp: ContextParallel, shape: tuple[int, ...]
    ) -> Geometry:
        spans = self._spans(ranges, shape[0], cp.block_size)
        seq_len = ranges.start.shape[1]
        queries = self.probe_queries(cp.block_size)
        if self.probe_rows == "last":
            rows = last_rows(spans, queries, seq_len, cp.block_size)
        else:
            last = queries // 4 if self.probe_rows == "both" else 0
            rows = spread_rows(spans, queries, seq_len, cp.block_size, probe_seed(), last)
        return probe_geometry(ranges, spans, rows, cp)

    def _priced(self, ranges: MaskRanges, cp: ContextParallel, shape: tuple[int, ...]) -> Priced:
        spans = self._spans(ranges, shape[0], cp.block_size)
        geometry = self._remembered(ranges, "probe", cp, shape, self._geometry)
        seq_len = ranges.start.shape[1]
        return priced_geometry(
            spans,
            geometry,
            seq_len,
            cp.block_size,
            self.sinks,
            self.local_slashes,
            self.count_sinks,
        )

    def _limits(self, ranges: MaskRanges, cp: ContextParallel, shape: tuple[int, ...]) -> Limits:
        spans = self._spans(ranges, shape[0], cp.block_size)
        geometry = self._remembered(ranges, "probe", cp, shape, self._geometry)
        # [B, n]
        probed = geometry.rows.group_rows.sum(-1)
        most_diagonals = None
        if self.max_slashes:
            most_diagonals = _share(self.max_slashes, self.min_slashes, spans)
        return Limits(
            allowed=loss_allowed(probed, self.recall),
            least_verticals=self.min_verticals,
            least_diagonals=self.min_slashes,
            most_verticals=_share(self.max_verticals, self.min_verticals, spans),
            most_diagonals=most_diagonals,
        )

    def _pairs(self, ranges: MaskRanges, cp: ContextParallel, shape: tuple[int, ...]) -> Pairs:
        batch, heads = shape
        spans = self._spans(ranges, batch, cp.block_size)
        geometry = self._remembered(ranges, "probe", cp, (batch,), self._geometry)
        seq_len = ranges.start.shape[1]
        blocks = seq_len // cp.block_size
        sequence = sequences_of_pairs(batch, heads, cp, spans.start.device)
        diagonals = entries(seq_len, cp.block_size, spans.start.shape[1])
        tile = tiles_of_diagonals(spans, geometry, blocks, cp.block_size)
        return Pairs(self._segments(spans, seq_len, diagonals, sequence), tile[sequence])

    def _segments(self, spans: Spans, seq_len: int, diagonals: int, sequence: Tensor) -> Segments:
        """What is chosen from in a row of masses [S + E], in 2 n segments.

        These are each span's verticals, then each span's slashes.
        diagonals: E. sequence: int64 [N], of each row.
        """
        n = spans.start.shape[1]
        # [B, S]: the segment of each vertical is its span.
        vertical_segment = span_of_tokens(spans.start, spans.stop, seq_len)
        vertical_segment = vertical_segment.where(vertical_segment < n, 2 * n)
        # [B, E]: those of the slashes come after them.
        entry = torch.arange(diagonals, device=spans.start.device)
        entry = entry.expand(len(vertical_segment), -1).contiguous()
        first_behind = spans.offset + spans.diagonals
        diagonal_segment = n + torch.searchsorted(first_behind, entry, right=True)

        most_verticals = _share(self.max_verticals, self.min_verticals, spans)
        if self.max_slashes:
            most_slashes = _share(self.max_slashes, self.min_slashes, spans)
        else:
            # No cap must not be shared out: a short span can touch more slashes than its part of
            # the list's length.
            most_slashes = spans.diagonals
        first_diagonal = seq_len + spans.offset
        vertical_bounds = _bounds(
            spans.start, spans.stop, self.min_verticals, most_verticals, self.sinks
        )
        diagonal_bounds = _bounds(
            first_diagonal,
            first_diagonal + spans.diagonals,
            self.min_slashes,
            most_slashes,
            self.local_slashes,
        )
        # [B, 2 n, 5]; the counts may be larger than int32, for example an unlimited maximum.
        bounds = torch.cat([vertical_bounds, diagonal_bounds], dim=1)
        bounds = bounds.clamp(max=seq_len + diagonals)
        segment = torch.cat([vertical_segment, diagonal_segment], dim=1)
        return Segments(sequence.int(), segment.int(), bounds.int())

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        diagonals = entries(seq_len, block_size, slots(seq_len, self.dense_below, packed))
        capacity = self.vertical_capacity(seq_len, block_size, packed)
        # As select_tensors() returns them.
        slashes = q.new_empty(batch, heads, diagonals, dtype=torch.bool)
        verticals = q.new_empty(batch, heads, capacity, dtype=torch.int32)
        capped = q.new_empty(batch, heads, 2, dtype=torch.bool)
        return [slashes, verticals, capped]

    def vertical_count(self, tensors: list[Tensor]) -> int:
        _, verticals, _ = tensors
        return verticals.shape[-1]

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> VerticalSlashIndex:
        slashes, verticals, capped = tensors
        seq_len = ranges.start.shape[1]
        packed = ranges.document_start is not None
        spans = self._spans(ranges, batch, block_size)
        most_blocks = self.most_blocks(seq_len, block_size, packed)
        return VerticalSlashIndex(
            slashes, verticals, capped, spans, seq_len, block_size, most_blocks
        )

    def most_blocks(self, seq_len: int, block_size: int, packed: bool) -> int:
        """Upper bound, independent of the data, on the KV blocks that a query block meets by slashes.

        It counts the cap of each span that the block may touch (two in a packed sequence) and short
        documents. All blocks where there is no cap.
        """
        blocks = -(-seq_len // block_size)
        if not self.max_slashes:
            return blocks
        slashes = self.max_slashes + self.min_slashes + self.local_slashes + 1
        if not packed:
            return min(blocks, slashes)
        # A document that begins anywhere in a block touches one block more.
        short_documents = -(-self.dense_below // block_size) + 1
        return min(blocks, 2 * slashes + short_documents)


def _bounds(begin: Tensor, stop: Tensor, least: int, most: Tensor, always: int) -> Tensor:
    """int64 [B, n, 5], as Segments holds them."""
    # [B, n]
    least = torch.full_like(begin, least)
    always = torch.full_like(begin, always)
    # In the order that Segments names.
    fields = [begin, stop, least, most, always]
    return torch.stack(fields, dim=-1)


def _share(most: int, least: int, spans: Spans) -> Tensor:
    """int64 [B, n]: each span's part of a budget's cap.

    It is all of the cap for an unpacked sequence, else in proportion to length.
    Padding does not count as length: the number of ranks, which padding depends on, does not change
    the selection.
    """
    # [B, n]
    length = spans.stop - spans.start
    # [B, 1], not 0 where all is padding.
    tokens = spans.tokens.clamp(min=1)
    # [B, n], rounded up.
    share = (most * length + spans.tokens - 1) // tokens
    return torch.maximum(share, torch.full_like(length, least))
