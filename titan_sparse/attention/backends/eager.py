"""The truth: block-sparse attention in plain PyTorch, any device, fp64 to bf16.

Query block by query block it gathers the listed KV blocks, so what is not selected is not computed, forward or
backward. Arithmetic and results are fp32, or fp64 for fp64 inputs.
"""

import torch
from torch import Tensor

from titan_sparse.attention.merge import merge
from titan_sparse.attention.tiles.blocks import Tiles
from titan_sparse.kernels.bits import unpack
from titan_sparse.kernels.chunks import ChosenChunks, chosen_keys

READS_BY_KEY = False
"""Whether backward reads Tiles.by_key: here it goes query block by query block throughout."""
SERVES_SLICES = True
"""Whether it takes Tiles of a mask of slices."""
COMPILES_BY_LENGTH = False
"""Whether a number of keys that it has not seen takes seconds to compile."""


def refusal(device_type: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why this backend cannot serve a case: it serves all."""
    return None


def describe() -> str:
    """What computes, for the banner."""
    return "eager: plain PyTorch over the selected KV blocks"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64, everything else is computed in fp32."""
    return torch.promote_types(dtype, torch.float32)


def _met(tiles: Tiles, q_block: int) -> tuple[Tensor, Tensor]:
    """KV blocks that one query block meets, int64 [B, Hq, K], full ones first, and which of the K entries are real, bool
    alike."""
    lists, tables, real = tiles.by_query, [], []
    for count, table in ((lists.full_count, lists.full), (lists.partial_count, lists.partial)):
        count = count[:, :, q_block, None]
        table = table[:, :, q_block, : int(count.max())].long()
        tables.append(table)
        real.append(torch.arange(table.shape[-1], device=table.device) < count)
    return torch.cat(tables, dim=-1), torch.cat(real, dim=-1)


def _kv_rows(table: Tensor, kv_heads: int, kv_blocks: int) -> Tensor:
    """Rows of [B * Hkv * kv_blocks] KV blocks for the blocks [B, Hq, K] that each query head meets."""
    batch, heads = table.shape[:2]
    kv_head = torch.arange(heads, device=table.device) // (heads // kv_heads)
    owner = torch.arange(batch, device=table.device)[:, None] * kv_heads + kv_head
    return owner[..., None] * kv_blocks + table


def _seen(tiles: Tiles, q_block: int, table: Tensor, real: Tensor) -> Tensor:
    """bool [B, Hq, block, K * block]: pairs of one query block that are computed."""
    size = tiles.block_size
    position = _of_blocks(tiles.k_positions.expand(*table.shape[:2], -1), table, size)
    start, stop = (
        _bounds(tiles, q_block) if tiles.slices is None else _bounds_in_slices(tiles, q_block)
    )
    seen = (position[:, :, None] >= start) & (position[:, :, None] < stop)
    seen &= real.repeat_interleave(size, dim=-1)[:, :, None]
    if tiles.covered is not None:
        covered = unpack(tiles.covered[:, :, q_block], tiles.k_positions.shape[-1])
        seen &= ~_of_blocks(covered, table, size)[:, :, None]
    if tiles.chosen is not None:
        words, origin, tokens = tiles.chosen
        rows = slice(q_block * size, (q_block + 1) * size)
        # A tile that is listed as full is chosen by all of its queries: looking again changes nothing.
        seen &= chosen_keys(ChosenChunks(words[:, :, rows], origin[:, rows], tokens), position)
    return seen


def _bounds(tiles: Tiles, q_block: int) -> tuple[Tensor, Tensor]:
    """start and stop of the queries of one block, int32 [B, 1, block, 1]."""
    rows = slice(q_block * tiles.block_size, (q_block + 1) * tiles.block_size)
    return tiles.start[:, None, rows, None], tiles.stop[:, None, rows, None]


def _bounds_in_slices(tiles: Tiles, q_block: int) -> tuple[Tensor, Tensor]:
    """From and before which key position each query of the block sees the keys of each entry of _met(), int64
    [B, Hq, block, K * block]: all keys of full tiles, of others those of the entry's slice."""
    lists, size = tiles.by_query, tiles.block_size
    full, partial = (
        int(count[:, :, q_block].max()) for count in (lists.full_count, lists.partial_count)
    )
    number = lists.partial_slice[:, :, q_block, :partial].long()
    batch = torch.arange(len(number), device=number.device)[:, None, None]
    q_start, q_stop, k_start, k_stop, low, high = (
        tiles.slices[batch, number].long()[:, :, None].unbind(-1)
    )
    query = tiles.q_positions[q_block * size : (q_block + 1) * size].long()[:, None]
    inside = (query >= q_start) & (query < q_stop)
    start, stop = torch.maximum(k_start, query + low), torch.minimum(k_stop, query + high + 1)
    bounds = (start, 0), (torch.where(inside, stop, 0), torch.iinfo(torch.int32).max)
    return tuple(
        torch.nn.functional.pad(x, (full, 0), value=value).repeat_interleave(size, -1)
        for x, value in bounds
    )


def _of_blocks(x: Tensor, table: Tensor, size: int) -> Tensor:
    """The tokens of the tabled blocks: x [B, H, Sk], table [B, H, K] -> [B, H, K * size]."""
    index = table[..., None] * size + torch.arange(size, device=x.device)
    return x.gather(2, index.flatten(2))


def _blocks(x: Tensor, size: int) -> Tensor:
    """[B, H, S, D] -> [B * H * S / size, size, D]"""
    return x.reshape(-1, size, x.shape[-1])


def _busy(tiles: Tiles) -> list[int]:
    """Query blocks that meet anything."""
    count = tiles.by_query.full_count + tiles.by_query.partial_count
    return torch.nonzero(count.amax(dim=(0, 1))).flatten().tolist()


def serves_causal(q: Tensor) -> bool:
    """Whether forward_causal() and its like are to be used: they hold all scores, which only tests want."""
    return False


def forward_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Dense causal attention: out [B, Hq, S, D] and natural-log lse [B, Hq, S]; twin of flash.py's."""
    return _dense_forward(
        q, k, v, scale, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    )


def forward_full(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every query to every key; twin of flash.py's."""
    return _dense_forward(
        q, k, v, scale, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    )


def backward_causal(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of forward_causal()."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return _dense_backward(d_out, q, k, v, out, lse, scale, seen)


def backward_full(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of forward_full()."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return _dense_backward(d_out, q, k, v, out, lse, scale, seen)


def forward_packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, offsets: Tensor, longest: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Dense causal attention inside documents, as packed.Packing has them; twin of flash.py's."""
    batch, seen = len(q), _packed_pairs(offsets, window)
    out, lse = _dense_forward(*(_in_a_row(x) for x in (q, k, v)), scale, seen)
    return _in_sequences(out, batch), _in_sequences(lse[..., None], batch)[..., 0]


def backward_packed(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    offsets: Tensor,
    longest: int,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of forward_packed()."""
    inputs = [_in_a_row(x) for x in (d_out, q, k, v, out, lse[..., None])]
    found = _dense_backward(*inputs[:-1], inputs[-1][..., 0], scale, _packed_pairs(offsets, window))
    return tuple(_in_sequences(x, len(q)) for x in found)


def _packed_pairs(offsets: Tensor, window: int | None) -> Tensor:
    """bool [T, T]: which tokens see which."""
    position = torch.arange(int(offsets[-1]), device=offsets.device)
    document = torch.searchsorted(offsets, position.int(), right=True)
    distance = position[:, None] - position
    seen = (document[:, None] == document) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def _in_a_row(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [1, H, B * S, D]"""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _in_sequences(x: Tensor, batch: int) -> Tensor:
    """The inverse of _in_a_row()."""
    return x[0].unflatten(1, (batch, -1)).transpose(0, 1)


def _dense_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(group, 1).mT * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


def _dense_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    p = (q @ keys.mT * scale - lse[..., None]).exp().masked_fill(~seen, 0)
    d_scores = p * (d_out @ values.mT - (d_out * out).sum(-1, keepdim=True)) * scale
    dk, dv = ((x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((d_scores, q), (p, d_out)))
    return d_scores @ keys, dk, dv


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    scale: float,
    out_dtype: torch.dtype | None = None,
    total: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D] over the tiles of k, v [B, Hkv, Sk, D], and over what `total` = (out, lse) is of.

    Returns out [B, Hq, Sq, D] in out_dtype, or in the memory `into`, and natural-log lse [B, Hq, Sq], both fp32 (fp64 for
    fp64) by default; 0 and -inf for rows that see nothing.
    """
    dtype, size = accumulation_dtype(q.dtype), tiles.block_size
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    k_blocks, v_blocks = _blocks(k, size), _blocks(v, size)
    for block in _busy(tiles):
        table, real = _met(tiles, block)
        rows = _kv_rows(table, k.shape[1], k.shape[2] // size)
        here = slice(block * size, (block + 1) * size)
        scores = q[:, :, here].to(dtype) @ k_blocks[rows].to(dtype).flatten(2, 3).mT * scale
        scores = scores.masked_fill(~_seen(tiles, block, table, real), -torch.inf)
        lse[:, :, here] = scores.logsumexp(-1)
        p = (scores - _finite(lse[:, :, here, None])).exp()
        out[:, :, here] = p @ v_blocks[rows].to(dtype).flatten(2, 3)
    return merge(total, out, lse, out_dtype or dtype, into)


def forward_with_verticals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    k2: Tensor,
    v2: Tensor,
    tiles2: Tiles,
    scale: float,
    out_dtype: torch.dtype | None = None,
    total: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """forward() over blocks and over gathered verticals k2, v2 [B, Hq, C, D] with their own tiles."""
    return forward(
        q, k2, v2, tiles2, scale, out_dtype, forward(q, k, v, tiles, scale, None, total), into
    )


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    scale: float,
    out_dtype: torch.dtype | None = None,
    dq_total: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these tiles in out_dtype (default fp32, fp64 for fp64); dq is added to dq_total, and
    written to the memory `into` if there is some.

    out and lse are those of the whole attention, over all tiles of all chunks: with them the pieces add up exactly.
    """
    dtype, size = accumulation_dtype(q.dtype), tiles.block_size
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    k_blocks, v_blocks, dk_blocks, dv_blocks = (_blocks(x, size) for x in (k, v, dk, dv))
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    for block in _busy(tiles):
        table, real = _met(tiles, block)
        rows = _kv_rows(table, k.shape[1], k.shape[2] // size)
        here = slice(block * size, (block + 1) * size)
        q_here, d_here = q[:, :, here].to(dtype), d_out[:, :, here].to(dtype)
        keys, values = (x[rows].to(dtype).flatten(2, 3) for x in (k_blocks, v_blocks))
        scores = (q_here @ keys.mT * scale).masked_fill(
            ~_seen(tiles, block, table, real), -torch.inf
        )
        p = (scores - _finite(lse[:, :, here, None])).exp()
        d_scores = p * (d_here @ values.mT - delta[:, :, here]) * scale
        dq[:, :, here] = d_scores @ keys
        dk_blocks.index_add_(0, rows.flatten(), _blocks(d_scores.mT @ q_here, size))
        dv_blocks.index_add_(0, rows.flatten(), _blocks(p.mT @ d_here, size))
    if dq_total is not None:
        dq += dq_total
    dtype = out_dtype or dtype
    return dq.to(dtype) if into is None else into.copy_(dq), dk.to(dtype), dv.to(dtype)


def backward_with_verticals(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    k2: Tensor,
    v2: Tensor,
    tiles2: Tiles,
    scale: float,
    out_dtype: torch.dtype | None = None,
    dq_total: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """As backward() through blocks and verticals, then dk and dv of the verticals, fp32 (fp64 for fp64)."""
    dq, dk2, dv2 = backward(d_out, q, k2, v2, out, lse, tiles2, scale, None, dq_total)
    return *backward(d_out, q, k, v, out, lse, tiles, scale, out_dtype, dq, into), dk2, dv2


def _finite(lse: Tensor) -> Tensor:
    """-inf would give NaN in exp(-inf - lse)."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)
