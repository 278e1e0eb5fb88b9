"""MoBA, mixture of block attention (Lu et al. 2025, arXiv 2502.13189).

Every query chooses chunks of keys for itself. Chunks are counted from the beginning of a document.
A query sees its own chunk, causally, and those of the earlier chunks whose mean key has the largest
product with it. A block of queries computes the union of what its queries chose. Inside a tile that
not all of them chose, each query keeps to its own choice (ChosenChunks).

On one rank, where the backend has kernels for it, the queries of each chunk are gathered instead,
and tiles of them meet whole chunks. The queries' own chunks, which causality cuts, and short
documents go by lists of blocks, which follow from the mask alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask, token_positions
from titan_sparse.attention.patterns.base import (
    BlockIndex,
    Computation,
    Pattern,
    gather_blocks,
    no_verticals,
)
from titan_sparse.attention.patterns.spans import (
    Spans,
    document_origin,
    find_spans,
    lookup,
    slots,
    span_of_tokens,
    spans_of_blocks,
)
from titan_sparse.kernels import gathered
from titan_sparse.kernels.block_sparse import ChosenChunks, Piece, Tiles, chosen_bits
from titan_sparse.kernels.block_sparse.piece import mapped
from titan_sparse.kernels.compact import pack, unpack
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.options.patterns import MoBAOptions

_CHUNK_ELEMENTS = 1 << 24
"""Gates held at a time, some of them as int64."""
_COUNTED_ELEMENTS = 1 << 24
"""Counts held at a time, one for each query, chunk, and part."""


@dataclass(eq=False)
class MoBAIndex(BlockIndex):
    """Chunks chosen by every query, and by blocks of queries; bits as in kernels/compact.py."""

    by_head = ("verticals", "words", "any_words", "all_words")
    words: Tensor
    """int32 [B, Hq, S, W]; bit c: the query sees chunk c of its document."""
    any_words: Tensor
    """int32 [B, Hq, blocks, T, W], the chunks chosen by any query of the block, one set for each of
    the (at most two) long documents that it touches."""
    all_words: Tensor
    """int32 [B, Hq, blocks, W], the chunks chosen by all queries of the block."""
    origin: Tensor
    """int32 [B, S], where each query's chunks are counted from."""
    spans: Spans
    chunk: int
    """Tokens of a chunk."""
    top_k: int
    """The most chunks that a query chose, its own included."""

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        spans = self.spans
        q_blocks = q_blocks.long()
        k_blocks = k_blocks.long()
        past = q_blocks[:, None] >= k_blocks  # [nq, nk]
        # [B, 1, nq, nk]: short documents are seen whole.
        selected = ((k_blocks >= spans.dense_from[:, q_blocks, None]) & past)[:, None]
        # [B, nq, T]: a query block touches one long document or two.
        touching = spans_of_blocks(spans, q_blocks, self.block_size)
        for number, slot in enumerate(touching.unbind(-1)):
            known = slot.clamp(min=0)
            first_block = spans.first_block.gather(1, known)
            # [B, nq, nk]
            inside = (slot >= 0)[..., None] & past & (k_blocks >= first_block[..., None])
            # [B, Hq, nq, nk]
            words = self.any_words[:, :, q_blocks, number]
            in_first, in_last = self._touched_bits(words, spans.start.gather(1, known), k_blocks)
            selected = selected | ((in_first | in_last) & inside[:, None])
        return selected

    def selects_for_all(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        q_blocks = q_blocks.long()
        # [B, nq], of the first query. Where a block touches two documents, the mask does not let
        # all of its queries see all keys anyway.
        document_start = self.origin[:, q_blocks * self.block_size]
        words = self.all_words[:, :, q_blocks]
        in_first, in_last = self._touched_bits(words, document_start, k_blocks.long())
        return in_first & in_last

    def _touched_bits(
        self, words: Tensor, document_start: Tensor, k_blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The bits of the first and of the last chunk that each key block touches:
        bool [B, Hq, nq, nk].

        words: int32 [B, Hq, nq, W]. document_start: [B, nq], where the chunks are counted from.
        """
        # [B, 1, nq, nk], counted from the document's start. A block has no more tokens than a
        # chunk, so that it touches two chunks at most.
        first_key = (k_blocks * self.block_size - document_start[..., None])[:, None]
        last_key = first_key + self.block_size - 1
        in_first = chosen_bits(words, first_key.clamp(min=0) // self.chunk)
        return in_first, chosen_bits(words, last_key.clamp(min=0) // self.chunk)

    def chosen_chunks(self, q_positions: Tensor) -> ChosenChunks:
        # [B, Hq, Sq, W] and [B, Sq]
        return ChosenChunks(self.words[:, :, q_positions], self.origin[:, q_positions], self.chunk)

    def tensors(self) -> list[Tensor]:
        return [self.words, self.any_words, self.all_words]

    def pairs(self, ranges: MaskRanges, q_blocks: Tensor, parts: Sequence[Tensor]) -> Tensor:
        # Exact: the chosen chunks are intersected with what the mask shows each query.
        device = q_blocks.device
        chunk_count = self.words.shape[-1] * 32
        batch, heads = self.words.shape[:2]
        # [parts, S + 1]: tokens of each part in front of each position.
        owned = torch.zeros(len(parts), self.seq_len + 1, dtype=torch.int32, device=device)
        for part_owned, part in zip(owned, parts):
            # Not by assignment: the host would wait while the number is copied to the GPU.
            part_owned.index_fill_(0, token_positions(part, self.block_size) + 1, 1)
        owned_before = owned.cumsum(1, dtype=torch.int32)

        total = torch.zeros(batch, heads, len(parts), dtype=torch.float64, device=device)
        chunk_start = torch.arange(chunk_count, device=device) * self.chunk
        step = max(1, _COUNTED_ELEMENTS // (chunk_count * len(parts) * self.block_size))
        for step_blocks in q_blocks.split(step):
            # [m], then [Bm, m, 1]
            position = token_positions(step_blocks, self.block_size)
            start = ranges.start[:, position, None].long()
            stop = ranges.stop[:, position, None].long()
            # [B, m, chunks]: each chunk, as far as the mask shows it to the query.
            begin = self.origin[:, position, None] + chunk_start
            low = torch.minimum(torch.maximum(begin, start), stop)
            high = torch.maximum(torch.minimum(begin + self.chunk, stop), low)
            # [parts, B, m, chunks] -> [B, m chunks, parts]
            seen = owned_before[:, high] - owned_before[:, low]
            seen = seen.movedim(0, -1).flatten(1, 2).double()
            # [B, Hq, m chunks]
            chosen = unpack(self.words[:, :, position], chunk_count).flatten(2).double()
            total += chosen @ seen
        return total

    def computation(
        self,
        ranges: MaskRanges,
        cp: ContextParallel,
        scale: float,
        dense_tiles: Callable[[MaskRanges], Tiles],
    ) -> Computation | None:
        """Gathers queries. Where the mask may be anything, the host waits for it, once a batch."""
        slots = min(self.top_k - 1, (self.seq_len - 1) // self.chunk)
        if slots == 0 or ranges.slices is not None:
            return None
        if not ranges.plain:
            if not once_per_mask(ranges, "whole chunks", lambda: shows_the_past(ranges)):
                # A window cuts through chunks.
                return None
        key = ("gathered", self.chunk, cp.key, self.words.shape[:2])
        geometry = once_per_mask(ranges, key, lambda: _find_geometry(self, ranges, cp, dense_tiles))
        return GatheredQueries(self, geometry, slots, scale)


class MoBA(Pattern, MoBAOptions):
    """Each query chooses chunks of keys by their mean key. MoBAOptions has the parameters."""

    gathers_queries: ClassVar[bool] = True

    def select_tensors(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        # The largest products are the same for any scale, so that it is not needed.
        batch, heads = q.shape[:2]
        seq_len = ranges.start.shape[1]
        size = cp.block_size
        spans = find_spans(ranges, batch, self.chunk_size, size)
        chunks = _chunks_of(ranges, spans, cp, self.chunk_size)
        # [B, Hkv, n, D]
        means = _mean_keys(k, chunks, cp, self.chunk_size, ranges)

        # Some of this rank's query blocks at a time.
        most_chunks = max(means.shape[2], -(-seq_len // self.chunk_size))
        step = max(1, _CHUNK_ELEMENTS // (batch * heads * size * most_chunks))
        # [B, Hq, m, size, W], [B, Hq, m, T, W] and [B, Hq, m, W] at a time.
        pieces = []
        for first in range(0, seq_len // cp.size // size, step):
            last = first + step
            tokens = slice(first * size, last * size)
            # [B, Hq, m, size, C]
            chosen = self._choose(q[:, :, tokens], means, chunks, tokens, seq_len)
            chosen = chosen.unflatten(2, (-1, size))
            # T times [B, Hq, m, C]; members as [B, 1, m, size, 1] at a time
            members = chunks.member[:, None, first:last, :, None].unbind(-1)
            of_any = torch.stack([(chosen & member).any(3) for member in members], dim=3)
            pieces.append((pack(chosen), pack(of_any), pack(chosen.all(3))))

        # Those of all ranks, as MoBAIndex holds them.
        words, any_words, all_words = (
            gather_blocks(torch.cat(of_pieces, dim=2), cp, ranges) for of_pieces in zip(*pieces)
        )
        return [words.flatten(2, 3), any_words, all_words]

    def _choose(
        self, q: Tensor, means: Tensor, chunks: "MoBAChunks", tokens: slice, seq_len: int
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
        gate = (q_by_group @ means[:, :, None].mT).flatten(1, 2)

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

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        blocks = seq_len // block_size
        # One bit for each chunk of the longest document that fits.
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
        def find_origin() -> Tensor:
            return document_origin(ranges).expand(batch, -1).contiguous()

        origin = once_per_mask(ranges, ("origin", batch), find_origin)
        # The documents that have a whole chunk.
        spans = find_spans(ranges, batch, self.chunk_size, block_size)
        words, any_words, all_words = tensors
        seq_len, verticals = origin.shape[1], no_verticals(words)
        of_options = self.chunk_size, self.top_k
        return MoBAIndex(
            seq_len, block_size, verticals, words, any_words, all_words, origin, spans, *of_options
        )


class MoBAChunks(NamedTuple):
    """The inputs of the gate that depend on mask and layout. They are the same for every layer.

    The n whole chunks of all long documents are numbered document by document.
    """

    begin: Tensor
    """int64 [B, n], the first token of a chunk; the sequence length for one that does not exist."""
    in_chunk: Tensor
    """bool [B, n_local, 2, block], which tokens of this rank's blocks are in each of the two chunks
    that a block can touch."""
    entry: Tensor
    """int64 [B, n, m], those of all blocks' two sums that make up each chunk, 2 for each block."""
    counts: Tensor
    """bool [B, n, m], which of these there are."""
    offset: Tensor
    """int64 [B, S_local], where the chunks begin of the document that each of this
    rank's queries is in."""
    own: Tensor
    """int64 [B, S_local], the number of each query's own chunk in the document."""
    member: Tensor
    """bool [B, n_local, block, T], in which of the long documents that touch
    the block a query is."""


def _chunks_of(ranges: MaskRanges, spans: Spans, cp: ContextParallel, chunk: int) -> MoBAChunks:
    """The chunks of `chunk` tokens of the mask's long documents, for this rank's queries."""
    key = ("moba", chunk, cp.key, len(spans.start))
    return once_per_mask(ranges, key, lambda: _find_chunks(ranges, spans, cp, chunk))


def _find_chunks(ranges: MaskRanges, spans: Spans, cp: ContextParallel, chunk: int) -> MoBAChunks:
    seq_len = ranges.start.shape[1]
    size = cp.block_size
    device = ranges.start.device
    batch, span_count = spans.start.shape

    # Chunks of all spans, one after the other: [B, spans], then [B, n].
    chunks_of_span = (spans.stop - spans.start) // chunk
    offset = chunks_of_span.cumsum(-1) - chunks_of_span
    most_chunks = max(1, seq_len // chunk)
    number = torch.arange(most_chunks, device=device).expand(batch, -1).contiguous()
    span = torch.searchsorted(offset + chunks_of_span, number, right=True)
    exists = span < span_count
    span = span.clamp(max=span_count - 1)
    number_in_span = number - offset.gather(1, span)
    begin = spans.start.gather(1, span) + number_in_span * chunk
    begin = begin.where(exists, seq_len)

    # [B, blocks]: the first chunk that a block touches or that comes after it.
    block_begin = torch.arange(0, seq_len, size, device=device).expand(batch, -1).contiguous()
    slot = torch.searchsorted(begin + chunk, block_begin, right=True)
    # [B, n_local, 2, block]
    own_blocks = cp.blocks(ranges)
    position = token_positions(own_blocks, size)  # [S_local]
    two_chunks = slot[:, own_blocks, None] + torch.arange(2, device=device)
    padded_begin = F.pad(begin, (0, 1), value=seq_len)
    chunk_begin = lookup(padded_begin, two_chunks.clamp(max=most_chunks))[..., None]
    token = position.view(-1, 1, size)
    in_chunk = (chunk_begin <= token) & (token < chunk_begin + chunk)

    # [B, n, m]: the blocks that each chunk touches, and whether it is their first chunk or second.
    block = (begin // size)[..., None] + torch.arange(-(-chunk // size) + 1, device=device)
    counts = (block <= ((begin + chunk - 1) // size)[..., None]) & exists[..., None]
    block = block.where(counts, 0)
    which = (number[..., None] - lookup(slot, block)).clamp(0, 1)

    # Of this rank's queries, [B, S_local]: their span, and their own chunk in the document.
    token_span = span_of_tokens(spans.start, spans.stop, seq_len)[:, position]
    query_origin = document_origin(ranges)[:, position].expand(batch, -1)
    # [B, n_local, T]
    touching = spans_of_blocks(spans, own_blocks, size)
    return MoBAChunks(
        begin=begin,
        in_chunk=in_chunk,
        entry=block * 2 + which,
        counts=counts,
        offset=F.pad(offset, (0, 1)).gather(1, token_span),
        own=(position - query_origin) // chunk,
        member=token_span.unflatten(1, (-1, size))[..., None] == touching[:, :, None],
    )


def _mean_keys(
    k: Tensor, chunks: MoBAChunks, cp: ContextParallel, chunk: int, ranges: MaskRanges
) -> Tensor:
    """Mean key of every whole chunk, [B, Hkv, n, D] in fp32 (fp64 for fp64), from k
    [B, Hkv, S_local, D].

    Keys are summed within blocks on the rank that owns them. These sums are added up over blocks in
    global order on every rank, so that the number of ranks does not change the result.
    """
    kv_heads, _, dim = k.shape[1:]
    dtype = accumulation_dtype(k.dtype)
    # [B, Hkv, n_local, block, D]
    k_blocks = k.unflatten(2, (-1, cp.block_size)).to(dtype)
    # [B, Hkv, n_local, 2, D], then of all ranks: [B, Hkv, blocks, 2, D]
    sums = gather_blocks(chunks.in_chunk[:, None].to(dtype) @ k_blocks, cp, ranges)
    # [B, Hkv, n m, D]
    entry = chunks.entry.flatten(1)[:, None, :, None].expand(-1, kv_heads, -1, dim)
    block_sums = sums.flatten(2, 3).gather(2, entry)
    # [B, Hkv, n, m, D]
    block_sums = block_sums.unflatten(2, chunks.entry.shape[1:])
    return (block_sums * chunks.counts[:, None, ..., None]).sum(3) / chunk


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


class Geometry(NamedTuple):
    """The tables that follow from the mask alone, the same in every layer.

    earlier, offset, begin: as in kernels.gathered.Choices, of the chunks of all documents.
    """

    tiles: Tiles  # of every query and its own chunk
    earlier: Tensor
    offset: Tensor
    begin: Tensor


@dataclass
class GatheredQueries(Computation):
    """Computes a call of MoBA whose queries are gathered.

    slots: the most chunks that a query can see in addition to its own.
    """

    index: MoBAIndex
    geometry: Geometry
    slots: int
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return gathered.forward(q, self._plan(k, v))

    def backward(
        self, queries: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, d_out, out, lse = queries
        return gathered.backward(d_out, q, out, lse, self._plan(k, v))

    def _plan(self, k: Tensor, v: Tensor) -> gathered.Plan:
        tiles, earlier, offset, begin = self.geometry
        index = self.index
        choices = gathered.Choices(index.words, earlier, offset, begin, index.chunk, self.slots)
        return gathered.Plan(own=Piece(k, v, tiles), choices=choices, scale=self.scale)


def shows_the_past(ranges: MaskRanges) -> bool:
    """True if every query sees its whole document up to itself, or nothing.

    The host waits, but for masks with offsets. Their window is taken to cut some document.
    """
    if ranges.offsets is not None:
        return not 0 < ranges.window < ranges.start.shape[1]
    position = torch.arange(ranges.start.shape[1], device=ranges.start.device)
    from_origin = ranges.start == document_origin(ranges)
    up_to_itself = ranges.stop == position + 1
    sees_nothing = ranges.start >= ranges.stop
    return bool((sees_nothing | (from_origin & up_to_itself)).all())


def _find_geometry(
    index: MoBAIndex,
    mask: MaskRanges,
    cp: ContextParallel,
    dense_tiles: Callable[[MaskRanges], Tiles],
) -> Geometry:
    chunk = index.chunk
    chunks = _chunks_of(mask, index.spans, cp, chunk)
    # [Bm, S]: keys before a query's own chunk are hidden.
    position = torch.arange(index.seq_len, dtype=torch.int32, device=mask.start.device)
    origin = document_origin(mask)
    own_start = origin + (position - origin) // chunk * chunk
    sees_any = mask.start < mask.stop
    start = torch.where(sees_any, own_start, mask.start)
    own_mask = MaskRanges(start, mask.stop, mask.document_start)

    tiles = dense_tiles(own_mask)
    # The most KV blocks that a query block meets in the own chunks of its queries: the first
    # query's chunk begins `chunk` - 1 tokens before it at most.
    width = -(-(chunk - 1) // index.block_size) + 1
    by_query = mapped(tiles.by_query, lambda field: _narrowed(field, width))
    by_key = mapped(tiles.by_key, lambda field: _narrowed(field, width))
    # Rows that see nothing have no chunks either.
    earlier = torch.where(sees_any, chunks.own, 0)
    return Geometry(
        tiles=tiles._replace(by_query=by_query, by_key=by_key),
        earlier=earlier.int().contiguous(),
        offset=chunks.offset.int().contiguous(),
        begin=chunks.begin.int().contiguous(),
    )


def _narrowed(field: Tensor, width: int) -> Tensor:
    """A table of `width` entries a row; on a GPU it has room for all blocks. Counts stay."""
    if field.dim() < 4:
        return field
    batch, heads = field.shape[:2]
    # All heads share their memory, and so may all sequences.
    sequences = 1 if field.stride(0) == 0 else batch
    narrow = field[:sequences, :1, :, :width].contiguous()
    return narrow.expand(batch, heads, -1, -1)
