"""The cross-entropy kernel against its plain-torch twin (which tests/test_loss.py holds against
autograd), in place and not, over ragged vocabularies."""

import pytest
import torch
from torch import Tensor

from tests.reference import DEVICE
from titan_sparse.kernels import cross_entropy as kernels

TILE = kernels._TILE


def _inputs(
    rows: int, vocab: int, dtype: torch.dtype, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in the middle of a wider buffer of nan, so that what lies beyond a row is
    neither read nor written."""
    g = torch.Generator().manual_seed(rows * vocab)
    buffer = torch.full((rows, vocab + padding), torch.nan, dtype=dtype, device=DEVICE)
    buffer[:, :vocab] = torch.randn(rows, vocab, generator=g) * 5
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[torch.rand(rows, generator=g) < 0.3] = -100
    labels[0], labels[-1] = 0, vocab - 1
    return buffer[:, :vocab], labels.to(DEVICE), torch.rand(rows, generator=g).to(DEVICE) * 3 - 1


@pytest.mark.parametrize(
    "rows, vocab, padding, dtype, d_dtype, scaled, z_loss",
    [
        (9, 2, 0, torch.float32, torch.float32, False, 0.01),
        (9, 97, 15, torch.float32, torch.float32, True, 0.0),
        (9, TILE, 0, torch.float32, torch.float32, True, 0.01),
        (9, 2 * TILE + 5, 11, torch.float32, torch.float32, False, 0.0),
        # A narrow gradient lies in the memory of the logits.
        (5, 97, 9, torch.float32, torch.float16, True, 0.001),
        (5, 3 * TILE + 7, 9, torch.float16, torch.float16, True, 0.001),
        pytest.param(
            513, 151936, 0, torch.float32, torch.bfloat16, False, 0.0,
            marks=pytest.mark.skipif(DEVICE == "cpu", reason="bf16 is wrong in the interpreter"),
        ),
    ],
)  # fmt: skip
def test_matches_the_twin(rows, vocab, padding, dtype, d_dtype, scaled, z_loss) -> None:
    logits, labels, scales = _inputs(rows, vocab, dtype, padding)
    arguments = (labels, scales if scaled else None, z_loss)
    wanted_losses, wanted = kernels.cross_entropy_naive(logits.double(), *arguments, torch.float64)
    losses, d_logits = kernels.cross_entropy(logits, *arguments, d_dtype)
    assert d_logits.dtype == d_dtype and d_logits.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(losses.double(), wanted_losses, rtol=1e-5, atol=1e-5)
    rounding = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[d_dtype]
    torch.testing.assert_close(d_logits.double(), wanted, rtol=rounding, atol=rounding / 10)
    assert (d_logits[labels == -100] == 0).all() and (losses[labels == -100] == 0).all()
    if d_dtype == dtype and logits._base is not None:
        assert torch.isnan(logits._base[:, vocab:]).all()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, -3e4, 3e4], [-2e38, -3e4, -torch.inf]], device=DEVICE)
    losses, d_logits = kernels.cross_entropy(
        logits, torch.tensor([0, 1], device=DEVICE), None, 0.0, torch.float32
    )
    torch.testing.assert_close(losses.cpu(), torch.tensor([2.0, 1.0]).log())
    torch.testing.assert_close(d_logits.cpu(), torch.tensor([[-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]))
