"""The reference: block-sparse attention in plain PyTorch, on any device, from fp64 to bf16.

It walks over the query blocks and gathers the listed KV blocks of each, so it does not compute what
is not selected, neither in the forward nor in the backward. Arithmetic is fp32, or fp64 for fp64
inputs.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from titan_sparse.attention.backends.base import Backend, DenseShape, Partial, Queries
from titan_sparse.attention.merge import accumulation_dtype, merge
from titan_sparse.kernels.bits import unpack
from titan_sparse.kernels.block_sparse import Piece, Tiles
from titan_sparse.kernels.chunks import ChosenChunks, chosen_keys


class Eager(Backend):
    """Serves every input."""

    READS_BY_KEY = False
    SERVES_SLICES = True

    def describe(self) -> str:
        return "eager: plain PyTorch over the selected KV blocks"

    def forward(
        self,
        q: Tensor,
        pieces: Sequence[Piece],
        total: Partial | None,
        scale: float,
        dtype: torch.dtype | None = None,
        into: Tensor | None = None,
    ) -> Partial:
        sum_dtype = accumulation_dtype(q.dtype)
        for piece in pieces[:-1]:
            out, lse = _piece_forward(q, piece, scale)
            total = merge(total, out, lse, sum_dtype)

        # Only the last sum is rounded, or written to the memory that the caller wants.
        if dtype is None:
            dtype = sum_dtype
        out, lse = _piece_forward(q, pieces[-1], scale)
        out, lse = merge(total, out, lse, dtype, into)
        return Partial(out, lse)

    def backward(
        self,
        queries: Queries,
        pieces: Sequence[Piece],
        dq: Tensor | None,
        scale: float,
        dtype: torch.dtype | None = None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        sum_dtype = accumulation_dtype(queries.q.dtype)
        if dtype is None:
            dtype = sum_dtype
        gradients = []
        # The verticals first: they are added in full precision, and the blocks round the sum once.
        for piece in reversed(pieces):
            piece_dq, dk, dv = _piece_backward(queries, piece, scale)
            if dq is not None:
                piece_dq += dq
            dq = piece_dq
            gradients.insert(0, (dk, dv))

        blocks_dk, blocks_dv = gradients[0]
        gradients[0] = (blocks_dk.to(dtype), blocks_dv.to(dtype))
        if into is not None:
            return into.copy_(dq), gradients
        return dq.to(dtype), gradients

    def serves_dense(self, q: Tensor, shape: DenseShape) -> bool:
        """Whether to compute without tiles: plain causal attention, which then makes no tables.

        A chunk of a longer sequence keeps its tiles, as its sums are fp32.
        """
        return shape.causal and shape.is_whole and not shape.is_packed

    def dense_forward(
        self, q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float
    ) -> Partial:
        # A block of queries at a time, so that there is never more than one block of scores.
        if shape.offsets is not None:
            batch = len(q)
            q, k, v = _one_sequence(q), _one_sequence(k), _one_sequence(v)
        dtype = torch.promote_types(q.dtype, torch.float32)
        group = q.shape[1] // k.shape[1]
        # [B, Hq, Sk, D]
        keys = k.to(dtype).repeat_interleave(group, 1)
        values = v.to(dtype).repeat_interleave(group, 1)
        out = q.new_empty(q.shape)
        lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)

        for here, met in _dense_steps(q, k, shape):
            out[:, :, here], lse[:, :, here] = _rows(
                q[:, :, here].to(dtype),
                keys[:, :, met],
                values[:, :, met],
                scale,
                _hidden(here, met, shape, q.device),
            )

        if shape.offsets is not None:
            out = _many_sequences(out, batch)
            lse = _many_sequences(lse[..., None], batch)[..., 0]
        return Partial(out, lse)

    def dense_backward(
        self, queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, d_out, out, lse = queries
        if shape.offsets is not None:
            batch = len(q)
            q, d_out, out = _one_sequence(q), _one_sequence(d_out), _one_sequence(out)
            k, v = _one_sequence(k), _one_sequence(v)
            lse = _one_sequence(lse[..., None])[..., 0]
        dtype = torch.promote_types(q.dtype, torch.float32)
        kv_heads = k.shape[1]
        group = q.shape[1] // kv_heads
        # [B, Hq, Sk, D]
        keys = k.to(dtype).repeat_interleave(group, 1)
        values = v.to(dtype).repeat_interleave(group, 1)
        dq = q.new_empty(q.shape)
        dk = torch.zeros(k.shape, dtype=dtype, device=k.device)
        dv = torch.zeros(v.shape, dtype=dtype, device=v.device)
        # [B, Hq, Sq, 1]
        delta = (d_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)

        for here, met in _dense_steps(q, k, shape):
            dq[:, :, here], dk_here, dv_here = _row_gradients(
                q[:, :, here].to(dtype),
                d_out[:, :, here].to(dtype),
                keys[:, :, met],
                values[:, :, met],
                lse[:, :, here],
                delta[:, :, here],
                scale,
                _hidden(here, met, shape, q.device),
            )
            # [B, Hkv, group, keys, D]
            dk_here = dk_here.unflatten(1, (kv_heads, group))
            dv_here = dv_here.unflatten(1, (kv_heads, group))
            # Head after head, in the order in which _piece_backward() adds them.
            for member in range(group):
                dk[:, :, met] += dk_here[:, :, member]
                dv[:, :, met] += dv_here[:, :, member]

        dk = dk.to(q.dtype)
        dv = dv.to(q.dtype)
        if shape.offsets is not None:
            dq = _many_sequences(dq, batch)
            dk = _many_sequences(dk, batch)
            dv = _many_sequences(dv, batch)
        return dq, dk, dv


def _piece_forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, D] and natural-log lse [B, Hq, Sq] over one piece, fp32 (fp64 for fp64)."""
    tiles = piece.tiles
    size = tiles.block_size
    dtype = accumulation_dtype(q.dtype)
    # [B * Hkv * blocks, block, D]
    k_blocks = _in_blocks(piece.k, size)
    v_blocks = _in_blocks(piece.v, size)
    # Query blocks that meet no key keep these values.
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)

    for q_block in _busy_query_blocks(tiles):
        queries = slice(q_block * size, (q_block + 1) * size)
        kv_blocks, is_listed = _listed_kv_blocks(tiles, q_block)
        # Rows of k_blocks and v_blocks: [B, Hq, K]
        rows = _kv_rows(kv_blocks, piece.k.shape[1], piece.k.shape[2] // size)
        keys = k_blocks[rows].to(dtype).flatten(2, 3)
        values = v_blocks[rows].to(dtype).flatten(2, 3)

        hidden = ~_visible(tiles, q_block, kv_blocks, is_listed)
        q_here = q[:, :, queries].to(dtype)
        out[:, :, queries], lse[:, :, queries] = _rows(q_here, keys, values, scale, hidden)
    return out, lse


def _piece_backward(queries: Queries, piece: Piece, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv through one piece, fp32 (fp64 for fp64)."""
    q, d_out, out, lse = queries
    tiles = piece.tiles
    size = tiles.block_size
    dtype = accumulation_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(piece.k.shape, dtype=dtype, device=q.device)
    dv = torch.zeros(piece.v.shape, dtype=dtype, device=q.device)
    # [B * Hkv * blocks, block, D]; those of the gradients are views.
    k_blocks = _in_blocks(piece.k, size)
    v_blocks = _in_blocks(piece.v, size)
    dk_blocks = _in_blocks(dk, size)
    dv_blocks = _in_blocks(dv, size)
    # [B, Hq, Sq, 1]
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)

    for q_block in _busy_query_blocks(tiles):
        here = slice(q_block * size, (q_block + 1) * size)
        kv_blocks, is_listed = _listed_kv_blocks(tiles, q_block)
        rows = _kv_rows(kv_blocks, piece.k.shape[1], piece.k.shape[2] // size)
        # [B, Hq, block, D]
        q_here = q[:, :, here].to(dtype)
        d_here = d_out[:, :, here].to(dtype)
        # [B, Hq, K * block, D]
        keys = k_blocks[rows].to(dtype).flatten(2, 3)
        values = v_blocks[rows].to(dtype).flatten(2, 3)

        hidden = ~_visible(tiles, q_block, kv_blocks, is_listed)
        dq[:, :, here], dk_here, dv_here = _row_gradients(
            q_here, d_here, keys, values, lse[:, :, here], delta[:, :, here], scale, hidden
        )
        # Several query heads share a KV head, so a row may come up more than once.
        dk_blocks.index_add_(0, rows.flatten(), _in_blocks(dk_here, size))
        dv_blocks.index_add_(0, rows.flatten(), _in_blocks(dv_here, size))
    return dq, dk, dv


def _rows(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, n, D] and lse [B, Hq, n] of some queries [B, Hq, n, D].

    keys, values: [B, Hq, m, D]. hidden: bool, [B, Hq, n, m] or less, the pairs that are not seen.
    """
    scores = (q @ keys.mT * scale).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - _finite(lse[..., None])).exp()
    return p @ values, lse


def _row_gradients(
    q: Tensor,
    d_out: Tensor,
    keys: Tensor,
    values: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what _rows() takes: dq [B, Hq, n, D], dk and dv [B, Hq, m, D].

    delta: [B, Hq, n, 1], the product of out and d_out.
    """
    scores = (q @ keys.mT * scale).masked_fill(hidden, -torch.inf)
    p = (scores - _finite(lse[..., None])).exp()
    d_scores = p * (d_out @ values.mT - delta) * scale
    return d_scores @ keys, d_scores.mT @ q, p.mT @ d_out


def _busy_query_blocks(tiles: Tiles) -> list[int]:
    lists = tiles.by_query
    count = lists.full_count + lists.partial_count
    most = count.amax(dim=(0, 1))
    return torch.nonzero(most).flatten().tolist()


def _listed_kv_blocks(tiles: Tiles, q_block: int) -> tuple[Tensor, Tensor]:
    """The KV blocks that one query block meets, int64 [B, Hq, K], full ones first.

    The second tensor, bool [B, Hq, K], says which of the K entries are real: sequences and heads
    meet different numbers of blocks.
    """
    lists = tiles.by_query
    numbers = []
    is_listed = []
    for all_counts, all_numbers in (
        (lists.full_count, lists.full),
        (lists.partial_count, lists.partial),
    ):
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
    if tiles.slices is None:
        # [B, 1, block, 1]
        start, stop = tiles.start[:, None, queries, None], tiles.stop[:, None, queries, None]
    else:
        start, stop = _bounds_in_slices(tiles, q_block)
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


def _bounds_in_slices(tiles: Tiles, q_block: int) -> tuple[Tensor, Tensor]:
    """Where each query of a block begins and stops to see each entry of _listed_kv_blocks().

    Two of int64 [B, Hq, block, K * block]. Every key of a full tile is seen; in a partial one the entry's
    slice decides.
    """
    lists = tiles.by_query
    size = tiles.block_size
    full = int(lists.full_count[:, :, q_block].max())
    partial = int(lists.partial_count[:, :, q_block].max())

    # Limits of the slice of each partial entry: [B, Hq, 1, K partial]
    number = lists.partial_slice[:, :, q_block, :partial].long()
    batch = torch.arange(len(number), device=number.device)[:, None, None]
    limits = tiles.slices[batch, number].long()[:, :, None]
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
    """What belongs to the tokens of some blocks: [B, H, Sk], [B, H, K] -> [B, H, K * size]."""
    offset = torch.arange(size, device=per_token.device)
    index = blocks[..., None] * size + offset
    return per_token.gather(2, index.flatten(2))


def _in_blocks(x: Tensor, size: int) -> Tensor:
    """[B, H, S, D] -> [B * H * S / size, size, D]"""
    return x.reshape(-1, size, x.shape[-1])


def _finite(lse: Tensor) -> Tensor:
    """lse without -inf, which would give NaN in exp(-inf - lse)."""
    lowest = torch.finfo(lse.dtype).min
    return lse.clamp(min=lowest)


def _dense_steps(q: Tensor, k: Tensor, shape: DenseShape) -> Iterator[tuple[slice, slice]]:
    q_len = q.shape[2]
    k_len = k.shape[2]
    for first in range(0, q_len, shape.block_size):
        last = min(first + shape.block_size, q_len)
        last_key = k_len - q_len + last if shape.causal else k_len
        yield slice(first, last), slice(last_key)


def _hidden(here: slice, met: slice, shape: DenseShape, device: torch.device) -> Tensor:
    """bool [queries, keys]: the pairs of a step of _dense_steps() that are not seen.

    The last of the keys is that of the last query, if the shape is causal.
    """
    queries = here.stop - here.start
    keys = met.stop
    if not shape.causal:
        return torch.zeros(queries, keys, dtype=torch.bool, device=device)
    # [queries, 1] and [keys]
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    hidden = key > query
    if shape.window is not None:
        hidden |= query - key >= shape.window
    if shape.offsets is not None:
        number = torch.searchsorted(shape.offsets, key.int(), right=True)
        hidden |= number[keys - queries :, None] != number
    return hidden


def _one_sequence(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [1, H, B * S, D], where documents are counted through all sequences."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _many_sequences(x: Tensor, batch: int) -> Tensor:
    by_head = x[0].unflatten(1, (batch, -1))
    return by_head.transpose(0, 1)
