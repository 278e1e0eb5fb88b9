"""Layouts and schedules are integers: permutations, balance, and rings simulated hop by hop."""

import itertools
import math

import pytest
import torch

from titan_sparse.attention.context_parallel.layouts import (
    LAYOUTS,
    block_ids,
    block_multiple,
    restore_blocks,
    take_blocks,
)
from titan_sparse.attention.context_parallel.schedules import (
    LOCAL,
    choose,
    circulates_queries,
    ring_windows,
)
from titan_sparse.config import Attention, resolve_overlap_stages
from titan_sparse.training.attention import schedule_named

WORLDS = [(1, 1), (1, 2), (1, 5), (2, 2), (2, 3), (3, 2), (4, 1)]


@pytest.mark.parametrize(
    "layout, cp, table",
    [
        ("contiguous", 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("zigzag", 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("striped", 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_eight_blocks(layout, cp, table):
    assert block_ids(layout, cp, 8 * 16, 16).tolist() == table


@pytest.mark.parametrize("layout, size, runs", itertools.product(LAYOUTS, (1, 2, 3), (1, 3)))
def test_a_layout_is_a_permutation_in_equal_shares(layout, size, runs):
    blocks = runs * block_multiple(layout, size)
    table = block_ids(layout, size, blocks * 4, 4)
    assert table.dtype == torch.int64 and table.shape == (size, blocks // size)
    assert sorted(table.flatten().tolist()) == list(range(blocks))
    for dim in (0, 1, -1):
        shape = [2, 3, 5]
        shape[dim] = blocks * 4
        x = torch.arange(math.prod(shape)).view(shape)
        shards = [take_blocks(x, dim, owned, 4) for owned in table]
        assert all(shard.shape[dim] == blocks * 4 // size for shard in shards)
        assert torch.equal(restore_blocks(torch.cat(shards, dim), dim, table, 4), x)


@pytest.mark.parametrize(
    "layout, size, seq_len, multiple",
    [("contiguous", 2, 24, 16), ("striped", 3, 32, 24), ("zigzag", 2, 48, 32)],
)
def test_a_length_that_does_not_divide_is_refused(layout, size, seq_len, multiple):
    with pytest.raises(ValueError, match=f"multiple of {multiple}$"):
        block_ids(layout, size, seq_len, 8)


def _imbalance(layout: str, size: int, blocks: int) -> float:
    """Largest over mean causal area of a rank: query block g meets g + 1 key blocks."""
    area = (block_ids(layout, size, blocks, 1) + 1).sum(1).double()
    return (area.max() / area.mean()).item()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_balance_under_a_causal_mask(size):
    blocks = 64 * size
    assert _imbalance("zigzag", size, blocks) == 1.0
    assert 1.0 < _imbalance("striped", size, blocks) < 1.03
    assert _imbalance("contiguous", size, blocks) == pytest.approx(2 - 1 / size, rel=0.01)


def _simulate(inter: int, intra: int) -> list[list[list[int]]]:
    """Chunk held at [rank][window][step] when chunks move one inner hop a step
    and one outer a window."""
    # Of each node and local rank.
    at_window = torch.arange(inter * intra).view(inter, intra)
    seen = []
    for _ in range(inter):
        seen.append(torch.stack([at_window.roll(step, 1) for step in range(intra)], -1))
        at_window = at_window.roll(1, 0)
    return torch.stack(seen, 2).flatten(0, 1).tolist()


@pytest.mark.parametrize("inter, intra", WORLDS)
def test_rings_list_what_the_hops_bring(inter, intra):
    """A rank begins with its own chunk, and meets every chunk once."""
    size = inter * intra
    double = _simulate(inter, intra)
    single = _simulate(1, size)
    for rank in range(size):
        assert ring_windows(inter, intra, rank) == double[rank]
        assert ring_windows(1, size, rank) == single[rank]
        for windows in (double[rank], single[rank]):
            sources = sum(windows, [])
            assert sources[0] == rank and sorted(sources) == list(range(size))


def test_local_serves_one_rank_only():
    assert LOCAL.step_sources(1, 1) == [[0]]
    with pytest.raises(ValueError, match="ring"):
        LOCAL.rings(1, 2)


@pytest.mark.parametrize(
    "inter, intra, usual",
    [(1, 1, "local"), (1, 4, "all_gather"), (2, 4, "double_ring"), (4, 1, "ring")],
)
def test_auto_casts_where_few_blocks_are_needed(inter, intra, usual):
    """These are documents or a window under a static pattern, in the layout made for it. Otherwise
    the mesh decides."""

    def named(**keys) -> str:
        settings = {"pattern": "dense", "layout": "balanced"} | keys
        return schedule_named(Attention(**settings), inter, intra)

    cast = "group_cast" if inter * intra > 1 else "local"
    assert named(mask="documents") == named(mask="causal", sliding_window=4096) == cast
    assert (
        named(mask="causal")
        == named(mask="documents", layout="striped")
        == named(mask="documents", pattern="vertical_slash")
        == usual
    )
    assert named(mask="documents", backward_circulates="q") == usual.replace("all_gather", "ring")
    assert choose(inter, intra).name == usual
    assert choose(inter, intra, "q").name == usual.replace("all_gather", "ring")
    assert named(mask="documents", schedule="ring") == "ring"
    stages = 2 if inter > 1 else 1
    assert resolve_overlap_stages(Attention(), inter) == (stages, stages)
    assert resolve_overlap_stages(Attention(overlap_stages=3), inter) == (3, 3)
    assert resolve_overlap_stages(Attention(overlap_stages_backward=4), inter) == (stages, 4)


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, width, gradient_width, queries",
    [
        # 8 Hq D + 8 Hq bytes against 12 Hkv D, by hand.
        (16, 16, 128, 2, 4, True),
        (16, 8, 128, 2, 4, False),
        (3, 2, 64, 2, 4, False),
        # With bf16 gradients 6 Hq D + 8 Hq against 8 Hkv D: 3D + 4 < 4D.
        (16, 16, 128, 2, 2, True),
        (16, 16, 4, 2, 2, False),
        (16, 16, 5, 2, 2, True),
        # fp64: 24 Hq D + 16 Hq against 32 Hkv D.
        (1, 1, 2, 8, 8, False),
        (1, 1, 3, 8, 8, True),
    ],
)
def test_auto_circulates_what_is_less(heads, kv_heads, head_dim, width, gradient_width, queries):
    sizes = (heads, kv_heads, head_dim, width, gradient_width)
    assert circulates_queries("auto", *sizes) == queries
    assert circulates_queries("q", *sizes)
    assert not circulates_queries("kv", *sizes)
