"""The reference: block-sparse attention in plain PyTorch, on any device, from fp64 to bf16.

It walks over the query blocks and gathers the listed KV blocks of each, so it does not compute what
is not selected, neither in the forward nor in the backward. Arithmetic is fp32, or fp64 for fp64
inputs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import (
    Backend,
    Case,
    Gradients,
    Partial,
    Queries,
    Sum,
    merge,
)
from titan_sparse.kernels.block_sparse import ChosenChunks, Piece, Tiles, chosen_keys
from titan_sparse.kernels.compact import unpack
from titan_sparse.kernels.dtypes import accumulation_dtype


class Eager(Backend):
    """Serves every input."""

    READS_BY_KEY = False
    SERVES_SLICES = True

    def refusal(self, case: Case) -> str | None:
        return None

    def describe(self) -> str:
        return "eager: plain PyTorch over the selected KV blocks"

    def forward(self, q: Tensor, pieces: list[Piece], scale: float, total: Sum[Partial]) -> Partial:
        *earlier, last = pieces
        before = total.before
        for piece in earlier:
            before = merge(before, *_piece_forward(q, piece, scale), accumulation_dtype(q.dtype))
        # Only the last sum is rounded.
        out, lse = _piece_forward(q, last, scale)
        if before is None:
            return Partial(out.to(total.dtype), lse)
        return merge(before, out, lse, total.dtype)

    def backward(
        self, queries: Queries, pieces: list[Piece], scale: float, total: Sum[Tensor]
    ) -> Gradients:
        before = total.before
        gradients: list[tuple[Tensor, Tensor]] = []
        # The verticals first: they are added in full precision, and the blocks round the sum once.
        for piece in reversed(pieces):
            dq, dk, dv = _piece_backward(queries, piece, scale)
            if before is not None:
                dq += before
            before = dq
            gradients.insert(0, (dk, dv))
        blocks_dk, blocks_dv = gradients[0]
        gradients[0] = (blocks_dk.to(total.dtype), blocks_dv.to(total.dtype))
        return dq.to(total.dtype), gradients


def _piece_forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, D] and natural-log lse [B, Hq, Sq] over one piece, fp32 (fp64 for fp64)."""
    dtype = accumulation_dtype(q.dtype)
    # Query blocks that meet no key keep these values.
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    for met in _met(q, piece, scale):
        lse_here = met.scores.logsumexp(-1)
        p = (met.scores - _finite(lse_here[..., None])).exp()
        out[:, :, met.place], lse[:, :, met.place] = p @ met.values, lse_here
    return out, lse


def _piece_backward(queries: Queries, piece: Piece, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv through one piece, fp32 (fp64 for fp64)."""
    q, d_out, out, lse = queries
    size = piece.tiles.block_size
    dtype = accumulation_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(piece.k.shape, dtype=dtype, device=q.device)
    dv = torch.zeros(piece.v.shape, dtype=dtype, device=q.device)
    dk_blocks = _in_blocks(dk, size)
    dv_blocks = _in_blocks(dv, size)
    # [B, Hq, Sq, 1]
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    for here, q_here, keys, values, rows, scores in _met(q, piece, scale):
        d_here = d_out[:, :, here].to(dtype)
        p = (scores - _finite(lse[:, :, here, None])).exp()
        d_scores = p * (d_here @ values.mT - delta[:, :, here]) * scale
        dq[:, :, here] = d_scores @ keys
        # Several query heads share a KV head, so a row may come up more than once.
        dk_blocks.index_add_(0, rows.flatten(), _in_blocks(d_scores.mT @ q_here, size))
        dv_blocks.index_add_(0, rows.flatten(), _in_blocks(p.mT @ d_here, size))
    return dq, dk, dv


class Met(NamedTuple):
    """A block of queries and the n = K * block keys that it meets."""

    place: slice  # of the queries
    q: Tensor  # [B, Hq, block, D]
    keys: Tensor  # [B, Hq, n, D]
    values: Tensor  # [B, Hq, n, D]
    rows: Tensor  # int64 [B, Hq, K], of the keys in the layout of _in_blocks()
    scores: Tensor  # [B, Hq, block, n], -inf for pairs that are not seen


def _met(q: Tensor, piece: Piece, scale: float) -> Iterator[Met]:
    """Each block of queries that meets keys."""
    tiles = piece.tiles
    size = tiles.block_size
    dtype = accumulation_dtype(q.dtype)
    k_blocks = _in_blocks(piece.k, size)
    v_blocks = _in_blocks(piece.v, size)
    lists = tiles.by_query
    most = (lists.full_count + lists.partial_count).amax(dim=(0, 1))
    for q_block in torch.nonzero(most).flatten().tolist():
        here = slice(q_block * size, (q_block + 1) * size)
        kv_blocks, is_listed = _listed_kv_blocks(tiles, q_block)
        rows = _kv_rows(kv_blocks, piece.k.shape[1], piece.k.shape[2] // size)
        q_here = q[:, :, here].to(dtype)
        keys = k_blocks[rows].to(dtype).flatten(2, 3)
        values = v_blocks[rows].to(dtype).flatten(2, 3)
        hidden = ~_visible(tiles, q_block, kv_blocks, is_listed)
        scores = (q_here @ keys.mT * scale).masked_fill(hidden, -torch.inf)
        yield Met(here, q_here, keys, values, rows, scores)


def _listed_kv_blocks(tiles: Tiles, q_block: int) -> tuple[Tensor, Tensor]:
    """The KV blocks that one query block meets, int64 [B, Hq, K], full ones first.

    The second tensor, bool [B, Hq, K], says which of the K entries are real: sequences and heads
    meet different numbers of blocks.
    """
    lists = tiles.by_query
    numbers = []
    is_listed = []
    full = (lists.full_count, lists.full)
    partial = (lists.partial_count, lists.partial)
    for all_counts, all_numbers in (full, partial):
        # [B, Hq, 1]
        count = all_counts[:, :, q_block, None]
        most = int(count.max())
        numbers.append(all_numbers[:, :, q_block, :most].long())
        is_listed.append(torch.arange(most, device=count.device) < count)
    return torch.cat(numbers, dim=-1), torch.cat(is_listed, dim=-1)


def _kv_rows(kv_blocks: Tensor, kv_heads: int, blocks: int) -> Tensor:
    """Rows of k and v in the layout of _in_blocks(), for the KV blocks [B, Hq, K] of query heads.

    kv_heads, blocks: heads of k and v, and KV blocks of one of them.
    """
    batch, heads, _ = kv_blocks.shape
    device = kv_blocks.device
    kv_head = torch.arange(heads, device=device) // (heads // kv_heads)
    # [B, Hq]: which of the B * Hkv lists of blocks a query head looks into.
    owner = torch.arange(batch, device=device)[:, None] * kv_heads + kv_head
    return owner[..., None] * blocks + kv_blocks


def _visible(tiles: Tiles, q_block: int, kv_blocks: Tensor, is_listed: Tensor) -> Tensor:
    """bool [B, Hq, block, K * block]: the pairs of one query block that are computed."""
    size = tiles.block_size
    batch, heads, _ = kv_blocks.shape
    # [B, Hq, K * block]
    all_positions = tiles.k_positions.expand(batch, heads, -1)
    position = _tokens_of_blocks(all_positions, kv_blocks, size)

    queries = slice(q_block * size, (q_block + 1) * size)
    # [B, 1, block, 1], or with slices [B, Hq, block, K * block]
    start, stop = tiles.start[:, None, queries, None], tiles.stop[:, None, queries, None]
    if tiles.slices is not None:
        start, stop = _bounds_in_slices(tiles, tiles.slices, q_block)
    visible = (position[:, :, None] >= start) & (position[:, :, None] < stop)
    visible &= is_listed.repeat_interleave(size, dim=-1)[:, :, None]

    if tiles.covered is not None:
        # [B, Hq, Sk]
        covered = unpack(tiles.covered[:, :, q_block], tiles.k_positions.shape[-1])
        visible &= ~_tokens_of_blocks(covered, kv_blocks, size)[:, :, None]
    if tiles.chosen is not None:
        words, origin, chunk_tokens = tiles.chosen
        chosen = ChosenChunks(words[:, :, queries], origin[:, queries], chunk_tokens)
        # All queries of a full tile chose it, so looking again changes nothing there.
        visible &= chosen_keys(chosen, position)
    return visible


def _bounds_in_slices(tiles: Tiles, slices: Tensor, q_block: int) -> tuple[Tensor, Tensor]:
    """Bounds of the keys that each query of a block sees in each entry of _listed_kv_blocks().

    Two of int64 [B, Hq, block, K * block]. Every key of a full tile is seen; in a partial one the
    entry's slice decides.
    """
    lists = tiles.by_query
    size = tiles.block_size
    full = int(lists.full_count[:, :, q_block].max())
    partial = int(lists.partial_count[:, :, q_block].max())

    # Limits of the slice of each partial entry: [B, Hq, 1, K partial]
    assert lists.partial_slice is not None and tiles.q_positions is not None
    number = lists.partial_slice[:, :, q_block, :partial].long()
    batch = torch.arange(len(number), device=number.device)[:, None, None]
    limits = slices[batch, number].long()[:, :, None]
    q_start, q_stop, k_start, k_stop, low, high = limits.unbind(-1)

    # [B, Hq, block, K partial]
    query = tiles.q_positions[q_block * size : (q_block + 1) * size].long()[:, None]
    is_inside = (query >= q_start) & (query < q_stop)
    start = torch.maximum(k_start, query + low)
    stop = torch.minimum(k_stop, query + high + 1)
    stop = torch.where(is_inside, stop, 0)

    # Full entries come first, and end behind every position.
    everywhere = torch.iinfo(torch.int32).max
    start = torch.nn.functional.pad(start, (full, 0), value=0)
    stop = torch.nn.functional.pad(stop, (full, 0), value=everywhere)
    return start.repeat_interleave(size, -1), stop.repeat_interleave(size, -1)


def _tokens_of_blocks(per_token: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Values of the tokens of some blocks: [B, H, Sk], [B, H, K] -> [B, H, K * size]."""
    offset = torch.arange(size, device=per_token.device)
    index = blocks[..., None] * size + offset
    return per_token.gather(2, index.flatten(2))


def _in_blocks(x: Tensor, size: int) -> Tensor:
    """[B, H, S, D] -> [B * H * S / size, size, D]"""
    return x.reshape(-1, size, x.shape[-1])


def _finite(lse: Tensor) -> Tensor:
    """lse without the -inf of rows that see nothing, which would give NaN in exp(-inf - lse)."""
    lowest = torch.finfo(lse.dtype).min
    return lse.clamp(min=lowest)
