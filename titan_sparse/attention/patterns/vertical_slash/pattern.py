"""Vertical-slash selection (MTraining, section 4 and appendix B.1).

Every query head has its own choice, per sequence, or per document in a packed sequence. The probe,
some of a span's queries, looks at all its keys. Verticals are the single keys, and slashes the
block diagonals, that carry the target share of the attention mass. A slash is one entry of a 1-D
list per head, never a mask.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, TypeVar

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
from titan_sparse.attention.patterns.vertical_slash.probe import Geometry, probe_geometry
from titan_sparse.attention.patterns.vertical_slash.rows import (
    last_rows,
    probe_seed,
    spread_rows,
)
from titan_sparse.kernels.budget import Segments
from titan_sparse.kernels.prices import loss_allowed

T = TypeVar("T")


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

    recall: share of the attention mass to reach, in (0, 1].
    budget: "joint", each head reaches the recall over all rows, in the least time (priced.py);
        "layer", all heads share one price of a pair of tokens, and their mean reaches it, which
        takes less mass from heads that spread it; "independent", verticals and slashes of each head each have to reach
        the recall alone, in the probe's rows (the paper; independent.py).
    probe: queries of each span that are looked at; 0 means block_size.
    probe_rows: "spread", one at random in each of as many equal parts of the span; "last", the
        span's last ones (the paper); "both", a quarter of them the last ones, where questions
        stand, the others spread over what is before.
    sinks: first tokens of each span that are always verticals.
    count_sinks: whether their mass counts in recall. It is much mass and carries little: 0.9 of the
        rest is worth more than 0.95 of all. Budget "independent" always counts it.
    local_diagonals: nearest block diagonals, which are always on.
    min_columns, max_columns, min_slashes, max_slashes: bounds on the budgets, sinks and local
        diagonals not counted. max_slashes = 0 means no cap, max_columns = 0 no verticals but the
        sinks. A document in a packed sequence gets its share of the maxima by length (at least the
        minimum).
    dense_below: documents of a packed sequence with fewer tokens are computed whole.
    Raises ValueError for values out of range.
    """

    recall: float = 0.9
    probe: int = 0
    sinks: int = 4
    local_diagonals: int = 2
    min_columns: int = 0
    max_columns: int = 4096
    min_slashes: int = 0
    max_slashes: int = 0
    dense_below: int = 4096
    budget: str = "joint"
    probe_rows: str = "both"
    count_sinks: bool = False
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
        if self.budget not in ("joint", "layer", "independent"):
            raise ValueError(
                f'VerticalSlash(budget="{self.budget}"): write "joint", "layer" or "independent"'
            )
        if self.probe_rows not in ("spread", "last", "both"):
            raise ValueError(
                f'VerticalSlash(probe_rows="{self.probe_rows}"): write "spread", "last" or "both"'
            )
        if not isinstance(self.count_sinks, bool):
            raise ValueError(
                f"VerticalSlash(count_sinks={self.count_sinks!r}): write True or False"
            )
        if self.budget == "independent" and not self.count_sinks:
            raise ValueError(
                'VerticalSlash(budget="independent", count_sinks=False): each head counts its sinks '
                'there; write count_sinks=True or budget="joint"'
            )
        for field in dataclasses.fields(self):
            if field.name in ("recall", "budget", "probe_rows", "count_sinks"):
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
            self.local_diagonals,
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
            shared=self.budget == "layer",
            least_verticals=self.min_columns,
            least_diagonals=self.min_slashes,
            most_verticals=_share(self.max_columns, self.min_columns, spans),
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
        tile = tiles_of_diagonals(spans, geometry.rows, blocks, cp.block_size)
        return Pairs(self._segments(spans, seq_len, diagonals, sequence), tile[sequence])

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
