"""The cross-entropy kernel against its plain-torch twin, in place and not, over ragged vocabularies."""

import pytest
import torch
from torch import Tensor

from titan_sparse.kernels import cross_entropy as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = kernels._TILE


def _inputs(
    rows: int, vocab: int, dtype: torch.dtype, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in the middle of a wider buffer of nan, so that what lies beyond a row is neither read nor written."""
    g = torch.Generator().manual_seed(rows * vocab)
    buffer = torch.full((rows, vocab + padding), torch.nan, dtype=dtype, device=DEVICE)
    buffer[:, :vocab] = torch.randn(rows, vocab, generator=g) * 5
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[torch.rand(rows, generator=g) < 0.3] = -100
    labels[0], labels[-1] = 0, vocab - 1
    return buffer[:, :vocab], labels.to(DEVICE), torch.rand(rows, generator=g).to(DEVICE) * 3 - 1


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("vocab, padding", [(2, 0), (97, 15), (TILE, 0), (2 * TILE + 5, 11)])
def test_matches_the_twin(vocab: int, padding: int, scaled: bool, z_loss: float) -> None:
    logits, labels, scales = _inputs(9, vocab, torch.float32, padding)
    arguments = (labels, scales if scaled else None, z_loss, torch.float32)
    wanted_losses, wanted = kernels.cross_entropy_naive(
        logits.double(), *arguments[:3], torch.float64
    )
    losses, d_logits = kernels.cross_entropy(logits, *arguments)
    assert d_logits.data_ptr() == logits.data_ptr() and d_logits.stride() == logits.stride()
    torch.testing.assert_close(losses.double(), wanted_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_logits.double(), wanted, rtol=1e-5, atol=1e-6)
    assert (d_logits[labels == -100] == 0).all() and (losses[labels == -100] == 0).all()
    assert logits._base is None or torch.isnan(logits._base[:, vocab:]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [97, 3 * TILE + 7])
def test_narrow_gradient_in_the_memory_of_the_logits(vocab: int, dtype: torch.dtype) -> None:
    logits, labels, scales = _inputs(5, vocab, dtype, 9)
    wanted_losses, wanted = kernels.cross_entropy_naive(
        logits.double(), labels, scales, 0.001, torch.float64
    )
    losses, d_logits = kernels.cross_entropy(logits, labels, scales, 0.001, torch.float16)
    assert d_logits.dtype == torch.float16 and d_logits.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(losses.double(), wanted_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_logits.double(), wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.skipif(DEVICE == "cpu", reason="bf16 is wrong in Triton's interpreter")
@pytest.mark.gpu
def test_bf16_gradient_of_a_large_vocabulary() -> None:
    logits, labels, _ = _inputs(513, 151936, torch.float32, 0)
    wanted_losses, wanted = kernels.cross_entropy_naive(
        logits.clone(), labels, None, 0.0, torch.bfloat16
    )
    losses, d_logits = kernels.cross_entropy(logits, labels, None, 0.0, torch.bfloat16)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_logits, wanted, rtol=1e-2, atol=1e-12)


def test_without_gradient_the_logits_stay() -> None:
    logits, labels, scales = _inputs(7, 33, torch.float32, 0)
    before = logits.clone()
    losses, nothing = kernels.cross_entropy(logits, labels, scales, 0.1, None)
    assert nothing is None and torch.equal(logits, before)
    wanted, nothing = kernels.cross_entropy_naive(logits, labels, None, 0.1, None)
    assert nothing is None and torch.equal(logits, before)
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, -3e4, 3e4], [-2e38, -3e4, -torch.inf]], device=DEVICE)
    losses, d_logits = kernels.cross_entropy(
        logits, torch.tensor([0, 1], device=DEVICE), None, 0.0, torch.float32
    )
    torch.testing.assert_close(losses.cpu(), torch.tensor([2.0, 1.0]).log())
    torch.testing.assert_close(d_logits.cpu(), torch.tensor([[-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]))


def test_twin_is_autograd_of_the_formula() -> None:
    """The twin itself: its gradient is autograd's of losses written out, z-loss and scales included."""
    logits, labels, scales = (x.cpu() for x in _inputs(11, 23, torch.float64, 0))
    leaf = logits.clone().requires_grad_()
    lse = leaf.logsumexp(-1)
    terms = torch.nn.functional.cross_entropy(
        leaf, labels, reduction="none"
    ) + 0.03 * lse.square() * (labels != -100)
    (terms * scales).sum().backward()
    losses, d_logits = kernels.cross_entropy_naive(
        logits, labels, scales.double(), 0.03, torch.float64
    )
    torch.testing.assert_close(losses, terms.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_logits, leaf.grad, rtol=1e-12, atol=1e-12)


def test_no_rows() -> None:
    losses, d_logits = kernels.cross_entropy(
        torch.empty(0, 5, device=DEVICE),
        torch.empty(0, dtype=torch.int64, device=DEVICE),
        None,
        0.0,
        torch.float32,
    )
    assert losses.shape == (0,) and d_logits.shape == (0, 5)
