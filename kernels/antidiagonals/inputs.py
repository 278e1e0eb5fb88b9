"""What the kernels and their twins look at: blocks of queries, and sums by block of keys."""

from typing import NamedTuple

from torch import Tensor


class QueryBlocks(NamedTuple):
    """m blocks of queries, cut into c cells each. T = 1 or 2 documents touch a block.

    first, stop: int32 [B, m, c], the range of key cells that each query cell sees; 0 and 0 for none.
    slot: int32 [B, m, c], which of its block's documents each cell that sees anything belongs to.
    number: int32 [m], global numbers of the blocks.
    first_block: int32 [B, m, T], the first block of each of these documents, -1 for no document.
    dense_from: int32 [B, m], from this block of keys up to its own a block takes all.
    """

    first: Tensor
    stop: Tensor
    slot: Tensor
    number: Tensor
    first_block: Tensor
    dense_from: Tensor

    def part(self, part: slice) -> "QueryBlocks":
        """The blocks that the slice names."""
        return QueryBlocks(
            first=self.first[:, part],
            stop=self.stop[:, part],
            slot=self.slot[:, part],
            number=self.number[part],
            first_block=self.first_block[:, part],
            dense_from=self.dense_from[:, part],
        )


class BlockSums(NamedTuple):
    """Softmax sums of query cells over blocks of keys, relative to maxima of several blocks.

    weight: [B, G, m c, blocks], the sums of 2^(score - top). Blocks of which a cell sees nothing
        may hold anything.
    top: [B, G, m c, runs], a maximum of the scores for each run of neighboring blocks, base 2.
    run: blocks that share a maximum.
    """

    weight: Tensor
    top: Tensor
    run: int
