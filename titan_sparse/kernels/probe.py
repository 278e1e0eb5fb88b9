"""What a probe of a span's last queries sees of every KV block: softmax sums, then masses by vertical and by tile.

Two passes over the keys, as the normaliser of a row is known only after all of them. The plain-torch twin is
titan_sparse/attention/patterns/probe.py, which calls these on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scores(
    q,
    k,
    start,
    stop,
    slot,
    blocks,
    scale,
    i_b,
    i_h,
    i_c,
    i_t,
    heads,
    group,
    n,
    local,
    queries,
    dim,
    T: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """[P, SIZE] scores of one local KV block for the span in its slot i_t, -inf where nothing is seen; and the span."""
    o_p, o_k, o_d = tl.arange(0, P), tl.arange(0, SIZE), tl.arange(0, D)
    span = tl.load(slot + (i_b * local + i_c) * T + i_t)
    known = tl.maximum(span, 0)
    row = (i_b * n + known) * queries + o_p
    m_p, m_d = o_p < queries, o_d < dim
    q_row = ((i_b * heads + i_h) * n + known) * queries + o_p
    b_q = tl.load(
        q + q_row[:, None] * dim + o_d[None, :], mask=m_p[:, None] & m_d[None, :], other=0.0
    )
    k_row = ((i_b * (heads // group) + i_h // group) * local + i_c) * SIZE + o_k
    b_k = tl.load(k + k_row[:, None] * dim + o_d[None, :], mask=m_d[None, :], other=0.0)
    if UPCAST:
        b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    position = tl.load(blocks + i_c) * SIZE + o_k
    b_start = tl.load(start + row, mask=m_p, other=0)
    b_stop = tl.load(stop + row, mask=m_p, other=0)
    b_stop = tl.where(span >= 0, b_stop, b_start)
    seen = (position[None, :] >= b_start[:, None]) & (position[None, :] < b_stop[:, None])
    return tl.where(seen, b_s, float("-inf")), known


@triton.jit
def _lse_kernel(
    q,
    k,
    start,
    stop,
    slot,
    blocks,
    lse,
    scale,
    heads,
    group,
    n,
    local,
    queries,
    dim,
    T: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    i_c, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    b_s, _ = _scores(
        q,
        k,
        start,
        stop,
        slot,
        blocks,
        scale,
        i_b,
        i_h,
        i_c,
        i_t,
        heads,
        group,
        n,
        local,
        queries,
        dim,
        T,
        P,
        D,
        SIZE,
        UPCAST,
    )
    top = tl.maximum(tl.max(b_s, 1), -3.0e38)
    total = tl.sum(tl.exp(b_s - top[:, None]), 1)
    o_p = tl.arange(0, P)
    value = tl.where(total > 0, top + tl.log(total), float("-inf"))
    tl.store(lse + ((i_bh * local + i_c) * T + i_t) * queries + o_p, value, mask=o_p < queries)


@triton.jit
def _span_kernel(
    block_lse,
    slot,
    run,
    lse,
    heads,
    n,
    local,
    queries,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    i_span, i_bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_b = i_bh // heads
    o_p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, last = tl.load(run + (i_b * n + i_span) * 2), tl.load(run + (i_b * n + i_span) * 2 + 1)
    top, total = tl.full([ROWS], -3.0e38, tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(first, last, BLOCKS):
        o_c = start + tl.arange(0, BLOCKS)
        for i_t in tl.static_range(T):
            touches = (
                tl.load(slot + (i_b * local + o_c) * T + i_t, mask=o_c < last, other=-1) == i_span
            )
            at = ((i_bh * local + o_c) * T + i_t)[:, None] * queries + o_p[None, :]
            piece = tl.load(
                block_lse + at,
                mask=touches[:, None] & (o_p < queries)[None, :],
                other=float("-inf"),
            )
            higher = tl.maximum(top, tl.max(piece, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(piece - higher[None, :]), 0)
            top = higher
    value = tl.where(total > 0, top + tl.log(total), float("-inf"))
    tl.store(lse + (i_bh * n + i_span) * queries + o_p, value, mask=o_p < queries)


@triton.jit
def _mass_kernel(
    q,
    k,
    start,
    stop,
    slot,
    blocks,
    lse,
    block_back,
    vertical,
    tile,
    scale,
    heads,
    group,
    n,
    local,
    queries,
    dim,
    T: tl.constexpr,
    U: tl.constexpr,
    V: tl.constexpr,
    V2: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    i_c, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    o_p, o_v = tl.arange(0, P), tl.arange(0, V2)
    b_vertical = tl.zeros([V2, SIZE], tl.float32)
    for i_t in tl.static_range(T):
        b_s, known = _scores(
            q,
            k,
            start,
            stop,
            slot,
            blocks,
            scale,
            i_b,
            i_h,
            i_c,
            i_t,
            heads,
            group,
            n,
            local,
            queries,
            dim,
            T,
            P,
            D,
            SIZE,
            UPCAST,
        )
        b_lse = tl.load(lse + (i_bh * n + known) * queries + o_p, mask=o_p < queries, other=0.0)
        b_mass = tl.exp(b_s - tl.maximum(b_lse, -3.0e38)[:, None])
        b_row = tl.sum(b_mass, 1)
        back = tl.load(block_back + (i_b * n + known) * queries + o_p, mask=o_p < queries, other=-1)
        for u in tl.static_range(U):
            tl.store(
                tile + ((i_bh * local + i_c) * T + i_t) * U + u,
                tl.sum(tl.where(back == u, b_row, 0.0), 0),
            )
        for v in tl.static_range(V):
            b_part = tl.sum(b_mass if V == 1 else tl.where((back == v)[:, None], b_mass, 0.0), 0)
            b_vertical += tl.where((o_v == v)[:, None], b_part[None, :], 0.0)
    at = ((i_bh * local + i_c) * V + o_v)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(vertical + at, b_vertical, mask=(o_v < V)[:, None])


def _sizes(q: Tensor, block_size: int) -> dict:
    queries, dim = q.shape[3:]
    interpreted = q.device.type == "cpu"
    return dict(
        P=max(16, triton.next_power_of_2(queries)),
        D=max(16, triton.next_power_of_2(dim)),
        SIZE=block_size,
        UPCAST=interpreted,
        num_warps=8 if block_size >= 128 else 4,
    )


def block_lse(
    q: Tensor,
    k: Tensor,
    start: Tensor,
    stop: Tensor,
    slot: Tensor,
    blocks: Tensor,
    scale: float,
    block_size: int,
) -> Tensor:
    """Log of each probe row's softmax sum over each block, fp32 [B, Hq, local, T, P]; -inf where nothing is seen.

    q: [B, Hq, n, P, D], n spans. k: [B, Hkv, local * block_size, D]. start, stop: int32 [B, n, P], keys a row sees.
    slot: int32 [B, local, T], the spans that touch a block (-1: none). blocks: int32 [local] global numbers.
    """
    batch, heads, n, queries, dim = q.shape
    local, touched = slot.shape[1:]
    lse = torch.empty(batch, heads, local, touched, queries, dtype=torch.float32, device=q.device)
    _lse_kernel[(local, touched, batch * heads)](
        q.contiguous(),
        k.contiguous(),
        start.contiguous(),
        stop.contiguous(),
        slot.contiguous(),
        blocks,
        lse,
        scale,
        heads,
        heads // k.shape[1],
        n,
        local,
        queries,
        dim,
        T=touched,
        **_sizes(q, block_size),
    )
    return lse


def span_lse(block_lse: Tensor, slot: Tensor, run: Tensor) -> Tensor:
    """Log of each probe row's softmax sum over the blocks of its span, fp32 [B, Hq, n, P]; -inf where nothing is seen.

    block_lse: of block_lse(), slot as there. run: int32 [B, n, 2], the first block that touches a span and the one
    behind the last.
    """
    batch, heads, local, touched, queries = block_lse.shape
    n = run.shape[1]
    lse = block_lse.new_empty(batch, heads, n, queries)
    _span_kernel[(triton.cdiv(queries, 32), n, batch * heads)](
        block_lse.contiguous(),
        slot,
        run,
        lse,
        heads,
        n,
        local,
        queries,
        T=touched,
        ROWS=32,
        BLOCKS=64,
        num_warps=4,
    )
    return lse


def block_masses(
    q: Tensor,
    k: Tensor,
    start: Tensor,
    stop: Tensor,
    slot: Tensor,
    blocks: Tensor,
    scale: float,
    block_size: int,
    lse: Tensor,
    block_back: Tensor,
    back: int,
    split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax mass by vertical, fp32 [B, Hq, local, V, block_size], and by tile and block back, [B, Hq, local, T, back].

    lse: fp32 [B, Hq, n, P] over all keys. block_back: int32 [B, n, P]. split: verticals too by block back, V = back; else
    V = 1. The rest as in block_lse().
    """
    batch, heads, n, queries, dim = q.shape
    local, touched = slot.shape[1:]
    parts = back if split else 1
    vertical = torch.empty(
        batch, heads, local, parts, block_size, dtype=torch.float32, device=q.device
    )
    tile = torch.empty(batch, heads, local, touched, back, dtype=torch.float32, device=q.device)
    _mass_kernel[(local, batch * heads)](
        q.contiguous(),
        k.contiguous(),
        start.contiguous(),
        stop.contiguous(),
        slot.contiguous(),
        blocks,
        lse.contiguous(),
        block_back.contiguous(),
        vertical,
        tile,
        scale,
        heads,
        heads // k.shape[1],
        n,
        local,
        queries,
        dim,
        T=touched,
        U=back,
        V=parts,
        V2=triton.next_power_of_2(parts),
        **_sizes(q, block_size),
    )
    return vertical, tile
