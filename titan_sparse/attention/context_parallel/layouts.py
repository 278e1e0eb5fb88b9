"""Layouts define which rank owns which blocks.

A layout is a table block_ids[cp, n]: local block i of rank r is global block block_ids[r, i]. Every
layout is a permutation of whole blocks. Tokens, labels, positions and document ids are sharded by
it once, at the loader. The layouts in LAYOUTS follow from the sequence length alone. balanced()
makes a table for a mask. There are no process groups here.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges, token_positions
from titan_sparse.attention.masks.visibility import Runs, block_reach, tiles_of_slices


def contiguous(cp: int, blocks: int) -> Tensor:
    """Each rank owns one of cp equal runs of blocks, in order. int64 [cp, blocks / cp].

    contiguous(2, 8) is
        [[0, 1, 2, 3],
         [4, 5, 6, 7]]
    """
    return torch.arange(blocks, device="cpu").view(cp, -1)


def zigzag(cp: int, blocks: int) -> Tensor:
    """Rank r owns runs r and 2 cp - 1 - r of 2 cp equal runs. int64 [cp, blocks / cp].

    This balances dense causal attention: a rank's early run has little to see, its late run much.

    zigzag(2, 8) is
        [[0, 1, 6, 7],
         [2, 3, 4, 5]]
    """
    # [2 cp, blocks in a run]
    runs = torch.arange(blocks, device="cpu").view(2 * cp, -1)
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
    return torch.arange(blocks, device="cpu").view(-1, cp).t().contiguous()


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

    touched: int64 [n] each, the runs of tiles that the mask touches: sequence, line, first, and
    last, which with lines_are_keys are those of masks/visibility.py.
    """

    work: NDArray[np.int64]
    touched: tuple[Tensor, Tensor, Tensor, Tensor]
    lines_are_keys: bool


def balanced(
    ranges: MaskRanges, ranks: int, block_size: int, costs: Costs = DEFAULT_COSTS
) -> Tensor:
    """The table int64 [ranks, n] of the layout "balanced" for a mask, on the CPU, ascending.

    1. The sequence is cut into chunks of a few blocks (cut_into_chunks).
    2. The chunks are dealt to the ranks, equally many to each (deal_chunks). The chunk with the most
       work comes first. It goes to a rank that would be done soon: longest processing time first.
    3. Of several ranks that would be done almost equally soon, the one with the fewest keys to fetch
       takes the chunk. So most of a short document stays on one rank. What counts as "almost" shrinks
       with the work that is left, which can still even out what this makes uneven.

    MagiAttention deals out chunks by their areas alone (its blog, "dispatch"). All numbers are
    integers and follow from the mask, so every rank computes the same table without communication.
    If the mask differs between several sequences, their work is summed up block by block.
    Raises ValueError if the sequence does not divide.
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
    fair_share = max(_MIN_CHUNKS_PER_RANK, _MAX_CHUNKS // ranks)
    # A chunk holds at least one block.
    count = ranks * min(_CHUNKS_PER_RANK, fair_share, blocks // ranks)
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
    positions = torch.arange(ranges.start.shape[1], device="cpu")
    # [Bm, blocks] each
    reach = block_reach(ranges, positions, size)
    sees_any = reach.first < reach.last
    # Blocks of keys that are touched, from `begin` to before `end`; both 0 where none is.
    begin = reach.first // size * sees_any
    end = (reach.last + size - 1) // size * sees_any
    whole = (reach.all_last // size - (reach.all_first + size - 1) // size).clamp(min=0)
    work = 100 * whole + costs.partial * (end - begin - whole)
    batch, blocks = begin.shape
    sequence = torch.arange(batch, device="cpu").repeat_interleave(blocks)
    line = torch.arange(blocks, device="cpu").repeat(batch)
    touched = (sequence, line, begin.flatten(), end.flatten())
    return _MaskTiles(work.sum(0).numpy(), touched, lines_are_keys=False)


def _tiles_of_slices(ranges: MaskRanges, size: int, costs: Costs) -> _MaskTiles:
    tiles = tiles_of_slices(ranges, size)
    blocks = ranges.start.shape[1] // size
    whole = _count_by_query_block(tiles.whole, blocks, tiles.lines_are_keys)
    # A tile that several slices cut counts for each of them: the kernel visits it as often.
    partial = _count_by_query_block(tiles.cut, blocks, tiles.lines_are_keys)
    work = 100 * whole + costs.partial * partial
    runs = tiles.touched
    touched = (runs.sequence, runs.line, runs.first, runs.last)
    return _MaskTiles(work.numpy(), touched, tiles.lines_are_keys)


def _count_by_query_block(runs: Runs, blocks: int, lines_are_keys: bool) -> Tensor:
    """int64 [blocks]: how many tiles of these runs each block of queries has."""
    # One place more, for runs that end behind the last block.
    count = torch.zeros(blocks + 1, dtype=torch.int64, device="cpu")
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
    *_, first, last = tiles.touched
    sequence, line, first, last = (x[first < last] for x in tiles.touched)
    # [n] each: the chunks of the lines, and first and last chunk of the runs
    line = chunk_of_block[line]
    first = chunk_of_block[first]
    last = chunk_of_block[last - 1]
    # A run adds 1 at its first chunk and takes it away behind its last one.
    row = (sequence * count + line) * (count + 1)
    ones = torch.ones_like(row, dtype=torch.int32)
    changes = torch.zeros(sequences, count, count + 1, dtype=torch.int32, device="cpu")
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
