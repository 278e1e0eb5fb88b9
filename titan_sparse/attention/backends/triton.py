"""Triton kernels over the block lists; where there are verticals too, one fused pass over blocks and verticals.

The kernels want CUDA; on the CPU they run in Triton's interpreter, for tests.
"""

import torch
from torch import Tensor

from titan_sparse.attention.tiles.blocks import Tiles
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import Lists, Piece

READS_BY_KEY = True
"""Whether backward reads Tiles.by_key."""
SERVES_SLICES = True
"""Whether it takes Tiles of a mask of slices."""
COMPILES_BY_LENGTH = False
"""Whether a number of keys that it has not seen takes seconds to compile."""


def refusal(device_type: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why training with these inputs is not possible on this backend, in one sentence; None if it is."""
    interpreted = block_sparse.INTERPRETED
    if device_type != "cuda" and not interpreted:
        return f'attention.backend = "triton" needs CUDA, not {device_type}; write "eager"'
    if dtype == torch.float64 or (interpreted and dtype == torch.bfloat16):
        where = " in Triton's interpreter" if interpreted else ""
        return f'attention.backend = "triton" does not compute {dtype}{where}; write "eager"'
    if block_size not in ((16, 32, 64, 128) if interpreted else (64, 128)):
        return (
            f'attention.backend = "triton" takes attention.block_size 64 or 128, not {block_size}'
        )
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f'attention.backend = "triton" takes head_dim 16 to 256 in steps of 16, not {head_dim}; write "eager"'
    return None


def describe() -> str:
    """What computes, for the banner."""
    return "triton: own block-sparse kernels, blocks and verticals in one pass"


def serves_causal(q: Tensor) -> bool:
    """No kernel of its own for dense causal attention."""
    return False


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    scale: float,
    dtype: torch.dtype | None = None,
    total: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D] over the tiles of k, v [B, Hkv, Sk, D]; with `total` = (out, lse) over other keys
    the attention over both, in total's own memory where it has that dtype.

    Returns out in q's shape, in the memory `into` or in dtype (default total's, else q's), and natural-log lse fp32
    [B, Hq, Sq]; 0 and -inf for rows that see nothing.
    """
    return block_sparse.forward(
        q,
        [_piece(k, v, tiles)],
        tiles.start,
        tiles.stop,
        tiles.block_size,
        scale,
        dtype,
        total,
        into,
    )


def forward_with_verticals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    k2: Tensor,
    v2: Tensor,
    tiles2: Tiles,
    scale: float,
    dtype: torch.dtype | None = None,
    total: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """forward() over blocks and, in the same pass, over gathered verticals k2, v2 [B, Hq, C, D] with their own tiles."""
    pieces = [_piece(k, v, tiles), _piece(k2, v2, tiles2)]
    return block_sparse.forward(
        q, pieces, tiles.start, tiles.stop, tiles.block_size, scale, dtype, total, into
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
    dtype: torch.dtype | None = None,
    dq: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through these tiles in dtype (default q's) with the out and lse of the whole attention; needs by_key.

    dq: what came through other keys, which is added. into: memory for the sum, whose dtype wins.
    """
    dtype = dtype or q.dtype
    dq, [(dk, dv)] = block_sparse.backward(
        d_out,
        q,
        out,
        lse,
        [_piece(k, v, tiles)],
        tiles.start,
        tiles.stop,
        tiles.block_size,
        scale,
        [dtype, dtype],
        dq,
        into,
    )
    return dq, dk, dv


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
    dtype: torch.dtype | None = None,
    dq: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """As backward(), then dk and dv of the verticals in fp32; dq through blocks and verticals in one pass."""
    dtype, pieces = dtype or q.dtype, [_piece(k, v, tiles), _piece(k2, v2, tiles2)]
    dq, [(dk, dv), (dk2, dv2)] = block_sparse.backward(
        d_out,
        q,
        out,
        lse,
        pieces,
        tiles.start,
        tiles.stop,
        tiles.block_size,
        scale,
        [dtype, dtype, torch.float32],
        dq,
        into,
    )
    return dq, dk, dv, dk2, dv2


def _piece(k: Tensor, v: Tensor, tiles: Tiles) -> Piece:
    by_key = None if tiles.by_key is None else Lists(*tiles.by_key)
    return Piece(
        k,
        v,
        Lists(*tiles.by_query),
        by_key,
        tiles.k_positions,
        tiles.covered,
        tiles.chosen,
        tiles.slices,
        tiles.q_positions,
    )
