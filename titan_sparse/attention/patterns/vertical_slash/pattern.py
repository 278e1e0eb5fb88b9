"""Vertical-slash selection (MTraining, section 4 and appendix B.1).

Every query head selects for itself, per sequence, or per document in a packed sequence. The last
`probe` queries of a span look at all its keys. Verticals are the single keys, and slashes the block
diagonals, that carry the target share of the attention mass seen there. A slash is one entry of a
1-D list per head, never a mask.
"""

import dataclasses
from typing import ClassVar

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
from titan_sparse.attention.patterns.vertical_slash.budget import compact, smallest_sets
from titan_sparse.attention.patterns.vertical_slash.joint import incidence, smallest_union
from titan_sparse.attention.patterns.vertical_slash.probe import (
    probe_geometry,
    probe_masses,
    sequences_of_pairs,
)
from titan_sparse.kernels.budget import Segments
from titan_sparse.kernels.joint import Incidence
from titan_sparse.kernels.probe import blocks_back


class VerticalSlashIndex(BlockIndex):
    """Block diagonals per span (slashes) and single keys (verticals), for every query head.

    slashes: bool [B, Hq, E]; entry spans.offset[d] + delta is the diagonal of block pairs delta
        apart in span d.
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
            # [B, nq, nk] -> [B, Hq, nq * nk]: the diagonal of each pair of blocks.
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


@dataclasses.dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Parameters of the selection; counts are per query head.

    recall: share of the probe's attention mass to reach, in (0, 1].
    budget: "independent", verticals and slashes each have to reach the recall alone (the paper);
        "joint", the cheapest union of both has to reach it, those that are always on included
        (joint.py).
    probe: last queries of each span that are looked at; 0 means block_size.
    sinks: first tokens of each span that are always verticals.
    local_diagonals: nearest block diagonals, which are always on.
    min_columns, max_columns, min_slashes, max_slashes: bounds on the budgets, sinks and local
        diagonals not counted. max_slashes = 0 means no cap, max_columns = 0 no verticals but the
        sinks. A document in a packed sequence gets its share of the maxima by length (at least the
        minimum).
    dense_below: documents of a packed sequence with fewer tokens are computed whole.
    Raises ValueError for values out of range.
    """

    recall: float = 0.95
    probe: int = 0
    sinks: int = 30
    local_diagonals: int = 2
    min_columns: int = 0
    max_columns: int = 4096
    min_slashes: int = 0
    max_slashes: int = 0
    dense_below: int = 4096
    budget: str = "independent"
    name: ClassVar[str] = "vertical_slash"

    def __post_init__(self) -> None:
        if not 0 < self.recall <= 1:
            raise ValueError(
                f"VerticalSlash(recall={self.recall}): a share of the attention mass, above 0, "
                "at most 1"
            )
        if self.local_diagonals < 1:
            raise ValueError(
                "VerticalSlash(local_diagonals=0): a query must see its own block, write 1 or more"
            )
        if self.budget not in ("independent", "joint"):
            raise ValueError(
                f'VerticalSlash(budget="{self.budget}"): write "independent" or "joint"'
            )
        for field in dataclasses.fields(self):
            if field.name in ("recall", "budget"):
                continue
            count = getattr(self, field.name)
            if count < 0:
                raise ValueError(f"VerticalSlash({field.name}={count}): write 0 or more")
        if self.min_columns > self.max_columns or 0 < self.max_slashes < self.min_slashes:
            raise ValueError("VerticalSlash: the minimum of a budget is above its maximum")
        super().__post_init__()

    def probe_queries(self, block_size: int) -> int:
        """Number of queries looked at per span."""
        return self.probe or block_size

    def vertical_capacity(self, seq_len: int, block_size: int, packed: bool) -> int:
        """The most verticals that a head can have, rounded up to whole blocks."""
        n = slots(seq_len, self.dense_below, packed)
        most = self.max_columns + n * self.sinks
        if packed:
            # Shares of the maximum are rounded up, or up to the minimum.
            most += n * (self.min_columns + 1)
        return -(-min(most, seq_len) // block_size) * block_size

    def check_block_size(self, block_size: int) -> None:
        """ValueError if a block could touch three spans, or the probe be longer than a document."""
        queries = self.probe_queries(block_size)
        least = max(block_size, queries)
        if self.dense_below < least:
            raise ValueError(
                f"vertical_slash.dense_below = {self.dense_below} must be at least block_size "
                f"({block_size}) and probe ({queries}); write dense_below = {least} or more"
            )

    def select_tensors(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        batch, heads = q.shape[:2]
        seq_len = ranges.start.shape[1]
        block_size = cp.block_size
        queries = self.probe_queries(block_size)
        joint = self.budget == "joint"

        # Masses of N (sequence, head) pairs, this rank's share: verticals [N, K, V, b], diagonals
        # [N, E].
        spans = self._spans(ranges, batch, block_size)
        geometry = probe_geometry(ranges, spans, self, cp, queries, (batch, heads))
        verticals, diagonals = probe_masses(q, k, geometry, cp, queries, scale, split=joint)
        entry_count = diagonals.shape[1]

        # selected: bool [N, S + E], capped: bool [N, 2 n].
        segments = once_per_selection(
            ranges,
            "segments",
            self,
            cp,
            (batch, heads),
            lambda: self._segments(
                spans, seq_len, entry_count, sequences_of_pairs(batch, heads, cp, q.device)
            ),
        )
        if joint:
            incidence = self._incidence(ranges, spans, segments, cp, (batch, heads))
            selected, capped = smallest_union(verticals, segments, incidence, self.recall, queries)
        else:
            mass = torch.cat([verticals.flatten(1), diagonals], dim=1)
            selected, capped = smallest_sets(mass, segments, self.recall, queries)

        # One gather for everything chosen, int32 [N, C + E + 2] a rank.
        capacity = self.vertical_capacity(seq_len, block_size, ranges.document_start is not None)
        verticals = compact(selected[:, :seq_len], capacity, seq_len)
        slashes = selected[:, seq_len:].int()
        capped = capped.unflatten(1, (2, -1)).any(-1).int()
        chosen = torch.cat([verticals, slashes, capped], dim=1)
        # The last ranks may have chosen for pairs that do not exist.
        all_chosen = cp.all_gather(chosen).flatten(0, 1)[: batch * heads]
        all_chosen = all_chosen.view(batch, heads, -1)
        verticals, slashes, capped = all_chosen.split([capacity, entry_count, 2], dim=-1)
        return [slashes.bool(), verticals.contiguous(), capped.bool()]

    def _spans(self, ranges: MaskRanges, batch: int, block_size: int) -> Spans:
        return spans_of_mask(ranges, batch, self.dense_below, block_size)

    def _incidence(
        self,
        ranges: MaskRanges,
        spans: Spans,
        segments: Segments,
        cp: ContextParallel,
        shape: tuple[int, int],
    ) -> Incidence:
        """Which diagonals each vertical meets, remembered for the mask.

        shape: batch size and query heads.
        """
        seq_len = ranges.start.shape[1]
        back = blocks_back(self.probe_queries(cp.block_size), cp.block_size)
        return once_per_selection(
            ranges,
            "incidence",
            self,
            cp,
            shape,
            lambda: incidence(spans, segments, seq_len, back, cp.block_size),
        )

    def _segments(self, spans: Spans, seq_len: int, diagonals: int, sequence: Tensor) -> Segments:
        """What is chosen from in a row of masses [S + E], in 2 n segments.

        These are each span's verticals, then each span's diagonals.
        diagonals: E. sequence: int64 [N], of each row.
        """
        n = spans.start.shape[1]
        # [B, S]: the segment of each vertical is its span.
        vertical_segment = span_of_tokens(spans.start, spans.stop, seq_len)
        vertical_segment = vertical_segment.where(vertical_segment < n, 2 * n)
        # [B, E]: those of the diagonals come after them.
        entry = torch.arange(diagonals, device=spans.start.device)
        entry = entry.expand(len(vertical_segment), -1).contiguous()
        first_behind = spans.offset + spans.diagonals
        diagonal_segment = n + torch.searchsorted(first_behind, entry, right=True)

        most_verticals = _share(self.max_columns, self.min_columns, spans)
        if self.max_slashes:
            most_slashes = _share(self.max_slashes, self.min_slashes, spans)
        else:
            # No cap must not be shared out: a short span can touch more diagonals than its part of
            # the list's length.
            most_slashes = spans.diagonals
        first_diagonal = seq_len + spans.offset
        vertical_bounds = _bounds(
            spans.start, spans.stop, self.min_columns, most_verticals, self.sinks
        )
        diagonal_bounds = _bounds(
            first_diagonal,
            first_diagonal + spans.diagonals,
            self.min_slashes,
            most_slashes,
            self.local_diagonals,
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
        """Bound, known without looking, on the KV blocks that a query block can meet by slashes.

        It counts the cap of each span that the block may touch (two in a packed sequence) and short
        documents. All blocks where there is no cap.
        """
        blocks = -(-seq_len // block_size)
        if not self.max_slashes:
            return blocks
        slashes = self.max_slashes + self.min_slashes + self.local_diagonals + 1
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
