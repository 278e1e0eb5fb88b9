"""head_dim 256 (Gemma) on a GPU: triton's out and gradients against fp64, in bf16 and in fp32.

test_gradient_matrix.py has one sparse pattern for every grouping; here is every pattern. The bounds
of bf16 are that file's.
"""

import functools

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import published
from tests.gpu.test_gradient_matrix import _errors, _flash_errors, _problem, _with_gradients
from tests.reference import dense_attention
from titan_sparse.attention import attend, backends
from titan_sparse.attention.masks.packed import sliding_window
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
HEADS, DIM = (4, 1), 256
LENGTHS = [700, 3, 901, 130, 200]
MASKS = {
    "causal": Causal(),
    "documents": Documents(LENGTHS),
    "window": Causal() & SlidingWindow(512),
    "documents in a window": Documents(LENGTHS) & SlidingWindow(512),
}
PATTERNS = {
    "dense": Dense(),
    "vertical_slash": VerticalSlash(recall=0.8, sinks=4, max_verticals=200, dense_below=256),
    "joint": VerticalSlash(recall=0.9, dense_below=256, budget="joint"),
    "published": published(recall=0.9, dense_below=256),
    "xattention": XAttention(16, 0.7, 256),
    "moba": MoBA(300, 3),
}
CELLS = [
    *((mask, pattern) for mask in MASKS for pattern in ("dense", "vertical_slash")),
    *(("documents", pattern) for pattern in ("joint", "published", "xattention", "moba")),
]


def _got_and_wanted(
    inputs: list[Tensor], d_out: Tensor, mask, pattern, block_size: int
) -> tuple[list[Tensor], list[Tensor]]:
    """out, dq, dk and dv by triton, and in fp64 over the pairs that were selected."""
    run = functools.partial(
        attend, mask=mask, pattern=pattern, backend="triton", block_size=block_size
    )
    seen = run(*inputs, return_aux=True)[1].index.dense(mask)
    exact = [x.double() for x in inputs]
    want = _with_gradients(lambda *x: dense_attention(*x, seen)[0], exact, d_out.double())
    return _with_gradients(run, inputs, d_out), want


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("mask, pattern", CELLS)
def test_bf16(mask: str, pattern: str, block_size: int):
    qkv, d_out = _problem(*HEADS, DIM)
    got, want = _got_and_wanted(qkv, d_out, MASKS[mask], PATTERNS[pattern], block_size)
    errors = _errors(got, want)
    allowed = [min(5e-3, 2 * x) for x in _flash_errors(*HEADS, DIM)]
    print(f"{mask} {pattern} {block_size}:", *(f"{error:.1e}" for error in errors))
    assert all(e <= a for e, a in zip(errors, allowed, strict=True)), (errors, allowed)


def test_a_window_with_sinks():
    """A mask of slices: the first tokens of each document, and the last ones before the query."""
    qkv, d_out = _problem(*HEADS, DIM)
    mask = sliding_window(LENGTHS, 512, sinks=4)
    got, want = _got_and_wanted(qkv, d_out, mask, Dense(), 128)
    assert max(_errors(got, want)) < 5e-3


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash"])
def test_fp32(pattern: str):
    """Small tiles, which spill nothing: large ones took minutes to compile. The probe's kernels, which
    have no smaller ones, leave the selection to their twins."""
    qkv, d_out = _problem(*HEADS, DIM)
    inputs = [x.float() for x in qkv]
    got, want = _got_and_wanted(inputs, d_out.float(), MASKS["documents"], PATTERNS[pattern], 128)
    assert max(_errors(got, want)) < 1e-4


def test_it_is_chosen():
    """By auto, for all but dense attention, which is cuDNN's."""
    case = ("cuda", torch.bfloat16, DIM, 128)
    assert backends.choose("auto", *case, dynamic=True) == "triton"
    assert backends.choose("auto", *case) == "cudnn"


def test_compiled():
    qkv, d_out = _problem(*HEADS, DIM)
    run = functools.partial(attend, mask=MASKS["documents"], pattern=PATTERNS["vertical_slash"])
    want = _with_gradients(run, qkv, d_out)
    for a, b in zip(
        _with_gradients(torch.compile(run, fullgraph=True), qkv, d_out), want, strict=True
    ):
        assert torch.equal(a, b)
