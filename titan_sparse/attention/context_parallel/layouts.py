"""Layouts define which rank owns which blocks.

A layout is a table block_ids[cp, n]: local block i of rank r is global block block_ids[r, i]. Every
layout is a permutation of whole blocks. Tokens, labels, positions and document ids are sharded by
it once, at the loader. The layouts in LAYOUTS follow from the sequence length alone. balanced.py
makes a table for a mask.
"""

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import token_positions


def contiguous(cp: int, blocks: int) -> Tensor:
    """Each rank owns one of cp equal runs of blocks, in order. int64 [cp, blocks / cp].

    contiguous(2, 8) is
        [[0, 1, 2, 3],
         [4, 5, 6, 7]]
    """
    return torch.arange(blocks).view(cp, -1)


def zigzag(cp: int, blocks: int) -> Tensor:
    """Rank r owns runs r and 2 cp - 1 - r of 2 cp equal runs. int64 [cp, blocks / cp].

    This balances dense causal attention: a rank's early run has little to see, its late run much.

    zigzag(2, 8) is
        [[0, 1, 6, 7],
         [2, 3, 4, 5]]
    """
    # [2 cp, blocks in a run]
    runs = torch.arange(blocks).view(2 * cp, -1)
    early = runs[:cp]
    late = runs.flip(0)[:cp]
    return torch.cat([early, late], dim=1)


def striped(cp: int, blocks: int) -> Tensor:
    """Global block g is on rank g % cp. int64 [cp, blocks / cp].

    This is block-level striping (MTraining, section 4.1 ii).

    striped(2, 8) is
        [[0, 2, 4, 6],
         [1, 3, 5, 7]]
    """
    # [blocks / cp, cp]: each row holds one block of every rank
    return torch.arange(blocks).view(-1, cp).t().contiguous()


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
ALL_LAYOUTS = (*LAYOUTS, "balanced")


def block_multiple(layout: str, cp: int) -> int:
    """The number of blocks of a sequence must be a multiple of this."""
    if layout == "zigzag":
        # Each rank owns two runs.
        return 2 * cp
    return cp


def count_blocks(layout: str, cp: int, seq_len: int, block_size: int) -> int:
    """Blocks of a global sequence of `seq_len` tokens.

    Raises ValueError if they do not divide evenly over the ranks.
    """
    multiple = block_multiple(layout, cp) * block_size
    if seq_len % multiple:
        raise ValueError(
            f"a sequence of {seq_len} tokens does not divide into {layout} blocks of {block_size} "
            f"over {cp} ranks; pad it to a multiple of {multiple}"
        )
    return seq_len // block_size


def block_ids(layout: str, cp: int, seq_len: int, block_size: int) -> Tensor:
    """The table int64 [cp, n] of one of LAYOUTS for a global sequence of `seq_len` tokens.

    Raises ValueError if the blocks do not divide evenly over the ranks.
    """
    blocks = count_blocks(layout, cp, seq_len, block_size)
    return LAYOUTS[layout](cp, blocks)


def take_blocks(x: Tensor, dim: int, blocks: Tensor, block_size: int) -> Tensor:
    """The given global blocks of x, in the order given. x is in global order along `dim`.

    Example with blocks of 2 tokens: blocks [3, 0] of 0 .. 7 are 6, 7, 0, 1.
    """
    positions = token_positions(blocks, block_size)
    return x.index_select(dim, positions.to(x.device))


def restore_blocks(x: Tensor, dim: int, table: Tensor, block_size: int) -> Tensor:
    """Inverse of sharding: puts the tokens of all ranks back into global order.

    x holds all ranks' shards one after the other along `dim`. table: the layout's, int64 [cp, n].
    """
    # Shard by shard, the global position of each token; its argsort is the inverse.
    place = token_positions(table.flatten(), block_size).argsort()
    return x.index_select(dim, place.to(x.device))
