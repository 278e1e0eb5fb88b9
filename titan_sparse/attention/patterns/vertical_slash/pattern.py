"""Vertical-slash selection (MTraining, section 4 and appendix B.1).

Every query head has its own choice, per sequence, or per document in a packed sequence. The probe,
some of a span's queries, looks at all its keys. Verticals are the single keys, and slashes the
block diagonals, that carry the target share of the attention mass. A slash is one entry of a 1-D
list per head, never a mask.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask
from titan_sparse.attention.masks.visibility import queries_seeing
from titan_sparse.attention.patterns.base import BlockIndex, Pattern
from titan_sparse.attention.patterns.spans import (
    Spans,
    entries,
    find_spans,
    lookup,
    slots,
    spans_of_blocks,
)
from titan_sparse.attention.patterns.vertical_slash import independent, joint
from titan_sparse.attention.patterns.vertical_slash.probe import (
    last_rows,
    probe_geometry,
    spread_rows,
)
from titan_sparse.options.patterns import VerticalSlashOptions


@dataclass(eq=False)
class VerticalSlashIndex(BlockIndex):
    """Slashes (block diagonals) per span and single keys (verticals), for every query head."""

    by_head = ("verticals", "slashes", "capped")
    has_table_kernels: ClassVar[bool] = True
    shortens_rings: ClassVar[bool] = True
    slashes: Tensor
    """bool [B, Hq, E]; entry spans.offset[d] + delta is the slash of block pairs at
    distance delta in span d."""
    spans: Spans
    most_blocks: int
    """Bound on the KV blocks that a query block meets."""
    capped: Tensor  # type: ignore[assignment]

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        return self._at_slashes(self.slashes, 1, q_blocks, k_blocks.view(1, 1, 1, -1))

    def heads_selecting(self, q_blocks: Tensor, k_blocks: Tensor) -> tuple[Tensor, Tensor]:
        # Summed over heads before they are looked up, which is about Hq times cheaper.
        heads_with_slash = self.slashes.sum(1, keepdim=True, dtype=torch.int32)
        k_blocks = k_blocks.view(1, 1, 1, -1)
        selecting = self._at_slashes(heads_with_slash, self.heads, q_blocks, k_blocks)[:, 0]
        return selecting, selecting

    def heads_selecting_whole(self, q_blocks: Tensor, k_blocks: Tensor) -> tuple[Tensor, Tensor]:
        # All of these queries are in one document. Each sees the slashes one place further than the
        # query before it, so that one list holds what all of them see.
        least, most = int(q_blocks[0] - k_blocks[-1]), int(q_blocks[-1] - k_blocks[0])
        selecting = []
        spans = self.block_spans(q_blocks[:1])[:, 0].tolist()
        for slashes, (begin, *_, dense_from) in zip(self.slashes, spans):
            if k_blocks[0] >= dense_from:
                heads = torch.full((most - least + 1,), self.heads, dtype=torch.int32, device="cpu")
            else:
                heads = slashes[:, begin + least : begin + most + 1].sum(0, dtype=torch.int32)
            # By distance to the last query, which then comes first.
            selecting.append(heads.flip(0).unfold(0, len(k_blocks), 1).flip(0))
        # [B, nq, nk]
        of_sequences = torch.stack(selecting)
        return of_sequences, of_sequences

    def covers(self, q_blocks: Tensor, verticals: Tensor) -> Tensor:
        # [B, Hq, 1, C]
        k_blocks = (verticals // self.block_size)[:, :, None]
        return self._at_slashes(self.slashes, 1, q_blocks, k_blocks)

    def vertical_pairs_by_block(self, ranges: MaskRanges) -> Tensor:
        size = self.block_size
        spans = self.spans
        position = self.verticals.flatten(1).long()
        # [B, Hq C]: the span of each vertical. Short documents are computed whole.
        span = torch.searchsorted(spans.stop, position, right=True)
        known = span.clamp(max=spans.start.shape[1] - 1)
        in_span = (span == known) & (lookup(spans.start, known) <= position)
        # Which queries see it. Lists are filled up with the sequence length, which none sees.
        first, stop = queries_seeing(ranges, position)
        counted = (first < stop) & in_span
        # [n] each: for query block q, the slash of the vertical's block is entry `at` + q.
        lists = torch.arange(self.slashes.shape[:2].numel(), device="cpu") * self.slashes.shape[2]
        at = lists.view(-1, self.heads, 1).expand_as(self.verticals).flatten(1)
        at = at + lookup(spans.offset, known) - position // size
        first, stop, at = (x[counted].long() for x in (first, stop, at))
        first_block, last_block = first // size, (stop - 1) // size

        # [blocks]: every query block between the first and the last one sees it whole.
        is_slash = self.slashes.flatten().int()
        covered = torch.zeros(len(self.all_blocks()), dtype=torch.int32, device="cpu")
        rows, slashes = covered.numpy(), is_slash.numpy()
        for entry, begin, end in zip(at.tolist(), (first_block + 1).tolist(), last_block.tolist()):
            rows[begin:end] += slashes[entry + begin : entry + end]
        covered = covered.long() * size
        in_first = stop.minimum((first_block + 1) * size) - first
        in_last = (stop - last_block * size) * (first_block < last_block)
        for block, queries in ((first_block, in_first), (last_block, in_last)):
            covered.index_add_(0, block, queries * is_slash[at + block])

        # [S + 1]: how many verticals each query sees.
        tokens = len(covered) * size
        changes = first.bincount(minlength=tokens) - stop.bincount(minlength=tokens + 1)[:tokens]
        seeing = changes.cumsum(0).view(-1, size).sum(1)
        return seeing - covered

    def _at_slashes(
        self, values: Tensor, value_of_short: int, q_blocks: Tensor, k_blocks: Tensor
    ) -> Tensor:
        """Look up `values` at the slash of each pair of blocks; 0 where there is none.

        values: [B, H, E], one for each entry of self.slashes. value_of_short: the value inside
        short documents, which are computed whole. q_blocks: int [nq]. k_blocks: [B or 1, H or 1, 1,
        m]. Returns [B, H, nq, m].

        Two documents can meet in a query block. The later one adds only the tile on the main
        diagonal, and the earlier one has that tile already, because local_slashes is 1 or more. So
        the entries of the first span are enough.
        """
        # [B, 1, nq, 1] each: first entry of the span, its first block, the block from which on
        # short documents are computed whole.
        spans = self.block_spans(q_blocks)[:, None, :, None]
        begin, first_block, _, _, dense_from = spans.unbind(-1)
        # [B or 1, H or 1, nq, m]
        delta = q_blocks.int()[:, None] - k_blocks.int()
        in_span = (begin >= 0) & (delta >= 0) & (k_blocks >= first_block)
        # Entry 0 stands in outside of the span, where the product below removes its value.
        entry = (begin + delta) * in_span
        flat = entry.flatten(2).long().expand(*values.shape[:2], -1)
        looked_up = values.gather(2, flat).view(*values.shape[:2], *entry.shape[2:]) * in_span
        in_short = (k_blocks >= dense_from) & (delta >= 0)
        short = in_short * torch.tensor(value_of_short, dtype=values.dtype, device="cpu")
        return torch.maximum(looked_up, short)

    def counts(self) -> dict[str, list[int]]:
        verticals = (self.verticals[0] < self.seq_len).sum(-1)
        return {"verticals": verticals.tolist(), "slashes": self.slashes[0].sum(-1).tolist()}

    def tensors(self) -> list[Tensor]:
        return [self.slashes, self.verticals, self.capped]

    def block_spans(self, q_blocks: Tensor) -> Tensor:
        """int32 [B, nq, 5]: what selects() and kernels/block_tables.py look up for each query
        block: offset (-1 for no span) and first block of the two spans that it touches, then
        its dense_from.
        """
        spans = self.spans
        slot = spans_of_blocks(spans, q_blocks, self.block_size)
        # [B, nq, 2]: two spans even where a sequence has room for one.
        slot = F.pad(slot, (0, 2 - slot.shape[-1]), value=-1)
        known = slot.clamp(min=0)
        offset = lookup(spans.offset, known)
        offset = offset.where(slot >= 0, -1)
        first_block = lookup(spans.first_block, known)

        # [B, nq, 4] and [B, nq, 1]
        fields = torch.stack([offset, first_block], dim=-1).flatten(2)
        dense_from = spans.dense_from[:, q_blocks, None]
        return torch.cat([fields, dense_from], dim=-1).int()


class VerticalSlash(Pattern, VerticalSlashOptions):
    """Verticals and slashes chosen online from a probe. VerticalSlashOptions has the parameters."""

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
        # What follows from the mask and the rows alone is worked out once, not once a layer.
        plan = once_per_mask(
            ranges,
            ("vertical_slash", self, cp.key, batch, heads),
            lambda: self._plan(ranges, cp, batch, heads),
        )
        module = independent if self.budget == "independent" else joint
        verticals, slashes, capped = module.choose(q, k, plan, cp, scale, capacity)
        return [slashes, verticals, capped]

    def _plan(
        self, ranges: MaskRanges, cp: ContextParallel, batch: int, heads: int
    ) -> independent.IndependentPlan | joint.JointPlan:
        spans = find_spans(ranges, batch, self.dense_below, cp.block_size)
        seq_len = ranges.start.shape[1]
        queries = self.probe or cp.block_size
        if self.probe_rows == "last":
            rows = last_rows(spans, queries, seq_len, cp.block_size)
        else:
            last = queries // 4 if self.probe_rows == "both" else 0
            seed = 0 if ranges.probe_seed is None else ranges.probe_seed
            rows = spread_rows(spans, queries, seq_len, cp.block_size, seed, last)
        geometry = probe_geometry(ranges, spans, rows, cp)
        if self.budget == "independent":
            return independent.make_plan(self, spans, geometry, seq_len, cp, heads)
        return joint.make_plan(self, spans, geometry, seq_len, cp.block_size)

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        diagonals = entries(seq_len, block_size, slots(seq_len, self.dense_below, packed))
        capacity = self.vertical_capacity(seq_len, block_size, packed)
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
        spans = find_spans(ranges, batch, self.dense_below, block_size)
        most_blocks = self.most_blocks(seq_len, block_size, ranges.document_start is not None)
        return VerticalSlashIndex(
            seq_len, block_size, verticals, slashes, spans, most_blocks, capped
        )

    def most_blocks(self, seq_len: int, block_size: int, packed: bool) -> int:
        """Upper bound, independent of the data, on the KV blocks that a query
        block meets by slashes.

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
