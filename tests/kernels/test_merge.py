"""Merges and sums in one pass over memory: the kernels against their plain-torch twins."""

import pytest
import torch

from titan_sparse.kernels import merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


@pytest.mark.parametrize(
    "total, dtype",
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("float16", "float32"),
        ("float32", "float16"),
    ],
)
def test_add(total, dtype):
    g = torch.Generator().manual_seed(0)
    total, piece = (
        torch.randn(2, 3, 65, 24, generator=g).to(DEVICE, x)
        for x in (getattr(torch, total), torch.float16)
    )
    dtype, want = getattr(torch, dtype), merge.add_naive(total, piece, getattr(torch, dtype))
    got = merge.add(total, piece, dtype)
    assert got.dtype == dtype and (got is total) == (total.dtype == dtype)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 2e-3)
