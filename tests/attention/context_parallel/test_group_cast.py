"""Schedule group_cast.

The plan on integers, played through on all ranks. Attention over processes against one rank, and
not a byte more than is needed.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.context_parallel.against_one import by_one_rank, check, mesh_of, over_ranks
from tests.attention.problems import (
    PATTERNS,
    RANGES,
    SEQ_LEN,
    assert_equal,
    computed_blocks,
    problem,
)
from tests.distributed import run_processes
from tests.slice_cases import mask_and_truth
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.group_cast import GroupCast
from titan_sparse.attention.context_parallel.group_cast_plan import (
    assign_stages,
    blocks_before_others,
    plan,
    traffic,
    wanted_blocks,
)
from titan_sparse.attention.context_parallel.layouts import LAYOUTS
from titan_sparse.attention.masks.ranges import Causal, Mask
from titan_sparse.attention.patterns import Pattern, VerticalSlash

BLOCK = 8
WORLDS = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 3)]


def _exchange(plans, kind: str, stage: int, members: list[int], memory: list) -> dict[int, list]:
    """An all-to-all among `members`, of (sender, entry of the sender's memory)."""
    exchanges = [getattr(plans[rank].stages[stage], kind) for rank in members]
    if exchanges[0] is None:
        assert exchanges == [None] * len(members)
        return {rank: [] for rank in members}
    sent = {}
    for rank, exchange in zip(members, exchanges):
        rows = iter(exchange.rows.tolist())
        sent[rank] = [
            [(rank, memory[rank][next(rows)]) for _ in range(count)] for count in exchange.sends
        ]
        assert next(rows, None) is None
    for place, exchange in enumerate(exchanges):
        assert exchange.receives == [len(sent[rank][place]) for rank in members]
    return {
        rank: sum((sent[other][place] for other in members), [])
        for place, rank in enumerate(members)
    }


def _play(needed: Tensor, table: Tensor, inter: int, intra: int, stages: int) -> int:
    """Carry out the plans of all ranks and check the destinations. Returns the blocks received.

    needed: bool [W, blocks]. table: [W, n_local], each rank's own blocks.
    """
    size = inter * intra
    needs = [set(row.nonzero().flatten().tolist()) for row in needed]
    plans = [plan(needed, table, inter, intra, rank, stages) for rank in range(size)]
    # Of each rank: what it holds, in order, and what it is given to compute with.
    memory = [own.tolist() for own in table]
    got = [[] for _ in range(size)]
    # (block, node) of each block that goes to another node.
    crossings = []
    # Of each rank: blocks sent inside its node and to others, and those received.
    inside, across = torch.zeros(2, size, dtype=torch.int64)
    back_inside, back_across = torch.zeros(2, size, dtype=torch.int64)
    for stage in range(stages):
        for local in range(intra):
            members = list(range(local, size, intra))
            for rank, came in _exchange(plans, "outer", stage, members, memory).items():
                held = len(memory[rank])
                assert plans[rank].stages[stage].relayed == (held, held + len(came))
                for sender, block in came:
                    across[sender] += 1
                    back_across[rank] += 1
                    crossings.append((block, rank // intra))
                    memory[rank].append(block)
        for node in range(inter):
            members = list(range(node * intra, (node + 1) * intra))
            for rank, came in _exchange(plans, "inner", stage, members, memory).items():
                blocks = [block for _, block in came]
                assert plans[rank].stages[stage].k_blocks.tolist() == blocks
                got[rank] += blocks
                for sender, _ in came:
                    inside[sender] += sender != rank
                    back_inside[rank] += sender != rank

    owned = [set(own.tolist()) for own in table]
    for rank in range(size):
        assert len(memory[rank]) == plans[rank].memory
        assert sorted(got[rank]) == sorted(needs[rank] - owned[rank])

    # Each block that some rank of a node needs crosses to that node once, and nothing else crosses.
    wanted_crossings = []
    for node in range(inter):
        ranks = slice(node * intra, (node + 1) * intra)
        missing = set().union(*needs[ranks]) - set().union(*owned[ranks])
        wanted_crossings += [(block, node) for block in missing]
    assert sorted(crossings) == sorted(wanted_crossings)

    wanted = wanted_blocks(needed, table, inter, intra)
    for node, stage_of_block in enumerate(assign_stages(wanted, stages)):
        by_stage = stage_of_block[stage_of_block >= 0].bincount(minlength=stages)
        assert by_stage.max() - by_stage.min() <= 1
        # What comes from other nodes has more time to come.
        own = stage_of_block[node]
        others = stage_of_block[torch.arange(inter) != node]
        others = others[others >= 0]
        assert len(others) == 0 or own.max() <= others.min()
    for back, sums in ((False, (inside, across)), (True, (back_inside, back_across))):
        for counted, blocks in zip(traffic(wanted, stages, back), sums, strict=True):
            assert torch.equal(counted.sum(1), blocks)
    return sum(len(blocks) for blocks in got)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(WORLDS),
    st.integers(1, 5),
    st.integers(1, 4),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_every_block_reaches_those_who_need_it_once(world, n, stages, density, seed):
    g, size = torch.Generator().manual_seed(seed), world[0] * world[1]
    table = torch.randperm(size * n, generator=g).view(size, n)
    needed = torch.rand(size, size * n, generator=g) < density
    own = torch.zeros_like(needed).scatter_(1, table, True)
    assert _play(needed, table, *world, stages) == (needed & ~own).sum()


MASKS = RANGES | {"random 11": mask_and_truth("random 11")[0]}
STAGES = [(2, 3), (3, 2), (1, 1)]
CASES = [
    ("causal", "dense"),
    ("documents", "vertical_slash"),
    ("windowed documents", "dense"),
    ("random 11", "dense"),
    ("documents", "moba"),
    ("padded", "xattention"),
    ("short documents", "vertical_slash"),
    ("full", "dense"),
]
MESHES = {3: (1, 3), 4: (2, 2)}
"""By number of processes: cp_inter and cp_intra."""


def _context(axes: tuple[int, int], layout: str, stages: tuple[int, int]) -> ContextParallel:
    return ContextParallel(mesh_of(axes), layout, "group_cast", BLOCK, overlap_stages=stages)


def _check_blocks(cp: ContextParallel, mask: Mask, pattern: Pattern) -> None:
    p = problem((4, 2), mask, pattern)
    cp.sent.clear()
    stages = []
    with pytest.MonkeyPatch.context() as patch:
        start = GroupCast.__init__

        def noted(self, *arguments, **options) -> None:
            start(self, *arguments, **options)
            stages.append(len(self.plan.stages))

        patch.setattr(GroupCast, "__init__", noted)
        check(p, cp)
    # The forward's number, then the backward's.
    assert stages == list(cp.overlap_stages)
    index = pattern.select(*p.inputs[:2], mask, block_size=BLOCK)
    needed = computed_blocks(index, mask)[cp.block_table(SEQ_LEN)].any(1)
    _check_bytes(cp, needed, f"{mask}, {pattern}, {cp.key}, rank {cp.rank}")


def _check_bytes(cp: ContextParallel, needed: Tensor, case: str) -> None:
    """Each rank sends only what is needed, counted as
    test_every_block_reaches_those_who_need_it_once counts it."""
    wanted = wanted_blocks(needed, cp.block_table(SEQ_LEN), cp.inter, cp.intra)
    # k and v, sequences, heads, tokens and head_dim of float64
    block = 2 * 2 * 2 * BLOCK * 8 * 8
    # The backward fetches keys and values again.
    for is_gradient, suffix, times in ((False, "", 2), (True, "_gradient", 1)):
        counted = traffic(wanted, 1, is_gradient)
        for axis, blocks in zip(("inner", "outer"), counted, strict=True):
            once = blocks[cp.rank].sum().item() * block
            assert cp.sent[axis + suffix] == once * times, (axis, suffix, case)


def _check_ranks(world: int) -> None:
    """Every other case with one layout and numbers of stages, in rotation."""
    contexts = [_context(MESHES[world], layout, stages) for layout, stages in zip(LAYOUTS, STAGES)]
    for number, (mask, pattern) in enumerate(CASES[world % 2 :: 2]):
        _check_blocks(contexts[number % 3], MASKS[mask], PATTERNS[pattern])
    if world == 3:
        _check_calls_with_other_heads()
        _check_layers_with_other_selections()


def _check_calls_with_other_heads() -> None:
    """Backwards under one mask may begin with different parts of the own blocks, as gradients of
    more heads are returned.
    """
    cp = _context((1, 3), "contiguous", (1, 1))
    ranges = MASKS["window"].rows(SEQ_LEN)
    for kv_heads in (1, 4):
        check(problem((4, kv_heads), ranges), cp)


def _check_layers_with_other_selections() -> None:
    """Two layers under one mask need other blocks. As on a GPU, kernels make the tables."""
    cp = ContextParallel(mesh_of((1, 3)), "contiguous", "group_cast", 16)
    pattern = VerticalSlash(recall=0.6, dense_below=32)
    rows = Causal().rows(SEQ_LEN)
    remote = set()
    for seed in (3, 8):
        p = problem((4, 2), rows, pattern, seed=seed)
        wanted = by_one_rank(p)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AttentionCall, "_has_table_kernels", lambda call: True)
            assert_equal(over_ranks(p, cp), wanted, cp.key)
        blocks = torch.arange(SEQ_LEN // 16)
        index = pattern.select(*p.inputs[:2], rows, block_size=16)
        met = index.selects(blocks[8:], blocks[:8])
        remote.add(tuple(met.flatten(0, 2).any(0).tolist()))
    # Of the last rank.
    assert len(remote) == 2


@pytest.mark.parametrize("world", MESHES)
def test_parallel_equals_single(world):
    run_processes(world, _check_ranks, world)


@pytest.mark.parametrize(
    "own, remote, heads, kv_heads, nodes, first",
    [
        (65, 0, 64, 8, 2, 33),  # half of them between nodes
        # 12 x 65 x 8 x 8 bytes go home, above 64 x 64 x 12 of a second pass
        (64, 65, 64, 8, 1, 32),
        (64, 64, 64, 8, 1, 64),
        (65, 0, 64, 8, 1, 65),
        (64, 64, 16, 16, 1, 32),
    ],
)
def test_own_blocks_before_others(own, remote, heads, kv_heads, nodes, first):
    """Inside one node all come first where another pass over dq costs more than it hides."""
    assert blocks_before_others(own, remote, heads, kv_heads, 2, nodes) == first
