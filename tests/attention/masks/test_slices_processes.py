"""Attention over masks of slices on 3 and 4 ranks against dense attention in fp64: layouts x
schedules x what circulates. Each mask meets one layout and schedule.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import run_processes
from tests.reference import dense_attention, gradients, structured_qkv
from tests.slice_cases import NAMES, SEQ_LEN, mask_and_truth
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.observe import recording

BLOCK = 8
AXES = [(1, 3), (2, 2)]
LAYOUTS = ("contiguous", "zigzag", "striped")
SCHEDULES = (
    ("ring", "kv"),
    ("ring", "q"),
    ("double_ring", "kv"),
    ("double_ring", "q"),
    ("all_gather", "auto"),
)


@functools.cache
def _inputs() -> tuple[list[Tensor], Tensor]:
    qkv = structured_qkv(2, 4, 2, SEQ_LEN, 8, seed=3)
    return qkv, torch.randn(
        qkv[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )


@functools.cache
def _wanted(name: str) -> list[Tensor]:
    """out, lse, dq, dk, dv of dense attention."""
    qkv, d_out = _inputs()
    seen = mask_and_truth(name)[1].expand(2, 4, -1, -1)
    out, grads = gradients(lambda *x: dense_attention(*x, seen)[0], d_out, *qkv)
    return [out, dense_attention(*qkv, seen)[1], *grads]


def _check(name: str, mask: Slices, cp: ContextParallel, want: list[Tensor]) -> None:
    qkv, d_out = _inputs()
    leaves = [cp.shard(x, 2).requires_grad_() for x in qkv]
    with recording() as seen:
        out, aux = attend(*leaves, mask, cp=cp, return_aux=True)
    got = [out.detach(), aux.lse, *torch.autograd.grad(out, leaves, cp.shard(d_out, 2))]
    for what, a, b in zip(
        ("out", "lse", "dq", "dk", "dv"), (cp.unshard(x, 2) for x in got), want, strict=True
    ):
        assert torch.equal(a.isfinite(), b.isfinite()), (what, name, cp.key)
        gap = (a - b).nan_to_num(0).abs().max().item()
        assert gap < 1e-9, f"{what} off by {gap}: {name}, {cp.key}, rank {dist.get_rank()}"
    assert (seen.visited[0] == seen.visible[0]).all(), (name, cp.key)


def _check_masks(world: int, numbers: list[int]) -> None:
    mesh = init_device_mesh("cpu", AXES[world], mesh_dim_names=("cp_inter", "cp_intra"))
    make = functools.cache(
        lambda layout, schedule: ContextParallel(mesh, layout, schedule[0], BLOCK, schedule[1])
    )
    for number in numbers:
        mask = mask_and_truth(NAMES[number])[0]
        layout = LAYOUTS[(number + world) % 3]
        schedule = SCHEDULES[(number + number // 5 + 2 * world) % 5]
        _check(NAMES[number], mask, make(layout, schedule), _wanted(NAMES[number]))


@pytest.mark.parametrize("world", range(2), ids=[str(axes) for axes in AXES])
def test_some_masks(world):
    run_processes(
        torch.Size(AXES[world]).numel(), _check_masks, world, list(range(world, len(NAMES), 5))
    )


def _check_bytes() -> None:
    """Chunks that the mask hides from all other ranks are not sent. A batch has one mask per sequence."""
    cp = ContextParallel(
        init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "contiguous", "ring", BLOCK
    )
    apart = Slices.of([(0, 96, 0, 96, "full"), (96, 192, 96, 192, "inv_causal")])
    qkv, d_out = _inputs()
    both = Slices.batch([apart, mask_and_truth("far future")[0]])
    for mask, sends in ((apart, False), (both, True)):
        before = cp.bytes_sent
        leaves = [cp.shard(x, 2).requires_grad_() for x in qkv]
        out = attend(*leaves, mask, cp=cp)
        grads = torch.autograd.grad(out, leaves, cp.shard(d_out, 2))
        assert (cp.bytes_sent > before) == sends
        seen = mask.dense(SEQ_LEN)[:, None].expand(2, 4, -1, -1)
        want = gradients(lambda *x, seen=seen: dense_attention(*x, seen)[0], d_out, *qkv)
        for a, b in zip((out.detach(), *grads), (want[0], *want[1]), strict=True):
            assert (cp.unshard(a, 2) - b).abs().max() < 1e-9


def test_hops_are_skipped_and_sequences_differ():
    run_processes(2, _check_bytes)
