"""Sums over splits: the kernel against its plain-torch twin."""

import pytest
import torch

from titan_sparse.kernels.block_sparse import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1, 1), (5, 2, 3, 33, 24), (16, 1, 2, 64, 16)])
def test_sum_splits(shape, dtype):
    g = torch.Generator().manual_seed(shape[0])
    dk_parts, dv_parts = (torch.randn(shape, generator=g).to(DEVICE) for _ in range(2))
    got = launch.sum_splits(dk_parts, dv_parts, dtype)
    want = [parts.double().sum(0).to(dtype) for parts in (dk_parts, dv_parts)]
    rounding = torch.finfo(dtype).eps
    for one, wanted in zip(got, want, strict=True):
        assert one.shape == shape[1:] and one.dtype == dtype and one.is_contiguous()
        torch.testing.assert_close(one, wanted, atol=8 * rounding, rtol=2 * rounding)


@pytest.mark.parametrize(
    "programs, group, q_blocks, parts",
    [
        # 4,096 tokens, 16:2 heads: 32 blocks, and 2 tiles of verticals.
        (64, 8, 32, (2, 1)),
        (4, 8, 32, (8, 2)),
        # A group of 7 is not cut into 8 parts; and a head alone has only its list.
        (8, 7, 32, (7, 2)),
        (16, 1, 32, (1, 8)),
        # 131,072 tokens: 1,024 blocks, and 6 tiles of verticals.
        (2048, 8, 1024, (1, 1)),
        (12, 8, 1024, (8, 2)),
        (100, 8, 1024, (8, 1)),
    ],
)
def test_key_splits(monkeypatch, programs, group, q_blocks, parts):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert launch.key_splits(programs, group, q_blocks) == parts
