"""Learned sinks on a GPU: every backend's out and gradients in bf16, against fp64.

The bound of out and of the gradients of q, k and v is that of test_gradient_matrix.py: at most 5e-3,
and at most twice the error of torch's dense flash attention, which knows no sinks, on the same
tensors. The sinks' gradient is a sum over all rows of a head in which much cancels: its bound is 5e-3,
or three times what rounding an exact output to bf16 does to it: kernels round once, and sinks again.
"""

import functools

import pytest
import torch
from torch import Tensor

from tests.gpu.test_gradient_matrix import _errors, _flash_errors, _problem
from tests.reference import attention_with_sinks, relative_error
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns import Dense, VerticalSlash

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
HEADS = (8, 2)
MASKS = {
    "causal": Causal(),
    "documents": Documents([700, 3, 901, 130, 200]),
    "padding": Causal(valid=(1500,)),
    "window": Causal() & SlidingWindow(128),
}
PATTERNS = {
    "dense": Dense(),
    "vertical_slash": VerticalSlash(recall=0.8, sinks=4, max_verticals=200, dense_below=256),
}
CELLS = [("triton", 64), ("triton", 128), ("triton", 256), ("flex", 64), ("flex", 128)]


def sink_logits(dtype: torch.dtype = torch.float32) -> Tensor:
    """From one that hardly counts to one that takes most."""
    return torch.linspace(-3, 9, HEADS[0], device="cuda", dtype=dtype)


def with_gradients(function, inputs: list[Tensor], d_out: Tensor) -> list[Tensor]:
    """out, and the gradients of q, k, v and the sinks."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options):
    return attend(q, k, v, sinks=sinks, **options)


def _check(backend: str, dim: int, mask: str, pattern: str, sink_dtype: torch.dtype) -> None:
    qkv, d_out = _problem(*HEADS, dim)
    inputs = [*qkv, sink_logits(sink_dtype)]
    options = dict(mask=MASKS[mask], pattern=PATTERNS[pattern], backend=backend)
    _, aux = _attend(*inputs, **options, return_aux=True)
    seen = aux.index.dense(MASKS[mask])
    exact = [x.double() for x in inputs]
    want = with_gradients(lambda *x: attention_with_sinks(*x, seen)[0], exact, d_out.double())
    got = with_gradients(functools.partial(_attend, **options), inputs, d_out)
    errors = _errors(got, want)
    exact_out, lse = attention_with_sinks(*exact, seen)
    rounding = relative_error(_sinks_gradient_of(exact_out, lse, exact[3], d_out), want[4])
    allowed = [min(5e-3, 2 * x) for x in _flash_errors(*HEADS, dim)] + [max(5e-3, 3 * rounding)]
    print(f"{backend} {dim} {mask} {pattern}:", *(f"{error:.1e}" for error in errors))
    assert all(e <= a for e, a in zip(errors, allowed, strict=True)), (errors, allowed)
    assert (aux.lse - lse).abs().max() < 1e-3
    assert got[4].dtype == sink_dtype and all(x.isfinite().all() for x in got)


def _sinks_gradient_of(out: Tensor, lse: Tensor, sinks: Tensor, d_out: Tensor) -> Tensor:
    """In fp64, of an output that is rounded to the dtype of d_out."""
    rounded = out.to(d_out.dtype).double()
    share = (sinks[:, None] - lse).exp()
    return -(share * (d_out.double() * rounded).sum(-1)).sum((0, 2))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend, dim", CELLS)
def test_bf16(backend: str, dim: int, mask: str, pattern: str):
    _check(backend, dim, mask, pattern, torch.float32)


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_sinks_in_bf16(backend):
    _check(backend, 64, "documents", "dense", torch.bfloat16)


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_fp32(pattern, backend):
    qkv, d_out = _problem(*HEADS, 64)
    inputs = [*(x.float() for x in qkv), sink_logits()]
    options = dict(mask=MASKS["documents"], pattern=PATTERNS[pattern], backend=backend)
    seen = _attend(*inputs, **options, return_aux=True)[1].index.dense(MASKS["documents"])
    want = with_gradients(
        lambda *x: attention_with_sinks(*x, seen)[0], [x.double() for x in inputs], d_out.double()
    )
    got = with_gradients(functools.partial(_attend, **options), inputs, d_out.float())
    assert max(_errors(got, want)) < 1e-4


def test_compiled():
    """The same bits as without torch.compile, and the same bits twice."""
    qkv, d_out = _problem(*HEADS, 64)
    inputs = [*qkv, sink_logits()]
    function = functools.partial(_attend, mask=MASKS["documents"], backend="triton")
    want = with_gradients(function, inputs, d_out)
    compiled = torch.compile(function, fullgraph=True)
    for run in (compiled, compiled, function):
        for a, b in zip(with_gradients(run, inputs, d_out), want, strict=True):
            assert torch.equal(a, b)


def test_memory():
    """Sinks cost memory of rows, not of rows times head_dim."""
    leaves = [
        torch.randn(1, heads, 32768, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    ranges = Causal().rows(32768, "cuda")
    peaks = []
    for sinks in (None, sink_logits().requires_grad_()):
        inputs = leaves if sinks is None else [*leaves, sinks]
        # The first time something may be compiled, and remembered for the mask.
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = attend(*leaves, ranges, backend="triton", sinks=sinks)
            torch.autograd.grad(out, inputs, out.detach())
            peak = torch.cuda.max_memory_allocated() - before
            del out
        peaks.append(peak)
    assert peaks[1] - peaks[0] < leaves[0].nbytes / 4
