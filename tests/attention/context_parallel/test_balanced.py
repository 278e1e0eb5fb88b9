"""The layout "balanced" on integers: its view of a mask, its assignment of blocks, the savings, and
its run time.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference import tiles_of
from tests.slice_cases import NAMES, SEQ_LEN, mask_and_truth, random_legal
from titan_sparse.attention.context_parallel import layouts
from titan_sparse.attention.context_parallel.layouts import (
    Costs,
    balanced,
    block_ids,
    cut_into_chunks,
)
from titan_sparse.attention.masks.ranges import (
    Causal,
    Documents,
    Full,
    Mask,
    MaskRanges,
    SlidingWindow,
)
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.observe import count_visits
from titan_sparse.attention.patterns import Dense
from titan_sparse.estimate.constants import BACKWARD_FLOPS, FORWARD_FLOPS, load_constants
from titan_sparse.estimate.indexes import ragged_lengths

CONSTANTS = Path(__file__).parents[3] / "titan_sparse/estimate/constants_h200.json"
MILLION, BLOCK = 1 << 20, 128


def incoming_blocks(ranges: MaskRanges, table: Tensor, size: int) -> Tensor:
    """int64 [ranks]: the key blocks that each rank's queries see and another rank holds."""
    start, stop = (x[0].view(-1, size) for x in (ranges.start, ranges.stop))
    blocks, coming = table.numel(), []
    for own in table:
        steps = torch.zeros(blocks + 1, dtype=torch.int64)
        steps.index_add_(0, start[own].amin(1) // size, torch.ones_like(own))
        steps.index_add_(0, (stop[own].amax(1) + size - 1) // size, -torch.ones_like(own))
        seen = steps.cumsum(0)[:-1] > 0
        seen[own] = False
        coming.append(seen.sum())
    return torch.stack(coming)


def pairs_of_ranks(ranges: MaskRanges, table: Tensor, size: int) -> Tensor:
    """float64 [ranks]: pairs of tokens that the mask allows the queries of each rank."""
    # [blocks], over all sequences
    by_block = (ranges.stop - ranges.start).view(-1, size).sum(1)
    return by_block[table].sum(1).double()


def degree(work: Tensor) -> float:
    return (work.max() / work.mean()).item()


RANGES: list[Mask] = [
    Causal(),
    Full(),
    Documents([[61, 3, 90, 21], [192]]),
    Documents([100, 50]) & SlidingWindow(37),
    Causal(valid=(130, 7)),
    Documents([8] * 20),
    Documents([1]),
    SlidingWindow(20),
]


def _check_cut(
    ranges: MaskRanges, seen: Tensor, size: int, ranks: int, partial: Tensor | None = None
) -> None:
    """Chunks, their work and what they need, against a dense mask [Bm, S, S]."""
    costs = Costs(partial=130)
    chunks = cut_into_chunks(ranges, ranks, size, costs)
    tiles = tiles_of(seen, size)
    # [Bm, blocks, blocks]
    needs = tiles.any(-1).any(-1)
    whole = tiles.all(-1).all(-1)
    if partial is None:
        partial = needs & ~whole
    # [blocks]
    work = (100 * whole + costs.partial * partial).sum((0, 2))

    count = len(chunks.work)
    assert count % ranks == 0
    bounds = torch.from_numpy(chunks.bounds)
    assert bounds[0] == 0
    assert bounds[-1] == len(work)
    lengths = bounds.diff()
    assert lengths.max() - lengths.min() <= 1

    # [blocks]: the chunk of each block.
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    work_of_chunks = torch.zeros(count, dtype=torch.int64).index_add_(0, owner, work)
    assert torch.equal(torch.from_numpy(chunks.work), work_of_chunks)

    assert chunks.sequences == len(seen)
    for sequence, needs_of_blocks in enumerate(needs):
        wanted = torch.zeros(count, count, dtype=torch.bool)
        for q_block, k_block in needs_of_blocks.nonzero().tolist():
            wanted[owner[q_block], owner[k_block]] = True
        for number, bits in enumerate(chunks.needs):
            first_bit = sequence * count
            got = [bool(bits >> (first_bit + key) & 1) for key in range(count)]
            assert got == wanted[number].tolist()


@pytest.mark.parametrize("mask", RANGES, ids=range(len(RANGES)))
@pytest.mark.parametrize("size, ranks, most", [(16, 2, 4), (8, 2, 5)])
def test_work_and_needs_of_ranges(monkeypatch, mask, size, ranks, most):
    monkeypatch.setattr(layouts, "_CHUNKS_PER_RANK", most)
    _check_cut(mask.rows(SEQ_LEN), mask.dense(SEQ_LEN), size, ranks)


@pytest.mark.parametrize("name", NAMES[::2])
def test_work_and_needs_of_slices(name):
    mask = mask_and_truth(name)[0]
    visits = count_visits(
        Dense().index([], mask.rows(SEQ_LEN), len(mask.rows(SEQ_LEN).start), 1, 16),
        mask.rows(SEQ_LEN),
        torch.arange(SEQ_LEN // 16)[:, None],
    )
    _check_cut(mask.rows(SEQ_LEN), mask.dense(SEQ_LEN), 16, 3, visits.partial)


def _check_table(ranges: MaskRanges, ranks: int, size: int) -> Tensor:
    table = balanced(ranges, ranks, size)
    assert torch.equal(table.flatten().sort().values, torch.arange(ranges.start.shape[1] // size))
    assert table.shape[0] == ranks and (table.diff(dim=1) > 0).all()
    assert torch.equal(table, balanced(ranges, ranks, size))
    return table


@pytest.mark.parametrize(
    "mask, table",
    [
        # 19 and 17 tiles: with so few blocks, work may differ a little to save keys.
        (Causal(), [[0, 2, 6, 7], [1, 3, 4, 5]]),
        # Each document stays on a rank.
        (Documents([4 * BLOCK, 4 * BLOCK]), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Documents([BLOCK] * 8), [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
    ids=["causal", "two documents", "eight documents"],
)
def test_eight_blocks_on_two_ranks(mask, table):
    assert balanced(mask.rows(8 * BLOCK), 2, BLOCK).tolist() == table


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from([4, 16]),
    st.integers(0, 60),
    st.integers(0, 7),
)
def test_any_documents_are_dealt_in_equal_shares(lengths, ranks, size, window, more):
    longest = max(sum(row) for row in lengths)
    seq_len = (-(-longest // (ranks * size)) + more) * ranks * size
    mask = Documents(lengths) & SlidingWindow(window) if window else Documents(lengths)
    _check_table(mask.rows(seq_len), ranks, size)


def test_slices_are_dealt_in_equal_shares():
    for seed, ranks in ((1, 2), (2, 3), (3, 6)):
        _check_table(Slices.of(random_legal(seed, 8)).rows(SEQ_LEN), ranks, 8)


def test_a_table_is_that_of_the_numbers():
    """It depends on the mask and not on how the mask is written. Sequences of a batch can share one."""
    lengths = ragged_lengths(8000, 3)
    alone = Documents(lengths).rows(8192)
    assert torch.equal(
        balanced(alone, 4, 64),
        balanced(Documents([lengths]).rows(8192)._replace(causal=False), 4, 64),
    )
    twice = Documents([lengths, lengths]).rows(8192)
    for costs in (Costs(), Costs(transfer=100_000)):
        assert torch.equal(balanced(alone, 4, 64, costs), balanced(twice, 4, 64, costs))
    other = balanced(Documents([lengths, lengths[::-1]]).rows(8192), 4, 64)
    assert not torch.equal(other, balanced(alone, 4, 64))


def test_ragged_documents_are_balanced_with_few_bytes(monkeypatch):
    ranges = Documents(ragged_lengths(MILLION, 0)).rows(MILLION)
    table = _check_table(ranges, 8, BLOCK)
    assert degree(pairs_of_ranks(ranges, table, BLOCK)) < 1.01
    assert degree(pairs_of_ranks(ranges, block_ids("zigzag", 8, MILLION, BLOCK), BLOCK)) > 1.6
    monkeypatch.setattr(layouts, "_SLACK_PERCENT", 0)
    monkeypatch.setattr(layouts, "_SLACK_PERCENT_OF_REST", 0)
    plain = balanced(ranges, 8, BLOCK)  # longest processing time first, and no more
    assert degree(pairs_of_ranks(ranges, plain, BLOCK)) < 1.01
    assert (
        2 * incoming_blocks(ranges, table, BLOCK).sum()
        < incoming_blocks(ranges, plain, BLOCK).sum()
    )
    assert incoming_blocks(ranges, table, BLOCK).max() < incoming_blocks(ranges, plain, BLOCK).min()


def test_costs_are_those_of_the_constants():
    machine = load_constants(CONSTANTS)
    seconds_of_a_pair = (
        (FORWARD_FLOPS / machine.forward_tflops + BACKWARD_FLOPS / machine.backward_tflops)
        / 1e12
        * 128
    )
    tile = 8 * BLOCK**2 * seconds_of_a_pair  # the 8 query heads of a KV head, dim 128
    transfer = (
        BLOCK * 128 * (4 * 2 + 2 * 4) / (machine.inside_gb_s * 1e9)
    )  # K and V twice in bf16, gradients in fp32
    assert Costs().transfer == pytest.approx(100 * transfer / tile, rel=0.05)


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="pad it to a multiple of 256"):
        balanced(Causal().rows(300), 4, 64)
