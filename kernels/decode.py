"""Attention of one query per sequence to cached keys.

A single query gives a program per head too little to do. So the keys are split over programs, as in
flash decoding (Dao, Haziza, Massa, and Sizov, 2023), and the caller merges the parts by
log-sum-exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import LOG2_E, rows_of, slice_of
from titan_sparse.kernels.dtypes import accumulation_dtype

_PART = 1024
"""Keys of a program."""
_TILE_BYTES = 16384
"""Keys that are loaded at a time, so that small GPUs have the shared memory too."""
_LEAST = 16
"""The smallest side of a tile that tl.dot takes."""


def attend_in_parts_naive(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The twin of attend_in_parts() in plain torch, for any floating dtype. One part."""
    dtype = accumulation_dtype(q.dtype)
    # [B, Hkv, G, D]: the queries of a group share its keys.
    grouped = q.squeeze(2).unflatten(1, (keys.shape[1], -1)).to(dtype)
    with torch.autocast(q.device.type, enabled=False):
        # [B, Hkv, G, n]
        scores = grouped @ keys.to(dtype).transpose(2, 3) * scale
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        # Where nothing is seen, -inf - -inf would be NaN.
        weights = (scores - lse.clamp(min=torch.finfo(dtype).min)).exp()
        out = weights @ values.to(dtype)
    # [B, Hq, 1, D] and [B, Hq, 1]
    return out.flatten(1, 2)[:, :, None], lse.flatten(1, 2)


@triton.jit
def _part_kernel(
    q, keys, values, seen, out, lse, length, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """GROUP query heads of one sequence over PART keys of their KV head."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    o_row = tl.arange(0, ROWS)
    o_dim = tl.arange(0, D)
    in_dim = o_dim < HEAD_DIM
    # The query heads [ROWS, 1] of this KV head, and what is stored of them.
    row = (batch.to(tl.int64) * tl.num_programs(1) + head) * GROUP + o_row[:, None]
    inside = (o_row < GROUP)[:, None] & in_dim[None, :]
    q_tile = tl.load(q + row * HEAD_DIM + o_dim[None, :], mask=inside, other=0.0)
    k_begin = slice_of(keys, batch, head)
    v_begin = slice_of(values, batch, head)
    seen_begin = seen + batch.to(tl.int64) * length

    acc = tl.zeros([ROWS, D], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(part * PART, tl.minimum(part * PART + PART, length), KEYS):
        key = first + tl.arange(0, KEYS)
        in_length = key < length
        is_seen = tl.load(seen_begin + key, mask=in_length, other=0) != 0
        # [KEYS, D]. What is not seen is not read.
        loaded = is_seen[:, None] & in_dim[None, :]
        offset = key.to(tl.int64)[:, None]
        k_at = k_begin + offset * keys.stride[2] + o_dim[None, :]
        k_tile = tl.load(k_at, mask=loaded, other=0.0)
        # [ROWS, KEYS]
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Before the first key that is seen, -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.math.exp2(scores - base[:, None])
        rescale = tl.math.exp2(top - base)
        weight = weight * rescale + tl.sum(p, 1)
        v_at = v_begin + offset * values.stride[2] + o_dim[None, :]
        v_tile = tl.load(v_at, mask=loaded, other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
        top = new_top

    weight_or_one = tl.where(weight == 0.0, 1.0, weight)
    # [ROWS, 1], of [B * Hq, parts]
    at = row * tl.num_programs(0) + part
    tl.store(out + at * HEAD_DIM + o_dim[None, :], acc / weight_or_one[:, None], mask=inside)
    # ln 2 makes a natural logarithm of it.
    natural = (top + tl.math.log2(weight_or_one)) * 0.6931471805599453
    tl.store(lse + at, natural[:, None], mask=(o_row < GROUP)[:, None])


def attend_in_parts(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one query per sequence over each of P parts of the keys.

    q: [B, Hq, 1, D]. keys, values: [B, Hkv, n, D] in q's dtype, any but fp64. seen: bool [B, n],
    the keys that the query sees; others are not read. scale: of the scores.
    Returns out [B, Hq, P, D] and natural-log lse [B, Hq, P] in fp32; 0 and -inf where a part holds
    nothing that is seen. P is 0 for no keys.
    """
    batch, heads, _, dim = q.shape
    kv_heads, length = keys.shape[1:3]
    parts = triton.cdiv(length, _PART)
    out = torch.empty(batch, heads, parts, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, parts, dtype=torch.float32, device=q.device)
    if parts == 0:
        return out, lse
    group = heads // kv_heads
    padded_dim = max(_LEAST, triton.next_power_of_2(dim))
    keys_at_a_time = _TILE_BYTES // (padded_dim * keys.element_size())
    # fp32 with head_dim above 256: the smallest tile is larger, so that fewer are loaded ahead.
    stages = 3 if keys_at_a_time >= _LEAST else 2
    _part_kernel[parts, kv_heads, batch](
        q.contiguous(), rows_of(keys), rows_of(values), seen.contiguous(), out, lse, length,
        scale * LOG2_E,
        GROUP=group, ROWS=max(_LEAST, triton.next_power_of_2(group)), PART=_PART,
        KEYS=min(max(_LEAST, keys_at_a_time), 128), HEAD_DIM=dim, D=padded_dim,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out, lse
