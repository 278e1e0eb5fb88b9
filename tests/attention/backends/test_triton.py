"""The triton backend as attend() drives it, against eager; over ranks too.

Tables, the ring, and verticals together with the first chunk.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import run_processes
from tests.reference import attention_with_sinks, gradients, structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns import Dense, VerticalSlash

BLOCK, SEQ_LEN = 16, 96
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":  # the chip's kernels start at blocks of 64
    BLOCK, SEQ_LEN = 64, 384
PATTERNS = [
    Dense(),
    VerticalSlash(recall=0.6, sinks=2, local_slashes=1, max_verticals=20, dense_below=2 * BLOCK),
]
MASKS = [Causal(), Documents([SEQ_LEN // 2 + 5, 9, SEQ_LEN // 3])]


def _gradients(
    backend: str, qkv: list[torch.Tensor], d_out: torch.Tensor, mask, pattern, cp=None
) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, aux = attend(
        *leaves, mask, pattern, cp, backend=backend, block_size=BLOCK, return_aux=True
    )
    return [out.detach(), aux.lse, *torch.autograd.grad(out, leaves, d_out)]


def _problem(dim: int = 16) -> tuple[list[torch.Tensor], torch.Tensor]:
    qkv = [x.to(DEVICE) for x in structured_qkv(1, 4, 2, SEQ_LEN, dim, dtype=torch.float32)]
    return qkv, torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)


def _check_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(
            a, b, atol=2e-4, rtol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
@pytest.mark.parametrize("mask", MASKS, ids=["causal", "documents"])
def test_equals_eager(mask, pattern):
    qkv, d_out = _problem()
    _check_close(
        *(_gradients(backend, qkv, d_out, mask, pattern) for backend in ("triton", "eager"))
    )


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_head_dim_256(pattern):
    qkv, d_out = _problem(256)
    mask = MASKS[1] & SlidingWindow(SEQ_LEN // 3)
    _check_close(
        *(_gradients(backend, qkv, d_out, mask, pattern) for backend in ("triton", "eager"))
    )


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_learned_sinks(pattern):
    """Out, lse and every gradient as by brute force; with padding, whose rows see nothing."""
    mask = Documents([SEQ_LEN // 2 + 5, 9, SEQ_LEN // 4])
    qkv, d_out = _problem()
    sinks = torch.tensor([-4.0, 0.0, 1.5, 9.0], device=DEVICE)
    leaves = [x.clone().requires_grad_() for x in (*qkv, sinks)]
    *inputs, leaf = leaves
    options = dict(backend="triton", block_size=BLOCK, return_aux=True)
    out, aux = attend(*inputs, mask, pattern, sinks=leaf, **options)
    got = [out.detach(), aux.lse, *torch.autograd.grad(out, leaves, d_out)]

    seen = aux.index.dense(mask)
    exact = [x.double() for x in (*qkv, sinks)]
    want, grads = gradients(lambda *x: attention_with_sinks(*x, seen)[0], d_out.double(), *exact)
    want_lse = attention_with_sinks(*exact, seen)[1]
    for a, b in zip(got, [want, want_lse, *grads], strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-4, rtol=2e-4)


def _over_ranks() -> None:
    mesh, (qkv, d_out) = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)), _problem()
    want = _gradients("eager", qkv, d_out, MASKS[1], PATTERNS[1])
    for schedule in ("ring", "group_cast"):
        cp = ContextParallel(mesh, "striped", schedule, BLOCK)
        local = [cp.shard(x, 2) for x in qkv]
        got = _gradients("triton", local, cp.shard(d_out, 2), MASKS[1], PATTERNS[1], cp)
        _check_close([cp.unshard(x, 2) for x in got], want)


@pytest.mark.skipif(DEVICE == "cuda", reason="gloo ranks on the CPU; NCCL is in tests/gpu")
def test_three_ranks_equal_one():
    run_processes(3, _over_ranks)
