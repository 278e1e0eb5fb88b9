"""The chunked, fused LM head and loss against the full logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.loss import count_valid, linear_cross_entropy

torch.set_num_threads(1)


def _inputs(batch: int, length: int, dim: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length * vocab + batch)
    hidden = torch.randn(batch, length, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) < 0.3] = -100
    return hidden, weight, labels


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss * upstream, (hidden, weight))


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 16, 1000])
@pytest.mark.parametrize("batch, length, dim, vocab", [(1, 17, 8, 33), (2, 13, 5, 7), (3, 8, 16, 101)])
@pytest.mark.parametrize("upstream", [1.0, 0.37])
def test_matches_full_logits_in_fp64(
    batch: int, length: int, dim: int, vocab: int, chunk_tokens: int, upstream: float
) -> None:
    hidden, weight, labels = _inputs(batch, length, dim, vocab, torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    gradients = torch.autograd.grad(loss * upstream, (hidden, weight))
    expected = _reference(hidden, weight, labels, upstream)
    assert loss.dtype == torch.float64 and loss.shape == ()
    for actual, reference in zip((loss, *gradients), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_ignored_gives_zero_without_nan(dtype: torch.dtype) -> None:
    hidden, weight, labels = _inputs(2, 11, 4, 9, dtype)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), 4)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_error_does_not_grow_with_the_number_of_chunks(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = _inputs(2, 512, 32, 65, dtype)
    expected = _reference(hidden, weight, labels)
    errors = {}
    for chunk_tokens in (1024, 16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert loss.dtype == torch.float32 and all(g.dtype == dtype for g in gradients)
        errors[chunk_tokens] = [_relative_error(a, e) for a, e in zip((loss, *gradients), expected, strict=True)]
    for one_chunk, many_chunks in zip(errors[1024], errors[16], strict=True):
        assert many_chunks < tolerance
        assert many_chunks < 1.5 * one_chunk + 1e-7


def test_upstream_gradient_is_not_rounded_to_bf16() -> None:
    hidden, weight, labels = _inputs(1, 64, 16, 33, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, 16)
    scale = 1.0038  # just under half a bf16 step above 1: in bf16 it would be 1
    plain, scaled = (torch.autograd.grad(loss * c, hidden, retain_graph=True)[0] for c in (1.0, scale))
    assert torch.equal(scaled, (plain.float() * scale).bfloat16())
    assert not torch.equal(scaled, plain)


def test_tied_weight_gets_both_gradients() -> None:
    _, weight, labels = _inputs(2, 9, 6, 15, torch.float64)
    tokens = labels.clamp(min=0)
    loss = linear_cross_entropy(F.embedding(tokens, weight).tanh(), weight, labels, 4)
    logits = F.embedding(tokens, weight).tanh() @ weight.T
    reference = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected, actual = torch.autograd.grad(reference, weight)[0], torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_wanted_gradient(wanted: str) -> None:
    hidden, weight, labels = _inputs(1, 10, 6, 11, torch.float64)
    expected = dict(zip(("hidden", "weight"), _reference(hidden, weight, labels)[1:], strict=True))
    tensors = {"hidden": hidden.detach(), "weight": weight.detach()}
    tensors[wanted].requires_grad_()
    linear_cross_entropy(tensors["hidden"], tensors["weight"], labels, 3).backward()
    torch.testing.assert_close(tensors[wanted].grad, expected[wanted], rtol=1e-12, atol=1e-12)
    assert all(tensor.grad is None for name, tensor in tensors.items() if name != wanted)


def test_no_grad_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = _inputs(1, 10, 6, 11, torch.float64)
    expected = _reference(hidden, weight, labels)[0]
    monkeypatch.setattr(torch.Tensor, "exp_", lambda self: pytest.fail("d_logits computed under no_grad"))
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, 3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


def test_second_backward_through_a_retained_graph_is_the_same() -> None:
    hidden, weight, labels = _inputs(1, 10, 6, 11, torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels, 3)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_non_contiguous_hidden() -> None:
    hidden, weight, labels = _inputs(3, 8, 6, 11, torch.float64)
    view = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    expected = _reference(hidden, weight, labels)
    loss = linear_cross_entropy(view, weight, labels, 5)
    gradients = torch.autograd.grad(loss, (view, weight))
    for actual, reference in zip((loss, *gradients), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


def test_bad_arguments_are_refused() -> None:
    hidden, weight, labels = _inputs(2, 8, 6, 11, torch.float64)
    with pytest.raises(ValueError, match="shape of hidden"):
        linear_cross_entropy(hidden, weight, labels[:, :-1], 4)
    with pytest.raises(ValueError, match="training.loss_chunk_tokens"):
        linear_cross_entropy(hidden, weight, labels, 0)


@pytest.mark.parametrize("labels, count", [([[1, -100, 3]], 2), ([[-100, -100]], 0), ([[0], [5]], 2)])
def test_count_valid(labels: list[list[int]], count: int) -> None:
    valid = count_valid(torch.tensor(labels))
    assert valid.dtype == torch.int64 and valid.item() == count
