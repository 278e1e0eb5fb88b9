"""Which keys the queries of a block see: any of them, and all of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges


class Reach(NamedTuple):
    """Key positions seen by the queries of each block, int32 [Bm, nq]: by any from `first` to before `last`, by every
    one from `all_first` to before `all_last`. Empty ranges where there are none."""

    first: Tensor
    last: Tensor
    all_first: Tensor
    all_last: Tensor


def block_reach(rows: MaskRanges, q_positions: Tensor, block_size: int) -> Reach:
    """Reach of this rank's query blocks, from int [Sq] global positions of its queries."""
    start, stop = (
        x[:, q_positions].unflatten(1, (-1, block_size)) for x in (rows.start, rows.stop)
    )
    seen = start < stop
    first = torch.where(seen, start, torch.iinfo(torch.int32).max).amin(-1)
    last = torch.where(seen, stop, 0).amax(-1)
    return Reach(first, last, start.amax(-1), torch.where(seen, stop, 0).amin(-1))


def reached(reach: Reach, k_blocks: Tensor, block_size: int) -> Tensor:
    """bool [Bm, nq, nk]: some query of the block sees a key of the KV block, int [nk] global."""
    begin = k_blocks * block_size
    return (reach.first[..., None] < begin + block_size) & (reach.last[..., None] > begin)
