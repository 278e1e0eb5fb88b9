"""Attention over 3 and 4 processes against one: every layout, schedule, mask and pattern, forward
and backward, with learned sinks and recomputed parts."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.attention.collectives import collectives
from tests.attention.context_parallel.against_one import (
    MASKS,
    check,
    check_dense_kernels,
    check_everything,
    check_groups_beside_each_other,
    mesh_of,
)
from tests.attention.problems import PATTERNS, SEQ_LEN, problem
from tests.distributed import on_ranks, run_processes
from tests.fake_step import fake_world
from tests.reference import structured_qkv
from tests.slice_cases import NAMES, mask_and_truth
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.layouts import ALL_LAYOUTS
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.patterns import Dense, VerticalSlash

SOME = [PATTERNS["dense"], PATTERNS["vertical_slash"]]
BUDGETS = [
    VerticalSlash(recall=0.95, dense_below=24),
    VerticalSlash(
        recall=0.8,
        probe=20,
        min_verticals=3,
        max_verticals=40,
        min_slashes=1,
        max_slashes=4,
        dense_below=24,
        probe_rows="last",
        count_sinks=True,
    ),
    VerticalSlash(
        recall=0.8,
        dense_below=24,
        budget="independent",
        probe_rows="spread",
        count_sinks=True,
    ),
]


def _check_selections(mesh: DeviceMesh) -> None:
    """Every layout chooses what one rank does, with four collectives."""
    q, k, _ = problem((4, 2)).inputs
    contexts = [ContextParallel(mesh, layout, "group_cast", 8) for layout in ALL_LAYOUTS]
    windows = Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 35)) & SlidingWindow(80)
    for pattern, mask in itertools.product(BUDGETS, (windows, MASKS[3])):
        wanted = pattern.select(q, k, mask, block_size=8).tensors()
        # Something was chosen, and something was left.
        assert wanted[0].any() and not wanted[0].all()
        for cp in contexts:
            ranges = cp.balance(mask.rows(SEQ_LEN))
            parts = [cp.shard(x, 2, ranges.table) for x in (q, k)]
            with collectives() as said:
                found = pattern.select(*parts, ranges, cp).tensors()
            assert len(said) == 4
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other), (pattern.key, cp.layout, mask)
    # What ranks send of a block of 7 tokens is not whole words.
    cp = ContextParallel(mesh, "striped", "group_cast", 7)
    q, k = (x[:, :1, : 7 * cp.size] for x in (q, k))
    [wanted, *_] = BUDGETS[0].select(q, k, Causal(), block_size=7).tensors()
    [found, *_] = BUDGETS[0].select(cp.shard(q, 2), cp.shard(k, 2), Causal(), cp).tensors()
    assert torch.equal(found, wanted)


def _check_several_heads_at_once() -> None:
    """all_gather brings two of three KV heads together, and then the third one."""
    mesh = mesh_of((3,))
    for mask, pattern, layout in zip(MASKS, SOME, ("zigzag", "striped")):
        cp = ContextParallel(mesh, layout, "all_gather", 16)
        check(problem((6, 3), mask, pattern, sinks=True), cp)


def _check_rectangles(axes: tuple[int, int], heads: tuple[int, int]) -> None:
    """Two groups of KV heads travel, unless all heads go around one ring."""
    mesh = mesh_of(axes)
    schedules = ("ring", "all_gather") if axes[0] == 1 else ("double_ring",)
    for layout, schedule in itertools.product(("contiguous", "zigzag"), schedules):
        cp = ContextParallel(mesh, layout, schedule, SEQ_LEN // (2 * mesh.size()))
        computed = cp.size if layout == "zigzag" else cp.rank + 1
        in_groups = schedule == "all_gather" or cp.rings[0] > 1
        assert check_dense_kernels(cp, heads) == computed * (2 if in_groups else 1), cp.key


def _check_ranks(axes: tuple[int, ...]) -> None:
    heads = (6, 2) if axes == (2, 2) else (5, 1)
    check_everything(axes, MASKS, SOME, heads, every=4)
    _check_selections(mesh_of(axes))
    if len(axes) == 1:
        _check_rectangles((1, *axes), (6, 3))
        _check_several_heads_at_once()
    else:
        _check_rectangles(axes, (6, 2))
        check_groups_beside_each_other("ring")


@pytest.mark.parametrize("axes", [(3,), (2, 2)], ids=str)
def test_parallel_equals_single(axes):
    run_processes(torch.Size(axes).numel(), _check_ranks, axes)


def _check_slices(axes: tuple[int, ...], first: int) -> None:
    masks = [mask_and_truth(name)[0] for name in NAMES[first::5]]
    check_everything(axes, masks, [Dense()], heads=(4, 2), every=7)


@pytest.mark.parametrize("axes, first", [((3,), 0), ((2, 2), 1)], ids=str)
def test_masks_of_slices(axes, first):
    run_processes(torch.Size(axes).numel(), _check_slices, axes, first)


def _check_hidden_chunks() -> None:
    """Chunks that the mask hides from all other ranks are not sent. A batch has
    one mask per sequence."""
    cp = ContextParallel(mesh_of((2,)), "contiguous", "ring", 8)
    apart = Slices.of([(0, 96, 0, 96, "full"), (96, 192, 96, 192, "inv_causal")])
    both = Slices.batch([apart, mask_and_truth("far future")[0]])
    for mask, sends in ((apart, False), (both, True)):
        before = cp.bytes_sent
        check(problem((4, 2), mask), cp)
        assert (cp.bytes_sent > before) == sends


def test_hidden_chunks_are_not_sent():
    run_processes(2, _check_hidden_chunks)


def test_refusals():
    with fake_world(2):
        mesh = mesh_of((2,))
        with pytest.raises(ValueError, match="local"):
            ContextParallel(mesh, schedule="local")
        with pytest.raises(ValueError, match="double_ring"):
            ContextParallel(mesh, schedule="double_ring")
        with pytest.raises(ValueError, match="ascending"):
            ContextParallel(DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",)))
        cp = ContextParallel(mesh, block_size=16)
        with pytest.raises(ValueError, match="whole blocks"):
            attend(*structured_qkv(1, 1, 1, 24, 8), cp=cp)
        with pytest.raises(ValueError, match="multiple of 32"):
            cp.shard(torch.zeros(40), 0)


@on_ranks(2)
def test_the_default_device_of_torch_changes_nothing():
    """Layouts, routes, and plans are on the CPU."""
    mesh = mesh_of((2,))
    for schedule, layout, pattern in itertools.product(
        ("all_gather", "ring", "group_cast", "ulysses"), ALL_LAYOUTS, SOME
    ):
        found = []
        for device in ("cpu", "meta"):
            q, k, v = (
                torch.ones(1, heads, SEQ_LEN // 2, 8).requires_grad_() for heads in (4, 2, 2)
            )
            with torch.device(device):
                cp = ContextParallel(mesh, layout=layout, schedule=schedule, block_size=16)
                mask = Documents([[100, 7, 60]]).rows(SEQ_LEN)
                mask = cp.balance(mask) if layout == "balanced" else mask
                out = attend(q, k, v, mask=mask, pattern=pattern, cp=cp)
                found.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
        pairs = zip(*found, strict=True)
        assert all(torch.equal(*pair) for pair in pairs), (schedule, layout, pattern)
