"""The chunked, fused LM head and loss against the full logits."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_processes
from tests.reference import relative_error
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse import loss as loss_module
from titan_sparse.config import ActivationCheckpoint, Compile
from titan_sparse.kernels.cross_entropy import cross_entropy
from titan_sparse.loss import (
    answer_scores,
    count_valid,
    linear_cross_entropy,
    token_cross_entropy,
)
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import DecoderConfig, RopeConfig
from titan_sparse.training.build_model import parallelize

torch.set_num_threads(1)


def _inputs(
    batch: int, length: int, dim: int, vocab: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length * vocab + batch)
    hidden = (
        torch.randn(batch, length, dim, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(vocab, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    labels = torch.randint(0, vocab, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) < 0.3] = -100
    return hidden, weight, labels


def _reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, upstream: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss * upstream, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 16, 1000])
@pytest.mark.parametrize(
    "batch, length, dim, vocab", [(1, 17, 8, 33), (2, 13, 5, 7), (3, 8, 16, 101)]
)
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


@pytest.mark.parametrize(
    "dtype, gradient_tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)]
)
def test_error_does_not_grow_with_the_number_of_chunks(
    dtype: torch.dtype, gradient_tolerance: float
) -> None:
    """bf16: the loss is exact to fp32, as logits are not rounded to bf16; gradients are rounded to bf16 twice."""
    hidden, weight, labels = _inputs(2, 512, 32, 65, dtype)
    expected = _reference(hidden, weight, labels)
    errors = []
    for chunk_tokens in (1024, 128, 16):  # 1, 8 and 64 chunks
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert loss.dtype == torch.float32 and all(g.dtype == dtype for g in gradients)
        errors.append(
            [relative_error(a, e) for a, e in zip((loss, *gradients), expected, strict=True)]
        )
    for by_chunks, tolerance in zip(zip(*errors), (1e-6, gradient_tolerance, gradient_tolerance)):
        assert max(by_chunks) < tolerance
        assert max(by_chunks) < 1.1 * by_chunks[0] + 1e-7


def _reference_terms(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    logits = hidden @ weight.T
    terms = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )
    return terms + z_loss * logits.logsumexp(-1).square() * (labels != -100)


@pytest.mark.parametrize("z_loss", [0.0, 0.02])
@pytest.mark.parametrize("chunk_tokens", [3, 1000])
def test_terms_and_their_gradients_under_any_weights(z_loss: float, chunk_tokens: int) -> None:
    hidden, weight, labels = _inputs(2, 13, 5, 37, torch.float64)
    upstream = torch.randn(
        13, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).T  # not contiguous
    wanted = _reference_terms(hidden, weight, labels, z_loss)
    terms = token_cross_entropy(hidden, weight, labels, chunk_tokens, z_loss)
    assert terms.shape == labels.shape and (terms[labels == -100] == 0).all()
    torch.testing.assert_close(terms, wanted, rtol=1e-12, atol=1e-12)
    wanted_gradients = torch.autograd.grad(wanted, (hidden, weight), upstream)
    gradients = torch.autograd.grad(terms, (hidden, weight), upstream)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk_tokens", [4, 1000])
def test_z_loss(chunk_tokens: int) -> None:
    hidden, weight, labels = _inputs(2, 13, 5, 37, torch.float64)
    wanted = _reference_terms(hidden, weight, labels, 0.02).sum()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens, z_loss=0.02)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    gradients, wanted = (torch.autograd.grad(x * -0.7, (hidden, weight)) for x in (loss, wanted))
    torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-12)


def test_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Triton kernel in the twin's place, as on a GPU; fp32, as the interpreter has no right bf16."""
    monkeypatch.setattr(loss_module, "cross_entropy_naive", cross_entropy)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, labels = (x.detach().to(device) for x in _inputs(2, 13, 6, 37, torch.float32))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    expected = _reference(hidden, weight, labels)
    for loss in (
        linear_cross_entropy(*leaves, labels, 7),
        token_cross_entropy(*leaves, labels, 7).sum(),
    ):
        for actual, reference in zip(
            (loss, *torch.autograd.grad(loss, leaves)), expected, strict=True
        ):
            assert relative_error(actual, reference) < 1e-6


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.numel = max(self.numel, x.numel() if isinstance(x, Tensor) else 0)
        return out


@pytest.mark.parametrize("function", [linear_cross_entropy, token_cross_entropy])
def test_full_logits_never_exist(function) -> None:
    hidden, weight, labels = _inputs(2, 64, 4, 97, torch.bfloat16)
    with _LargestTensor() as largest:
        function(hidden, weight, labels, 8).sum().backward()
    assert largest.numel == 8 * 112  # a chunk, rows padded to 16


def test_upstream_gradient_is_not_rounded_to_bf16() -> None:
    hidden, weight, labels = _inputs(1, 64, 16, 33, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, 16)
    scale = 1.0038  # just under half a bf16 step above 1: in bf16 it would be 1
    plain, scaled = (
        torch.autograd.grad(loss * c, hidden, retain_graph=True)[0] for c in (1.0, scale)
    )
    assert torch.equal(scaled, (plain.float() * scale).bfloat16())
    assert not torch.equal(scaled, plain)


def test_tied_weight_gets_both_gradients() -> None:
    _, weight, labels = _inputs(2, 9, 6, 15, torch.float64)
    tokens = labels.clamp(min=0)
    loss = linear_cross_entropy(F.embedding(tokens, weight).tanh(), weight, labels, 4)
    logits = F.embedding(tokens, weight).tanh() @ weight.T
    reference = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected, actual = (
        torch.autograd.grad(reference, weight)[0],
        torch.autograd.grad(loss, weight)[0],
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [linear_cross_entropy, token_cross_entropy])
@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_wanted_gradient(function, wanted: str) -> None:
    hidden, weight, labels = _inputs(1, 10, 6, 11, torch.float64)
    expected = dict(zip(("hidden", "weight"), _reference(hidden, weight, labels)[1:], strict=True))
    tensors = {"hidden": hidden.detach(), "weight": weight.detach()}
    tensors[wanted].requires_grad_()
    function(tensors["hidden"], tensors["weight"], labels, 3).sum().backward()
    torch.testing.assert_close(tensors[wanted].grad, expected[wanted], rtol=1e-12, atol=1e-12)
    assert all(tensor.grad is None for name, tensor in tensors.items() if name != wanted)


def test_non_contiguous_hidden() -> None:
    hidden, weight, labels = _inputs(3, 8, 6, 11, torch.float64)
    view = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    expected = _reference(hidden, weight, labels)
    loss = linear_cross_entropy(view, weight, labels, 5)
    gradients = torch.autograd.grad(loss, (view, weight))
    for actual, reference in zip((loss, *gradients), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_hidden_that_lies_by_columns_lies_by_rows() -> None:
    """This is the layout that the kernels of the layer below read."""
    hidden, weight, labels = _inputs(3, 8, 6, 11, torch.float64)
    by_columns = hidden.detach().flatten(0, 1).T.contiguous().T.view(hidden.shape).requires_grad_()
    loss = linear_cross_entropy(by_columns, weight, labels, 5)
    (gradient,) = torch.autograd.grad(loss, by_columns)
    assert gradient.is_contiguous() and not by_columns.is_contiguous()
    wanted = _reference(hidden, weight, labels)[1]
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


# Scores of answers


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
def test_scores_of_answers_are_those_of_the_full_logits(chunk_tokens: int) -> None:
    hidden, weight, labels = _inputs(2, 13, 5, 37, torch.float64)
    valid = labels != -100
    logits = (hidden @ weight.T)[valid]
    scores, predictions = answer_scores(hidden, weight, labels, chunk_tokens)
    wanted = F.cross_entropy(logits, labels[valid], reduction="none")
    torch.testing.assert_close(scores, wanted, rtol=1e-12, atol=1e-12)
    assert predictions.dtype == torch.int64 and torch.equal(predictions, logits.argmax(-1))
    assert not scores.requires_grad
    scores, _ = answer_scores(hidden, weight, labels, chunk_tokens, z_loss=0.02)
    wanted = _reference_terms(hidden, weight, labels, 0.02)[valid]
    torch.testing.assert_close(scores, wanted, rtol=1e-12, atol=1e-12)


def test_the_most_likely_token_is_not_lost_in_bf16() -> None:
    """Logits of 256 and 257, which are one number in bf16."""
    weight = torch.tensor([[256.0, 0.0], [256.0, 1.0], [0.0, 0.0]], dtype=torch.bfloat16)
    hidden = torch.ones(1, 2, 2, dtype=torch.bfloat16)
    scores, predictions = answer_scores(hidden, weight, torch.tensor([[-100, 1]]), 4)
    assert predictions.tolist() == [1]
    # log(1 + 1 / e)
    assert scores.tolist() == pytest.approx([0.31326], abs=1e-5)


# Refusals


def test_bad_arguments_are_refused() -> None:
    hidden, weight, labels = _inputs(2, 8, 6, 11, torch.float64)
    with pytest.raises(ValueError, match="shape of hidden"):
        linear_cross_entropy(hidden, weight, labels[:, :-1], 4)
    with pytest.raises(ValueError, match="shape of hidden"):
        answer_scores(hidden, weight, labels[:, :-1], 4)
    with pytest.raises(ValueError, match="training.loss_chunk_tokens"):
        linear_cross_entropy(hidden, weight, labels, 0)
    with pytest.raises(ValueError, match="float16"):
        token_cross_entropy(hidden.half(), weight.half(), labels, 4)
    with pytest.raises(ValueError, match="weight torch.float64"):
        linear_cross_entropy(hidden.float(), weight, labels, 4)
    for label in (11, -1):
        with pytest.raises(RuntimeError, match=r"labels must be -100 or in \[0, 11\)"):
            linear_cross_entropy(hidden, weight, torch.full_like(labels, label), 4)


@pytest.mark.parametrize(
    "labels, count", [([[1, -100, 3]], 2), ([[-100, -100]], 0), ([[0], [5]], 2)]
)
def test_count_valid(labels: list[list[int]], count: int) -> None:
    valid = count_valid(torch.tensor(labels))
    assert valid.dtype == torch.int64 and valid.item() == count


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _sharded_equals_whole(tied: bool) -> None:
    rope = RopeConfig(10000.0, "none", 1.0, 64)
    config = DecoderConfig(
        vocab_size=37,
        hidden_size=12,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=6,
        intermediate_size=16,
        qkv_bias=False,
        qk_norm=False,
        tied_embeddings=tied,
        norm_eps=1e-6,
        rope=rope,
        max_positions=64,
    )
    torch.manual_seed(0)
    whole = Decoder(config, _causal).double()
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard_cp",))
    parallelize(sharded, mesh, torch.float64, True, ActivationCheckpoint(mode="none"), Compile())
    tokens = torch.randint(0, 37, (2, 10))
    mine = tokens[dist.get_rank() :][:1]
    for _ in range(2):  # the second step with changed weights
        for model, batch in ((whole, tokens), (sharded, mine)):
            positions = torch.arange(10).expand(len(batch), -1)
            model(batch, positions, None, labels=batch, loss_chunk_tokens=3, z_loss=0.01).backward()
        for wanted, parameter in zip(whole.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(
                parameter.grad.full_tensor(), wanted.grad, rtol=1e-9, atol=1e-11
            )
        with torch.no_grad():
            for parameter in (*whole.parameters(), *sharded.parameters()):
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None


def _option_z_loss(folder: Path) -> None:
    first = []
    for z_loss in (0.0, 0.1):
        config = tiny_config(folder, f"z{z_loss}", training__z_loss=z_loss, training__steps=1)
        train(config)
        dist.barrier()  # rank 0 writes
        first.append(metrics_of(config)[0])
    plain, one = (line["loss"] for line in first)
    # lse of logits near 0 is the log of the vocabulary, about 5.6
    assert 1.0 < one - plain < 10.0
    assert first[0]["grad_norm"] != first[1]["grad_norm"]


def _sharded(folder: Path) -> None:
    for tied in (True, False):
        _sharded_equals_whole(tied)
    _option_z_loss(folder)


def test_sharded_heads_and_the_option_z_loss(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    run_processes(2, _sharded, tmp_path)
