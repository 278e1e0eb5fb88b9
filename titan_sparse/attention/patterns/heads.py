"""What all heads of an index compute together, without asking for every head on its own."""

import torch
from torch import Tensor

from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex


def heads_selecting(index: BlockIndex, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
    """How many heads compute each pair of global blocks: int32 [B or 1, 1, nq, nk].

    q_blocks: int64 [nq]. k_blocks: int64 [nk]. The slashes of a vertical-slash index are summed
    over heads before they are looked up, which is about Hq times cheaper.
    """
    if isinstance(index, VerticalSlashIndex):
        # [B, 1, E]
        heads_with_slash = index.slashes.sum(1, keepdim=True, dtype=torch.int32)
        return values_on_diagonals(
            index, heads_with_slash, index.heads, q_blocks, k_blocks.view(1, 1, 1, -1)
        )
    # [B or 1, Hq or 1, nq, nk]
    selected = index.selects(q_blocks, k_blocks)
    # A pattern that treats all heads alike answers for one of them.
    heads_per_answer = index.heads // selected.shape[1]
    return selected.sum(1, keepdim=True, dtype=torch.int32) * heads_per_answer


def values_on_diagonals(
    index: VerticalSlashIndex,
    values: Tensor,
    value_of_short: int,
    q_blocks: Tensor,
    k_blocks: Tensor,
) -> Tensor:
    """Look up `values` at the block diagonal of each pair of blocks; 0 where there is no diagonal.

    values: [B, H, E], one for each entry of index.slashes. value_of_short: the value inside short
    documents, which are computed whole. q_blocks: int64 [nq]. k_blocks: [B or 1, H or 1, 1, m].
    Returns [B, H, nq, m].

    Two documents can meet in a query block. The later one adds only the tile on the main diagonal,
    and the earlier one has that tile already, because local_diagonals is 1 or more. So the entries
    of the first span are enough.
    """
    # [B, 1, nq, 1] each: first entry of the span, its first block, the block from which on short
    # documents are computed whole.
    spans = index.block_spans(q_blocks)[:, None, :, None]
    begin, first_block, _, _, dense_from = spans.unbind(-1)
    # [B or 1, H or 1, nq, m]
    delta = q_blocks.int()[:, None] - k_blocks.int()
    in_span = (begin >= 0) & (delta >= 0) & (k_blocks >= first_block)
    # Entry 0 stands in outside of the span, where the product below removes its value.
    entry = ((begin + delta) * in_span).expand(*values.shape[:2], -1, -1)
    looked_up = values.gather(2, entry.flatten(2).long()).view(entry.shape) * in_span
    in_short = (k_blocks >= dense_from) & (delta >= 0)
    short = in_short * torch.tensor(value_of_short, dtype=values.dtype)
    return torch.maximum(looked_up, short)
