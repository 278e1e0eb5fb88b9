"""The fused loss on one CUDA GPU, in bf16: errors against fp64, memory, and chunks
beyond 2^31 elements."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.errors import no_waits
from tests.reference import relative_error
from titan_sparse.loss import linear_cross_entropy, token_cross_entropy


def _inputs(
    tokens: int, dim: int, vocab: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(1, tokens, dim, generator=g, device="cuda").to(dtype).requires_grad_()
    weight = (
        (torch.randn(vocab, dim, generator=g, device="cuda") * 3 * dim**-0.5)
        .to(dtype)
        .requires_grad_()
    )
    labels = torch.randint(vocab, (1, tokens), generator=g, device="cuda")
    labels[torch.rand(1, tokens, generator=g, device="cuda") < 0.2] = -100
    return hidden, weight, labels


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.bfloat16, 3e-3), (torch.float32, 1e-5), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("vocab", [20003, 4096])
def test_errors_for_any_number_of_chunks(dtype: torch.dtype, tolerance: float, vocab: int) -> None:
    hidden, weight, labels = _inputs(1024, 256, vocab, dtype)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    squares = logits[0].logsumexp(-1).square() * (labels[0] >= 0)
    terms = F.cross_entropy(logits[0], labels[0], reduction="none") + 1e-3 * squares
    wanted = (terms.sum().detach(), *torch.autograd.grad(terms.sum() / 800, wide))
    for function in (linear_cross_entropy, token_cross_entropy):
        errors = []
        for chunk_tokens in (1024, 128, 16):
            loss = function(hidden, weight, labels, chunk_tokens, z_loss=1e-3).sum()
            found = (loss.detach(), *torch.autograd.grad(loss / 800, (hidden, weight)))
            errors.append([relative_error(a, b) for a, b in zip(found, wanted, strict=True)])
        for by_chunks in zip(*errors, strict=True):
            assert max(by_chunks) < tolerance and max(by_chunks) < 1.1 * by_chunks[0] + 1e-7
        assert errors[0][0] < 1e-6  # the loss itself: logits are not rounded to bf16


def test_memory_is_one_chunk_and_gradients() -> None:
    tokens, dim, vocab, chunk = 8192, 1024, 100000, 2048
    hidden, weight, labels = _inputs(tokens, dim, vocab)
    linear_cross_entropy(
        hidden, weight, labels, chunk
    ).backward()  # loads kernels, allocates cuBLAS's workspace
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, labels, chunk)
    forward = torch.cuda.max_memory_allocated() - before
    expected = 4 * chunk * vocab + 4 * vocab * dim + 2 * tokens * dim + 4 * chunk * dim
    assert forward < 1.05 * expected
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 1.05 * (6 * vocab * dim + 4 * tokens * dim)


def test_chunk_of_more_than_two_to_the_31_elements() -> None:
    """bf16 gradients lie at the front of rows of fp32 logits: 8192 such rows span 2.5e9
    elements of 2 bytes."""
    hidden, weight, labels = _inputs(8192, 64, 151936)
    results = []
    for chunk_tokens in (8192, 1024):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
        results.append((loss.detach(), *torch.autograd.grad(loss / 6000, (hidden, weight))))
    for whole, parts in zip(*results, strict=True):
        assert relative_error(whole, parts.double()) < 1e-3
    whole, parts = (d_hidden[0, -100:] for _, d_hidden, _ in results)  # the last rows lie farthest
    assert relative_error(whole, parts.double()) < 1e-3


def test_no_wait_for_the_gpu() -> None:
    """The host queues the whole step without a synchronisation."""
    hidden, weight, labels = _inputs(512, 64, 1000)
    linear_cross_entropy(hidden, weight, labels, 128).backward()
    first, hidden.grad, weight.grad = hidden.grad, None, None
    with no_waits():
        linear_cross_entropy(hidden, weight, labels, 128).backward()
    assert torch.equal(hidden.grad, first) and weight.grad.isfinite().all()
