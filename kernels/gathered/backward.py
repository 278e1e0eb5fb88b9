"""Backward over gathered queries: dq slot by slot, dk and dv chunk by chunk, without atomics.

Both take the out and lse of the whole attention: with them the gradients of its pieces add up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.backward import QuerySide
from titan_sparse.kernels.block_sparse.piece import LOG2_E, slice_of
from titan_sparse.kernels.gathered.forward import gather_rows, load_keys, scatter_rows, tile_rows
from titan_sparse.kernels.gathered.launch import (
    chunk_options,
    chunk_tile,
    list_splits,
    row_options,
    row_tile,
)
from titan_sparse.kernels.gathered.lists import Work


@triton.jit
def _meet_keys(
    dq, q_tile, d_tile, lse, delta, k, k_step, v, v_step, first, left, scale,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """dq / logit scale over N keys from `first` on, or over the `left` of them if CUT."""
    k_tile = load_keys(k, k_step, first, left, N, HEAD_DIM, D, CUT)
    v_tile = load_keys(v, v_step, first, left, N, HEAD_DIM, D, CUT)
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
    head = tl.program_id(1)
    batch = tl.program_id(2)
    head_row = batch.to(tl.int64) * met.heads + head
    entry = (head_row * met.slots + slot) * tl.num_programs(0) + tl.program_id(0)
    if tl.load(tiles.count + entry) > 0:
        rows, inside, chunk = tile_rows(met, tiles, head_row, slot, M)
        first = tl.load(met.begin + batch * met.chunks + chunk)
        q_head = slice_of(q, batch, head)
        d_head = slice_of(d_out, batch, head)
        k_head = slice_of(met.k, batch, head // met.group)
        v_head = slice_of(met.v, batch, head // met.group)
        dq_head = dq + head_row * met.q_len * HEAD_DIM
        row = head_row * met.q_len + rows
        # [M, D]
        q_tile = gather_rows(q_head, q.stride[2], rows, inside, HEAD_DIM, D)
        d_tile = gather_rows(d_head, d_out.stride[2], rows, inside, HEAD_DIM, D)
        row_lse = tl.load(lse + row, mask=inside, other=0.0)
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        # What is there already counts the logit scale; the sum is multiplied by it at the end.
        total = gather_rows(dq_head, HEAD_DIM, rows, inside, HEAD_DIM, D) / logit_scale

        for done in range(0, CHUNK // N * N, N):
            total = _meet_keys(
                total, q_tile, d_tile, row_lse, row_delta, k_head, met.k.stride[2], v_head,
                met.v.stride[2], first + done, N, scale, N, HEAD_DIM, D, CUT=False,
            )  # fmt: skip
        if CHUNK % N:
            total = _meet_keys(
                total, q_tile, d_tile, row_lse, row_delta, k_head, met.k.stride[2], v_head,
                met.v.stride[2], first + CHUNK // N * N, CHUNK % N, scale, N, HEAD_DIM, D, CUT=True,
            )  # fmt: skip
        scatter_rows(dq_head, total * logit_scale, rows, inside, HEAD_DIM, D)


def add_query_gradient(queries: QuerySide, work: Work, dq: Tensor) -> None:
    """dq through the gathered pairs, added to dq [B, Hq, S, D], contiguous fp32, in place.

    queries: of the work's share.
    """
    q = queries.q
    choices = work.plan.choices
    batch, heads, _, dim = q.shape
    padded_dim = triton.next_power_of_2(dim)
    m = work.tiles.rows
    _, n = row_tile(dim, queries.block_size, q.element_size(), choices.tokens)
    sizes = dict(CHUNK=choices.tokens, M=m, N=n, HEAD_DIM=dim, D=padded_dim)
    options = sizes | row_options(m, n, padded_dim, q.device)
    operands = (*queries.rows(), work.operand(), work.tiles, dq)
    for slot in range(choices.slots):
        _query_kernel[work.tiles.count.shape[-1], heads, batch](
            *operands, slot, queries.scale * LOG2_E, queries.scale, **options
        )


@triton.jit
def _walk_queries(
    dk, dv, k_tile, v_tile, scale, q, q_step, d_out, d_out_step, lse, delta, listed, begin, end,
    M: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk / logit scale and dv over the queries at `begin` to before `end` of the list `listed`, M at
    a time. Scores are [keys, queries]."""
    place = tl.arange(0, M)
    for at in range(begin, end, M):
        inside = at + place < end
        rows = tl.load(listed + at + place, mask=inside, other=0)
        # [M, D]
        q_tile = gather_rows(q, q_step, rows, inside, HEAD_DIM, D)
        d_tile = gather_rows(d_out, d_out_step, rows, inside, HEAD_DIM, D)
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
        k_head = slice_of(met.k, batch, kv_head)
        v_head = slice_of(met.v, batch, kv_head)
        # [N, D]
        k_tile = load_keys(k_head, met.k.stride[2], first, left, N, HEAD_DIM, D, CUT)
        v_tile = load_keys(v_head, met.v.stride[2], first, left, N, HEAD_DIM, D, CUT)
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
                slice_of(q, batch, head), q.stride[2], slice_of(d_out, batch, head), d_out.stride[2],
                lse + row * met.q_len, delta + row * met.q_len,
                met.queries + row * met.slots * met.q_len,
                of_head + count * split // splits, of_head + count * (split + 1) // splits,
                M, HEAD_DIM, D,
            )  # fmt: skip

        # Rows behind the chunk's end may be infinite. No other row reads them, and none is written.
        keys = tl.arange(0, N)
        inside = keys < left
        at = split.to(tl.int64) * d_stride[0] + batch.to(tl.int64) * d_stride[1]
        at += kv_head.to(tl.int64) * d_stride[2]
        before = gather_rows(dk + at, HEAD_DIM, first + keys, inside, HEAD_DIM, D)
        dk_sum = before + dk_sum * logit_scale
        scatter_rows(dk + at, dk_sum, first + keys, inside, HEAD_DIM, D)
        before = gather_rows(dv + at, HEAD_DIM, first + keys, inside, HEAD_DIM, D)
        scatter_rows(dv + at, before + dv_sum, first + keys, inside, HEAD_DIM, D)


def add_key_gradient(queries: QuerySide, work: Work, gradients: tuple[Tensor, Tensor]) -> None:
    """dk and dv through the gathered pairs, added to `gradients` in place.

    gradients: dk and dv [B, Hkv, Sk, D], fp32, of the same strides; contiguous from dim 2 on.
    """
    q = queries.q
    choices = work.plan.choices
    batch, kv_heads, _, dim = work.plan.own.k.shape
    padded_dim = triton.next_power_of_2(dim)
    m, n = chunk_tile(dim, queries.block_size, q.element_size())
    tiles = choices.begin.shape[1] * triton.cdiv(choices.tokens, n)
    splits = list_splits(tiles * kv_heads * batch)
    # [splits, B, Hkv, Sk, D], each of one part of the lists.
    dk, dv = (gradient[None] for gradient in gradients)
    if splits > 1:
        shape = (2, splits, *work.plan.own.k.shape)
        dk, dv = torch.zeros(shape, dtype=torch.float32, device=q.device)
    sizes = dict(CHUNK=choices.tokens, M=m, N=n, HEAD_DIM=dim, D=padded_dim)
    options = sizes | chunk_options(m, n, padded_dim, q.device)
    scales = (queries.scale * LOG2_E, queries.scale)
    _key_kernel[tiles, kv_heads, batch * splits](
        *queries.rows(), work.operand(), dk, dv, dk.stride()[:3], batch, splits, *scales, **options
    )
    if splits > 1:
        for gradient, of_splits in zip(gradients, (dk, dv), strict=True):
            gradient += of_splits.sum(0)
