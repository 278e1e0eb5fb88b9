"""MoBA, mixture of block attention (Lu et al. 2025, arXiv 2502.13189).

Every query chooses chunks of keys for itself. Chunks are counted from the beginning of a document.
A query sees its own chunk, causally, and those of the earlier chunks whose mean key has the largest
product with it. A block of queries computes the union of what its queries chose. Inside a tile that
not all of them chose, each query keeps to its own choice (kernels/chunks.py).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.base import once_per_mask, token_positions
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import Pattern, gather_blocks
from titan_sparse.attention.patterns.moba_index import MoBAIndex
from titan_sparse.attention.patterns.spans import (
    Spans,
    lookup,
    once_per_selection,
    slots,
    span_of_tokens,
    spans_of_blocks,
    spans_of_mask,
)
from titan_sparse.kernels.bits import pack
from titan_sparse.options import MoBAOptions

_CHUNK_ELEMENTS = 1 << 24
"""Gates held at a time, some of them as int64."""


class MoBA(Pattern, MoBAOptions):
    """Each query chooses chunks of keys by their mean key. MoBAOptions has the parameters."""

    def select_tensors(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        # The largest products are the same for any scale, so that it is not needed.
        batch, heads = q.shape[:2]
        seq_len = ranges.start.shape[1]
        size = cp.block_size
        chunks = self.chunks_of(ranges, batch, cp)
        # [B, Hkv, n, D]
        means = _mean_keys(k, chunks, cp, self.chunk_size, ranges)

        # Some of this rank's query blocks at a time.
        most_chunks = max(means.shape[2], -(-seq_len // self.chunk_size))
        step = max(1, _CHUNK_ELEMENTS // (batch * heads * size * most_chunks))
        # [B, Hq, m, size, W], [B, Hq, m, T, W] and [B, Hq, m, W] at a time.
        words = []
        any_words = []
        all_words = []
        for first in range(0, seq_len // cp.size // size, step):
            last = first + step
            tokens = slice(first * size, last * size)
            # [B, Hq, m size, C]
            chosen = self._choose(q[:, :, tokens], means, chunks, tokens, seq_len)
            packed = _pack_by_blocks(chosen, chunks.member[:, first:last], size)
            words.append(packed[0])
            any_words.append(packed[1])
            all_words.append(packed[2])

        # Those of all ranks, as MoBAIndex holds them.
        words = gather_blocks(torch.cat(words, dim=2), cp, ranges)
        any_words = gather_blocks(torch.cat(any_words, dim=2), cp, ranges)
        all_words = gather_blocks(torch.cat(all_words, dim=2), cp, ranges)
        return [words.flatten(2, 3), any_words, all_words]

    def _choose(
        self, q: Tensor, means: Tensor, chunks: "Chunks", tokens: slice, seq_len: int
    ) -> Tensor:
        """bool [B, Hq, m, C]: the chunks of its own document that each query sees.

        q: [B, Hq, m, D], the queries `tokens` of this rank. means: [B, Hkv, n, D], of the chunks of
            all documents.
        """
        kv_heads, count = means.shape[1:3]
        # [B, 1, m, 1]: the document's first chunk, and the query's own one counted from there.
        offset = chunks.offset[:, None, tokens, None]
        own = chunks.own[:, None, tokens, None]

        # [B, Hkv, G, m, D] @ [B, Hkv, 1, D, n]
        q_by_group = q.unflatten(1, (kv_heads, -1)).to(means.dtype)
        gate = q_by_group @ means[:, :, None].mT
        # [B, Hq, m, n]
        gate = gate.flatten(1, 2)

        # [B, 1, m, n]: the earlier chunks of the query's document.
        number = torch.arange(count, device=q.device)
        past = (number >= offset) & (number < offset + own)
        # [B, Hq, m, n]
        best = _largest(gate.masked_fill(~past, -torch.inf), self.top_k - 1)

        # [B, Hq, m, C]: the same, with chunks counted from the document's start.
        most_chunks = -(-seq_len // self.chunk_size)
        chunk = torch.arange(most_chunks, device=q.device)
        number = (offset + chunk).clamp(max=count - 1)
        number = number.expand(-1, best.shape[1], -1, -1)
        is_best = best.gather(3, number) & (chunk < own)
        return is_best | (chunk == own)

    def _spans(self, ranges: MaskRanges, batch: int, block_size: int) -> Spans:
        """The documents that have a whole chunk."""
        return spans_of_mask(ranges, batch, self.chunk_size, block_size)

    def chunks_of(self, ranges: MaskRanges, batch: int, cp: ContextParallel) -> "Chunks":
        """The chunks that the mask's long documents have, for this rank's queries."""
        spans = self._spans(ranges, batch, cp.block_size)
        return once_per_selection(
            ranges,
            "chunks",
            self,
            cp,
            (batch,),
            lambda: _find_chunks(ranges, spans, cp, self.chunk_size),
        )

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        blocks = seq_len // block_size
        # W: one bit for each chunk of the longest document that fits.
        words = -(-seq_len // (32 * self.chunk_size))
        touching = min(slots(seq_len, self.chunk_size, packed), 2)
        return [
            q.new_empty(batch, heads, seq_len, words, dtype=torch.int32),
            q.new_empty(batch, heads, blocks, touching, words, dtype=torch.int32),
            q.new_empty(batch, heads, blocks, words, dtype=torch.int32),
        ]

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> MoBAIndex:
        words, any_words, all_words = tensors
        origin = once_per_mask(
            ranges,
            ("origin", batch),
            lambda: document_origin(ranges).expand(batch, -1).contiguous(),
        )
        spans = self._spans(ranges, batch, block_size)
        return MoBAIndex(words, any_words, all_words, origin, spans, self.chunk_size, block_size)


class Chunks(NamedTuple):
    """What the gate needs to know of the mask and the layout; int64 unless said otherwise.

    It is the same for every layer.
    n whole chunks of all long documents, document by document.
    begin: [B, n], the first token of a chunk; the sequence length for one that does not exist.
    first, last: [B, n], the blocks that a chunk begins and ends in.
    exists: bool [B, n].
    slot: [B, blocks], the first chunk that a block touches or that comes after it.
    weight: bool [B, n_local, 2, block], which tokens of this rank's blocks are in chunk slot, and
        in chunk slot + 1.
    offset: [B, S_local], where the chunks of the document begin that each of this rank's queries is
        in.
    own: [B, S_local], the number of each query's own chunk in the document.
    member: bool [B, n_local, block, T], in which of the long documents that touch the block a query
        is.
    """

    begin: Tensor
    first: Tensor
    last: Tensor
    exists: Tensor
    slot: Tensor
    weight: Tensor
    offset: Tensor
    own: Tensor
    member: Tensor


def document_origin(ranges: MaskRanges) -> Tensor:
    """int32 [Bm, S], where each token's document begins; 0 for padding."""
    if ranges.document_start is None:
        return torch.zeros_like(ranges.start)
    return ranges.document_start.clamp(min=0).int()


def _find_chunks(ranges: MaskRanges, spans: Spans, cp: ContextParallel, chunk: int) -> Chunks:
    """chunk: tokens of a chunk."""
    seq_len = ranges.start.shape[1]
    size = cp.block_size
    device = ranges.start.device
    batch, span_count = spans.start.shape

    # Chunks of all spans, one after the other: [B, spans], then [B, n].
    chunks_of_span = (spans.stop - spans.start) // chunk
    offset = chunks_of_span.cumsum(-1) - chunks_of_span
    most_chunks = max(1, seq_len // chunk)
    number = torch.arange(most_chunks, device=device)
    number = number.expand(batch, -1).contiguous()
    span = torch.searchsorted(offset + chunks_of_span, number, right=True)
    exists = span < span_count
    span = span.clamp(max=span_count - 1)
    number_in_span = number - offset.gather(1, span)
    begin = spans.start.gather(1, span) + number_in_span * chunk
    begin = begin.where(exists, seq_len)

    # [B, blocks]
    block_begin = torch.arange(0, seq_len, size, device=device)
    block_begin = block_begin.expand(batch, -1).contiguous()
    slot = torch.searchsorted(begin + chunk, block_begin, right=True)

    # Which tokens of this rank's blocks are in the two chunks that a block can touch, [B, n_local,
    # 2, block].
    own_blocks = cp.blocks(ranges)
    position = token_positions(own_blocks, size)  # [S_local]
    two_chunks = slot[:, own_blocks, None] + torch.arange(2, device=device)
    padded_begin = F.pad(begin, (0, 1), value=seq_len)
    chunk_begin = lookup(padded_begin, two_chunks.clamp(max=most_chunks))[..., None]
    token = position.view(-1, 1, size)
    in_chunk = (chunk_begin <= token) & (token < chunk_begin + chunk)

    # Of this rank's queries, [B, S_local]: their span, and their own chunk in the document.
    token_span = span_of_tokens(spans.start, spans.stop, seq_len)[:, position]
    query_offset = F.pad(offset, (0, 1)).gather(1, token_span)
    query_origin = document_origin(ranges)[:, position].expand(batch, -1)
    # [B, n_local, block, T]
    touching = spans_of_blocks(spans, own_blocks, size)
    member = token_span.unflatten(1, (-1, size))[..., None] == touching[:, :, None]
    return Chunks(
        begin=begin,
        first=begin // size,
        last=(begin + chunk - 1) // size,
        exists=exists,
        slot=slot,
        weight=in_chunk,
        offset=query_offset,
        own=(position - query_origin) // chunk,
        member=member,
    )


def _mean_keys(
    k: Tensor, chunks: Chunks, cp: ContextParallel, chunk: int, ranges: MaskRanges
) -> Tensor:
    """Mean key of every whole chunk, [B, Hkv, n, D], from k [B, Hkv, S_local, D].

    In fp32 (fp64 for fp64).
    Keys are summed within blocks on the rank that owns them. These sums are added up over blocks in
    global order on every rank, so that the number of ranks does not change the result.
    """
    _, kv_heads, _, dim = k.shape
    dtype = torch.promote_types(k.dtype, torch.float32)

    # [B, Hkv, n_local, block, D]
    k_blocks = k.unflatten(2, (-1, cp.block_size)).to(dtype)
    # [B, Hkv, n_local, 2, D]: for each block the sums over the two chunks that it can touch.
    sums = chunks.weight[:, None].to(dtype) @ k_blocks
    # [B, Hkv, blocks, 2, D]
    sums = gather_blocks(sums, cp, ranges)

    # [B, n, blocks a chunk]: the blocks that each chunk touches.
    blocks_a_chunk = -(-chunk // cp.block_size) + 1
    block = chunks.first[..., None] + torch.arange(blocks_a_chunk, device=k.device)
    valid = (block <= chunks.last[..., None]) & chunks.exists[..., None]
    block = block.where(valid, 0)
    # [B, n, blocks a chunk], 0 or 1: the chunk is the first or the second one that the block
    # touches.
    number = torch.arange(block.shape[1], device=k.device)[:, None]
    which = (number - lookup(chunks.slot, block)).clamp(0, 1)

    # [B, Hkv, n * blocks a chunk, D]
    entry = (block * 2 + which).flatten(1)
    entry = entry[:, None, :, None].expand(-1, kv_heads, -1, dim)
    block_sums = sums.flatten(2, 3).gather(2, entry)

    # [B, Hkv, n, blocks a chunk, D]
    block_sums = block_sums.unflatten(2, block.shape[1:])
    block_sums = block_sums * valid[:, None, ..., None]
    # [B, Hkv, n, D]
    return block_sums.sum(3) / chunk


def _largest(gate: Tensor, count: int) -> Tensor:
    """bool like gate [..., n]: the `count` largest elements above -inf.

    Equal ones are taken in order of position.
    """
    if count == 0:
        return torch.zeros_like(gate, dtype=torch.bool)

    # [..., 1]: the smallest element that is among the largest.
    least = gate.topk(min(count, gate.shape[-1])).values[..., -1:]

    # [..., n]: what is above it, and of what is equal to it the first ones.
    above = gate > least
    equal = (gate == least) & (gate > -torch.inf)
    # [..., 1]: how many of these there is room for.
    left = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= left))


def _pack_by_blocks(chosen: Tensor, member: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The words of MoBAIndex by blocks: [B, Hq, m, size, W], [B, Hq, m, T, W] and [B, Hq, m, W].

    chosen: bool [B, Hq, m size, C], of each query. member: bool [B, m, size, T], the queries of
        each document.
    """
    # [B, Hq, m, size, C]
    chosen = chosen.unflatten(2, (-1, size))

    # T times [B, Hq, m, C]
    any_chosen = []
    for in_document in member.unbind(-1):
        # [B, 1, m, size, 1]
        in_document = in_document[:, None, ..., None]
        any_chosen.append((chosen & in_document).any(3))

    # [B, Hq, m, T, C]
    any_chosen = torch.stack(any_chosen, dim=3)
    return pack(chosen), pack(any_chosen), pack(chosen.all(3))
