"""attend_in_parts() against its plain-torch twin, which tests/attention/test_decode.py holds
against attention in float64.

Without a GPU it runs in Triton's interpreter, where bf16 is wrong: fp32 and fp16 there.
"""

import pytest
import torch
from torch import Tensor

from tests.reference import DEVICE
from titan_sparse.kernels import decode
from titan_sparse.kernels.decode import attend_in_parts, attend_in_parts_naive

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3}
if DEVICE == "cuda":
    DTYPES[torch.bfloat16] = 2e-2
SHAPES = {
    "one KV head, one key": (1, 1, 1, 1, 16),
    "groups of seven, ragged": (2, 14, 2, 333, 64),
    "head_dim that is no power of two": (1, 6, 6, 128, 24),
    "more rows than a tile": (2, 24, 1, 200, 80),
    "rows that fill small tiles": (1, 2, 1, 150, 320),
}
SCALE = 0.2


def _problem(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, keys, values, and seen: the last sequence sees nothing of the second part."""
    batch, heads, kv_heads, length, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    q = torch.randn(batch, heads, 1, dim, generator=generator)
    # Keys as a model's projections leave them, [B, n, H, D] transposed, and contiguous values.
    keys = torch.randn(batch, length, kv_heads, dim, generator=generator).transpose(1, 2)
    values = torch.randn(batch, kv_heads, length, dim, generator=generator)
    seen = torch.rand(batch, length, generator=generator) < 0.6
    seen[0, 0] = True
    seen[-1, 128:256] = False
    return [*(x.to(DEVICE, dtype) for x in (q, keys, values)), seen.to(DEVICE)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_parts_of_the_keys(shape, dtype, monkeypatch):
    monkeypatch.setattr(decode, "_PART", 128)
    q, keys, values, seen = _problem(shape, dtype)
    # What is not seen is not read.
    values.masked_fill_(~seen[:, None, :, None], torch.nan)
    out, lse = attend_in_parts(q, keys, values, seen, SCALE)
    starts = range(0, shape[3], 128)
    assert out.shape[2] == lse.shape[2] == len(starts)
    exact = [x.double() for x in (q, keys, values.nan_to_num())]
    for part, start in enumerate(starts):
        chunk = slice(start, start + 128)
        _, k, v = (x[:, :, chunk] for x in exact)
        want, want_lse = attend_in_parts_naive(exact[0], k, v, seen[:, chunk], SCALE)
        tolerance = dict(atol=DTYPES[dtype], rtol=DTYPES[dtype])
        torch.testing.assert_close(out[:, :, part].double(), want[:, :, 0], **tolerance)
        torch.testing.assert_close(lse[:, :, part].double(), want_lse[:, :, 0], **tolerance)


def test_no_keys():
    q, keys, values, seen = _problem((2, 4, 2, 300, 16), torch.float32)
    keys = keys[:, :, :0]
    values = values[:, :, :0]
    out, lse = attend_in_parts(q, keys, values, seen[:, :0], SCALE)
    assert out.shape == (2, 4, 0, 16)
    assert lse.shape == (2, 4, 0)
