"""Only the product of out and d_out travels with queries. Any out with that product works."""

import pytest
import torch

from titan_sparse.attention.context_parallel.ring import _out_with


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_is_right(dtype, size):
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    d_out = (torch.randn(2, 3, 50, 24) * size).to(dtype)
    d_out[:, :, 7] = 0
    true = torch.randn(2, 3, 50, 24).to(dtype)
    # fp64 knows the product that fp32 sums.
    product = (d_out.double() * true.double()).sum(-1)
    out = _out_with(d_out, product.to(wide))
    assert out.dtype == dtype and out.isfinite().all()
    error = (d_out.double() * out.double()).sum(-1) - product
    # The rounding of the true out would cost as much.
    bound = torch.finfo(dtype).eps * d_out.double().norm(dim=-1) * true.double().norm(dim=-1)
    assert (error.abs() <= bound).all()
    assert (out.double().norm(dim=-1) <= 1.01 * true.double().norm(dim=-1)).all()
