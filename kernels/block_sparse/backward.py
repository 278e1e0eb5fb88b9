"""Backward of block-sparse attention: dq by query block, dk and dv by KV block, without atomics.

Both take the out and lse of the whole attention, over all pieces: with them the gradients of pieces
add up exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.launch import (
    key_splits,
    key_tile,
    options,
    query_tile,
    sum_splits,
)
from titan_sparse.kernels.block_sparse.piece import (
    LOG2_E,
    Piece,
    Rows,
    Tiles,
    bounds_in_slice,
    choices,
    chosen_range,
    hide_covered,
    hide_keys,
    lists_of,
    load_rows,
    look_up,
    operand,
    output_like,
    rows_of,
    slice_of,
    store_rows,
)

_DELTA_ROWS = 16  # divides every block, so also every number of queries


@triton.jit
def _delta_kernel(
    out, d_out, lse, delta, lse_2, q_len, heads,
    M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(d_out * out), and lse in base 2.

    Where nothing is seen lse becomes finite, so that no masked p is NaN.
    """
    first = tl.program_id(0) * M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    # [M, D]
    out_tile = load_rows(slice_of(out, batch, head), out.stride[2], first, M, HEAD_DIM, D)
    d_tile = load_rows(slice_of(d_out, batch, head), d_out.stride[2], first, M, HEAD_DIM, D)
    rows = (batch.to(tl.int64) * heads + head) * q_len + first + tl.arange(0, M)
    tl.store(delta + rows, tl.sum(out_tile.to(tl.float32) * d_tile.to(tl.float32), 1))
    natural = tl.load(lse + rows)
    tl.store(lse_2 + rows, tl.where(natural == float("-inf"), 0.0, natural * LOG2_E))


@triton.jit
def _query_gradient(
    dq, q_tile, d_tile, lse, delta, scale,
    piece, batch, head, heads, q_block, q_blocks, rows, start, stop,
    BLOCK: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq / logit scale through one piece, N keys at a time: its full list without masking, then its
    partial list."""
    PER_BLOCK: tl.constexpr = BLOCK // N
    k = slice_of(piece.k, batch, head // piece.group)
    v = slice_of(piece.v, batch, head // piece.group)
    lists = lists_of(piece, batch, head, q_block)
    looked_up = look_up(piece, batch, head, heads, q_block, q_blocks, rows, BLOCK)
    for MASKED in tl.static_range(2):
        count, table, numbers = lists[MASKED]
        for step in range(count * PER_BLOCK):
            first = tl.load(table + step // PER_BLOCK) * BLOCK + step % PER_BLOCK * N
            # [N, D]
            k_tile = load_rows(k, piece.k.stride[2], first, N, HEAD_DIM, D)
            v_tile = load_rows(v, piece.v.stride[2], first, N, HEAD_DIM, D)
            # [M, N]
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if MASKED:
                number = numbers + step // PER_BLOCK
                scores = hide_keys(scores, piece, batch, first, number, start, stop, looked_up, N)
            p = tl.math.exp2(scores * scale - lse[:, None])
            dp = tl.dot(d_tile, tl.trans(v_tile), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit
def _query_kernel(
    q, d_out, lse, delta, before, dq, pieces, start, stop, q_len, heads, scale, logit_scale,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    PIECES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq of M queries of one head through the pieces, plus `before` if ADD."""
    # Under causal masks the last query blocks have the most to do: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    first = tile * M
    q_block = tile * M // BLOCK
    rows = first + tl.arange(0, M)
    row = (batch.to(tl.int64) * heads + head) * q_len
    seen_from = tl.load(start + batch.to(tl.int64) * q_len + rows)
    seen_until = tl.load(stop + batch.to(tl.int64) * q_len + rows)
    # [M, D]
    q_tile = load_rows(slice_of(q, batch, head), q.stride[2], first, M, HEAD_DIM, D)
    d_tile = load_rows(slice_of(d_out, batch, head), d_out.stride[2], first, M, HEAD_DIM, D)
    row_lse = tl.load(lse + row + rows)
    row_delta = tl.load(delta + row + rows)

    total = tl.zeros([M, D], tl.float32)
    for i in tl.static_range(PIECES):
        total = _query_gradient(
            total, q_tile, d_tile, row_lse, row_delta, scale,
            pieces[i], batch, head, heads, q_block, q_len // BLOCK, rows, seen_from, seen_until,
            BLOCK, N, HEAD_DIM, D,
        )  # fmt: skip
    total *= logit_scale
    if ADD:
        total += load_rows(before + row * HEAD_DIM, HEAD_DIM, first, M, HEAD_DIM, D).to(tl.float32)
    store_rows(dq + row * HEAD_DIM, total, first, M, HEAD_DIM, D)


@triton.jit
def _walk_queries(
    dk, dv, k_tile, v_tile, scale,
    q, q_step, d_out, d_out_step, lse, delta, piece, batch, head, heads, q_len,
    blocks, split, splits, start, stop, position, first_position, covered, keys,
    BLOCK: tl.constexpr, M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dk / logit scale and dv over part `split` of `splits` of a list of query blocks, one of
    lists_of(), M queries at a time. Scores are [keys, queries]."""
    PER_BLOCK: tl.constexpr = BLOCK // M
    count, table, numbers = blocks
    begin = count * split // splits
    end = count * (split + 1) // splits
    for step in range(begin * PER_BLOCK, end * PER_BLOCK):
        q_block = tl.load(table + step // PER_BLOCK)
        first = q_block * BLOCK + step % PER_BLOCK * M
        rows = first + tl.arange(0, M)
        # [M, D]
        q_tile = load_rows(q, q_step, first, M, HEAD_DIM, D)
        d_tile = load_rows(d_out, d_out_step, first, M, HEAD_DIM, D)
        # [N, M]
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        if MASKED:
            visible = position
            if piece.covered is not None:
                covered_words = covered + q_block.to(tl.int64) * piece.words
                visible = hide_covered(position, covered_words, keys)
            if piece.partial_slice is not None:
                query = tl.load(piece.q_positions + rows)
                number = tl.load(numbers + step // PER_BLOCK)
                seen_from, seen_until = bounds_in_slice(piece, batch, number, query)
            else:
                seen_from = tl.load(start + rows)
                seen_until = tl.load(stop + rows)
            if piece.chosen is not None:
                words, origin = choices(piece, batch, head, heads, q_len, rows)
                seen_from, seen_until = chosen_range(
                    seen_from, seen_until, words, origin,
                    piece.chosen.tokens, piece.chosen_words, first_position,
                )  # fmt: skip
            after_start = visible[:, None] >= seen_from[None, :]
            seen = after_start & (visible[:, None] < seen_until[None, :])
            scores = tl.where(seen, scores, float("-inf"))
        p = tl.math.exp2(scores * scale - tl.load(lse + rows)[None, :])
        dv = tl.dot(p.to(d_tile.dtype), d_tile, dv, input_precision="ieee")
        dp = tl.dot(v_tile, tl.trans(d_tile), input_precision="ieee")
        ds = p * (dp - tl.load(delta + rows)[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _key_kernel(
    q, d_out, lse, delta, dk, dv, piece, start, stop, q_len, heads, batches, head_splits,
    list_splits, scale, logit_scale,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys over all query heads of their group, or over one of the parts that the
    heads, and the query lists of each, are cut into."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2) % batches
    split = tl.program_id(2) // batches
    head_split = split // list_splits
    list_split = split % list_splits
    first = tile * N
    k_block = tile * N // BLOCK
    keys = first + tl.arange(0, N)
    # [N, D]
    k_head = slice_of(piece.k, batch, kv_head)
    k_tile = load_rows(k_head, piece.k.stride[2], first, N, HEAD_DIM, D)
    v_head = slice_of(piece.v, batch, kv_head)
    v_tile = load_rows(v_head, piece.v.stride[2], first, N, HEAD_DIM, D)
    dk_sum = tl.zeros([N, D], tl.float32)
    dv_sum = tl.zeros([N, D], tl.float32)
    row_start = start + batch.to(tl.int64) * q_len
    row_stop = stop + batch.to(tl.int64) * q_len

    first_member = piece.group * head_split // head_splits
    stop_member = piece.group * (head_split + 1) // head_splits
    for member in range(first_member, stop_member):
        head = kv_head * piece.group + member
        head_q = slice_of(q, batch, head)
        head_d = slice_of(d_out, batch, head)
        row = batch.to(tl.int64) * heads + head
        # What partial tiles look up.
        positions = slice_of(piece.positions, batch, head)
        position = tl.load(positions + keys)
        first_position = tl.load(positions + first)
        covered = positions
        if piece.covered is not None:
            covered = piece.covered + row * (q_len // BLOCK) * piece.words
        # Its full list without masking, then its partial list.
        lists = lists_of(piece, batch, head, k_block)
        for MASKED in tl.static_range(2):
            dk_sum, dv_sum = _walk_queries(
                dk_sum, dv_sum, k_tile, v_tile, scale, head_q, q.stride[2], head_d, d_out.stride[2],
                lse + row * q_len, delta + row * q_len, piece, batch, head, heads, q_len,
                lists[MASKED], list_split, list_splits, row_start, row_stop,
                position, first_position, covered, keys, BLOCK, M, HEAD_DIM, D, MASKED,
            )  # fmt: skip

    kv_heads = tl.num_programs(1)
    at = ((split.to(tl.int64) * batches + batch) * kv_heads + kv_head) * piece.k_len * HEAD_DIM
    store_rows(dk + at, dk_sum * logit_scale, first, N, HEAD_DIM, D)
    store_rows(dv + at, dv_sum, first, N, HEAD_DIM, D)


def backward(
    d_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    dtypes: Sequence[torch.dtype],
    before: Tensor | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Gradients through one piece or two, which need by_key.

    d_out, q, out: [B, Hq, Sq, D]; lse: natural log [B, Hq, Sq]; out and lse of the whole attention.
    dtypes: of dq, then of the dk and dv of each piece. before: as in query_gradient().
    Returns dq in q's shape, and (dk, dv) of each piece in the shape of its k.
    """
    queries = query_side(d_out, q, out, lse, pieces[0].tiles, scale)
    dq = query_gradient(queries, pieces, dtypes[0], before)
    d_pieces = []
    for piece, dtype in zip(pieces, dtypes[1:], strict=True):
        d_pieces.append(key_gradient(queries, piece, dtype))
    return dq, d_pieces


class QuerySide(NamedTuple):
    """The inputs of both gradient kernels on the side of the queries. lse_2: in base 2. scale: of
    the logits."""

    q: Tensor
    d_out: Tensor
    lse_2: Tensor
    delta: Tensor
    start: Tensor
    stop: Tensor
    block_size: int
    scale: float

    def rows(self) -> tuple[Rows, Rows, Tensor, Tensor]:
        """The values of each query, as kernels get them."""
        return rows_of(self.q), rows_of(self.d_out), self.lse_2, self.delta


def query_side(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, tiles: Tiles, scale: float
) -> QuerySide:
    """The inputs of query_gradient() and key_gradient(); tiles: of any piece."""
    lse = lse.contiguous()
    batch, heads, q_len, dim = q.shape
    delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    lse_2 = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    sizes = dict(M=_DELTA_ROWS, HEAD_DIM=dim, D=triton.next_power_of_2(dim), LOG2_E=LOG2_E)
    _delta_kernel[q_len // _DELTA_ROWS, heads, batch](
        rows_of(out), rows_of(d_out), lse, delta, lse_2, q_len, heads, **sizes
    )
    return QuerySide(q, d_out, lse_2, delta, tiles.start, tiles.stop, tiles.block_size, scale)


def query_gradient(
    queries: QuerySide,
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    before: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """dq through all pieces in one launch, in `dtype`.

    before: what came through other keys, which is added to dq. Where it is contiguous and has
    `dtype`, the sum is written to its memory.
    into: contiguous memory for dq; its dtype, whichever it is, wins.
    """
    q = queries.q
    before = None if before is None else before.contiguous()
    batch, heads, q_len, dim = q.shape
    dq = output_like(q, before, dtype, into)
    verticals_only = all(piece.tiles.covered is not None for piece in pieces)
    tile = query_tile(dim, queries.block_size, q.element_size(), verticals_only)
    operands = tuple(operand(piece, piece.tiles.by_query, heads) for piece in pieces)
    _query_kernel[q_len // tile[0], heads, batch](
        *queries.rows(), dq if before is None else before, dq, operands,
        queries.start, queries.stop, q_len, heads, queries.scale * LOG2_E, queries.scale,
        BLOCK=queries.block_size, PIECES=len(pieces), ADD=before is not None,
        **options(tile, dim, q.device),
    )  # fmt: skip
    return dq


def key_gradient(queries: QuerySide, piece: Piece, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dk and dv of one piece, which needs by_key, in `dtype`."""
    by_key = piece.tiles.by_key
    assert by_key is not None
    q = queries.q
    batch, heads, q_len, dim = q.shape
    _, kv_heads, k_len, _ = piece.k.shape
    tile = key_tile(dim, queries.block_size, q.element_size())
    tiles = k_len // tile[1]
    head_splits, list_splits = key_splits(
        tiles * kv_heads * batch, heads // kv_heads, q_len // queries.block_size
    )
    splits = head_splits * list_splits
    # Sums of parts are rounded once, when they are added up.
    kept = dtype if splits == 1 else torch.float32
    shape = piece.k.shape if splits == 1 else (splits, *piece.k.shape)
    dk = torch.empty(shape, dtype=kept, device=q.device)
    dv = torch.empty(shape, dtype=kept, device=q.device)
    _key_kernel[tiles, kv_heads, batch * splits](
        *queries.rows(), dk, dv, operand(piece, by_key, heads),
        queries.start, queries.stop, q_len, heads, batch, head_splits, list_splits,
        queries.scale * LOG2_E, queries.scale,
        BLOCK=queries.block_size, **options(tile, dim, q.device),
    )  # fmt: skip
    if splits == 1:
        return dk, dv
    return sum_splits(dk, dv, dtype)
