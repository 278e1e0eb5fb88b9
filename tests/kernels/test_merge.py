"""Merges and sums in one pass over memory, and the gradient of learned sinks: the kernels against
their plain-torch twins, which tests/attention/test_attend.py holds against autograd.

Without a GPU they run in Triton's interpreter, where bf16 is wrong: fp32 and fp16 there.
"""

import pytest
import torch
from torch import Tensor

from tests.reference import DEVICE
from titan_sparse.kernels import merge
from titan_sparse.kernels.sinks import add_sinks, sinks_gradient, sinks_gradient_naive


@pytest.mark.parametrize("shape", [(1, 2, 7, 24), (2, 3, 65, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge(shape, dtype):
    g = torch.Generator().manual_seed(0)
    out, piece = (torch.randn(shape, generator=g).to(DEVICE, dtype) for _ in range(2))
    lse, lse_piece = (torch.randn(shape[:-1], generator=g).to(DEVICE) * 50 for _ in range(2))
    lse[..., 0] = lse_piece[..., 0] = lse[..., 1] = lse_piece[..., 2] = -torch.inf
    # Rows that see nothing.
    out[lse.isinf()] = 0
    piece[lse_piece.isinf()] = 0
    got, got_lse = merge.merge(out, lse, piece, lse_piece, torch.float32)
    want, want_lse = merge.merge_naive(out.float(), lse, piece.float(), lse_piece)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype_of_total", [torch.float32, torch.float16])
def test_add(dtype_of_total, dtype):
    g = torch.Generator().manual_seed(0)
    total, piece = torch.randn(2, 2, 3, 65, 24, generator=g).to(DEVICE)
    total, piece = total.to(dtype_of_total), piece.half()
    want = merge.add_naive(total, piece, dtype)
    got = merge.add(total, piece, dtype)
    assert got.dtype == dtype and (got is total) == (total.dtype == dtype)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 2e-3)


DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


def _problem_with_sinks(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """d_out, out', L' and sinks: a head without a sink, rows that see nothing."""
    generator = torch.Generator().manual_seed(sum(shape))
    d_out, out = torch.randn(2, *shape, generator=generator)
    lse = 3 * torch.randn(shape[:-1], generator=generator)
    sinks = 3 * torch.randn(shape[1], generator=generator)
    sinks[0] = -torch.inf
    lse[:, :, :5] = -torch.inf
    out[:, :, :5] = 0
    d_out, out = d_out.to(DEVICE, dtype), out.to(DEVICE, dtype)
    sinks = sinks.to(DEVICE)
    out, lse = add_sinks(out, lse.to(DEVICE), sinks)
    return [d_out, out, lse, sinks]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 64, 16), (2, 2, 77, 24), (1, 2, 9, 256)], ids=str)
def test_the_gradient_of_sinks(shape, dtype):
    d_out, out, lse, sinks = _problem_with_sinks(shape, dtype)
    got = sinks_gradient(d_out, out, lse, sinks)
    exact = [x.double() for x in (d_out, out, lse, sinks)]
    want = sinks_gradient_naive(*exact)
    assert got.dtype == torch.float32 and got[0] == 0 and (got[1:] != 0).all()
    assert ((got - want).norm() / want.norm()).item() < 1e-5
    assert torch.equal(got, sinks_gradient(d_out, out, lse, sinks))
    low = sinks.half()
    got = sinks_gradient(d_out, out, lse, low)
    torch.testing.assert_close(got, sinks_gradient(d_out, out, lse, low.float()).half())
