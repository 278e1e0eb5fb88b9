"""What block-sparse kernels compute, in plain torch: dense attention over masks made from the lists.

For any dtype and device, and for small sizes. Gradients are autograd's.
"""

import torch
from torch import Tensor

from tests.reference import dense_attention, gradients
from titan_sparse.kernels.bits import unpack
from titan_sparse.kernels.block_sparse import Piece, Tiles
from titan_sparse.kernels.chunks import chosen_keys


def attend_pieces(q: Tensor, d_out: Tensor, pieces: list[Piece], scale: float) -> list[Tensor]:
    """out, lse, dq, and dk and dv of each piece, in fp64."""
    heads = q.shape[1]
    # [B, Hq, Sq, all Sk]
    seen = torch.cat([seen_pairs(piece) for piece in pieces], dim=3)

    def attend(q: Tensor, *kv: Tensor) -> tuple[Tensor, Tensor]:
        k = torch.cat([x.repeat_interleave(heads // x.shape[1], 1) for x in kv[0::2]], dim=2)
        v = torch.cat([x.repeat_interleave(heads // x.shape[1], 1) for x in kv[1::2]], dim=2)
        return dense_attention(q, k, v, seen, scale)

    inputs = [q.double()]
    for piece in pieces:
        inputs += [piece.k.double(), piece.v.double()]
    _, lse = attend(*inputs)
    out, grads = gradients(lambda *x: attend(*x)[0], d_out.double(), *inputs)
    return [out, lse, *grads]


def seen_pairs(piece: Piece) -> Tensor:
    """bool [B, Hq, Sq, Sk]: the pairs that a piece computes."""
    tiles = piece.tiles
    block_size = tiles.block_size
    lists = tiles.by_query
    k_len = piece.k.shape[2]
    kv_blocks = k_len // block_size

    # Of a full tile every pair is seen.
    full = _listed(lists.full_count, lists.full, kv_blocks)
    full = _of_tokens(full, block_size)

    # In a partial one the mask decides, or the slice that the entry names.
    if tiles.slices is None:
        position = tiles.k_positions[:, :, None]
        start = tiles.start[:, None, :, None]
        stop = tiles.stop[:, None, :, None]
        seen = (position >= start) & (position < stop)
        partial = _listed(lists.partial_count, lists.partial, kv_blocks)
        seen = seen & _of_tokens(partial, block_size)
    else:
        seen = _seen_in_slices(tiles)
    if tiles.covered is not None:
        covered = unpack(tiles.covered, k_len)
        seen = seen & ~covered.repeat_interleave(block_size, 2)
    if tiles.chosen is not None:
        seen = seen & chosen_keys(tiles.chosen, tiles.k_positions)
    return full | seen


def _listed(count: Tensor, table: Tensor, blocks: int) -> Tensor:
    """bool [B, Hq, n, blocks]: which blocks of the other side are on the lists [B, Hq, n, K]."""
    # Entries behind the count are no blocks, and may hold any number.
    entry = torch.arange(table.shape[-1], device=table.device)
    is_real = entry < count[..., None]
    number = table.long().clamp(0, blocks - 1)
    hits = torch.zeros(*table.shape[:-1], blocks, dtype=torch.int32, device=table.device)
    return hits.scatter_add_(-1, number, is_real.int()) > 0


def _of_tokens(of_blocks: Tensor, block_size: int) -> Tensor:
    """[B, Hq, nq, nk] -> [B, Hq, nq * block_size, nk * block_size]"""
    return of_blocks.repeat_interleave(block_size, 2).repeat_interleave(block_size, 3)


def _seen_in_slices(tiles: Tiles) -> Tensor:
    """bool [B, Hq, Sq, Sk]: the pairs of partial tiles, each entry of the lists with its slice."""
    lists = tiles.by_query
    block_size = tiles.block_size
    batch, heads, q_blocks, _ = lists.partial.shape
    # Positions: [nq, block, 1] and [nk, 1, block]
    queries = tiles.q_positions.view(-1, block_size, 1)
    keys = tiles.k_positions.flatten().view(-1, 1, block_size)
    seen = torch.zeros(
        (batch, heads, q_blocks, len(keys), block_size, block_size),
        dtype=torch.bool,
        device=queries.device,
    )
    rows = torch.cartesian_prod(torch.arange(batch), torch.arange(heads), torch.arange(q_blocks))
    for b, h, q_block in rows.tolist():
        q = queries[q_block]
        for entry in range(int(lists.partial_count[b, h, q_block])):
            number = int(lists.partial_slice[b, h, q_block, entry])
            kv_block = int(lists.partial[b, h, q_block, entry])
            k = keys[kv_block]
            q_start, q_stop, k_start, k_stop, low, high = tiles.slices[b, number].tolist()
            inside = (q >= q_start) & (q < q_stop) & (k >= k_start) & (k < k_stop)
            between = (k - q >= low) & (k - q <= high)
            # A tile may be there once for each of its slices.
            seen[b, h, q_block, kv_block] |= inside & between
    # [B, Hq, nq, block, nk, block]
    seen = seen.transpose(3, 4)
    return seen.flatten(2, 3).flatten(3, 4)
