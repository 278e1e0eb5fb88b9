"""Layout "balanced": which rank owns which blocks, as follows from the mask. Pure integers, no process groups.

A sequence is cut into chunks of a few blocks, which are dealt to the ranks, to each equally many. The largest come first and
go to a rank that has least to do (longest processing time first). Of the ranks that are near enough to that, the one takes
the chunk that has the fewest keys still to fetch for it: most of a short document stays on one rank. How near is near
enough shrinks with the work that is left, which can still even out what this makes uneven. MagiAttention deals out chunks by
their areas alone (its blog, "dispatch"); here it is by time, and keys count.

Nothing but integers, so that every rank comes to the same table without asking the others.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.attention.context_parallel import layouts
from titan_sparse.attention.masks import classification as slice_tiles
from titan_sparse.attention.masks.classification import Runs
from titan_sparse.attention.masks.ranges import MaskRanges

_CHUNKS_PER_RANK, _LEAST_CHUNKS_PER_RANK, _CHUNKS = 64, 8, 1024
"""Chunks of a rank; fewer where all ranks together would have more than _CHUNKS, each of which takes the planner some
microseconds. 64 leave the busiest rank within one percent of the mean for ragged documents, and a chunk of a million tokens
on 8 ranks is still 2,048 tokens long."""
_NEAR, _NEAR_OF_REST = 1, 60
"""Percent of a rank's mean work, and of its mean work not dealt out yet, by which a rank may have more to do than another
and take a chunk nevertheless, to save keys."""


class Costs(NamedTuple):
    """Time in hundredths of that of a whole tile (a block of queries on a block of keys), forward and backward.

    partial: a tile that the mask cuts through: the same products and the mask; an estimate. transfer: one block of keys
    and values that has to come, twice, and its gradients that leave. Of benchmarks/results/constants_h200.json inside a node,
    with 8 query heads to a KV head, bf16 with gradients in fp32, blocks of 128: tests/attention/context_parallel/test_balanced.py works it out.
    """

    partial: int = 120
    transfer: int = 280


class Chunks(NamedTuple):
    """What dealing has to know of the C chunks of a sequence (or of several, which share a table).

    bounds: int64 [C + 1], the first block of each, and the number of blocks. work: computing time, int64 [C]. needs: of each
    the chunks whose keys its queries see, as bits, chunk c of sequence s as bit s * C + c.
    """

    bounds: NDArray[np.int64]
    work: NDArray[np.int64]
    needs: list[int]
    sequences: int


def block_table(rows: MaskRanges, ranks: int, block_size: int, costs: Costs = Costs()) -> Tensor:
    """int64 [ranks, n], on the CPU: the blocks of each rank, ascending; a function of the mask's numbers alone.

    With a mask for each of several sequences their work is summed up, block by block. Raises ValueError if the sequence does
    not divide.
    """
    chunks = cut(rows, ranks, block_size, costs)
    owner = deal(chunks, ranks, costs.transfer)
    return torch.from_numpy(
        np.repeat(owner, np.diff(chunks.bounds)).argsort(kind="stable").reshape(ranks, -1)
    )


# Chunks -------------------------------------------------------------------------------------------------------------


def cut(rows: MaskRanges, ranks: int, block_size: int, costs: Costs) -> Chunks:
    """The chunks of all sequences. Their lengths differ by a block at most, and each rank gets equally many long ones."""
    blocks = layouts.count_blocks("balanced", ranks, rows.start.shape[1], block_size)
    most = min(_CHUNKS_PER_RANK, max(_LEAST_CHUNKS_PER_RANK, _CHUNKS // ranks))
    count = ranks * min(blocks // ranks, most)
    bounds = np.arange(count + 1) * blocks // count
    work, met, lines_are_keys = (_slices if rows.slices is not None else _ranges)(
        rows, block_size, costs
    )
    return Chunks(
        bounds,
        np.add.reduceat(work, bounds[:-1]),
        _needs(met, lines_are_keys, bounds, len(rows.start)),
        len(rows.start),
    )


def _ranges(rows: MaskRanges, size: int, costs: Costs) -> tuple[NDArray[np.int64], Runs, bool]:
    """Work of each block of queries, int64 [blocks], and the runs of key blocks that it meets."""
    start, stop = (x.cpu().numpy().reshape(len(x), -1, size) for x in (rows.start, rows.stop))
    seen = start < stop
    # Both are sorted: the first query that sees anything sees the earliest keys, the last one the latest.
    first, last = seen.argmax(-1)[..., None], size - 1 - seen[..., ::-1].argmax(-1)[..., None]
    some = np.take_along_axis(seen, first, -1)[..., 0]
    begin = np.take_along_axis(start, first, -1)[..., 0] // size * some
    end = -(-np.take_along_axis(stop, last, -1)[..., 0] // size) * some
    # Seen by the first query and by the last, so by all of them; none if any of them sees nothing.
    whole = (stop[..., 0] // size + -start[..., -1] // size).clip(min=0)
    work = 100 * whole + costs.partial * (end - begin - whole)
    sequence, line = np.indices(begin.shape, dtype=np.int64)
    runs = (
        torch.from_numpy(x.astype(np.int64).ravel()) for x in (sequence, sequence, line, begin, end)
    )
    return work.sum(0, dtype=np.int64), Runs(*runs), False


def _slices(rows: MaskRanges, size: int, costs: Costs) -> tuple[NDArray[np.int64], Runs, bool]:
    """As _ranges(), with runs of query blocks for each block of keys where the last result is True."""
    rows = rows._replace(start=rows.start.cpu(), stop=rows.stop.cpu(), slices=rows.slices.cpu())
    found, blocks = slice_tiles.classified(rows, size), rows.start.shape[1] // size
    tiles = [
        _tiles_by_query(runs, found.lines_are_keys, blocks) for runs in (found.whole, found.cut)
    ]
    return (100 * tiles[0] + costs.partial * tiles[1]).numpy(), found.met, found.lines_are_keys


def _tiles_by_query(runs: Runs, lines_are_keys: bool, blocks: int) -> Tensor:
    """int64 [blocks]: how many tiles of the runs each block of queries has, over all sequences."""
    count = torch.zeros(blocks + 1, dtype=torch.int64)
    if not lines_are_keys:
        return count.index_add_(0, runs.line, runs.last - runs.first)[:-1]
    ones = torch.ones_like(runs.line)
    return count.index_add_(0, runs.first, ones).index_add_(0, runs.last, -ones).cumsum(0)[:-1]


def _needs(met: Runs, lines_are_keys: bool, bounds: NDArray[np.int64], sequences: int) -> list[int]:
    """Chunks.needs of the runs of tiles that the mask meets."""
    count = len(bounds) - 1
    chunk = torch.from_numpy(np.repeat(np.arange(count), np.diff(bounds)))
    some = met.first < met.last
    sequence, line, first, last = (x[some] for x in (met.sequence, met.line, met.first, met.last))
    place = (sequence * count + chunk[line]) * (count + 1)
    # A run adds 1 where it begins and takes it away behind its end.
    steps = torch.zeros(sequences, count, count + 1, dtype=torch.int32)
    for at, step in ((chunk[first], 1), (chunk[last - 1] + 1, -1)):
        steps.view(-1).index_add_(0, place + at, torch.full_like(place, step, dtype=torch.int32))
    seen = steps.cumsum(-1, dtype=torch.int32)[..., :-1] > 0
    seen = (seen.mT if lines_are_keys else seen).transpose(0, 1).flatten(1)
    packed = np.packbits(seen.numpy(), axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


# Dealing ------------------------------------------------------------------------------------------------------------


class _Hand:
    """What a rank has been dealt so far. room: short and long chunks that it still takes. own, seen: its chunks, and those
    whose keys its queries see, as bits. coming: how many chunks of keys others have to send."""

    def __init__(self, rank: int, room: list[int]):
        self.rank, self.room, self.work, self.own, self.seen, self.coming = rank, room, 0, 0, 0, 0

    def offer(self, own: int, needs: int, work: int, transfer: int) -> tuple[int, int, int]:
        """With this chunk: chunks of keys that have to come besides, the time until everything is done, and the rank. Keys
        travel while others are computed on, so that the longer of the two counts."""
        coming = ((self.seen | needs) & ~(self.own | own)).bit_count()
        done, travelled = self.work + work, coming * transfer
        return coming - self.coming, done if done > travelled else travelled, self.rank

    def take(self, own: int, needs: int, work: int, kind: int, fetched: int) -> None:
        self.own, self.seen, self.work = self.own | own, self.seen | needs, self.work + work
        self.room[kind] -= 1
        self.coming += fetched


def deal(chunks: Chunks, ranks: int, transfer: int) -> NDArray[np.int64]:
    """int64 [C]: the rank that owns each chunk. transfer: Costs.transfer, of a block of keys."""
    count, lengths = len(chunks.work), np.diff(chunks.bounds)
    length, kinds = int(lengths.min()), (lengths > lengths.min()).tolist()
    hands = [
        _Hand(rank, [(count - sum(kinds)) // ranks, sum(kinds) // ranks]) for rank in range(ranks)
    ]
    everywhere = sum(1 << count * sequence for sequence in range(chunks.sequences))
    owner, works = np.empty(count, dtype=np.int64), chunks.work.tolist()
    total = left = sum(works)
    for chunk in np.argsort(-chunks.work, kind="stable").tolist():
        own, needs, work, kind = (
            everywhere << chunk,
            chunks.needs[chunk],
            works[chunk],
            kinds[chunk],
        )
        left -= work
        offers = [
            hand.offer(own, needs, work, length * transfer) for hand in hands if hand.room[kind]
        ]
        near = min([done for _, done, _ in offers]) + (_NEAR * total + _NEAR_OF_REST * left) // (
            100 * ranks
        )
        fetched, _, owner[chunk] = min([offer for offer in offers if offer[1] <= near])
        hands[owner[chunk]].take(own, needs, work, kind, fetched)
    return owner
