"""What the kernels and their twins look at: the probe's queries, and blocks of keys."""

from typing import NamedTuple

from torch import Tensor


class Probe(NamedTuple):
    """The last P queries of each of n spans; a span shorter than P has rows that see nothing.

    q: [B, Hq, n, P, D] in its own dtype.
    start, stop: int32 [B, n, P], the keys that each row sees.
    block_back: int32 [B, n, P], how many blocks the row lies before the span's last block.
    scale: of the scores.
    """

    q: Tensor
    start: Tensor
    stop: Tensor
    block_back: Tensor
    scale: float


class KeyBlocks(NamedTuple):
    """The blocks of keys that a rank holds.

    k: [B, Hkv, n_local * block_size, D].
    blocks: int32 [n_local], their global numbers.
    slot: int32 [B, n_local, T], the spans that touch them, -1 for none.
    block_size: tokens of a block.
    """

    k: Tensor
    blocks: Tensor
    slot: Tensor
    block_size: int


def blocks_back(queries: int, block_size: int) -> int:
    """Query blocks that the last `queries` queries can lie in."""
    # As many as if the first of them were the last token of its block.
    return (queries + block_size - 2) // block_size + 1
