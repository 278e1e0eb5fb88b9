"""MoBA, mixture of block attention (Lu et al. 2025, arXiv 2502.13189): every query chooses chunks of keys for itself.

Chunks are counted from the beginning of a document. A query sees its own chunk, causally, and those of the earlier ones
whose mean key has the largest product with it. A block of queries computes the union of what its queries chose; inside a
tile that not all of them chose each query keeps to its own choice (kernels/chunks.py).
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import Mask, MaskRanges
from titan_sparse.attention.patterns.base import BlockIndex, Pattern
from titan_sparse.attention.patterns.bitsets import gather_blocks, no_verticals
from titan_sparse.attention.patterns.vertical_slash.spans import (
    Spans,
    find_spans,
    slots,
    span_of_tokens,
    spans_of_blocks,
)
from titan_sparse.kernels.bits import pack, unpack
from titan_sparse.kernels.chunks import ChosenChunks, chosen_bits, chosen_keys

if TYPE_CHECKING:
    from titan_sparse.attention.context_parallel.group import ContextParallel

_CHUNK_ELEMENTS = 1 << 24
"""Gates held at a time, some of them as int64."""


class MoBAIndex(BlockIndex):
    """Chunks chosen by every query, and what follows for blocks of queries; bits as kernels/bits.py has them.

    words: int32 [B, Hq, S, W], bit c: the query sees chunk c of its document. any_words: int32 [B, Hq, blocks, T, W],
    those chosen by any query of the block in each of the (at most two) long documents that it touches. all_words: int32
    [B, Hq, blocks, W], chosen by all. origin: int32 [B, S], where each query's chunks are counted from. chunk: tokens.
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
        self.words, self.any_words, self.all_words = words, any_words, all_words
        self.origin, self.spans, self.chunk = origin, spans, chunk

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        q_blocks, k_blocks = q_blocks.long(), k_blocks.long()
        past = q_blocks[:, None] >= k_blocks
        selected = ((k_blocks >= self.spans.dense_from[:, q_blocks, None]) & past)[:, None]
        for number, slot in enumerate(
            spans_of_blocks(self.spans, q_blocks, self.block_size).unbind(-1)
        ):
            known = slot.clamp(min=0)
            begin, first = (x.gather(1, known) for x in (self.spans.start, self.spans.first_block))
            inside = (slot >= 0)[..., None] & past & (k_blocks >= first[..., None])
            here, beyond = self._touched(self.any_words[:, :, q_blocks, number], begin, k_blocks)
            selected = selected | ((here | beyond) & inside[:, None])
        return selected

    def selects_for_all(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        begin = self.origin[:, q_blocks.long() * self.block_size]
        here, beyond = self._touched(self.all_words[:, :, q_blocks.long()], begin, k_blocks.long())
        return here & beyond

    def _touched(self, words: Tensor, begin: Tensor, k_blocks: Tensor) -> tuple[Tensor, Tensor]:
        """bool [B, Hq, nq, nk] twice: the bits of the first and of the last chunk that each key block touches, of chunks
        counted from `begin` [B, nq]."""
        first = k_blocks * self.block_size - begin[..., None]
        ends = (first, first + self.block_size - 1)
        return tuple(chosen_bits(words, (x.clamp(min=0) // self.chunk)[:, None]) for x in ends)

    def chosen_chunks(self, q_positions: Tensor) -> ChosenChunks:
        return ChosenChunks(self.words[:, :, q_positions], self.origin[:, q_positions], self.chunk)

    def tensors(self) -> list[Tensor]:
        return [self.words, self.any_words, self.all_words]

    def dense(self, mask: Mask) -> Tensor:
        position = torch.arange(self.seq_len, device=self.words.device)
        chosen = chosen_keys(self.chosen_chunks(position), position.view(1, 1, -1))
        return chosen & mask.dense(self.seq_len, position.device)[:, None]

    def pairs(self, rows: MaskRanges, q_blocks: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Pairs of tokens computed for the queries of these blocks on each part of the keys, float64 [B, Hq, parts].

        parts: global blocks int64 [n], such as the rows of a layout's table. Exact: chosen chunks cut with what the mask
        shows each query.
        """
        ranks, width = len(parts), self.words.shape[-1] * 32
        owned = torch.zeros(
            ranks, self.seq_len // self.block_size + 1, dtype=torch.int64, device=q_blocks.device
        )
        for own, part in zip(owned, parts):
            own[part + 1] = 1
        before, mine = (
            owned.cumsum(1) * self.block_size,
            torch.nn.functional.pad(owned[:, 1:], (0, 1)),
        )
        tokens_before = lambda p: (
            before[:, p // self.block_size] + mine[:, p // self.block_size] * (p % self.block_size)
        )
        total = torch.zeros(
            *self.words.shape[:2], ranks, dtype=torch.float64, device=q_blocks.device
        )
        step = max(1, _CHUNK_ELEMENTS // (width * ranks * self.block_size))
        for some in q_blocks.split(step):
            position = token_positions(some, self.block_size)
            start, stop = (x[:, position, None].long() for x in (rows.start, rows.stop))
            begin = (
                self.origin[:, position, None]
                + torch.arange(width, device=q_blocks.device) * self.chunk
            )
            low = torch.minimum(torch.maximum(begin, start), stop)
            high = torch.maximum(torch.minimum(begin + self.chunk, stop), low)
            seen = (tokens_before(high) - tokens_before(low)).movedim(0, -1).flatten(1, 2).double()
            chosen = unpack(self.words[:, :, position], width).flatten(2).double()
            total += chosen @ seen
        return total


@dataclasses.dataclass(frozen=True)
class MoBA(Pattern):
    """Parameters of the gate. chunk_size: tokens of a chunk, no fewer than of a block. top_k: chunks that a query sees,
    its own among them. Documents of fewer tokens than a chunk are dense. Raises ValueError for values out of range.
    """

    chunk_size: int = 4096
    top_k: int = 12
    name: ClassVar[str] = "moba"

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.top_k < 1:
            raise ValueError(
                f"MoBA(chunk_size={self.chunk_size}, top_k={self.top_k}): write 1 or more"
            )
        super().__post_init__()

    def check_block_size(self, block_size: int) -> None:
        """ValueError if a tile could touch three chunks."""
        if self.chunk_size < block_size:
            raise ValueError(
                f"moba.chunk_size = {self.chunk_size} is below block_size ({block_size}); "
                f"write chunk_size = {block_size} or more"
            )

    def select_tensors(
        self, q: Tensor, k: Tensor, rows: MaskRanges, cp: "ContextParallel", scale: float
    ) -> list[Tensor]:
        batch, heads = q.shape[:2]
        seq_len, size = rows.start.shape[1], cp.block_size
        chunks = self._chunks(rows, batch, cp)
        means = _mean_keys(k, chunks, cp, self.chunk_size, rows)
        step = max(
            1,
            _CHUNK_ELEMENTS
            // (batch * heads * size * max(means.shape[2], -(-seq_len // self.chunk_size))),
        )
        found = []
        for first in range(0, seq_len // cp.size // size, step):
            some = slice(first * size, (first + step) * size)
            chosen = self._choose(q[:, :, some], means, chunks, some, seq_len)
            found.append(
                _of_queries_and_blocks(chosen, chunks.member[:, first : first + step], size)
            )
        words, any_words, all_words = (
            gather_blocks(torch.cat(x, dim=2), cp, rows) for x in zip(*found)
        )
        return [words.flatten(2, 3), any_words, all_words]

    def _choose(
        self, q: Tensor, means: Tensor, chunks: "Chunks", some: slice, seq_len: int
    ) -> Tensor:
        """bool [B, Hq, n, C]: the chunks of its own document that each of n queries sees. means: [B, Hkv, chunks, D]."""
        offset, own = (x[:, None, some, None] for x in (chunks.offset, chunks.own))
        number = torch.arange(means.shape[2], device=q.device)
        past = (number >= offset) & (number < offset + own)
        gate = q.unflatten(1, (means.shape[1], -1)).to(means.dtype) @ means[:, :, None].mT
        top = _largest(gate.flatten(1, 2).masked_fill(~past, -torch.inf), self.top_k - 1)
        chunk = torch.arange(-(-seq_len // self.chunk_size), device=q.device)
        at = (offset + chunk).clamp(max=means.shape[2] - 1).expand(-1, top.shape[1], -1, -1)
        return (top.gather(3, at) & (chunk < own)) | (chunk == own)

    def _spans(self, rows: MaskRanges, batch: int, block_size: int) -> Spans:
        key = ("spans", batch, self.chunk_size, block_size)
        return once_per_mask(
            rows, key, lambda: find_spans(rows, batch, self.chunk_size, block_size)
        )

    def _chunks(self, rows: MaskRanges, batch: int, cp: "ContextParallel") -> "Chunks":
        key = ("moba", self.key, cp.key, batch)
        spans = self._spans(rows, batch, cp.block_size)
        return once_per_mask(rows, key, lambda: _find_chunks(rows, spans, cp, self.chunk_size))

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        batch, heads = q.shape[:2]
        blocks, words = seq_len // block_size, -(-seq_len // (32 * self.chunk_size))
        touching = min(slots(seq_len, self.chunk_size, packed), 2)
        shapes = ((seq_len, words), (blocks, touching, words), (blocks, words))
        return [q.new_empty(batch, heads, *shape, dtype=torch.int32) for shape in shapes]

    def index(
        self, tensors: list[Tensor], rows: MaskRanges, batch: int, heads: int, block_size: int
    ) -> MoBAIndex:
        origin = once_per_mask(
            rows, ("origin", batch), lambda: _origin(rows).expand(batch, -1).contiguous()
        )
        return MoBAIndex(
            *tensors, origin, self._spans(rows, batch, block_size), self.chunk_size, block_size
        )


class Chunks(NamedTuple):
    """What the gate needs to know of the mask and the layout, for every layer the same; int64 unless said otherwise.

    n whole chunks of all long documents, document by document. first, last: [B, n], their blocks. exists: bool [B, n].
    slot: [B, blocks], the first chunk that a block touches or that comes after it. weight: bool [B, n_local, 2, block],
    which tokens of this rank's blocks are in chunk slot, slot + 1. Of this rank's queries, [B, S_local]: offset, where
    their document's chunks begin; own, the number of their own chunk in the document. member: bool [B, n_local, block, T],
    in which of the long documents that touch the block a query is.
    """

    first: Tensor
    last: Tensor
    exists: Tensor
    slot: Tensor
    weight: Tensor
    offset: Tensor
    own: Tensor
    member: Tensor


def _origin(rows: MaskRanges) -> Tensor:
    """int32 [Bm, S], where each token's document begins; 0 for padding."""
    return (
        torch.zeros_like(rows.start)
        if rows.document_start is None
        else rows.document_start.clamp(min=0).int()
    )


def _find_chunks(rows: MaskRanges, spans: Spans, cp: "ContextParallel", chunk: int) -> Chunks:
    seq_len, size, device = rows.start.shape[1], cp.block_size, rows.start.device
    own = cp.blocks(rows)
    position = token_positions(own, size)
    count = (spans.stop - spans.start) // chunk
    offset = count.cumsum(-1) - count
    number = (
        torch.arange(max(1, seq_len // chunk), device=device).expand(len(count), -1).contiguous()
    )
    span = torch.searchsorted(offset + count, number, right=True)
    exists, span = span < count.shape[1], span.clamp(max=count.shape[1] - 1)
    begin = spans.start.gather(1, span) + (number - offset.gather(1, span)) * chunk
    begin = begin.where(exists, seq_len)
    block_begin = torch.arange(0, seq_len, size, device=device).expand(len(count), -1).contiguous()
    slot = torch.searchsorted(begin + chunk, block_begin, right=True)
    touched = (slot[:, own, None] + torch.arange(2, device=device)).clamp(max=number.shape[1])
    from_ = (
        torch.nn.functional.pad(begin, (0, 1), value=seq_len)
        .gather(1, touched.flatten(1))
        .view(*touched.shape, 1)
    )
    token = position.view(-1, 1, size)
    token_span = span_of_tokens(spans.start, spans.stop, seq_len)[:, position]
    member = (
        token_span.unflatten(1, (-1, size))[..., None]
        == spans_of_blocks(spans, own, size)[:, :, None]
    )
    own_offset = torch.nn.functional.pad(offset, (0, 1)).gather(1, token_span)
    return Chunks(
        begin // size,
        (begin + chunk - 1) // size,
        exists,
        slot,
        (from_ <= token) & (token < from_ + chunk),
        own_offset,
        (position - _origin(rows)[:, position].expand(len(count), -1)) // chunk,
        member,
    )


def _mean_keys(
    k: Tensor, chunks: Chunks, cp: "ContextParallel", chunk: int, rows: MaskRanges
) -> Tensor:
    """Mean key of every whole chunk, [B, Hkv, n, D], fp32 (fp64 for fp64).

    What is summed within blocks, on the rank that owns them, is summed up over blocks in global order on every rank: the
    number of ranks does not change the result.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    sums = chunks.weight[:, None].to(dtype) @ k.unflatten(2, (-1, cp.block_size)).to(dtype)
    sums = gather_blocks(sums, cp, rows)
    block = chunks.first[..., None] + torch.arange(-(-chunk // cp.block_size) + 1, device=k.device)
    valid = (block <= chunks.last[..., None]) & chunks.exists[..., None]
    block = block.where(valid, 0)
    number = torch.arange(block.shape[1], device=k.device)[:, None]
    which = (number - chunks.slot.gather(1, block.flatten(1)).view_as(block)).clamp(0, 1)
    at = (block * 2 + which).flatten(1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    parts = sums.flatten(2, 3).gather(2, at).unflatten(2, block.shape[1:])
    return (parts * valid[:, None, ..., None]).sum(3) / chunk


def _largest(gate: Tensor, count: int) -> Tensor:
    """bool like gate [..., n]: the `count` largest elements above -inf, equal ones in order of position."""
    if count == 0:
        return torch.zeros_like(gate, dtype=torch.bool)
    least = gate.topk(min(count, gate.shape[-1])).values[..., -1:]
    above, equal = gate > least, (gate == least) & (gate > -torch.inf)
    left = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= left))


def _of_queries_and_blocks(
    chosen: Tensor, member: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The words of MoBAIndex by blocks, [B, Hq, n, size, W], [B, Hq, n, T, W] and [B, Hq, n, W], from the choices
    [B, Hq, n size, C] and `member` [B, n, size, T]."""
    chosen = chosen.unflatten(2, (-1, size))
    any_chosen = torch.stack(
        [(chosen & m[:, None, ..., None]).any(3) for m in member.unbind(-1)], dim=3
    )
    return pack(chosen), pack(any_chosen), pack(chosen.all(3))
