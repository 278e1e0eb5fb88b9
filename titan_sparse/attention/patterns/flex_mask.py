"""A selection as a BlockMask of torch's flex_attention."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from titan_sparse.attention.inputs import mask_of_whole_blocks
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.visibility import pairs_by_block
from titan_sparse.kernels.block_sparse import ChosenChunks


def flex_block_mask(
    ranges: MaskRanges,
    block_size: int,
    selected: Tensor,
    selected_for_all: Tensor,
    verticals: Tensor,
    chosen: ChosenChunks | None,
) -> BlockMask:
    """The BlockMask [B, Hq, S, S] of what the mask allows and an index selected.

    selected, selected_for_all: bool, broadcastable to [B, Hq, blocks, blocks]: pairs of blocks that
    some, and that all queries of the block compute. verticals: int32 [B, Hq, C]. chosen: what
    single queries chose inside of selected pairs of blocks; None for everything.
    """
    batch, heads = verticals.shape[:2]
    seq_len = ranges.start.shape[1]
    blocks = selected.shape[-1]
    shape = (batch, heads, blocks, blocks)
    selected = selected.expand(shape)
    # One place more takes the filling of `verticals`.
    is_vertical = verticals.new_zeros(batch, heads, blocks * block_size + 1, dtype=torch.bool)
    is_vertical.scatter_(2, verticals.long().clamp(max=blocks * block_size), True)
    is_vertical[:, :, seq_len:] = False
    # [B, Hq, 1, blocks]
    has_vertical = is_vertical[:, :, None, :-1].unflatten(-1, (blocks, block_size)).any(-1)
    # [B or 1, 1, blocks, blocks]
    q_blocks = torch.arange(blocks, device=selected.device)
    whole_blocks = mask_of_whole_blocks(ranges, block_size)
    pairs = pairs_by_block(whole_blocks, q_blocks, block_size)[:, None]
    is_met = (selected | has_vertical) & (pairs > 0)
    # In these, mask_mod is not asked.
    is_full = selected & selected_for_all & (pairs == block_size**2)
    return BlockMask.from_kv_blocks(
        *_ordered(is_met & ~is_full),
        *_ordered(is_full),
        BLOCK_SIZE=block_size,
        mask_mod=_mask_mod(ranges, block_size, selected, is_vertical, chosen),
        seq_lengths=(seq_len, seq_len),
    )


def _ordered(met: Tensor) -> tuple[Tensor, Tensor]:
    """The number of key blocks that each query block meets, then the blocks: int32 [B,
    Hq, blocks (, blocks)].

    met: bool [B, Hq, blocks, blocks].
    """
    order = met.int().argsort(dim=-1, descending=True, stable=True)
    return met.sum(-1, dtype=torch.int32), order.int().contiguous()


def _mask_mod(
    ranges: MaskRanges,
    block_size: int,
    selected: Tensor,
    is_vertical: Tensor,
    chosen: ChosenChunks | None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    batch = selected.shape[0]
    start, stop = (x.expand(batch, -1) for x in (ranges.start, ranges.stop))
    slices = None if ranges.slices is None else ranges.slices.expand(batch, -1, -1)

    def is_allowed(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if slices is None:
            return (start[b, q] <= kv) & (kv < stop[b, q])
        allowed = kv < 0
        for number in range(slices.shape[1]):
            q_start, q_stop, k_start, k_stop, low, high = (
                slices[b, number, column] for column in range(6)
            )
            in_rectangle = (q_start <= q) & (q < q_stop) & (k_start <= kv) & (kv < k_stop)
            allowed = allowed | (in_rectangle & (low <= kv - q) & (kv - q <= high))
        return allowed

    def is_chosen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if chosen is None:
            return selected[b, h, q // block_size, kv // block_size]
        chunk = (kv - chosen.origin[b, q]).clamp(min=0) // chosen.tokens
        width = chosen.words.shape[-1]
        word = chosen.words[b, h, q, (chunk // 32).clamp(max=width - 1)]
        return (((word >> (chunk % 32)) & 1) == 1) & (chunk < 32 * width)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (is_chosen(b, h, q, kv) | is_vertical[b, h, kv]) & is_allowed(b, q, kv)

    return mask_mod
