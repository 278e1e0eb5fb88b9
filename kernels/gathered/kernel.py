"""Kernels over gathered queries: dense tiles of the queries that chose a chunk, and its keys.

A launch of the forward, or of dq, computes one slot of the choices, in which no query appears
twice. So a program reads the sums of its queries, continues from them, and writes them back. dk and
dv go chunk by chunk. Nothing needs atomics. The backward takes the out and lse of the whole
attention: with them the gradients of its pieces add up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.backward import QuerySide
from titan_sparse.kernels.block_sparse.piece import LOG2_E, load_rows, rows_of, slice_of
from titan_sparse.kernels.gathered.launch import (
    chunk_options,
    chunk_tile,
    forward_keys,
    list_splits,
    row_options,
    row_tile,
)
from titan_sparse.kernels.gathered.lists import Work


@triton.jit
def _gather_rows(pointer, stride, rows, inside, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """[M, D]: the rows with these numbers [M], 0 where not `inside`.

    D is HEAD_DIM padded with zeros to a power of two.
    """
    dims = tl.arange(0, D)[None, :]
    at = pointer + rows.to(tl.int64)[:, None] * stride + dims
    wanted = inside[:, None]
    if D != HEAD_DIM:
        wanted = wanted & (dims < HEAD_DIM)
    return tl.load(at, mask=wanted, other=0.0)


@triton.jit
def _scatter_rows(pointer, x, rows, inside, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Write [M, D] to the rows with these numbers, of HEAD_DIM elements, where `inside`."""
    dims = tl.arange(0, D)[None, :]
    at = pointer + rows.to(tl.int64)[:, None] * HEAD_DIM + dims
    tl.store(at, x.to(pointer.dtype.element_ty), mask=inside[:, None] & (dims < HEAD_DIM))


@triton.jit
def _head_of(x, batch, head):
    """The [S, D] of one head: its offset, and elements per row."""
    return slice_of(x, batch, head), x.stride[2]


@triton.jit
def _load_keys(
    head, first, left, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, CUT: tl.constexpr
):
    """[N, D] keys or values from `first` on; if CUT only `left` of them are
    of the chunk, then 0."""
    pointer, stride = head
    if CUT:
        # Fewer than N keys may be left.
        rows = tl.arange(0, N)
        return _gather_rows(pointer, stride, first + rows, rows < left, HEAD_DIM, D)
    return load_rows(pointer, stride, first, N, HEAD_DIM, D)


@triton.jit
def _entry(met, slot):
    """The head of this program's tile, counted over all sequences, and its entry in the table."""
    head_row = tl.program_id(2).to(tl.int64) * met.heads + tl.program_id(1)
    return head_row, (head_row * met.slots + slot) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _tile_rows(met, tiles, head_row, entry, ROWS: tl.constexpr):
    """Numbers of a tile's queries, which of them exist, and the first key of the chunk."""
    place = tl.arange(0, ROWS)
    inside = place < tl.load(tiles.count + entry)
    first = met.queries + head_row * met.slots * met.q_len + tl.load(tiles.first + entry)
    rows = tl.load(first + place, mask=inside, other=0)
    chunk = tl.load(tiles.chunk + entry)
    return rows, inside, tl.load(met.begin + tl.program_id(2) * met.chunks + chunk)


@triton.jit
def _attend(
    sums, q_tile, k, v, first, left, scale,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Online softmax (base 2) over N keys from `first` on, or over the `left` of them if CUT."""
    acc, top, weight = sums
    k_tile = _load_keys(k, first, left, N, HEAD_DIM, D, CUT)
    # [M, N]
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if CUT:
        scores = tl.where((tl.arange(0, N) < left)[None, :], scores, float("-inf"))
    # Every query sees some key of every tile, so that the top is finite.
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.math.exp2(scores * scale - new_top[:, None])
    rescale = tl.math.exp2(top - new_top)
    weight = weight * rescale + tl.sum(p, 1)
    v_tile = _load_keys(v, first, left, N, HEAD_DIM, D, CUT)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
    return acc, new_top, weight


@triton.jit(do_not_specialize=["slot"])
def _forward_kernel(
    q, met, tiles, out, lse, slot, scale,
    CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    LOG2_E: tl.constexpr,
):  # fmt: skip
    """M gathered queries of one head over the CHUNK keys that they chose, added to out and lse."""
    WHOLE: tl.constexpr = CHUNK // N * N
    head = tl.program_id(1)
    batch = tl.program_id(2)
    head_row, entry = _entry(met, slot)
    if tl.load(tiles.count + entry) > 0:
        rows, inside, first = _tile_rows(met, tiles, head_row, entry, M)
        q_head, q_step = _head_of(q, batch, head)
        k = _head_of(met.k, batch, head // met.group)
        v = _head_of(met.v, batch, head // met.group)
        out_head = out + head_row * met.q_len * HEAD_DIM
        lse_rows = lse + head_row * met.q_len + rows
        # [M, D]
        q_tile = _gather_rows(q_head, q_step, rows, inside, HEAD_DIM, D)
        # A finished softmax is one whose weights add up to 1 at top = lse. Where nothing was met,
        # lse is -inf, and what was there is forgotten at the first tile.
        acc = _gather_rows(out_head, HEAD_DIM, rows, inside, HEAD_DIM, D)
        top = tl.load(lse_rows, mask=inside, other=0.0) * LOG2_E
        weight = tl.full([M], 1.0, tl.float32)

        sums = (acc, top, weight)
        for done in range(0, WHOLE, N):
            sums = _attend(sums, q_tile, k, v, first + done, N, scale, N, HEAD_DIM, D, CUT=False)
        if CHUNK % N:
            sums = _attend(
                sums, q_tile, k, v, first + WHOLE, CHUNK % N, scale, N, HEAD_DIM, D, CUT=True
            )
        acc, top, weight = sums

        _scatter_rows(out_head, acc / weight[:, None], rows, inside, HEAD_DIM, D)
        # ln 2 makes a natural logarithm of it.
        tl.store(lse_rows, (top + tl.math.log2(weight)) * 0.6931471805599453, mask=inside)


def add_attention(q: Tensor, work: Work, total: tuple[Tensor, Tensor]) -> None:
    """Attention of the gathered pairs, added to `total` in place.

    q: [B, Hq, S, D], of the work's share. total: contiguous out [B, Hq, S, D] and natural-log lse
    [B, Hq, S] over other keys, fp32; 0 and -inf where a query has met none.
    """
    choices = work.plan.choices
    batch, heads, _, dim = q.shape
    block_size = work.plan.own.tiles.block_size
    keys = forward_keys(row_tile(dim, block_size, q.element_size(), choices.tokens), dim)
    options = row_options((work.tiles.rows, keys), dim, q.device)
    operands = (rows_of(q), work.operand(), work.tiles, *total)
    for slot in range(choices.slots):
        _forward_kernel[work.tiles.count.shape[-1], heads, batch](
            *operands,
            slot,
            work.plan.scale * LOG2_E,
            CHUNK=choices.tokens,
            LOG2_E=LOG2_E,
            **options,
        )


@triton.jit
def _meet_keys(
    dq, queries, k, v, first, left, scale,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """dq / logit scale over N keys from `first` on, or over the `left` of them if CUT."""
    q_tile, d_tile, lse, delta = queries
    k_tile = _load_keys(k, first, left, N, HEAD_DIM, D, CUT)
    v_tile = _load_keys(v, first, left, N, HEAD_DIM, D, CUT)
    # [M, N]
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if CUT:
        # p of a key of 0 may be infinite, where all logits are far below 0.
        scores = tl.where((tl.arange(0, N) < left)[None, :], scores, float("-inf"))
    p = tl.math.exp2(scores * scale - lse[:, None])
    dp = tl.dot(d_tile, tl.trans(v_tile), input_precision="ieee")
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["slot"])
def _query_kernel(
    q, d_out, lse, delta, met, tiles, dq, slot, scale, logit_scale,
    CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq of M gathered queries of one head through the chunk that they chose, added to dq."""
    WHOLE: tl.constexpr = CHUNK // N * N
    head = tl.program_id(1)
    batch = tl.program_id(2)
    head_row, entry = _entry(met, slot)
    if tl.load(tiles.count + entry) > 0:
        rows, inside, first = _tile_rows(met, tiles, head_row, entry, M)
        q_head, q_step = _head_of(q, batch, head)
        d_head, d_step = _head_of(d_out, batch, head)
        k = _head_of(met.k, batch, head // met.group)
        v = _head_of(met.v, batch, head // met.group)
        dq_head = dq + head_row * met.q_len * HEAD_DIM
        row = head_row * met.q_len + rows
        # [M, D]
        q_tile = _gather_rows(q_head, q_step, rows, inside, HEAD_DIM, D)
        d_tile = _gather_rows(d_head, d_step, rows, inside, HEAD_DIM, D)
        row_lse = tl.load(lse + row, mask=inside, other=0.0)
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        queries = (q_tile, d_tile, row_lse, row_delta)
        # What is there already counts the logit scale; the sum is multiplied by it at the end.
        total = _gather_rows(dq_head, HEAD_DIM, rows, inside, HEAD_DIM, D) / logit_scale

        for done in range(0, WHOLE, N):
            total = _meet_keys(
                total, queries, k, v, first + done, N, scale, N, HEAD_DIM, D, CUT=False
            )
        if CHUNK % N:
            total = _meet_keys(
                total, queries, k, v, first + WHOLE, CHUNK % N, scale, N, HEAD_DIM, D, CUT=True
            )
        _scatter_rows(dq_head, total * logit_scale, rows, inside, HEAD_DIM, D)


def add_query_gradient(queries: QuerySide, work: Work, dq: Tensor) -> None:
    """dq through the gathered pairs, added to dq [B, Hq, S, D], contiguous fp32, in place.

    queries: of the work's share.
    """
    q = queries.q
    chunk = work.plan.choices.tokens
    batch, heads, _, dim = q.shape
    _, keys = row_tile(dim, queries.block_size, q.element_size(), chunk)
    options = row_options((work.tiles.rows, keys), dim, q.device)
    operands = (*queries.rows(), work.operand(), work.tiles, dq)
    for slot in range(work.plan.choices.slots):
        _query_kernel[work.tiles.count.shape[-1], heads, batch](
            *operands, slot, queries.scale * LOG2_E, queries.scale, CHUNK=chunk, **options
        )


@triton.jit
def _walk_queries(
    dk, dv, k_tile, v_tile, scale, q, d_out, lse, delta, listed, begin, end,
    M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk / logit scale and dv over the queries at `begin` to before `end` of the list `listed`, M
    at a time. Scores are [keys, queries]."""
    q_head, q_step = q
    d_head, d_step = d_out
    place = tl.arange(0, M)
    for at in range(begin, end, M):
        inside = at + place < end
        rows = tl.load(listed + at + place, mask=inside, other=0)
        # [M, D]
        q_tile = _gather_rows(q_head, q_step, rows, inside, HEAD_DIM, D)
        d_tile = _gather_rows(d_head, d_step, rows, inside, HEAD_DIM, D)
        # [N, M]
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        # Behind the list's end q and d_out are 0, and add nothing.
        row_lse = tl.load(lse + rows, mask=inside, other=0.0)
        p = tl.math.exp2(scores * scale - row_lse[None, :])
        dv = tl.dot(p.to(d_tile.dtype), d_tile, dv, input_precision="ieee")
        dp = tl.dot(v_tile, tl.trans(d_tile), input_precision="ieee")
        row_delta = tl.load(delta + rows, mask=inside, other=0.0)
        ds = p * (dp - row_delta[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _key_kernel(
    q, d_out, lse, delta, met, dk, dv, d_stride, batches, splits, scale, logit_scale,
    CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys of a chunk over all query heads of their group, or over one of the
    `splits` that the lists are cut into, added to dk and dv."""
    TILES: tl.constexpr = (CHUNK + N - 1) // N
    chunk = tl.program_id(0) // TILES
    done = tl.program_id(0) % TILES * N
    kv_head = tl.program_id(1)
    batch = tl.program_id(2) % batches
    split = tl.program_id(2) // batches
    CUT: tl.constexpr = CHUNK % N != 0
    key_count = (met.chunks + 1) * met.slots + 1
    head_row = batch.to(tl.int64) * met.heads + kv_head * met.group

    listed = 0
    for member in range(met.group):
        bounds = met.list_begin + (head_row + member) * key_count + chunk * met.slots
        listed += tl.load(bounds + met.slots) - tl.load(bounds)
    # Nobody chose it, or it is none: a sequence may have fewer chunks than there is room for.
    if listed > 0:
        first = tl.load(met.begin + batch * met.chunks + chunk) + done
        left = CHUNK - done
        k = _head_of(met.k, batch, kv_head)
        v = _head_of(met.v, batch, kv_head)
        # [N, D]
        k_tile = _load_keys(k, first, left, N, HEAD_DIM, D, CUT)
        v_tile = _load_keys(v, first, left, N, HEAD_DIM, D, CUT)
        dk_sum = tl.zeros([N, D], tl.float32)
        dv_sum = tl.zeros([N, D], tl.float32)
        for member in range(met.group):
            row = head_row + member
            head = kv_head * met.group + member
            bounds = met.list_begin + row * key_count + chunk * met.slots
            of_head = tl.load(bounds)
            count = tl.load(bounds + met.slots) - of_head
            dk_sum, dv_sum = _walk_queries(
                dk_sum, dv_sum, k_tile, v_tile, scale,
                _head_of(q, batch, head), _head_of(d_out, batch, head), lse + row * met.q_len,
                delta + row * met.q_len, met.queries + row * met.slots * met.q_len,
                of_head + count * split // splits, of_head + count * (split + 1) // splits,
                M, HEAD_DIM, D,
            )  # fmt: skip

        # Rows behind the chunk's end may be infinite. No other row reads them, and none is written.
        keys = tl.arange(0, N)
        inside = keys < left
        at = split.to(tl.int64) * d_stride[0] + batch.to(tl.int64) * d_stride[1]
        at += kv_head.to(tl.int64) * d_stride[2]
        before = _gather_rows(dk + at, HEAD_DIM, first + keys, inside, HEAD_DIM, D)
        dk_sum = before + dk_sum * logit_scale
        _scatter_rows(dk + at, dk_sum, first + keys, inside, HEAD_DIM, D)
        before = _gather_rows(dv + at, HEAD_DIM, first + keys, inside, HEAD_DIM, D)
        _scatter_rows(dv + at, before + dv_sum, first + keys, inside, HEAD_DIM, D)


def add_key_gradient(queries: QuerySide, work: Work, gradients: tuple[Tensor, Tensor]) -> None:
    """dk and dv through the gathered pairs, added to `gradients` in place.

    gradients: dk and dv [B, Hkv, Sk, D], fp32, of the same strides; contiguous from dim 2 on.
    """
    q = queries.q
    choices = work.plan.choices
    batch, kv_heads, _, dim = work.plan.own.k.shape
    tile = chunk_tile(dim, queries.block_size, q.element_size())
    tiles = choices.begin.shape[1] * triton.cdiv(choices.tokens, tile[1])
    splits = list_splits(tiles * kv_heads * batch)
    # [splits, B, Hkv, Sk, D], each of one part of the lists.
    dk, dv = (gradient[None] for gradient in gradients)
    if splits > 1:
        shape = (2, splits, *work.plan.own.k.shape)
        dk, dv = torch.zeros(shape, dtype=torch.float32, device=q.device)
    _key_kernel[tiles, kv_heads, batch * splits](
        *queries.rows(), work.operand(), dk, dv, dk.stride()[:3], batch, splits,
        queries.scale * LOG2_E, queries.scale,
        CHUNK=choices.tokens, **chunk_options(tile, dim, q.device),
    )  # fmt: skip
    if splits > 1:
        for gradient, of_splits in zip(gradients, (dk, dv), strict=True):
            gradient += of_splits.sum(0)
