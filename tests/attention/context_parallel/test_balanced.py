"""The layout "balanced": its view of a mask, its assignment of blocks, and the savings, on
integers; and over processes its tables in use, refusals, and costs."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist

from tests.attention.context_parallel.against_one import by_one_rank, mesh_of
from tests.attention.dense_twin import let_eager_serve_dense
from tests.attention.problems import PATTERNS, RANGES, problem
from tests.distributed import run_processes
from tests.fake_step import fake_world
from tests.reference import tiles_of
from tests.slice_cases import NAMES, SEQ_LEN, mask_and_truth, random_legal
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel import layouts
from titan_sparse.attention.context_parallel.layouts import (
    Costs,
    balanced,
    block_ids,
    cut_into_chunks,
)
from titan_sparse.attention.masks import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.observe import worker_imbalance
from titan_sparse.attention.patterns import Dense
from titan_sparse.config import Attention
from titan_sparse.estimate.constants import BACKWARD_FLOPS, FORWARD_FLOPS, load_constants
from titan_sparse.estimate.indexes import ragged_lengths
from titan_sparse.estimate.visits import count_visits
from titan_sparse.training.attention import build_context_parallel

CONSTANTS = Path(__file__).parents[3] / "titan_sparse/estimate/constants_h200.json"
MILLION, BLOCK = 1 << 20, 128


def incoming_blocks(ranges: MaskRanges, table: Tensor) -> Tensor:
    """int64 [ranks]: the key blocks that each rank's queries see and another rank holds."""
    first = ranges.start.view(-1, BLOCK).amin(1) // BLOCK
    behind = -(-ranges.stop.view(-1, BLOCK).amax(1) // BLOCK)
    blocks = torch.arange(len(first))
    seen = (first[:, None] <= blocks) & (blocks < behind[:, None])
    return seen[table].any(1).scatter(1, table, False).sum(1)


def imbalance(ranges: MaskRanges, table: Tensor) -> float:
    """Of the pairs of tokens that the mask allows the queries of each rank."""
    # [blocks], over all sequences
    by_block = (ranges.stop - ranges.start).view(-1, BLOCK).sum(1)
    return worker_imbalance(by_block[table].sum(1).double())


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


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("size, ranks, most", [(16, 2, 4), (8, 2, 5)])
def test_work_and_needs_of_ranges(monkeypatch, name, size, ranks, most):
    mask = RANGES[name]
    monkeypatch.setattr(layouts, "_CHUNKS_PER_RANK", most)
    _check_cut(mask.rows(SEQ_LEN), mask.dense(SEQ_LEN), size, ranks)


@pytest.mark.parametrize("name", NAMES[::2])
def test_work_and_needs_of_slices(name):
    mask = mask_and_truth(name)[0]
    ranges = mask.rows(SEQ_LEN)
    index = Dense().index([], ranges, len(ranges.start), 1, 16)
    visits = count_visits(index, ranges, index.all_blocks()[:, None])
    _check_cut(ranges, mask.dense(SEQ_LEN), 16, 3, visits.partial)


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
    """It depends on the mask and not on how the mask is written. Sequences of a
    batch can share one."""
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
    assert imbalance(ranges, table) < 1.01
    assert imbalance(ranges, block_ids("zigzag", 8, MILLION, BLOCK)) > 1.6
    monkeypatch.setattr(layouts, "_SLACK_PERCENT", 0)
    monkeypatch.setattr(layouts, "_SLACK_PERCENT_OF_REST", 0)
    plain = balanced(ranges, 8, BLOCK)  # longest processing time first, and no more
    assert imbalance(ranges, plain) < 1.01
    coming, of_plain = incoming_blocks(ranges, table), incoming_blocks(ranges, plain)
    assert 2 * coming.sum() < of_plain.sum() and coming.max() < of_plain.min()


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


# Over processes. test_group.py compares attention in this layout, as in all others.

SIZE = 16
PACKED = Documents([[100, 7, 1, 60], [20, 90, 30, 52]])
PATTERN = PATTERNS["vertical_slash"]


def test_refusals():
    """What needs a table, or has one that does not belong there."""
    with fake_world(2):
        mesh = mesh_of((2,))
        cp = ContextParallel(mesh, "balanced", "ring", SIZE)
        striped = ContextParallel(mesh, "striped", "ring", SIZE)
        ranges = PACKED.rows(SEQ_LEN)
        q, k, v = (x[:, :, : SEQ_LEN // cp.size] for x in problem((4, 2)).inputs)
        balanced = cp.balance(ranges)
        wrong = balanced._replace(table=balanced.table[:, 1:])
        for call, words in (
            (lambda: attend(q, k, v, ranges, cp=cp), "cp.balance"),
            (lambda: attend(q, k, v, wrong, cp=cp), "cp.balance"),
            (lambda: cp.shard(q, 2), "cp.balance"),
            (lambda: cp.balance(PACKED), r"balance\(Documents\) .*; write balance\(mask.rows"),
            (lambda: striped.balance(PACKED), r"write balance\(mask.rows"),
            # Tokens of a longer sequence would be lost.
            (lambda: cp.shard(q, 2, wrong.table), "table is for .* and there are 96; write"),
            (lambda: cp.unshard(q, 2, wrong.table), "table is for .* and there are 192; write"),
            (lambda: striped.shard(q, 2, balanced.table), "no table of a mask; leave it out"),
            (lambda: attend(q, k, v, balanced, cp=striped), '"striped"'),
            (lambda: attend(q, k, v, balanced, cp=cp, recomputed=0.5), 'layout "striped"'),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        assert striped.balance(ranges) is ranges and not striped.depends_on_mask


def _check_tables() -> None:
    """Batches run forward, then backward in the other order. Nothing is compiled anew for another
    table."""
    cp = ContextParallel(mesh_of((2,)), "balanced", "ring", SIZE)
    problems = []
    for lengths in ([10, 170, 12], [90, 90], [30] * 6):
        problems.append(problem((4, 2), Documents(lengths), PATTERN))
    tables, results = [], []
    layer = torch.compile(
        lambda q, k, v, ranges: attend(q, k, v, ranges, PATTERN, cp),
        fullgraph=True,
        backend="aot_eager",
    )
    for p in problems:
        ranges = cp.balance(p.mask.rows(SEQ_LEN))
        *qkv, d_out = (cp.shard(x, 2, ranges.table) for x in (*p.inputs, p.d_out))
        leaves = [x.requires_grad_() for x in qkv]
        with torch._dynamo.config.patch(error_on_recompile=True):
            results.append((layer(*leaves, ranges), leaves, d_out))
        tables.append(ranges.table)
    assert not torch.equal(tables[0], tables[1])
    cases = list(zip(problems, tables, results, strict=True))
    for p, table, (out, leaves, d_out) in reversed(cases):
        wanted = by_one_rank(p)
        gradients = torch.autograd.grad(out, leaves, d_out)
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert (cp.unshard(gradient, 2, table) - wanted[name]).abs().max() < 1e-9
    # Masks of other layers share a table. Without holes there are no rectangles in this layout,
    # whatever the backend serves.
    for mask, pattern in ((problems[1].mask & SlidingWindow(30), PATTERN), (Causal(), Dense())):
        p = problem((4, 2), mask, pattern)
        ranges = mask.rows(SEQ_LEN)._replace(table=tables[0])
        wanted = by_one_rank(p)["out"]
        with pytest.MonkeyPatch.context() as patch:
            let_eager_serve_dense(patch)
            local = [cp.shard(x, 2, tables[0]) for x in p.inputs]
            got = cp.unshard(attend(*local, ranges, pattern, cp), 2, tables[0])
        assert (got - wanted).abs().max() < 1e-9


def _check_costs() -> None:
    """Ranks report an error when their costs differ: here one of two has another file."""
    mesh = mesh_of((2,))
    attention = Attention(layout="balanced")
    cp = build_context_parallel(attention, mesh, Costs(transfer=100_000))
    assert cp.bytes_sent == 0 and cp.costs.transfer == 100_000
    transfer = 280 + (dist.get_rank() == 1)
    with pytest.raises(ValueError, match=r"\[120, 280\], \[120, 281\]"):
        ContextParallel(mesh, "balanced", costs=Costs(transfer=transfer))


def _check_two_ranks() -> None:
    _check_costs()
    _check_tables()


def test_two_ranks():
    run_processes(2, _check_two_ranks)
