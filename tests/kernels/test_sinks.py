"""The gradient of learned sinks: the kernel against its twin, which tests/attention/test_attend.py holds
against autograd.

Without a GPU the kernel runs in Triton's interpreter, where bf16 is wrong: fp32 and fp16 there.
"""

import pytest
import torch
from torch import Tensor

from titan_sparse.kernels.sinks import add_sinks, sinks_gradient, sinks_gradient_naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


def _problem(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
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
def test_the_kernel_does_what_its_twin_does(shape, dtype):
    d_out, out, lse, sinks = _problem(shape, dtype)
    got = sinks_gradient(d_out, out, lse, sinks)
    exact = [x.double() for x in (d_out, out, lse, sinks)]
    want = sinks_gradient_naive(*exact)
    assert got.dtype == torch.float32 and got[0] == 0 and (got[1:] != 0).all()
    assert ((got - want).norm() / want.norm()).item() < 1e-5
    assert torch.equal(got, sinks_gradient(d_out, out, lse, sinks))
    low = sinks.half()
    got = sinks_gradient(d_out, out, lse, low)
    torch.testing.assert_close(got, sinks_gradient(d_out, out, lse, low.float()).half())
