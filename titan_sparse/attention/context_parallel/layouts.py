"""Who owns which blocks: pure integers, no process groups.

A layout is a table block_ids[cp, n]: local block i of rank r is global block block_ids[r, i]. Every layout is a
permutation of whole blocks; tokens, labels, positions and document ids are sharded by it once, at the loader. Those of
LAYOUTS follow from the length alone; balanced.py makes a table for a mask.
"""

import torch
from torch import Tensor

from titan_sparse.attention.blocks import token_positions


def contiguous(cp: int, blocks: int) -> Tensor:
    """Rank r owns the r-th of cp equal runs of blocks."""
    return torch.arange(blocks).view(cp, -1)


def zigzag(cp: int, blocks: int) -> Tensor:
    """Rank r owns runs r and 2 cp - 1 - r of 2 cp equal runs, which balances dense causal attention."""
    runs = torch.arange(blocks).view(2 * cp, -1)
    return torch.cat([runs[:cp], runs.flip(0)[:cp]], dim=1)


def striped(cp: int, blocks: int) -> Tensor:
    """Global block g is on rank g % cp: block-level striping (MTraining, section 4.1 ii)."""
    return torch.arange(blocks).view(-1, cp).t().contiguous()


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
ALL_LAYOUTS = (*LAYOUTS, "balanced")


def block_multiple(layout: str, cp: int) -> int:
    """The number of blocks of a sequence must be a multiple of this."""
    return 2 * cp if layout == "zigzag" else cp


def count_blocks(layout: str, cp: int, seq_len: int, block_size: int) -> int:
    """Blocks of a global sequence of `seq_len` tokens; ValueError if they do not divide evenly over the ranks."""
    multiple = block_multiple(layout, cp) * block_size
    if seq_len % multiple:
        raise ValueError(
            f"a sequence of {seq_len} tokens does not divide into {layout} blocks of {block_size} over {cp} ranks; "
            f"pad it to a multiple of {multiple}"
        )
    return seq_len // block_size


def block_ids(layout: str, cp: int, seq_len: int, block_size: int) -> Tensor:
    """int64 [cp, n] for a global sequence of `seq_len` tokens; ValueError if the blocks do not divide evenly."""
    return LAYOUTS[layout](cp, count_blocks(layout, cp, seq_len, block_size))


def take_blocks(x: Tensor, dim: int, blocks: Tensor, block_size: int) -> Tensor:
    """The given global blocks of x (global order along `dim`), in the order given."""
    return x.index_select(dim, token_positions(blocks, block_size).to(x.device))


def restore_blocks(x: Tensor, dim: int, table: Tensor, block_size: int) -> Tensor:
    """Inverse of sharding: x holds all ranks' shards one after the other along `dim`; returns global order."""
    order = token_positions(table.flatten(), block_size)
    return x.index_select(dim, torch.argsort(order).to(x.device))
