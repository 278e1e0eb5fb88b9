"""The chunked, fused LM head and loss against the full logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import LargestTensor, relative_error
from titan_sparse import loss as loss_module
from titan_sparse.kernels.cross_entropy import cross_entropy
from titan_sparse.loss import (
    answer_logits,
    answer_scores,
    linear_cross_entropy,
    token_cross_entropy,
)

torch.set_num_threads(1)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def _inputs(
    batch: int, length: int, dim: int, vocab: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and labels, 30 % of which do not count."""
    generator = torch.Generator().manual_seed(length * vocab + batch)
    hidden = torch.randn(batch, length, dim, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocab, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) < 0.3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _terms(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    logits = hidden @ weight.T
    terms = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return terms.view(labels.shape) + z_loss * logits.logsumexp(-1).square() * (labels != -100)


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """In float64: the loss, and its gradients."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = _terms(*leaves, labels).sum()
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("function", [linear_cross_entropy, token_cross_entropy])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 0.02])
def test_matches_full_logits_in_fp64(function, chunk_tokens, z_loss):
    """The loss, or its terms, and gradients under any upstream gradient."""
    hidden, weight, labels = _inputs(2, 13, 5, 37)
    wanted = _terms(hidden, weight, labels, z_loss)
    # Not contiguous.
    upstream = torch.randn(13, 2, dtype=torch.float64).T
    if function is linear_cross_entropy:
        wanted = wanted.sum()
        upstream = upstream[0, 0]
    found = function(hidden, weight, labels, chunk_tokens, z_loss)
    torch.testing.assert_close(found, wanted, **EXACT)
    got, wanted = (torch.autograd.grad(x, (hidden, weight), upstream) for x in (found, wanted))
    torch.testing.assert_close(got, wanted, **EXACT)


def test_all_ignored_gives_zero_without_nan():
    hidden, weight, labels = _inputs(2, 11, 4, 9, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), 4)
    loss.backward()
    assert loss.item() == 0.0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_error_does_not_grow_with_the_number_of_chunks(dtype, tolerance):
    """bf16: the loss is exact to fp32, as logits are not rounded to bf16; gradients are
    rounded to bf16 twice."""
    hidden, weight, labels = _inputs(2, 512, 32, 65, dtype)
    expected = _reference(hidden, weight, labels)
    errors = []
    for chunk_tokens in (1024, 16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert loss.dtype == torch.float32 and all(g.dtype == dtype for g in gradients)
        errors.append(list(map(relative_error, (loss, *gradients), expected)))
    for one, many, most in zip(*errors, (1e-6, tolerance, tolerance), strict=True):
        assert many < most and many < 1.1 * one + 1e-7


def test_through_the_kernel(monkeypatch):
    """With the Triton kernel in the twin's place, as on a GPU; fp32, as the
    interpreter has no right bf16."""
    monkeypatch.setattr(loss_module, "cross_entropy_naive", cross_entropy)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, labels = (x.detach().to(device) for x in _inputs(2, 13, 6, 37, torch.float32))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    expected = _reference(hidden, weight, labels)
    for function in (linear_cross_entropy, token_cross_entropy):
        loss = function(*leaves, labels, 7).sum()
        found = loss, *torch.autograd.grad(loss, leaves)
        assert max(map(relative_error, found, expected)) < 1e-6


@pytest.mark.parametrize("function", [linear_cross_entropy, token_cross_entropy])
def test_full_logits_never_exist(function):
    hidden, weight, labels = _inputs(2, 64, 4, 97, torch.bfloat16)
    with LargestTensor() as largest:
        function(hidden, weight, labels, 8).sum().backward()
    assert largest.elements == 8 * 112  # a chunk, rows padded to 16


def test_upstream_gradient_is_not_rounded_to_bf16():
    hidden, weight, labels = _inputs(1, 64, 16, 33, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, 16)
    scale = 1.0038  # just under half a bf16 step above 1: in bf16 it would be 1
    plain, scaled = (
        torch.autograd.grad(loss * c, hidden, retain_graph=True)[0] for c in (1.0, scale)
    )
    assert torch.equal(scaled, (plain.float() * scale).bfloat16())
    assert not torch.equal(scaled, plain)


@pytest.mark.parametrize("function", [linear_cross_entropy, token_cross_entropy])
@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_wanted_gradient(function, wanted):
    hidden, weight, labels = _inputs(1, 10, 6, 11)
    expected = dict(zip(("hidden", "weight"), _reference(hidden, weight, labels)[1:], strict=True))
    tensors = {"hidden": hidden.detach(), "weight": weight.detach()}
    tensors[wanted].requires_grad_()
    function(tensors["hidden"], tensors["weight"], labels, 3).sum().backward()
    torch.testing.assert_close(tensors[wanted].grad, expected[wanted], **EXACT)
    assert all(tensor.grad is None for name, tensor in tensors.items() if name != wanted)


def test_the_gradient_of_a_hidden_that_lies_by_columns_lies_by_rows():
    """This is the layout that the kernels of the layer below read."""
    hidden, weight, labels = _inputs(3, 8, 6, 11)
    by_columns = hidden.detach().flatten(0, 1).T.contiguous().T.view(hidden.shape).requires_grad_()
    loss = linear_cross_entropy(by_columns, weight, labels, 5)
    (gradient,) = torch.autograd.grad(loss, by_columns)
    assert gradient.is_contiguous() and not by_columns.is_contiguous()
    torch.testing.assert_close(gradient, _reference(hidden, weight, labels)[1], **EXACT)


@pytest.mark.parametrize("chunk_tokens, z_loss", [(1, 0.0), (4, 0.02), (1000, 0.02)])
def test_scores_of_answers_are_those_of_the_full_logits(chunk_tokens, z_loss):
    hidden, weight, labels = _inputs(2, 13, 5, 37)
    valid = labels != -100
    logits = (hidden @ weight.T)[valid]
    scores, predictions = answer_scores(hidden, weight, labels, chunk_tokens, z_loss)
    torch.testing.assert_close(scores, _terms(hidden, weight, labels, z_loss)[valid], **EXACT)
    assert predictions.dtype == torch.int64 and torch.equal(predictions, logits.argmax(-1))
    assert not scores.requires_grad
    torch.testing.assert_close(answer_logits(hidden, weight, labels, 4), logits, **EXACT)


def test_the_most_likely_token_is_not_lost_in_bf16():
    """Logits of 256 and 257, which are one number in bf16."""
    weight = torch.tensor([[256.0, 0.0], [256.0, 1.0], [0.0, 0.0]], dtype=torch.bfloat16)
    hidden = torch.ones(1, 2, 2, dtype=torch.bfloat16)
    scores, predictions = answer_scores(hidden, weight, torch.tensor([[-100, 1]]), 4)
    assert predictions.tolist() == [1]
    # log(1 + 1 / e)
    assert scores.tolist() == pytest.approx([0.31326], abs=1e-5)


def test_bad_arguments_are_refused():
    hidden, weight, labels = _inputs(2, 8, 6, 11)
    refused = [
        (ValueError, "shape of hidden", (hidden, weight, labels[:, :-1], 4)),
        (ValueError, r"write labels.long\(\)", (hidden, weight, labels.short(), 4)),
        (ValueError, r"write labels.long\(\)", (hidden, weight, labels.double(), 4)),
        (ValueError, "training.loss_chunk_tokens", (hidden, weight, labels, 0)),
        (ValueError, "float16", (hidden.half(), weight.half(), labels, 4)),
        (ValueError, "weight torch.float64", (hidden.float(), weight, labels, 4)),
        (
            ValueError,
            r"\(11, 5\) do not fit; write .* \[V, D\]",
            (hidden, weight[:, 1:], labels, 4),
        ),
        (ValueError, "do not fit", (hidden[:0], weight[:, 1:], labels[:0], 4)),
        (ValueError, "do not fit", (hidden, weight[None], labels, 4)),
        (ValueError, "do not fit", (hidden[0, 0], weight, labels[0, 0], 4)),
        (ValueError, "cpu, meta, and cpu; write", (hidden, weight.to("meta"), labels, 4)),
    ]
    for label in (11, -1):
        words = r"labels must be -100 or in \[0, 11\)"
        refused.append((RuntimeError, words, (hidden, weight, torch.full_like(labels, label), 4)))
    for function in (linear_cross_entropy, token_cross_entropy, answer_scores, answer_logits):
        for kind, words, arguments in refused:
            with pytest.raises(kind, match=words):
                function(*arguments)
