"""Exact counts of what each rank of a layout computes, from an index, without process groups."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, token_positions
from titan_sparse.attention.masks.visibility import block_reach, seen_blocks, tiles_between
from titan_sparse.attention.patterns import BlockIndex

_ELEMENTS = 1 << 23
"""Pairs of blocks, of all heads, that are looked at together, which bounds the memory."""


class Visits(NamedTuple):
    """The work of the queries of rank r on the keys of rank s, all sequences and heads together.

    All int64. W is the number of ranks.
    """

    full: Tensor  # [W, W], tiles (pairs of blocks) in which the mask lets every query see every key
    partial: Tensor  # [W, W], tiles that the mask cuts through, once for each slice of the mask
    pairs: Tensor  # [W, W], pairs of tokens computed in both kinds of tiles
    vertical_pairs: Tensor  # [W], pairs with gathered verticals, without those in computed tiles
    met: Tensor  # bool [W, blocks], some head computes a tile of the block for a query of the rank

    def total(self) -> Tensor:
        """Pairs of tokens that each rank computes, int64 [W].

        Their sum over ranks is what a Recording calls visited.
        """
        return self.pairs.sum(-1) + self.vertical_pairs


def count_visits(index: BlockIndex, ranges: MaskRanges, table: Tensor) -> Visits:
    """The work of the queries of each rank. table: int64 [W, n], the layout's blocks of each
    rank."""
    ranks = len(table)
    blocks = index.all_blocks()
    batch, size = index.batch, index.block_size
    owner = torch.empty_like(blocks)
    owner[table] = torch.arange(ranks, device="cpu")[:, None]
    # [W, blocks], by rank and block of keys: tiles of both kinds, and pairs of the partial ones.
    full, partial, cut_pairs = torch.zeros(3, ranks, len(blocks), dtype=torch.int64, device="cpu")
    at_once = max(1, _ELEMENTS // (batch * index.heads * len(blocks)))
    for q_blocks in blocks.split(at_once):
        rank = owner[q_blocks]
        for k_blocks, is_whole in _parts_of_keys(ranges, q_blocks, size):
            # [B or 1, nq, nk]: how many heads compute a tile, and for how many
            # all of its queries do.
            find = index.heads_selecting_whole if is_whole else index.heads_selecting
            some, every = find(q_blocks, k_blocks)
            kinds = [(full, every)]
            if every is not some:
                kinds.append((partial, some - every))
            if not is_whole:
                seen = tiles_between(ranges, q_blocks, k_blocks, size)
                kinds = [(counted, tiles * seen.whole) for counted, tiles in kinds]
                if len(seen.whole) == 1:
                    some = some.sum(0, keepdim=True) * (batch // len(some))
                cut = (rank[seen.q], k_blocks[seen.k])
                computing = some.expand_as(seen.whole)[seen.sequence, seen.q, seen.k].long()
                partial.index_put_(cut, computing, accumulate=True)
                cut_pairs.index_put_(cut, computing * seen.pairs, accumulate=True)
            for counted, tiles in kinds:
                # A mask or an index may stand for all sequences.
                alike = batch // len(tiles)
                of_part = counted[:, k_blocks].index_add_(0, rank, tiles.sum(0), alpha=alike)
                counted[:, k_blocks] = of_part
    pairs = full * size**2 + cut_pairs
    # [W, blocks] -> [W, W, n] -> [W, W]
    full_of_ranks, partial_of_ranks, pairs_of_ranks = (
        counted[:, table].sum(-1) for counted in (full, partial, pairs)
    )
    for of_rank, rank_blocks in zip(pairs_of_ranks, table):
        exact = index.pairs(ranges, rank_blocks, list(table))
        if exact is not None:
            # Of a tile that not all of its queries chose, fewer pairs are computed.
            of_rank.copy_(exact.sum((0, 1)))
    # [blocks] -> [W, n] -> [W]
    verticals = index.vertical_pairs_by_block(ranges)[table].sum(-1)
    met = full + partial > 0
    return Visits(full_of_ranks, partial_of_ranks, pairs_of_ranks, verticals, met)


def _parts_of_keys(
    ranges: MaskRanges, q_blocks: Tensor, size: int
) -> Iterator[tuple[Tensor, bool]]:
    """Lists of KV blocks, int64, that hold all keys these blocks of queries see; and whether every
    query sees all keys of the list, whose blocks are then in a row."""
    if ranges.slices is not None:
        yield seen_blocks(ranges, q_blocks[None], size)[0].nonzero().flatten(), False
        return
    blocks = torch.arange(ranges.start.shape[1] // size, device=q_blocks.device)
    reach = block_reach(ranges, token_positions(q_blocks, size), size)
    first = int(reach.first.min()) // size
    last = -(-int(reach.last.max()) // size)
    whole_first = -(-int(reach.all_first.max()) // size)
    whole_last = int(reach.all_last.min()) // size
    if whole_first < whole_last:
        yield blocks[whole_first:whole_last], True
    else:
        whole_first = whole_last = last
    for begin, end in ((first, whole_first), (whole_last, last)):
        if begin < end:
            yield blocks[begin:end], False


def by_step(visits: Visits, sources: Tensor, needed: Tensor) -> Tensor:
    """Pairs of tokens that each rank computes at each step, float64 [W, W].

    sources: int64 [W, W], by rank and step the rank whose keys and values are computed on.
    needed: bool [W, W], the chunks that ranks compute on (context_parallel/needed_keys.py). A rank
    always computes on its own one, first.

    Verticals count evenly for the steps that compute, but not for the first one
    if there are others.
    """
    # In the last dim steps take the place of ranks.
    work = visits.pairs.gather(-1, sources).double()
    meets = needed.gather(-1, sources)
    meets[:, 0] = ~meets[:, 1:].any(-1)
    return work + visits.vertical_pairs[:, None] * (meets / meets.sum(-1, keepdim=True))
