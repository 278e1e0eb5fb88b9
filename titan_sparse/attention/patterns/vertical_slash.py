"""Vertical-slash selection (MTraining, section 4 and appendix B.1): per sequence, or document when packed, and query head.

The last `probe` queries of a span look at all its keys. Verticals are the key columns, slashes the block diagonals, that
carry the target share of the attention mass seen there. A slash is one entry of a 1-D list per head, never a mask.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks import Rows
from titan_sparse.attention.memo import once_per_mask
from titan_sparse.attention.patterns.base import BlockIndex, Pattern
from titan_sparse.attention.patterns.budget import compact, smallest_sets
from titan_sparse.attention.patterns.probe import probe_masses, sequences_of_pairs
from titan_sparse.attention.patterns.spans import Spans, entries, find_spans, slots, span_of_tokens, spans_of_blocks

if TYPE_CHECKING:
    from titan_sparse.attention.context_parallel import ContextParallel


class VerticalSlashIndex(BlockIndex):
    """Block diagonals per span (slashes) and key columns (verticals), for every query head.

    slashes: bool [B, Hq, E], entry spans.offset[d] + delta is the diagonal of block pairs delta apart in span d.
    columns: int32 [B, Hq, C]. capped: bool [B, Hq, 2], whether the cap on columns, on slashes kept a budget short.
    most_blocks: bound on the KV blocks that a query block meets.
    """

    def __init__(self, slashes: Tensor, columns: Tensor, capped: Tensor, spans: Spans, seq_len: int, block_size: int,
                 most_blocks: int):
        super().__init__(columns.shape[1], seq_len, block_size, columns)
        self.slashes, self.capped, self.spans, self.most_blocks = slashes, capped, spans, most_blocks

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        q_blocks, k_blocks = q_blocks.long(), k_blocks.long()
        delta = q_blocks[:, None] - k_blocks
        selected = (k_blocks >= self.spans.dense_from[:, q_blocks, None])[:, None] & (delta >= 0)
        batch, heads = self.slashes.shape[:2]
        for slot in spans_of_blocks(self.spans, q_blocks, self.block_size).unbind(-1):
            known = slot.clamp(min=0)
            inside = (slot >= 0)[..., None] & (delta >= 0) & (k_blocks >= self.spans.first_block.gather(1, known)[..., None])
            entry = torch.where(inside, self.spans.offset.gather(1, known)[..., None] + delta, 0)
            on = self.slashes.gather(2, entry.view(batch, 1, -1).expand(-1, heads, -1)).view(batch, heads, *delta.shape)
            selected = selected | (on & inside[:, None])
        return selected

    def tensors(self) -> list[Tensor]:
        return [self.slashes, self.columns, self.capped]

    def block_spans(self, q_blocks: Tensor) -> Tensor:
        """int32 [B, nq, 5], what selects() looks up for each query block, as kernels/block_tables.py takes it."""
        slot = spans_of_blocks(self.spans, q_blocks, self.block_size)
        slot = torch.nn.functional.pad(slot, (0, 2 - slot.shape[-1]), value=-1)
        known = slot.clamp(min=0).flatten(1)
        offset, first = (x.gather(1, known).view_as(slot) for x in (self.spans.offset, self.spans.first_block))
        fields = torch.stack([offset.where(slot >= 0, -1), first], dim=-1).flatten(2)
        return torch.cat([fields, self.spans.dense_from[:, q_blocks, None]], dim=-1).int()


class Limits(NamedTuple):
    """Bounds on one kind of choice for N (sequence, head) pairs, over L columns or diagonals in n spans.

    segment: int64 [N, L], the span of each, n for none. most: int64 [N, n]. always: bool [N, L], on whatever the mass.
    """

    segment: Tensor
    most: Tensor
    always: Tensor


@dataclasses.dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Parameters of the selection; counts are per query head.

    recall: share of the probe's attention mass that verticals, and slashes, each have to reach, in (0, 1].
    probe: last queries of each span that are looked at; 0 means block_size.
    sinks: first tokens of each span that are always columns. local_diagonals: nearest block diagonals always on.
    min_columns, max_columns, min_slashes, max_slashes: bounds on the budgets, sinks and local diagonals not counted;
    max_slashes = 0 means no cap, max_columns = 0 no columns but the sinks. Of the maxima a document in a packed sequence gets its share by length (at least the minimum).
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
    name: ClassVar[str] = "vertical_slash"

    def __post_init__(self) -> None:
        if not 0 < self.recall <= 1:
            raise ValueError(f"VerticalSlash(recall={self.recall}): a share of the attention mass, above 0, at most 1")
        if self.local_diagonals < 1:
            raise ValueError("VerticalSlash(local_diagonals=0): a query must see its own block, write 1 or more")
        negative = [f.name for f in dataclasses.fields(self) if f.name != "recall" and getattr(self, f.name) < 0]
        if negative:
            raise ValueError(f"VerticalSlash({negative[0]}={getattr(self, negative[0])}): write 0 or more")
        if self.min_columns > self.max_columns or 0 < self.max_slashes < self.min_slashes:
            raise ValueError("VerticalSlash: the minimum of a budget is above its maximum")
        super().__post_init__()

    def probe_queries(self, block_size: int) -> int:
        """Number of queries looked at per span."""
        return self.probe or block_size

    def column_capacity(self, seq_len: int, block_size: int, packed: bool) -> int:
        """Columns that a head can have at the most, rounded up to whole blocks."""
        n = slots(seq_len, self.dense_below, packed)
        most = self.max_columns + n * self.sinks + (n * (self.min_columns + 1) if packed else 0)
        return -(-min(most, seq_len) // block_size) * block_size

    def check_block_size(self, block_size: int) -> None:
        """ValueError if a block could touch three selected documents, or the probe be longer than a document."""
        if self.dense_below < max(block_size, self.probe_queries(block_size)):
            raise ValueError(
                f"vertical_slash.dense_below = {self.dense_below} must be at least block_size ({block_size}) and probe "
                f"({self.probe_queries(block_size)}); write dense_below = {max(block_size, self.probe_queries(block_size))} or more"
            )

    def select_tensors(self, q: Tensor, k: Tensor, rows: Rows, cp: "ContextParallel", scale: float) -> list[Tensor]:
        batch, heads = q.shape[:2]
        seq_len, block_size = rows.start.shape[1], cp.block_size
        spans = self._spans(rows, batch, block_size)
        vertical, slash = probe_masses(q, k, rows, spans, self.key, cp, self.probe_queries(block_size), scale)
        limits = once_per_mask(rows, ("limits", self.key, cp.key, batch, heads), lambda: self._limits(
            Spans(*(x[sequences_of_pairs(batch, heads, cp, q.device)] for x in spans)), vertical.shape[1], slash.shape[1]))
        columns, column_capped = self._chosen(vertical, limits[0], self.min_columns)
        slashes, slash_capped = self._chosen(slash, limits[1], self.min_slashes)
        capacity = self.column_capacity(seq_len, block_size, rows.document_start is not None)
        mine = torch.cat([compact(columns, capacity, seq_len), slashes.int(), column_capped.int()[:, None],
                          slash_capped.int()[:, None]], dim=1)
        every = cp.all_gather(mine).flatten(0, 1)[: batch * heads].view(batch, heads, -1)
        columns, slashes, capped = every.split([capacity, slashes.shape[1], 2], dim=-1)
        return [slashes.bool(), columns.contiguous(), capped.bool()]

    def _spans(self, rows: Rows, batch: int, block_size: int) -> Spans:
        key = ("spans", batch, self.dense_below, block_size)
        return once_per_mask(rows, key, lambda: find_spans(rows, batch, self.dense_below, block_size))

    def _limits(self, spans: Spans, seq_len: int, diagonals: int) -> tuple["Limits", "Limits"]:
        """Bounds on the choice of columns [N, seq_len] and of diagonals [N, diagonals] of N (sequence, head) pairs."""
        n, device = spans.start.shape[1], spans.start.device
        segment = span_of_tokens(spans.start, spans.stop, seq_len)
        begin = spans.start.gather(1, segment.clamp(max=n - 1))
        sinks = (segment < n) & (torch.arange(seq_len, device=device) < begin + self.sinks)
        columns = Limits(segment, _share(self.max_columns, self.min_columns, spans), sinks)
        entry = torch.arange(diagonals, device=device).expand(len(segment), -1).contiguous()
        segment = torch.searchsorted(spans.offset + spans.diagonals, entry, right=True)
        local = entry - spans.offset.gather(1, segment.clamp(max=n - 1)) < self.local_diagonals
        # No cap must not be shared out: a short span can touch more diagonals than its part of the list's length.
        most = torch.full_like(spans.start, diagonals)
        limit = _share(self.max_slashes, self.min_slashes, spans) if self.max_slashes else most
        return columns, Limits(segment, limit, (segment < n) & local)

    def _chosen(self, mass: Tensor, limits: "Limits", minimum: int) -> tuple[Tensor, Tensor]:
        """Selected bool [N, L] and capped bool [N] from masses [N, L]."""
        selected, capped = smallest_sets(mass, limits.segment, self.recall, minimum, limits.most)
        return selected | limits.always, capped

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        diagonals = entries(seq_len, block_size, slots(seq_len, self.dense_below, packed))
        capacity = self.column_capacity(seq_len, block_size, packed)
        return [
            q.new_empty(batch, heads, diagonals, dtype=torch.bool),
            q.new_empty(batch, heads, capacity, dtype=torch.int32),
            q.new_empty(batch, heads, 2, dtype=torch.bool),
        ]

    def column_count(self, tensors: list[Tensor]) -> int:
        return tensors[1].shape[-1]

    def index(self, tensors: list[Tensor], rows: Rows, batch: int, heads: int, block_size: int) -> VerticalSlashIndex:
        spans = self._spans(rows, batch, block_size)
        most_blocks = self.most_blocks(rows.start.shape[1], block_size, rows.document_start is not None)
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


def _share(most: int, least: int, spans: Spans) -> Tensor:
    """A budget's cap for each span, int64 [N, n]: all of it for an unpacked sequence, else in proportion to length.

    Padding does not count as length, so that the number of ranks it depends on does not change the selection.
    """
    length = spans.stop - spans.start
    share = (most * length + spans.tokens - 1) // spans.tokens.clamp(min=1)
    return torch.maximum(share, torch.full_like(length, least))
