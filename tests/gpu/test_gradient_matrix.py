"""On a GPU: every backend's out and gradients in bf16, against fp64.

For every head size, block size, grouping and mask. The bound is the issue of trust: at most 5e-3,
and at most twice the error of torch's dense flash attention. A public bug of one kernel library
gave exact forwards and gradients off by 150 times, at one head size and one length only.
"""

import functools

import pytest
import torch
from torch import Tensor

from tests.reference import dense_attention, relative_error
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SEQ_LEN = 2001  # no whole blocks
MASKS = {
    "causal": Causal(),
    "documents": Documents([700, 3, 901, 130, 200]),
    "window": Causal() & SlidingWindow(777),
}
PATTERN = VerticalSlash(recall=0.8, sinks=4, max_verticals=200, max_slashes=5, dense_below=256)
GROUPS = [(4, 4), (6, 2), (8, 1)]
CELLS = [("triton", dim, size) for dim in (64, 96, 128, 256) for size in (64, 128)] + [
    ("flex", d, 128) for d in (64, 96, 128)
]


@functools.cache
def _problem(heads: int, kv_heads: int, dim: int) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(dim)
    *qkv, d_out = (
        torch.randn(1, h, SEQ_LEN, dim, generator=g).cuda().bfloat16()
        for h in (heads, kv_heads, kv_heads, heads)
    )
    return qkv, d_out


def _with_gradients(function, qkv: list[Tensor], d_out: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def _errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [relative_error(*pair) for pair in zip(got, want, strict=True)]


@functools.cache
def _flash_errors(heads: int, kv_heads: int, dim: int) -> list[float]:
    """Dense causal attention by torch's flash kernels on the same tensors."""
    qkv, d_out = _problem(heads, kv_heads, dim)
    seen = Causal().dense(SEQ_LEN, "cuda")[:, None].expand(1, heads, -1, -1)
    want = _with_gradients(
        lambda *x: dense_attention(*x, seen)[0], [x.double() for x in qkv], d_out.double()
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        got = _with_gradients(
            lambda *x: torch.nn.functional.scaled_dot_product_attention(
                *x, is_causal=True, enable_gqa=True
            ),
            qkv,
            d_out,
        )
    return _errors(got, want)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", GROUPS, ids=str)
@pytest.mark.parametrize("backend, dim, size", CELLS)
def test_cell(backend: str, dim: int, size: int, heads: tuple[int, int], mask: str):
    qkv, d_out = _problem(*heads, dim)
    run = functools.partial(
        attend, mask=MASKS[mask], pattern=PATTERN, backend=backend, block_size=size
    )
    seen = run(*qkv, return_aux=True)[1].index.dense(MASKS[mask])
    want = _with_gradients(
        lambda *x: dense_attention(*x, seen)[0], [x.double() for x in qkv], d_out.double()
    )
    errors = _errors(_with_gradients(run, qkv, d_out), want)
    allowed = [min(5e-3, 2 * x) for x in _flash_errors(*heads, dim)]
    assert all(e <= a for e, a in zip(errors, allowed)), (errors, allowed)
