"""The triton backend as attend() drives it, against eager and brute force."""

import pytest
import torch

from tests.reference import attention_with_sinks, gradients, structured_qkv
from titan_sparse.attention import attend
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
    backend: str, qkv: list[torch.Tensor], d_out: torch.Tensor, mask, pattern
) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, aux = attend(*leaves, mask, pattern, backend=backend, block_size=BLOCK, return_aux=True)
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
@pytest.mark.parametrize(
    "mask, dim",
    [(MASKS[0], 16), (MASKS[1] & SlidingWindow(SEQ_LEN // 3), 256)],
    ids=["causal", "documents, head_dim 256"],
)
def test_equals_eager(mask, dim, pattern):
    qkv, d_out = _problem(dim)
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
