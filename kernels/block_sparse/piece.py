"""A piece of block-sparse attention: keys, values and the lists of blocks that meet; and how the
kernels read it."""

from collections.abc import Callable
from typing import NamedTuple, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret
"""True if the kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 at import)."""

LOG2_E = 1.4426950408889634


class BlockLists(NamedTuple):
    """For each of n blocks of one side, the blocks of the other side that it meets.

    All int32; of one sequence and head contiguous. Of a full tile every pair is seen. In a partial
    one Tiles' start, stop and covered decide. No tile is in both lists.

    full_count, partial_count: [B, Hq, n].
    full, partial: [B, Hq, n, K], local block numbers, ascending. K is any width from the largest
        count on; entries behind the count mean nothing.
    partial_slice: like partial, the slice of the mask that is meant, which alone decides what is
        seen. A tile is in `partial` once for each of its slices. None where the mask has no slices.
    """

    full_count: Tensor
    full: Tensor
    partial_count: Tensor
    partial: Tensor
    partial_slice: Tensor | None = None


@overload
def mapped(lists: BlockLists, change: Callable[[Tensor], Tensor]) -> BlockLists: ...
@overload
def mapped(lists: None, change: Callable[[Tensor], Tensor]) -> None: ...
def mapped(lists: BlockLists | None, change: Callable[[Tensor], Tensor]) -> BlockLists | None:
    """change() of each tensor of the lists."""
    if lists is None:
        return None
    return BlockLists._make(None if field is None else change(field) for field in lists)


class ChosenChunks(NamedTuple):
    """Chunks of keys that single queries chose (MoBA): of the keys that start and stop let it see,
    a query sees those in its chunks.

    A tile of keys that is no longer than a chunk touches at most two chunks of a document. So in
    each tile the choice only narrows the range start <= p < stop that the mask gives a query, and
    kernels compare nothing but that range.

    words: int32 [B, Hq, Sq, W], contiguous; bit c (compact.py) stands for the `tokens` keys from
        origin + c * tokens on.
    origin: int32 [B, Sq], where the query's document begins.
    tokens: of a chunk, no fewer than of a block.
    """

    words: Tensor
    origin: Tensor
    tokens: int


def chosen_keys(chosen: ChosenChunks, position: Tensor) -> Tensor:
    """bool [B, Hq, Sq, n]: whether each query chose the chunk of each key.

    position: of the keys, [B or 1, Hq or 1, n].
    """
    # [B, 1, Sq, 1]
    origin = chosen.origin[:, None, :, None]
    # [B, Hq or 1, Sq, n]: keys before the document count as its first chunk; the mask hides them.
    chunk = (position[:, :, None] - origin).clamp(min=0) // chosen.tokens
    return chosen_bits(chosen.words, chunk)


def chosen_bits(words: Tensor, chunk: Tensor) -> Tensor:
    """bool: of each row of words [B, H, n, W] the bits with the numbers `chunk`, False beyond them.

    chunk: [B, H or 1, n, m]. Returns [B, H, n, m].
    """
    batch, heads, _, width = words.shape
    # [B, H, n, m]
    place = (chunk >> 5).clamp(max=width - 1).long()
    word = words.gather(3, place.expand(batch, heads, -1, -1))
    bit = (word >> (chunk & 31).int()) & 1
    return bit.bool() & (chunk < 32 * width)


class Tiles(NamedTuple):
    """The KV blocks that each query block meets, and the pairs inside them that are seen.

    This is the contract between masks and patterns on one side and backends on the other.

    by_query: KV blocks of each query block.
    by_key: query blocks of each KV block, if requested (for the backward).
    start, stop: int32 [B, Sq], contiguous; the query sees keys at positions start <= p < stop.
    k_positions: int32 [B, Hq, Sk] where every head has keys of its own, else [1, 1, Sk].
    covered: int32 [B, Hq, nq, ceil(Sk / 32)] or None: a bit (compact.py) for each key that the query
        block already met elsewhere, not to be counted again.
    block_size: tokens in a block of queries and of keys.
    chosen: what each query chose itself, for patterns that let it. Full tiles are those that all of
        their queries chose. The k_positions of a block are neighbors then.
    slices: int32 [B, N, 6] that partial_slice counts; None without slices. Each is (q_start,
        q_stop, k_start, k_stop, low, high): in it query position p sees key position r if
        q_start <= p < q_stop, k_start <= r < k_stop and low <= r - p <= high. This replaces start
        and stop. No two slices hold the same pair.
    q_positions: int32 [Sq], global; None without slices.
    """

    by_query: BlockLists
    by_key: BlockLists | None
    start: Tensor
    stop: Tensor
    k_positions: Tensor
    covered: Tensor | None
    block_size: int
    chosen: ChosenChunks | None = None
    slices: Tensor | None = None
    q_positions: Tensor | None = None


class Piece(NamedTuple):
    """Keys and values that queries meet, and the tiles that say which pairs are computed.

    k, v: [B, Hkv, Sk, D], Hq a multiple of Hkv; for gathered verticals [B, Hq, C, D], as every
    head has its own. Pieces of one call have the same start, stop and block_size.
    """

    k: Tensor
    v: Tensor
    tiles: Tiles


class Rows(NamedTuple):
    """[B, H, S, D] as a kernel gets it. stride: elements per batch, head and token; those along D
    are neighbors in memory."""

    data: Tensor
    stride: tuple[int, ...]


def rows_of(x: Tensor) -> Rows:
    """For [B, H, S, D] of any strides."""
    if x.stride(-1) != 1:
        # Elements of a row have to be neighbors.
        x = x.contiguous()
    return Rows(x, x.stride()[:3])


class Operand(NamedTuple):
    """A Piece as a kernel gets it, with one of its two BlockLists.

    list_stride: rows of a table per batch and head, 0 where they share one.
    """

    k: Rows
    v: Rows
    group: int  # query heads per KV head
    k_len: int
    full_count: Tensor
    full: Tensor
    full_width: int
    partial_count: Tensor
    partial: Tensor
    partial_width: int
    partial_slice: Tensor | None
    list_stride: tuple[int, int]
    positions: Rows  # of one element, so without a stride per token
    covered: Tensor | None
    words: int  # of `covered`, per query block
    chosen: ChosenChunks | None
    chosen_words: int  # per query
    slices: Rows | None
    q_positions: Tensor | None


def output_like(
    q: Tensor, before: Tensor | None, dtype: torch.dtype | None, into: Tensor | None
) -> Tensor:
    """Memory for a result in q's shape: `into`, else memory in `dtype`.

    before: what the result is added to; its dtype is the default one, else q's. Where `before` has
    the dtype already, its own memory is used: kernels read it before they write it.
    """
    if into is not None:
        return into
    if before is None:
        return torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    if dtype is None or dtype == before.dtype:
        return before
    return torch.empty(q.shape, dtype=dtype, device=q.device)


def operand(piece: Piece, lists: BlockLists, heads: int) -> Operand:
    """The inputs of a kernel that walks `lists`, one of the piece's two, for `heads` query
    heads."""
    tiles = piece.tiles
    lists, list_stride = _without_copies(lists)
    _, kv_heads, k_len, _ = piece.k.shape

    positions = tiles.k_positions.contiguous()
    # Positions that all sequences or heads share are there once.
    batch_stride = 0 if positions.shape[0] == 1 else positions.stride(0)
    head_stride = 0 if positions.shape[1] == 1 else positions.stride(1)

    chosen = tiles.chosen
    if chosen is not None:
        chosen = ChosenChunks(chosen.words.contiguous(), chosen.origin.contiguous(), chosen.tokens)
    slices = tiles.slices

    return Operand(
        k=rows_of(piece.k),
        v=rows_of(piece.v),
        group=heads // kv_heads,
        k_len=k_len,
        full_count=lists.full_count,
        full=lists.full,
        full_width=lists.full.shape[-1],
        partial_count=lists.partial_count,
        partial=lists.partial,
        partial_width=lists.partial.shape[-1],
        partial_slice=lists.partial_slice,
        list_stride=list_stride,
        positions=Rows(positions, (batch_stride, head_stride)),
        covered=None if tiles.covered is None else tiles.covered.contiguous(),
        words=-(-k_len // 32),
        chosen=chosen,
        chosen_words=0 if chosen is None else chosen.words.shape[-1],
        slices=None if slices is None else Rows(slices, slices.stride()[:1]),
        q_positions=tiles.q_positions,
    )


def _without_copies(lists: BlockLists) -> tuple[BlockLists, tuple[int, int]]:
    """The lists, contiguous, and how many rows of a table there are per batch and per head.

    Where all batches or all heads share their memory, the lists are there once and the stride is 0.
    """
    tables = [table for table in lists if table is not None]
    batches, heads, blocks, _ = lists.full.shape
    if all(table.stride(0) == 0 for table in tables):
        batches = 1
    if all(table.stride(1) == 0 for table in tables):
        heads = 1
    if (batches, heads) != lists.full.shape[:2]:
        lists = mapped(lists, lambda table: table[:batches, :heads])
    batch_stride = heads * blocks if batches > 1 else 0
    head_stride = blocks if heads > 1 else 0
    return mapped(lists, Tensor.contiguous), (batch_stride, head_stride)


@triton.jit
def slice_of(rows, batch, head):
    """The offset of the [S, D] of one batch and head."""
    batch_begin = rows.data + batch.to(tl.int64) * rows.stride[0]
    return batch_begin + head.to(tl.int64) * rows.stride[1]


@triton.jit
def load_rows(pointer, stride, first, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """[ROWS, D] from row `first` on; D is HEAD_DIM padded with zeros to a power of two."""
    dims = tl.arange(0, D)[None, :]
    # 64 bits for the tile, 32 bits inside it.
    begin = pointer + first.to(tl.int64) * stride
    at = begin + (tl.arange(0, ROWS)[:, None] * stride + dims)
    if D == HEAD_DIM:
        return tl.load(at)
    return tl.load(at, mask=dims < HEAD_DIM, other=0.0)


@triton.jit
def store_rows(pointer, x, first, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Write [ROWS, D] to contiguous rows of HEAD_DIM elements."""
    dims = tl.arange(0, D)[None, :]
    begin = pointer + first.to(tl.int64) * HEAD_DIM
    at = begin + (tl.arange(0, ROWS)[:, None] * HEAD_DIM + dims)
    tl.store(at, x.to(pointer.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def lists_of(piece, batch, head, block):
    """The full and the partial list of one block, each a count, a table, and for a piece with
    slices the slice that each entry of the partial table means."""
    batch_row = batch.to(tl.int64) * piece.list_stride[0]
    row = batch_row + head * piece.list_stride[1] + block
    full = piece.full + row * piece.full_width
    partial = piece.partial + row * piece.partial_width
    numbers = partial
    if piece.partial_slice is not None:
        numbers = piece.partial_slice + row * piece.partial_width
    full_count = tl.load(piece.full_count + row)
    partial_count = tl.load(piece.partial_count + row)
    return (full_count, full, full), (partial_count, partial, numbers)


@triton.jit
def bounds_in_slice(piece, batch, number, query):
    """From and before which position queries at positions `query` see keys in one slice."""
    batch_begin = piece.slices.data + batch.to(tl.int64) * piece.slices.stride[0]
    # (q_start, q_stop, k_start, k_stop, low, high)
    at = batch_begin + number * 6
    inside = (query >= tl.load(at)) & (query < tl.load(at + 1))
    start = tl.maximum(tl.load(at + 2), query + tl.load(at + 4))
    stop = tl.minimum(tl.load(at + 3), query + tl.load(at + 5) + 1)
    # Queries outside the slice see no position.
    return start, tl.where(inside, stop, 0)


@triton.jit
def _bit(words, number, width):
    """True if bit `number` of `width` words is set; False beyond them."""
    word = tl.load(words + (number >> 5), mask=number < width * 32, other=0)
    return ((word >> (number & 31)) & 1) != 0


@triton.jit
def chosen_range(start, stop, words, origin, tokens, width, position):
    """start and stop of each query, [M], for a tile of keys, narrowed to the chunks that it chose.

    words: [M], pointers to the queries' words. origin: [M], where their documents begin. position:
    of the tile's first key. The tile lies in that key's chunk and the one behind it.
    """
    chunk = tl.maximum(position - origin, 0) // tokens
    boundary = origin + (chunk + 1) * tokens
    here = _bit(words, chunk, width)
    beyond = _bit(words, chunk + 1, width)
    # Without the first chunk the range begins at the boundary, without the second it ends there.
    narrowed_start = tl.where(here, start, tl.maximum(start, boundary))
    narrowed_stop = tl.where(beyond, stop, tl.minimum(stop, boundary))
    return narrowed_start, narrowed_stop


@triton.jit
def choices(piece, batch, head, heads, q_len, rows):
    """Pointers to the bits of the queries' own choices, and the starts of the queries' documents.

    For a piece that has choices.
    """
    head_row = (batch.to(tl.int64) * heads + head) * q_len
    words = piece.chosen.words + (head_row + rows) * piece.chosen_words
    origin = piece.chosen.origin + batch.to(tl.int64) * q_len + rows
    return words, tl.load(origin)


@triton.jit
def hide_covered(position, covered, keys):
    """Give covered keys a position that no query sees."""
    word = tl.load(covered + (keys >> 5))
    is_covered = (word >> (keys & 31)) & 1 != 0
    return tl.where(is_covered, 2147483647, position)


@triton.jit
def look_up(piece, batch, head, heads, q_block, q_blocks, rows, BLOCK: tl.constexpr):
    """The inputs of hide_keys() for the queries `rows`, of one block: positions of keys, bits of
    covered keys, positions of the queries, and their choices().

    What the piece does not have is never read, so anything stands for it.
    """
    positions = slice_of(piece.positions, batch, head)
    covered = positions
    query = rows
    words = rows
    origin = rows
    if piece.covered is not None:
        row = (batch.to(tl.int64) * heads + head) * q_blocks + q_block
        covered = piece.covered + row * piece.words
    if piece.q_positions is not None:
        query = tl.load(piece.q_positions + rows)
    if piece.chosen is not None:
        words, origin = choices(piece, batch, head, heads, q_blocks * BLOCK, rows)
    return positions, covered, query, words, origin


@triton.jit
def hide_keys(scores, piece, batch, first, number, start, stop, looked_up, COUNT: tl.constexpr):
    """Scores [M, COUNT], with -inf for the keys from `first` on that their queries do not see.

    number: where the tile's slice is found, if the piece has slices. start, stop: of the mask's
    rows. looked_up: of look_up().
    """
    positions, covered, query, words, origin = looked_up
    keys = first + tl.arange(0, COUNT)
    position = tl.load(positions + keys)
    if piece.covered is not None:
        position = hide_covered(position, covered, keys)
    seen_from = start
    seen_until = stop
    if piece.partial_slice is not None:
        seen_from, seen_until = bounds_in_slice(piece, batch, tl.load(number), query)
    if piece.chosen is not None:
        # The keys of a tile are neighbors, so its first position says which chunks it touches.
        first_position = tl.load(positions + first)
        seen_from, seen_until = chosen_range(
            seen_from, seen_until, words, origin,
            piece.chosen.tokens, piece.chosen_words, first_position,
        )  # fmt: skip
    seen = (position[None, :] >= seen_from[:, None]) & (position[None, :] < seen_until[:, None])
    return tl.where(seen, scores, float("-inf"))
