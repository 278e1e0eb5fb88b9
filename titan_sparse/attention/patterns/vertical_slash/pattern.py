"""Vertical-slash selection (MTraining, section 4 and appendix B.1): per sequence, or document when packed, and query head.

The last `probe` queries of a span look at all its keys. Verticals are the key verticals, slashes the block diagonals, that
carry the target share of the attention mass seen there. A slash is one entry of a 1-D list per head, never a mask.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex, Pattern
from titan_sparse.attention.patterns.vertical_slash.budget import Segments, compact, smallest_sets
from titan_sparse.attention.patterns.vertical_slash.joint import incidence, smallest_union
from titan_sparse.attention.patterns.vertical_slash.probe import (
    blocks_back,
    probe_masses,
    sequences_of_pairs,
)
from titan_sparse.attention.patterns.vertical_slash.spans import (
    Spans,
    entries,
    find_spans,
    slots,
    span_of_tokens,
    spans_of_blocks,
)

if TYPE_CHECKING:
    from titan_sparse.attention.context_parallel.group import ContextParallel


class VerticalSlashIndex(BlockIndex):
    """Block diagonals per span (slashes) and key verticals (verticals), for every query head.

    slashes: bool [B, Hq, E], entry spans.offset[d] + delta is the diagonal of block pairs delta apart in span d.
    verticals: int32 [B, Hq, C]. capped: bool [B, Hq, 2], whether the cap on verticals, on slashes kept a budget short.
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
        self.slashes, self.capped, self.spans, self.most_blocks = (
            slashes,
            capped,
            spans,
            most_blocks,
        )

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        q_blocks, k_blocks = q_blocks.long(), k_blocks.long()
        delta = q_blocks[:, None] - k_blocks
        selected = (k_blocks >= self.spans.dense_from[:, q_blocks, None])[:, None] & (delta >= 0)
        batch, heads = self.slashes.shape[:2]
        for slot in spans_of_blocks(self.spans, q_blocks, self.block_size).unbind(-1):
            known = slot.clamp(min=0)
            inside = (
                (slot >= 0)[..., None]
                & (delta >= 0)
                & (k_blocks >= self.spans.first_block.gather(1, known)[..., None])
            )
            entry = torch.where(inside, self.spans.offset.gather(1, known)[..., None] + delta, 0)
            on = self.slashes.gather(2, entry.view(batch, 1, -1).expand(-1, heads, -1)).view(
                batch, heads, *delta.shape
            )
            selected = selected | (on & inside[:, None])
        return selected

    def tensors(self) -> list[Tensor]:
        return [self.slashes, self.verticals, self.capped]

    def block_spans(self, q_blocks: Tensor) -> Tensor:
        """int32 [B, nq, 5], what selects() looks up for each query block, as kernels/block_tables.py takes it."""
        slot = spans_of_blocks(self.spans, q_blocks, self.block_size)
        slot = torch.nn.functional.pad(slot, (0, 2 - slot.shape[-1]), value=-1)
        known = slot.clamp(min=0).flatten(1)
        offset, first = (
            x.gather(1, known).view_as(slot) for x in (self.spans.offset, self.spans.first_block)
        )
        fields = torch.stack([offset.where(slot >= 0, -1), first], dim=-1).flatten(2)
        return torch.cat([fields, self.spans.dense_from[:, q_blocks, None]], dim=-1).int()


@dataclasses.dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Parameters of the selection; counts are per query head.

    recall: share of the probe's attention mass to reach, in (0, 1]. budget: "independent", verticals and slashes each have to
    reach it alone (the paper); "joint", the union of least cost has to, always-on ones included (joint.py).
    probe: last queries of each span that are looked at; 0 means block_size.
    sinks: first tokens of each span that are always verticals. local_diagonals: nearest block diagonals always on.
    min_columns, max_columns, min_slashes, max_slashes: bounds on the budgets, sinks and local diagonals not counted;
    max_slashes = 0 means no cap, max_columns = 0 no verticals but the sinks. Of the maxima a document in a packed sequence
    gets its share by length (at least the minimum).
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
                f"VerticalSlash(recall={self.recall}): a share of the attention mass, above 0, at most 1"
            )
        if self.local_diagonals < 1:
            raise ValueError(
                "VerticalSlash(local_diagonals=0): a query must see its own block, write 1 or more"
            )
        if self.budget not in ("independent", "joint"):
            raise ValueError(
                f'VerticalSlash(budget="{self.budget}"): write "independent" or "joint"'
            )
        counts = [f.name for f in dataclasses.fields(self) if f.name not in ("recall", "budget")]
        negative = [name for name in counts if getattr(self, name) < 0]
        if negative:
            raise ValueError(
                f"VerticalSlash({negative[0]}={getattr(self, negative[0])}): write 0 or more"
            )
        if self.min_columns > self.max_columns or 0 < self.max_slashes < self.min_slashes:
            raise ValueError("VerticalSlash: the minimum of a budget is above its maximum")
        super().__post_init__()

    def probe_queries(self, block_size: int) -> int:
        """Number of queries looked at per span."""
        return self.probe or block_size

    def vertical_capacity(self, seq_len: int, block_size: int, packed: bool) -> int:
        """Columns that a head can have at the most, rounded up to whole blocks."""
        n = slots(seq_len, self.dense_below, packed)
        most = self.max_columns + n * self.sinks + (n * (self.min_columns + 1) if packed else 0)
        return -(-min(most, seq_len) // block_size) * block_size

    def check_block_size(self, block_size: int) -> None:
        """ValueError if a block could touch three selected documents, or the probe be longer than a document."""
        if self.dense_below < max(block_size, self.probe_queries(block_size)):
            raise ValueError(
                f"vertical_slash.dense_below = {self.dense_below} must be at least block_size ({block_size}) and probe "
                f"({self.probe_queries(block_size)}); write dense_below = "
                f"{max(block_size, self.probe_queries(block_size))} or more"
            )

    def select_tensors(
        self, q: Tensor, k: Tensor, rows: MaskRanges, cp: "ContextParallel", scale: float
    ) -> list[Tensor]:
        batch, heads = q.shape[:2]
        seq_len, block_size = rows.start.shape[1], cp.block_size
        spans, queries = self._spans(rows, batch, block_size), self.probe_queries(block_size)
        joint = self.budget == "joint"
        verticals, diagonals = probe_masses(
            q, k, rows, spans, self.key, cp, queries, scale, split=joint
        )
        segments = once_per_mask(
            rows,
            ("segments", self.key, cp.key, batch, heads),
            lambda: self._segments(
                spans, seq_len, diagonals.shape[1], sequences_of_pairs(batch, heads, cp, q.device)
            ),
        )
        if joint:
            of = once_per_mask(
                rows,
                ("incidence", self.key, cp.key, batch, heads),
                lambda: incidence(
                    spans, segments, seq_len, blocks_back(queries, block_size), block_size
                ),
            )
            selected, capped = smallest_union(verticals, segments, of, self.recall, queries)
        else:
            selected, capped = smallest_sets(
                torch.cat([verticals.flatten(1), diagonals], dim=1), segments, self.recall, queries
            )
        capacity = self.vertical_capacity(seq_len, block_size, rows.document_start is not None)
        verticals = compact(selected[:, :seq_len], capacity, seq_len)
        mine = torch.cat(
            [verticals, selected[:, seq_len:].int(), capped.unflatten(1, (2, -1)).any(-1).int()],
            dim=1,
        )
        every = cp.all_gather(mine).flatten(0, 1)[: batch * heads].view(batch, heads, -1)
        verticals, slashes, capped = every.split([capacity, diagonals.shape[1], 2], dim=-1)
        return [slashes.bool(), verticals.contiguous(), capped.bool()]

    def _spans(self, rows: MaskRanges, batch: int, block_size: int) -> Spans:
        key = ("spans", batch, self.dense_below, block_size)
        return once_per_mask(
            rows, key, lambda: find_spans(rows, batch, self.dense_below, block_size)
        )

    def _segments(self, spans: Spans, seq_len: int, diagonals: int, sequence: Tensor) -> Segments:
        """What is chosen from in a row of probe_masses(): each span's verticals, then its diagonals, 2 n segments."""
        n = spans.start.shape[1]
        vertical = span_of_tokens(spans.start, spans.stop, seq_len)
        entry = (
            torch.arange(diagonals, device=spans.start.device)
            .expand(len(vertical), -1)
            .contiguous()
        )
        diagonal = n + torch.searchsorted(spans.offset + spans.diagonals, entry, right=True)
        # No cap must not be shared out: a short span can touch more diagonals than its part of the list's length.
        most = (
            _share(self.max_slashes, self.min_slashes, spans)
            if self.max_slashes
            else spans.diagonals
        )
        begin = seq_len + spans.offset
        most_verticals = _share(self.max_columns, self.min_columns, spans)
        bounds = torch.cat(
            [
                _bounds(spans.start, spans.stop, self.min_columns, most_verticals, self.sinks),
                _bounds(
                    begin, begin + spans.diagonals, self.min_slashes, most, self.local_diagonals
                ),
            ],
            dim=1,
        ).clamp(max=seq_len + diagonals)
        segment = torch.cat([vertical.where(vertical < n, 2 * n), diagonal], dim=1)
        return Segments(sequence.int(), segment.int(), bounds.int())

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        diagonals = entries(seq_len, block_size, slots(seq_len, self.dense_below, packed))
        capacity = self.vertical_capacity(seq_len, block_size, packed)
        return [
            q.new_empty(batch, heads, diagonals, dtype=torch.bool),
            q.new_empty(batch, heads, capacity, dtype=torch.int32),
            q.new_empty(batch, heads, 2, dtype=torch.bool),
        ]

    def vertical_count(self, tensors: list[Tensor]) -> int:
        return tensors[1].shape[-1]

    def index(
        self, tensors: list[Tensor], rows: MaskRanges, batch: int, heads: int, block_size: int
    ) -> VerticalSlashIndex:
        spans = self._spans(rows, batch, block_size)
        most_blocks = self.most_blocks(
            rows.start.shape[1], block_size, rows.document_start is not None
        )
        return VerticalSlashIndex(*tensors, spans, rows.start.shape[1], block_size, most_blocks)

    def most_blocks(self, seq_len: int, block_size: int, packed: bool) -> int:
        """A bound, known without looking, on the KV blocks that one query block can meet by slashes: both spans that it
        may touch at their cap, and short documents. All blocks where there is no cap."""
        blocks = -(-seq_len // block_size)
        if not self.max_slashes:
            return blocks
        slashes = self.max_slashes + self.min_slashes + self.local_diagonals + 1
        short = -(-self.dense_below // block_size) + 1 if packed else 0
        return min(blocks, (2 if packed else 1) * slashes + short)


def _bounds(begin: Tensor, stop: Tensor, least: int, most: Tensor, always: int) -> Tensor:
    """int64 [B, n, 5], as Segments holds them."""
    return torch.stack(
        [begin, stop, torch.full_like(begin, least), most, torch.full_like(begin, always)], dim=-1
    )


def _share(most: int, least: int, spans: Spans) -> Tensor:
    """A budget's cap for each span, int64 [N, n]: all of it for an unpacked sequence, else in proportion to length.

    Padding does not count as length, so that the number of ranks it depends on does not change the selection.
    """
    length = spans.stop - spans.start
    share = (most * length + spans.tokens - 1) // spans.tokens.clamp(min=1)
    return torch.maximum(share, torch.full_like(length, least))
