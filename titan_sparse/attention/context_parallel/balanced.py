"""Layout "balanced": compute from the mask which rank owns which blocks. No process groups.

1. The sequence is cut into chunks of a few blocks (cut_into_chunks).
2. The chunks are dealt to the ranks, equally many to each (deal_chunks). The chunk with the most
   work comes first. It goes to a rank that would be done soon: longest processing time first.
3. Of several ranks that would be done almost equally soon, the one with the fewest keys to fetch
   takes the chunk. So most of a short document stays on one rank. What counts as "almost" shrinks
   with the work that is left, which can still even out what this makes uneven.

MagiAttention deals out chunks by their areas alone (its blog, "dispatch"). All numbers are integers,
so every rank computes the same table without communication.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.attention.context_parallel.layouts import count_blocks
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.visibility import Runs, block_reach, tiles_of_slices

_CHUNKS_PER_RANK = 64
"""64 leave the busiest rank within one percent of the mean for ragged documents. A chunk of a
million tokens on 8 ranks is then still 2,048 tokens long."""
_MIN_CHUNKS_PER_RANK = 8
_MAX_CHUNKS = 1024
"""Ranks get fewer chunks where all ranks together would have more than _MAX_CHUNKS, but at least
_MIN_CHUNKS_PER_RANK each. Dealing takes some microseconds a chunk."""
_SLACK_PERCENT = 1
"""A rank may be done later than the best one and still take a chunk to save keys: by so many
percent of a rank's mean work ..."""
_SLACK_PERCENT_OF_REST = 60
"""... plus so many percent of a rank's mean work that is not dealt out yet."""


class Costs(NamedTuple):
    """Time in hundredths of the time of a whole tile, forward and backward.

    A whole tile is a block of queries on a block of keys.

    partial: a tile that the mask cuts through. It has the same products, and the mask.
    transfer: one block of keys and values that has to come, twice, and its gradients that leave.

    The defaults are those of H200s inside a node, with 8 query heads to a KV head, bf16 with
    gradients in fp32, blocks of 128. estimate/constants.py has those of another machine.
    """

    partial: int = 120
    transfer: int = 280


DEFAULT_COSTS = Costs()


class Chunks(NamedTuple):
    """The inputs of dealing: the C chunks of one sequence, or of several with one table.

    bounds: int64 [C + 1], the first block of each chunk, and the number of blocks.
    work: int64 [C], time to compute the chunk's queries, as in Costs.
    needs: for each chunk the chunks whose keys its queries see, as bits. Chunk c of sequence s is
    bit s * C + c.
    sequences: how many sequences share the table.
    """

    bounds: NDArray[np.int64]
    work: NDArray[np.int64]
    needs: list[int]
    sequences: int


class _MaskTiles(NamedTuple):
    """The tiles of a mask. work: int64 [blocks], time of each block of queries, over all sequences.

    sequence, line, first, last: int64 [n], runs of tiles that the mask touches, as in masks/visibility.py.
    """

    work: NDArray[np.int64]
    sequence: Tensor
    line: Tensor
    first: Tensor
    last: Tensor
    lines_are_keys: bool


def block_table(
    ranges: MaskRanges, ranks: int, block_size: int, costs: Costs = DEFAULT_COSTS
) -> Tensor:
    """int64 [ranks, n], on the CPU: the blocks of each rank, ascending.

    The table depends on the mask's numbers alone. If the mask differs between several sequences,
    their work is summed up block by block. Raises ValueError if the sequence does not divide.
    """
    chunks = cut_into_chunks(ranges, ranks, block_size, costs)
    owner = deal_chunks(chunks, ranks, costs.transfer)
    blocks_of_chunk = np.diff(chunks.bounds)
    owner_of_block = np.repeat(owner, blocks_of_chunk)
    table = owner_of_block.argsort(kind="stable").reshape(ranks, -1)
    return torch.from_numpy(table)


def cut_into_chunks(ranges: MaskRanges, ranks: int, block_size: int, costs: Costs) -> Chunks:
    """The chunks of all sequences.

    Their lengths differ by a block at most, and each rank can get equally many long ones.
    """
    sequences, seq_len = ranges.start.shape
    blocks = count_blocks("balanced", ranks, seq_len, block_size)
    fair_share = _MAX_CHUNKS // ranks
    most_per_rank = max(_MIN_CHUNKS_PER_RANK, fair_share)
    most_per_rank = min(_CHUNKS_PER_RANK, most_per_rank)
    # A chunk holds at least one block.
    chunks_per_rank = min(blocks // ranks, most_per_rank)
    count = ranks * chunks_per_rank
    bounds = np.arange(count + 1) * blocks // count
    ranges = ranges._replace(start=ranges.start.cpu(), stop=ranges.stop.cpu())
    if ranges.slices is not None:
        ranges = ranges._replace(slices=ranges.slices.cpu())
        tiles = _tiles_of_slices(ranges, block_size, costs)
    else:
        tiles = _tiles_of_ranges(ranges, block_size, costs)
    return Chunks(
        bounds=bounds,
        work=np.add.reduceat(tiles.work, bounds[:-1]),
        needs=_needed_keys(tiles, bounds, sequences),
        sequences=sequences,
    )


def _tiles_of_ranges(ranges: MaskRanges, size: int, costs: Costs) -> _MaskTiles:
    positions = torch.arange(ranges.start.shape[1])
    # [Bm, blocks] each
    reach = block_reach(ranges, positions, size)
    sees_any = reach.first < reach.last
    # Blocks of keys that are touched, from `begin` to before `end`; both 0 where none is.
    begin = reach.first // size * sees_any
    end = (reach.last + size - 1) // size * sees_any
    whole = (reach.all_last // size - (reach.all_first + size - 1) // size).clamp(min=0)
    work = 100 * whole + costs.partial * (end - begin - whole)
    batch, blocks = begin.shape
    return _MaskTiles(
        work=work.sum(0).numpy(),
        sequence=torch.arange(batch).repeat_interleave(blocks),
        line=torch.arange(blocks).repeat(batch),
        first=begin.flatten(),
        last=end.flatten(),
        lines_are_keys=False,
    )


def _tiles_of_slices(ranges: MaskRanges, size: int, costs: Costs) -> _MaskTiles:
    tiles = tiles_of_slices(ranges, size)
    blocks = ranges.start.shape[1] // size
    whole = _count_by_query_block(tiles.whole, blocks, tiles.lines_are_keys)
    # A tile that several slices cut counts for each of them: the kernel visits it as often.
    partial = _count_by_query_block(tiles.cut, blocks, tiles.lines_are_keys)
    work = 100 * whole + costs.partial * partial
    touched = tiles.touched
    return _MaskTiles(
        work=work.numpy(),
        sequence=touched.sequence,
        line=touched.line,
        first=touched.first,
        last=touched.last,
        lines_are_keys=tiles.lines_are_keys,
    )


def _count_by_query_block(runs: Runs, blocks: int, lines_are_keys: bool) -> Tensor:
    """int64 [blocks]: how many tiles of these runs each block of queries has."""
    # One place more, for runs that end behind the last block.
    count = torch.zeros(blocks + 1, dtype=torch.int64)
    if lines_are_keys:
        # Runs go along the queries: each adds 1 where it begins and takes it away behind its end.
        ones = torch.ones_like(runs.line)
        count.index_add_(0, runs.first, ones).index_add_(0, runs.last, -ones)
        count = count.cumsum(0)
    else:
        count.index_add_(0, runs.line, runs.last - runs.first)
    return count[:-1]


def _needed_keys(tiles: _MaskTiles, bounds: NDArray[np.int64], sequences: int) -> list[int]:
    """Chunks.needs, from the runs of tiles that the mask touches."""
    count = len(bounds) - 1
    # [blocks]
    blocks_of_chunk = np.diff(bounds)
    chunk_of_block = torch.from_numpy(np.repeat(np.arange(count), blocks_of_chunk))
    holds_any = tiles.first < tiles.last
    # [n] each: the chunks of the lines, and first and last chunk of the runs
    sequence = tiles.sequence[holds_any]
    line = chunk_of_block[tiles.line[holds_any]]
    first = chunk_of_block[tiles.first[holds_any]]
    last_block = tiles.last[holds_any] - 1
    last = chunk_of_block[last_block]
    # A run adds 1 at its first chunk and takes it away behind its last one.
    row = (sequence * count + line) * (count + 1)
    ones = torch.ones_like(row, dtype=torch.int32)
    changes = torch.zeros(sequences, count, count + 1, dtype=torch.int32)
    changes.view(-1).index_add_(0, row + first, ones)
    changes.view(-1).index_add_(0, row + last + 1, -ones)
    # [sequences, C lines, C others]
    runs_over = changes.cumsum(-1, dtype=torch.int32)[..., :-1]
    seen = runs_over > 0
    if tiles.lines_are_keys:
        seen = seen.mT
    # [C queries, sequences * C keys]
    seen = seen.transpose(0, 1).flatten(1)
    packed = np.packbits(seen.numpy(), axis=1, bitorder="little")
    return [int.from_bytes(bits.tobytes(), "little") for bits in packed]


def deal_chunks(chunks: Chunks, ranks: int, transfer: int) -> NDArray[np.int64]:
    """int64 [C]: the rank that owns each chunk. transfer: Costs.transfer, for a block of keys."""
    count = len(chunks.work)
    lengths = np.diff(chunks.bounds)
    short = int(lengths.min())
    is_long = (lengths > short).tolist()
    long_chunks = sum(is_long)
    # Of each rank: how many short and how many long chunks it still takes, the time to compute, its
    # chunks and those whose keys its queries see as bits, and how many others have to send to it.
    room = [[(count - long_chunks) // ranks, long_chunks // ranks] for _ in range(ranks)]
    work, own, seen, incoming = ([0] * ranks for _ in range(4))
    # The bit of chunk 0 in every sequence; shifted by c, that of chunk c.
    first_chunk_everywhere = sum(1 << count * sequence for sequence in range(chunks.sequences))
    works = chunks.work.tolist()
    total_work = sum(works)
    work_left = total_work
    owner = np.empty(count, dtype=np.int64)
    # Longest first; of equally long ones the earlier first.
    for number in np.argsort(-chunks.work, kind="stable").tolist():
        chunk = first_chunk_everywhere << number
        work_left -= works[number]
        # (fetched, time, rank)
        offers = []
        for rank in range(ranks):
            if room[rank][is_long[number]] > 0:
                missing = (seen[rank] | chunks.needs[number]) & ~(own[rank] | chunk)
                coming = missing.bit_count()
                # Keys travel while others are computed on, so the longer of the two counts.
                time = max(work[rank] + works[number], coming * short * transfer)
                offers.append((coming - incoming[rank], time, rank))
        best_time = min(time for _, time, _ in offers)
        percents = _SLACK_PERCENT * total_work + _SLACK_PERCENT_OF_REST * work_left
        slack = percents // (100 * ranks)
        # Of the ranks that would be done soon enough, the one with the fewest keys to fetch.
        fetched, _, rank = min(offer for offer in offers if offer[1] <= best_time + slack)
        room[rank][is_long[number]] -= 1
        work[rank] += works[number]
        own[rank] |= chunk
        seen[rank] |= chunks.needs[number]
        incoming[rank] += fetched
        owner[number] = rank
    return owner
