"""Lists of the queries that chose each chunk, sorted by counting. The host does not wait.

Every query assigns the chunks that it chose to slots: the first one to slot 0, the next one to
slot 1. So within one slot each query belongs to at most one chunk. A kernel that computes slot by
slot can add to the memory of its queries without atomics.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import Piece, Rows, rows_of
from titan_sparse.kernels.gathered.launch import SORTED_ROWS, Share

_ROWS = 128
"""Queries of a program that reads bits."""


class Choices(NamedTuple):
    """The whole chunks of keys that every query chose. n chunks a sequence, of all its documents.

    words: int32 [B, Hq, S, W]; bit c (compact.py) is chunk c of the query's document.
    earlier: int32 [B, S]; only bits below this one count: the chunks before the query's own, 0 for
        padding.
    offset: int32 [B, S], the number of the first chunk of the query's document.
    begin: int32 [B, n], the first key of each chunk.
    tokens: keys of a chunk.
    slots: the most chunks that a query can have chosen.
    """

    words: Tensor
    earlier: Tensor
    offset: Tensor
    begin: Tensor
    tokens: int
    slots: int


class Gathered(NamedTuple):
    """The queries of each chunk, all slots of a chunk one after the other.

    queries: int32 [B, Hq, slots * S], ascending inside a chunk's slot.
    begin: int32 [B, Hq, (n + 1) * slots + 1]: where slot r of chunk c begins in `queries`, at
        c * slots + r. Chunk n has the places that no query used.
    slots: as in Choices.
    """

    queries: Tensor
    begin: Tensor
    slots: int


class TileTable(NamedTuple):
    """Tiles of gathered queries of one chunk, by slot. int32 [B, Hq, slots, T] each.

    chunk: whose keys the tile meets. first: where its queries begin in Gathered.queries.
    count: how many they are, 0 behind the last tile.
    rows: the most queries of a tile.
    """

    chunk: Tensor
    first: Tensor
    count: Tensor  # type: ignore[assignment]
    rows: int


class Plan(NamedTuple):
    """The plan of a computation.

    own: the lists of blocks, no larger than a chunk, and keys and values. choices: the chunks, of
    the same keys. scale: of the logits, above 0.
    """

    own: Piece
    choices: Choices
    scale: float

    def of(self, share: Share) -> "Plan":
        """The plan of a share, as views."""
        keys = (share.batches, share.kv_heads)
        tiles = self.own.tiles
        tiles = tiles._replace(
            by_query=share.of(tiles.by_query),
            # dk and dv of the blocks are computed for all heads at once.
            by_key=None,
            start=tiles.start[share.batches],
            stop=tiles.stop[share.batches],
        )
        own = Piece(self.own.k[keys], self.own.v[keys], tiles)
        return self._replace(own=own, choices=share.of(self.choices))


class Work(NamedTuple):
    """A share of a plan, with its lists of queries."""

    share: Share
    plan: Plan
    gathered: Gathered
    tiles: TileTable

    def operand(self) -> "ChoicesOperand":
        """As kernels get it."""
        own = self.plan.own
        choices = self.plan.choices
        _, heads, q_len, _ = choices.words.shape
        return ChoicesOperand(
            k=rows_of(own.k),
            v=rows_of(own.v),
            begin=choices.begin,
            queries=self.gathered.queries,
            list_begin=self.gathered.begin,
            slots=choices.slots,
            q_len=q_len,
            heads=heads,
            group=heads // own.k.shape[1],
            chunks=choices.begin.shape[1],
        )


class ChoicesOperand(NamedTuple):
    """Keys, values and lists of queries. heads: of queries. group: query heads of a KV head."""

    k: Rows
    v: Rows
    begin: Tensor
    queries: Tensor
    list_begin: Tensor
    slots: int
    q_len: int
    heads: int
    group: int
    chunks: int


@triton.jit
def _pair_kernel(
    words, words_stride, earlier, offset, pairs, q_len, heads, slots, chunks, ROWS: tl.constexpr
):  # fmt: skip
    """pairs: int32 [B, H, slots, S], of every query c * slots + r for the chunk c of its slot r."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < q_len
    batch_row = batch.to(tl.int64) * q_len
    limit = tl.load(earlier + batch_row + rows, mask=inside, other=0)
    first = tl.load(offset + batch_row + rows, mask=inside, other=0)
    head_words = words + batch.to(tl.int64) * words_stride[0] + head.to(tl.int64) * words_stride[1]
    row_words = head_words + rows.to(tl.int64) * words_stride[2]
    out = pairs + (batch.to(tl.int64) * heads + head) * slots * q_len + rows

    slot = tl.zeros([ROWS], tl.int32)
    for place in range((tl.max(limit, 0) + 31) // 32):
        word = tl.load(row_words + place, mask=place * 32 < limit, other=0)
        for bit in range(32):
            chunk = place * 32 + bit
            chosen = ((word >> bit) & 1 != 0) & (chunk < limit) & (slot < slots)
            tl.store(out + slot * q_len, (first + chunk) * slots + slot, mask=chosen)
            slot += chosen.to(tl.int32)
    for unused in range(slots):
        tl.store(out + unused * q_len, chunks * slots + unused, mask=inside & (slot <= unused))


def chosen_pairs(choices: Choices) -> Tensor:
    """int32 [B, Hq, slots, S]: c * slots + r, for the chunk c (of the sequence)
    in a query's slot r.

    Slots that a query does not use have c = n.
    """
    words = choices.words
    batch, heads, q_len, _ = words.shape
    shape = (batch, heads, choices.slots, q_len)
    pairs = torch.empty(shape, dtype=torch.int32, device=words.device)
    _pair_kernel[triton.cdiv(q_len, _ROWS), heads, batch](
        words, words.stride()[:3], choices.earlier, choices.offset, pairs,
        q_len, heads, choices.slots, choices.begin.shape[1], ROWS=_ROWS,
    )  # fmt: skip
    return pairs


@triton.jit
def _rank_in_tile(keys, ROWS: tl.constexpr):
    """The numbers of equal keys before and behind each of the keys [ROWS]."""
    place = tl.arange(0, ROWS)
    # [ROWS, ROWS]
    equal = keys[:, None] == keys[None, :]
    is_before = equal & (place[None, :] < place[:, None])
    is_behind = equal & (place[None, :] > place[:, None])
    return tl.sum(is_before.to(tl.int32), 1), tl.sum(is_behind.to(tl.int32), 1)


@triton.jit
def _count_kernel(pairs, counts, q_len, key_count, ROWS: tl.constexpr):
    """counts: int32 [B H, keys, tiles], how often each key occurs among ROWS queries of a slot."""
    tile = tl.program_id(0)
    slot = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    queries = tile * ROWS + tl.arange(0, ROWS)
    inside = queries < q_len
    of_slot = pairs + (row * tl.num_programs(1) + slot) * q_len
    keys = tl.load(of_slot + queries, mask=inside, other=-1)
    before, behind = _rank_in_tile(keys, ROWS)
    at = counts + (row * key_count + keys) * tl.num_programs(0) + tile
    tl.store(at, before + 1, mask=inside & (behind == 0))


@triton.jit
def _place_kernel(pairs, ends, counts, queries, q_len, key_count, ROWS: tl.constexpr):
    """Every query to its place. ends: like counts, their running sum over all of them."""
    tile = tl.program_id(0)
    slot = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    numbers = tile * ROWS + tl.arange(0, ROWS)
    inside = numbers < q_len
    of_slot = pairs + (row * tl.num_programs(1) + slot) * q_len
    keys = tl.load(of_slot + numbers, mask=inside, other=-1)
    before, _ = _rank_in_tile(keys, ROWS)
    at = (row * key_count + keys) * tl.num_programs(0) + tile
    end = tl.load(ends + at, mask=inside, other=0)
    count = tl.load(counts + at, mask=inside, other=0)
    tl.store(queries + (end - count + before), numbers, mask=inside)


def gather_queries(pairs: Tensor, chunks: int) -> Gathered:
    """The queries of chosen_pairs() [B, Hq, slots, S], of n = `chunks` chunks, sorted."""
    batch, heads, slots, q_len = pairs.shape
    rows = batch * heads
    key_count = (chunks + 1) * slots
    tiles = triton.cdiv(q_len, SORTED_ROWS)
    grid = (tiles, slots, rows)

    # [B H, keys, tiles]. Every place of `pairs` has a key, so that each row adds up to slots * S.
    counts = torch.zeros(rows, key_count, tiles, dtype=torch.int32, device=pairs.device)
    _count_kernel[grid](pairs, counts, q_len, key_count, ROWS=SORTED_ROWS)
    # One scan over all rows: a GPU is slow where there are few and long ones.
    ends = counts.flatten().cumsum(0, dtype=torch.int32)
    queries = torch.empty(rows, slots * q_len, dtype=torch.int32, device=pairs.device)
    _place_kernel[grid](pairs, ends, counts, queries, q_len, key_count, ROWS=SORTED_ROWS)

    # [B H, keys + 1]: where each key ends, counted from the row's beginning, behind a 0.
    ends = ends.view_as(counts)[..., -1]
    row_begin = torch.arange(rows, dtype=torch.int32, device=pairs.device) * (slots * q_len)
    begin = torch.nn.functional.pad(ends - row_begin[:, None], (1, 0))
    return Gathered(queries.view(batch, heads, -1), begin.view(batch, heads, -1), slots)


def tile_table(gathered: Gathered, rows: int) -> TileTable:
    """Tiles of up to `rows` queries."""
    slots = gathered.slots
    begin = gathered.begin
    places = gathered.queries.shape[-1]
    chunks = (begin.shape[-1] - 1) // slots - 1

    # [B, Hq, slots, n]: where the queries of each chunk begin and end.
    first = begin[..., : chunks * slots].unflatten(-1, (chunks, slots)).mT
    last = begin[..., 1 : chunks * slots + 1].unflatten(-1, (chunks, slots)).mT
    # Tiles up to each chunk, its own included.
    tiles = (last - first + (rows - 1)) // rows
    tile_end = tiles.cumsum(-1, dtype=torch.int32)

    # [B, Hq, slots, T]: all whole tiles, and for every chunk one that is not full.
    width = places // slots // rows + chunks
    number = torch.arange(width, dtype=torch.int32, device=begin.device)
    number = number.expand(*tile_end.shape[:-1], -1).contiguous()
    chunk = torch.searchsorted(tile_end, number, right=True)
    known = chunk.clamp(max=chunks - 1)
    in_chunk = number - (tile_end - tiles).gather(-1, known)
    tile_first = first.gather(-1, known) + in_chunk * rows
    count = (last.gather(-1, known) - tile_first).clamp(max=rows)
    count = torch.where(chunk < chunks, count, 0)
    return TileTable(known.int(), tile_first.int(), count.int(), rows)
