"""What MoBA's queries chose: chunks of keys, by query and by blocks of queries."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.masks.base import token_positions
from titan_sparse.attention.masks.ranges import Mask, MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex, no_verticals
from titan_sparse.attention.patterns.spans import Spans, spans_of_blocks
from titan_sparse.kernels.bits import unpack
from titan_sparse.kernels.chunks import ChosenChunks, chosen_bits, chosen_keys

_COUNTED_ELEMENTS = 1 << 24
"""Counts held at a time, one for each query, chunk, and part."""


class MoBAIndex(BlockIndex):
    """Chunks chosen by every query, and by blocks of queries; bits as in kernels/bits.py.

    words: int32 [B, Hq, S, W]; bit c: the query sees chunk c of its document.
    any_words: int32 [B, Hq, blocks, T, W], the chunks chosen by any query of the block, apart for
        each of the (at most two) long documents that it touches.
    all_words: int32 [B, Hq, blocks, W], the chunks chosen by all queries of the block.
    origin: int32 [B, S], where each query's chunks are counted from.
    chunk: tokens of a chunk.
    """

    by_head = ("verticals", "words", "any_words", "all_words")

    def __init__(
        self,
        words: Tensor,
        any_words: Tensor,
        all_words: Tensor,
        origin: Tensor,
        spans: Spans,
        chunk: int,
        block_size: int,
    ):
        super().__init__(words.shape[1], origin.shape[1], block_size, no_verticals(words))
        self.words = words
        self.any_words = any_words
        self.all_words = all_words
        self.origin = origin
        self.spans = spans
        self.chunk = chunk

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        spans = self.spans
        q_blocks = q_blocks.long()
        k_blocks = k_blocks.long()
        past = q_blocks[:, None] >= k_blocks  # [nq, nk]

        # [B, 1, nq, nk]: short documents are seen whole.
        dense_from = spans.dense_from[:, q_blocks, None]
        selected = ((k_blocks >= dense_from) & past)[:, None]

        # [B, nq, T]: a query block touches one long document or two.
        touching = spans_of_blocks(spans, q_blocks, self.block_size)
        for number, slot in enumerate(touching.unbind(-1)):
            # [B, nq]
            known = slot.clamp(min=0)
            document_start = spans.start.gather(1, known)
            first_block = spans.first_block.gather(1, known)
            # [B, nq, nk]
            inside = (slot >= 0)[..., None] & past & (k_blocks >= first_block[..., None])

            # [B, Hq, nq, nk]
            words = self.any_words[:, :, q_blocks, number]
            in_first, in_last = self._touched_bits(words, document_start, k_blocks)
            selected = selected | ((in_first | in_last) & inside[:, None])
        return selected

    def selects_for_all(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        q_blocks = q_blocks.long()
        # [B, nq], of the first query. Where a block touches two documents, the mask does not let
        # all of its queries see all keys anyway.
        document_start = self.origin[:, q_blocks * self.block_size]

        # [B, Hq, nq, nk]
        words = self.all_words[:, :, q_blocks]
        in_first, in_last = self._touched_bits(words, document_start, k_blocks.long())
        return in_first & in_last

    def _touched_bits(
        self, words: Tensor, document_start: Tensor, k_blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The bits of the first and of the last chunk that each key block touches.

        bool [B, Hq, nq, nk] each.
        words: int32 [B, Hq, nq, W]. document_start: [B, nq], where the chunks are counted from.
        """
        # [B, nq, nk], counted from the document's start. A block has no more tokens than a chunk,
        # so that it touches two chunks at most.
        first_key = k_blocks * self.block_size - document_start[..., None]
        last_key = first_key + self.block_size - 1

        # [B, nq, nk]
        first_chunk = first_key.clamp(min=0) // self.chunk
        last_chunk = last_key.clamp(min=0) // self.chunk

        # [B, Hq, nq, nk]
        in_first = chosen_bits(words, first_chunk[:, None])
        in_last = chosen_bits(words, last_chunk[:, None])
        return in_first, in_last

    def chosen_chunks(self, q_positions: Tensor) -> ChosenChunks:
        # [B, Hq, Sq, W]
        words = self.words[:, :, q_positions]
        # [B, Sq]
        origin = self.origin[:, q_positions]
        return ChosenChunks(words, origin, self.chunk)

    def tensors(self) -> list[Tensor]:
        return [self.words, self.any_words, self.all_words]

    def dense(self, mask: Mask) -> Tensor:
        device = self.words.device
        position = torch.arange(self.seq_len, device=device)
        # [B, Hq, S, S]
        chosen = chosen_keys(self.chosen_chunks(position), position.view(1, 1, -1))

        # [Bm, 1, S, S]
        visible = mask.dense(self.seq_len, device)[:, None]
        return chosen & visible

    def pairs(self, ranges: MaskRanges, q_blocks: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """float64 [B, Hq, parts]: pairs of tokens computed for these queries, by part of the keys.

        parts: global blocks int64 [n] each, such as the rows of a layout's table. Exact: the chosen
        chunks are intersected with what the mask shows each query.
        """
        device = q_blocks.device
        part_count = len(parts)
        chunk_count = self.words.shape[-1] * 32
        batch, heads = self.words.shape[:2]

        # For every part: whether it has a block [parts, blocks + 1], and its tokens in front of the
        # block.
        blocks = self.seq_len // self.block_size
        owned = torch.zeros(part_count, blocks + 1, dtype=torch.int64, device=device)
        for part_owned, part in zip(owned, parts):
            part_owned[part + 1] = 1
        owned_before = owned.cumsum(1) * self.block_size
        owns = F.pad(owned[:, 1:], (0, 1))

        def tokens_before(position: Tensor) -> Tensor:
            """int64 [parts, ...]: tokens of each part in front of the positions int64 [...]."""
            block = position // self.block_size
            in_block = position % self.block_size
            # Of the block that holds the position, the tokens in front of it.
            return owned_before[:, block] + owns[:, block] * in_block

        total = torch.zeros(batch, heads, part_count, dtype=torch.float64, device=device)
        chunk_start = torch.arange(chunk_count, device=device) * self.chunk
        step = max(1, _COUNTED_ELEMENTS // (chunk_count * part_count * self.block_size))
        for step_blocks in q_blocks.split(step):
            # [m]
            position = token_positions(step_blocks, self.block_size)
            # [Bm, m, 1]
            start = ranges.start[:, position, None].long()
            stop = ranges.stop[:, position, None].long()

            # [B, m, chunks]: each chunk, as far as the mask shows it to the query.
            begin = self.origin[:, position, None] + chunk_start
            low = torch.minimum(torch.maximum(begin, start), stop)
            high = torch.maximum(torch.minimum(begin + self.chunk, stop), low)

            # [parts, B, m, chunks]
            seen = tokens_before(high) - tokens_before(low)
            # [B, m chunks, parts]
            seen = seen.movedim(0, -1).flatten(1, 2).double()
            # [B, Hq, m chunks]
            chosen = unpack(self.words[:, :, position], chunk_count)
            chosen = chosen.flatten(2).double()
            # [B, Hq, parts]
            total += chosen @ seen
        return total
