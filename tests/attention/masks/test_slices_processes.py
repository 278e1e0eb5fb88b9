"""Attention over masks of slices on 2, 3 and 4 ranks, in layouts and schedules by turns."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.context_parallel.test_group import check_everything
from tests.distributed import run_processes
from tests.reference import dense_attention, gradients, structured_qkv
from tests.slice_cases import NAMES, SEQ_LEN, mask_and_truth
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.patterns import Dense

BLOCK = 8


def _check_masks(axes: tuple[int, ...], first: int) -> None:
    masks = [mask_and_truth(name)[0] for name in NAMES[first::5]]
    check_everything(axes, masks, [Dense()], heads=(4, 2), every=7)


@pytest.mark.parametrize("axes, first", [((3,), 0), ((2, 2), 1)], ids=str)
def test_some_masks(axes, first):
    run_processes(torch.Size(axes).numel(), _check_masks, axes, first)


def _check_bytes() -> None:
    """Chunks that the mask hides from all other ranks are not sent. A batch has one mask per sequence."""
    cp = ContextParallel(
        init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), "contiguous", "ring", BLOCK
    )
    apart = Slices.of([(0, 96, 0, 96, "full"), (96, 192, 96, 192, "inv_causal")])
    qkv = structured_qkv(2, 4, 2, SEQ_LEN, 8, seed=3)
    generator = torch.Generator().manual_seed(4)
    d_out = torch.randn(qkv[0].shape, dtype=torch.float64, generator=generator)
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
