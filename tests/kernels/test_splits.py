"""Sums over splits: the kernel against its plain-torch twin."""

import pytest
import torch

from titan_sparse.kernels.block_sparse.splits import sum_splits, sum_splits_naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1, 1), (5, 2, 3, 33, 24), (16, 1, 2, 64, 16)])
def test_sum_splits(shape, dtype):
    g = torch.Generator().manual_seed(shape[0])
    dk_parts, dv_parts = (torch.randn(shape, generator=g).to(DEVICE) for _ in range(2))
    got = sum_splits(dk_parts, dv_parts, dtype)
    want = sum_splits_naive(dk_parts, dv_parts, dtype)
    rounding = torch.finfo(dtype).eps
    for one, wanted in zip(got, want, strict=True):
        assert one.shape == shape[1:] and one.dtype == dtype and one.is_contiguous()
        torch.testing.assert_close(one, wanted, atol=8 * rounding, rtol=2 * rounding)
