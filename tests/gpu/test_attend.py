"""attend() on a GPU: what it refuses, empty inputs, compiled for lengths that change."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import published
from tests.reference import gradients, structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROOT = Path(__file__).parents[2]
SPARSE = VerticalSlash(recall=0.8, sinks=4, max_verticals=100, dense_below=256)
PATTERNS = {
    "dense": Dense(),
    "vertical_slash": SPARSE,
    "joint": VerticalSlash(recall=0.9, dense_below=256, budget="joint"),
    "published": published(recall=0.9, dense_below=256),
    "xattention": XAttention(16, 0.7, 256),
    "moba": MoBA(300, 3),
}


def _qkv(seq_len: int, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [x.to("cuda", dtype) for x in structured_qkv(1, 4, 2, seq_len, dim, seed=1)]


def test_tensors_of_two_devices_are_refused():
    q, k, v = _qkv(256)
    with pytest.raises(ValueError, match='must be on one device, not cuda:0, cpu, .*k.to."cuda:0"'):
        attend(q, k.cpu(), v.cpu())
    with pytest.raises(ValueError, match='the mask is on cpu, q on cuda:0; .*device="cuda:0"'):
        attend(q, k, v, Causal().rows(256))
    meta = [x.to("meta") for x in (q, k, v)]
    assert attend(*meta).device.type == "meta"


def test_triton_refuses_fp64():
    q, k, v = _qkv(128, dtype=torch.float64)
    with pytest.raises(ValueError, match='does not compute torch.float64; write "eager"'):
        attend(q, k, v, mask=Causal(), pattern=Dense(), backend="triton")


@pytest.mark.parametrize("batch, tokens", [(0, 256), (1, 0)])
@pytest.mark.parametrize("backend", ["triton", "flex", "eager"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_nothing_to_attend_to(pattern, backend, batch, tokens):
    leaves = [
        torch.empty(batch, heads, tokens, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    out = attend(*leaves, pattern=PATTERNS[pattern], backend=backend)
    out.sum().backward()
    assert out.shape == leaves[0].shape and all(x.grad.shape == x.shape for x in leaves)


def test_flex_leaves_chosen_pairs_to_triton():
    """Chunks that end inside of blocks: single queries choose, which flex does not compute."""
    q, k, v = _qkv(2048)
    d_out = torch.randn_like(q)

    def run(backend: str) -> tuple[Tensor, ...]:
        out, grads = gradients(
            lambda *x: attend(*x, pattern=MoBA(300, 3), backend=backend), d_out, q, k, v
        )
        return out, *grads

    for a, b in zip(run("flex"), run("triton"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash", "joint", "published"])
def test_compiled_for_lengths_and_heads_that_change(pattern):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern=PATTERNS[pattern], backend="triton")

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for seq_len, dim in ((512, 64), (700, 64), (1024, 128), (512, 96)):
        q, k, v = _qkv(seq_len, dim)
        d_out = torch.randn_like(q)
        got, grads = gradients(compiled, d_out, q, k, v)
        want, wanted = gradients(function, d_out, q, k, v)
        for a, b in zip((got, *grads), (want, *wanted), strict=True):
            assert torch.equal(a, b)
