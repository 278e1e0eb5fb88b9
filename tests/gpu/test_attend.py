"""attend() on a GPU: empty inputs, compiled for lengths that change, recomputed."""

import dataclasses
import functools
import gc

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.gpu.errors import skip_without
from tests.gpu.test_gradient_matrix import PATTERNS
from tests.reference import (
    attention_bytes,
    dense_attention,
    gradients,
    relative_error,
    structured_qkv,
)
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.training.model import checkpoint_contexts


def _qkv(seq_len: int, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [x.to("cuda", dtype) for x in structured_qkv(1, 4, 2, seq_len, dim, seed=1)]


@pytest.mark.parametrize("backend", ["triton", "flex"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_nothing_to_attend_to(pattern, backend):
    skip_without(backend)
    for batch, tokens in ((0, 256), (1, 0)):
        leaves = [
            torch.empty(batch, heads, tokens, 64, device="cuda", dtype=torch.bfloat16)
            for heads in (4, 2, 2)
        ]
        run = functools.partial(attend, pattern=PATTERNS[pattern], backend=backend)
        out, grads = gradients(run, leaves[0], *leaves)
        assert [x.shape for x in (out, *grads)] == [x.shape for x in (leaves[0], *leaves)]


@pytest.mark.parametrize("block_size", [8, 24])
def test_blocks_that_no_kernel_takes(block_size):
    q, k, v = _qkv(480, dtype=torch.float32)
    pattern = VerticalSlash(recall=0.8, sinks=4, dense_below=64)
    options = dict(pattern=pattern, backend="eager", block_size=block_size)
    out, aux = attend(q, k, v, return_aux=True, **options)
    seen = aux.index.selected_keys(torch.arange(480, device=q.device)).tril()
    assert not seen.all() and seen.diagonal(dim1=2, dim2=3).all()
    want, _ = dense_attention(q.double(), k.double(), v.double(), seen, 64**-0.5)
    assert relative_error(out, want) < 1e-5


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


@pytest.mark.parametrize(
    "pattern, backend, compiled",
    [
        ("dense", "triton", True),
        ("vertical_slash", "triton", False),
        ("vertical_slash", "flex", True),
        # FlashAttention-4's, where it is installed.
        ("dense", "flex", False),
    ],
)
def test_recomputed_attention(pattern, backend, compiled):
    """Recompute the first part of a sequence: out, gradients and memory."""
    skip_without(backend)
    q, k, v = (
        x.cuda().requires_grad_() for x in structured_qkv(1, 16, 2, 8192, 128, dtype=torch.bfloat16)
    )
    results = []
    kept = []
    # As in training: once for all calls, and its tables with it.
    ranges = Causal().rows(8192, "cuda")
    options = dict(mask=ranges, pattern=PATTERNS[pattern], backend=backend)
    for share in (0.0, 0.5):

        def block(q, k, v, share=share):
            # Another tensor than the one that is kept, so that the caller's hold
            # on it counts the same.
            return 2 * attend(q * 1.5, k, v, **options, recomputed=share)

        def gradients_of(out: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out.float().square().sum(), (q, k, v))

        torch._dynamo.reset()  # its guards don't look at a function's defaults, which hold the share
        function = functools.partial(
            checkpoint, block, use_reentrant=False, context_fn=checkpoint_contexts
        )
        function = torch.compile(function, fullgraph=True) if compiled else function
        gradients_of(function(q, k, v))  # compiles, and remembers for the mask
        gc.collect()  # now, and not while this measures
        before = torch.cuda.memory_allocated()
        out = function(q, k, v)
        kept.append(torch.cuda.memory_allocated() - before)
        results.append([out.detach(), *gradients_of(out)])
        del out
    shape = dataclasses.replace(FLAVOURS["debug"], heads=16, kv_heads=2, head_dim=128)
    promised = attention_bytes(shape, 4096, torch.bfloat16)
    assert 0.99 * promised < kept[0] - kept[1] < 1.01 * promised
    errors = [relative_error(a, b) for a, b in zip(*results)]
    assert errors[0] < 1e-3 and max(errors) < 3e-3, errors
