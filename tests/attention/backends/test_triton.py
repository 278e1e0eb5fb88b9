"""The triton backend as attend() drives it, with learned sinks, against brute force."""

import pytest
import torch

from tests.reference import attention_with_sinks, gradients, structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.attention.patterns import Dense, VerticalSlash

BLOCK, SEQ_LEN = 16, 96
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":  # the chip's kernels start at blocks of 64
    BLOCK, SEQ_LEN = 64, 384
PATTERNS = [
    Dense(),
    VerticalSlash(recall=0.6, sinks=2, local_slashes=1, max_verticals=20, dense_below=2 * BLOCK),
]


def _problem(dim: int = 16) -> tuple[list[torch.Tensor], torch.Tensor]:
    qkv = [x.to(DEVICE) for x in structured_qkv(1, 4, 2, SEQ_LEN, dim, dtype=torch.float32)]
    return qkv, torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)


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
