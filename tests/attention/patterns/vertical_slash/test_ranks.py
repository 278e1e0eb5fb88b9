"""Every layout and number of ranks chooses what one process chooses."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.collectives import collectives, counts
from tests.distributed import run_processes
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash

BLOCK = 16
SEQ_LEN = 2 * 3 * 4 * BLOCK
MASKS: list[Mask] = [
    Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 70)) & SlidingWindow(150),
    Documents([[201, 7, 1, 130], [90, 90, 90, 90]]),
]
BUDGETS = {
    "default": VerticalSlash(recall=0.95, dense_below=48),
    "joint": VerticalSlash(
        recall=0.8,
        probe=20,
        min_verticals=3,
        max_verticals=40,
        min_slashes=1,
        max_slashes=4,
        dense_below=48,
        budget="joint",
        probe_rows="last",
        count_sinks=True,
    ),
    "independent": VerticalSlash(
        recall=0.8,
        dense_below=48,
        budget="independent",
        probe_rows="spread",
        count_sinks=True,
    ),
}


def _selected(pattern: VerticalSlash, cp: ContextParallel | None, mask: Mask) -> list[Tensor]:
    q, k, _ = structured_qkv(2, 4, 2, SEQ_LEN, 8, seed=4)
    ranges = mask.rows(SEQ_LEN)
    if cp is None:
        return pattern.select(q, k, ranges, block_size=BLOCK).tensors()
    ranges = cp.balance(ranges) if cp.layout == "balanced" else ranges
    parts = [cp.shard(x, 2, ranges.table) for x in (q, k)]
    with collectives() as said:
        tensors = pattern.select(*parts, ranges, cp).tensors()
    assert sum(counts(said).values()) == 4
    return tensors


def _compare() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    layouts = ("contiguous", "zigzag", "striped", "balanced")
    contexts = [ContextParallel(mesh, layout, "ring", BLOCK) for layout in layouts]
    for (name, pattern), mask in itertools.product(BUDGETS.items(), MASKS):
        want = _selected(pattern, None, mask)
        # Something was chosen, and something was left.
        assert want[0].any() and not want[0].all()
        for cp in contexts:
            got = _selected(pattern, cp, mask)
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other), (name, cp.layout, type(mask))


@pytest.mark.parametrize("ranks", [3, 4])
def test_every_layout_and_world_size_chooses_the_same(ranks):
    run_processes(ranks, _compare)
