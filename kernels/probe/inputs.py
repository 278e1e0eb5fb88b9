"""What the kernels and their twins look at: the probe's queries, and blocks of keys."""

from typing import NamedTuple

from torch import Tensor


class Probe(NamedTuple):
    """P queries of each of n spans; a span shorter than P has rows that see nothing.

    q: [B, Hq, n, P, D] in its own dtype.
    start, stop: int32 [B, n, P], the keys that each row sees.
    row_block: int32 [B, n, P], the block of queries that each row lies in.
    group: int32 [B, n, P], which of `groups` groups each row belongs to. The rows of a group lie in
        one block. Where there are P groups, row i is group i.
    groups: U.
    scale: of the scores.
    """

    q: Tensor
    start: Tensor
    stop: Tensor
    row_block: Tensor
    group: Tensor
    groups: int
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
