"""A piece of block-sparse attention: keys, values and the lists of blocks that meet; how kernels see it."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import ChosenChunks, chosen_range

INTERPRETED = triton.knobs.runtime.interpret
"""Kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 when they were imported)."""

LOG2_E = 1.4426950408889634


class Lists(NamedTuple):
    """For each of n blocks of one side the blocks of the other side that it meets, int32 and contiguous.

    full_count, partial_count: [B, Hq, n]. full, partial: [B, Hq, n, K], K being any width from the largest count on.
    Of a full tile every pair is seen; in a partial one positions and `covered` decide.
    partial_slice: like partial, or None: which of the piece's slices alone decides; a block may be there once for each
    slice.
    """

    full_count: Tensor
    full: Tensor
    partial_count: Tensor
    partial: Tensor
    partial_slice: Tensor | None = None


class Piece(NamedTuple):
    """Keys and values [B, Hkv, Sk, D] (Hq a multiple of Hkv) and which query blocks meet which of their blocks.

    by_query: KV blocks of each query block. by_key: query blocks of each KV block, needed in backward only.
    k_positions: int32 [B, Hq, Sk] or [1, 1, Sk]; in a partial tile a query sees positions start <= p < stop.
    covered: int32 [B, Hq, nq, ceil(Sk / 32)] or None: a bit for each key that the query block does not see in a partial
    tile (bits.py).
    chosen: of the keys of a partial tile a query sees only those in chunks that it chose itself; k_positions of a
    block are neighbours then.
    slices: int32 [B, N, 6] or None: (q_start, q_stop, k_start, k_stop, low, high) of each slice, in which query
    position p sees key position r if q_start <= p < q_stop, k_start <= r < k_stop and low <= r - p <= high, in place of
    start and stop; no two slices hold the same pair. q_positions: int32 [Sq], with slices only.
    """

    k: Tensor
    v: Tensor
    by_query: Lists
    by_key: Lists | None
    k_positions: Tensor
    covered: Tensor | None
    chosen: ChosenChunks | None = None
    slices: Tensor | None = None
    q_positions: Tensor | None = None


class Operand(NamedTuple):
    """A Piece as a kernel gets it; *_stride: elements per batch, head and (k, v) token; list_stride: rows of a table
    per batch and head, 0 where they share one."""

    k: Tensor
    k_stride: tuple[int, int, int]
    v: Tensor
    v_stride: tuple[int, int, int]
    group: int
    k_len: int
    full_count: Tensor
    full: Tensor
    full_width: int
    partial_count: Tensor
    partial: Tensor
    partial_width: int
    partial_slice: Tensor | None
    list_stride: tuple[int, int]
    positions: Tensor
    positions_stride: tuple[int, int]
    covered: Tensor | None
    words: int  # of `covered`, a query block
    chosen: Tensor | None
    chosen_words: int  # a query
    origin: Tensor | None
    chunk: int
    slices: Tensor | None
    slices_stride: int  # a batch
    q_positions: Tensor | None


def dense_rows(x: Tensor) -> Tensor:
    """[B, H, S, D] with neighbouring elements along D, any strides else."""
    return x if x.stride(-1) == 1 else x.contiguous()


def output_like(
    q: Tensor, before: Tensor | None, dtype: torch.dtype | None, into: Tensor | None
) -> Tensor:
    """Memory for a result in q's shape: `into`, or memory in dtype, by default that of `before`, else q's: `before` itself,
    which is read before it is written, if its dtype is that."""
    if into is not None:
        return into
    dtype = dtype or (q if before is None else before).dtype
    if before is not None and before.dtype == dtype:
        return before
    return torch.empty(q.shape, dtype=dtype, device=q.device)


def operand(piece: Piece, lists: Lists, heads: int) -> Operand:
    """What a kernel walking `lists` (one of the piece's two) needs, for `heads` query heads."""
    k, v = dense_rows(piece.k), dense_rows(piece.v)
    lists, list_stride = _without_copies(lists)
    full_count, full, partial_count, partial, partial_slice = lists
    positions = piece.k_positions.contiguous()
    shared = tuple(0 if positions.shape[dim] == 1 else positions.stride(dim) for dim in (0, 1))
    covered = None if piece.covered is None else piece.covered.contiguous()
    words, origin, chunk = piece.chosen or (None, None, 0)
    chosen = (
        (None, 0, None, 0)
        if words is None
        else (words.contiguous(), words.shape[-1], origin.contiguous(), chunk)
    )
    return Operand(
        k,
        k.stride()[:3],
        v,
        v.stride()[:3],
        heads // k.shape[1],
        k.shape[2],
        full_count,
        full,
        full.shape[-1],
        partial_count,
        partial,
        partial.shape[-1],
        partial_slice,
        list_stride,
        positions,
        shared,
        covered,
        -(-k.shape[2] // 32),
        *chosen,
        piece.slices,
        0 if piece.slices is None else piece.slices.stride(0),
        piece.q_positions,
    )


def _without_copies(lists: Lists) -> tuple[Lists, tuple[int, int]]:
    """The lists, contiguous and once where batches or heads share their memory, and the rows of a table per batch,
    head."""
    shared = [all(x is None or x.stride(dim) == 0 for x in lists) for dim in (0, 1)]
    batches, heads = (1 if alike else size for alike, size in zip(shared, lists.full.shape))
    lists = Lists(*(None if x is None else x[:batches, :heads].contiguous() for x in lists))
    blocks = lists.full.shape[2]
    return lists, (heads * blocks if batches > 1 else 0, blocks if heads > 1 else 0)


@triton.jit
def slice_of(pointer, stride, batch, head):
    """Where the [S, D] of one batch and head begins."""
    return pointer + batch.to(tl.int64) * stride[0] + head.to(tl.int64) * stride[1]


@triton.jit
def load_rows(pointer, stride, first, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """[ROWS, D] from row `first` on; D is HEAD_DIM padded with zeros to a power of two."""
    dims = tl.arange(0, D)[None, :]
    at = pointer + first.to(tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + dims)
    if D == HEAD_DIM:
        return tl.load(at)
    return tl.load(at, mask=dims < HEAD_DIM, other=0.0)


@triton.jit
def store_rows(pointer, x, first, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Write [ROWS, D] to contiguous rows of HEAD_DIM elements."""
    dims = tl.arange(0, D)[None, :]
    at = pointer + first.to(tl.int64) * HEAD_DIM + (tl.arange(0, ROWS)[:, None] * HEAD_DIM + dims)
    tl.store(at, x.to(pointer.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def list_row(piece, batch, head, block):
    """Counts and tables of one block: full count, full table, partial count, partial table."""
    row = batch.to(tl.int64) * piece.list_stride[0] + head * piece.list_stride[1] + block
    full, partial = piece.full + row * piece.full_width, piece.partial + row * piece.partial_width
    return tl.load(piece.full_count + row), full, tl.load(piece.partial_count + row), partial


@triton.jit
def slice_numbers(piece, batch, head, block):
    """Beside list_row()'s partial table the slices that its entries mean, of a piece that has slices."""
    row = batch.to(tl.int64) * piece.list_stride[0] + head * piece.list_stride[1] + block
    return piece.partial_slice + row * piece.partial_width


@triton.jit
def query_positions(piece, rows, start):
    """Positions of the queries `rows` where the piece has slices; else any vector of that kind, which is not looked
    at."""
    if piece.q_positions is not None:
        return tl.load(piece.q_positions + rows)
    return start


@triton.jit
def bounds_in_slice(piece, batch, number, query):
    """From and before which position queries at positions `query` see keys in one slice."""
    at = piece.slices + batch.to(tl.int64) * piece.slices_stride + number * 6
    inside = (query >= tl.load(at)) & (query < tl.load(at + 1))
    start = tl.maximum(tl.load(at + 2), query + tl.load(at + 4))
    stop = tl.minimum(tl.load(at + 3), query + tl.load(at + 5) + 1)
    return start, tl.where(inside, stop, 0)


@triton.jit
def choices(piece, batch, head, heads, q_len, rows):
    """Where the queries' own choices of chunks stand, and where their documents begin, of a piece that has choices."""
    words = piece.chosen + ((batch.to(tl.int64) * heads + head) * q_len + rows) * piece.chosen_words
    return words, tl.load(piece.origin + batch.to(tl.int64) * q_len + rows)


@triton.jit
def hide_covered(position, covered, keys):
    """Give covered keys a position that no query sees."""
    word = tl.load(covered + (keys >> 5))
    return tl.where((word >> (keys & 31)) & 1 != 0, 2147483647, position)


@triton.jit
def load_positions(positions, covered, first, COUNT: tl.constexpr):
    """int32 [COUNT] positions of keys from `first` on."""
    keys = first + tl.arange(0, COUNT)
    position = tl.load(positions + keys)
    if covered is not None:
        position = hide_covered(position, covered, keys)
    return position


@triton.jit
def hide_keys(scores, piece, batch, positions, covered, first, numbers, entry, start, stop, query, words, origin,
              COUNT: tl.constexpr):  # fmt: skip
    """-inf in scores [M, COUNT] for the keys from `first` on that their queries do not see. start, stop: of the mask's rows;
    numbers, query: where the piece has slices, of which `entry` of the list is one; words, origin: where it has choices."""
    position = load_positions(positions, covered, first, COUNT)[None, :]
    seen_from, seen_until = start, stop
    if numbers is not None:
        seen_from, seen_until = bounds_in_slice(piece, batch, tl.load(numbers + entry), query)
    if piece.chosen is not None:
        seen_from, seen_until = chosen_range(
            seen_from,
            seen_until,
            words,
            origin,
            piece.chunk,
            piece.chosen_words,
            tl.load(positions + first),
        )
    return tl.where(
        (position >= seen_from[:, None]) & (position < seen_until[:, None]), scores, float("-inf")
    )
