"""The eager backend: dense attention against attention over tiles, and two pieces against one by one."""

import pytest
import torch
from torch import Tensor

from tests.reference import dense_attention, gradients, structured_qkv
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns.dense import DenseIndex
from titan_sparse.attention.tiles.blocks import block_tiles
from titan_sparse.kernels.block_sparse import Piece

eager = BACKENDS["eager"]

SCALE = 0.3
CASES = {
    "fp32": (torch.float32, (4, 2), 2, 256),
    "bf16": (torch.bfloat16, (6, 2), 1, 512),
    "fp64": (torch.float64, (3, 3), 2, 384),
    "long": (torch.float32, (2, 1), 1, 1920),
    "less than a block": (torch.float32, (2, 1), 1, 80),
}


def _problem(
    dtype: torch.dtype, heads: tuple[int, int], batch: int, seq_len: int
) -> tuple[list[Tensor], Tensor]:
    qkv = [x.to(dtype) for x in structured_qkv(batch, *heads, seq_len, 16)]
    g = torch.Generator().manual_seed(2)
    return qkv, torch.randn(qkv[0].shape, generator=g).to(dtype)


def _over_tiles(qkv: list[Tensor], d_out: Tensor, size: int) -> list[Tensor]:
    """out, lse, dq, dk and dv of causal attention over tiles, as one rank computes it."""
    q, k, v = qkv
    batch, heads, seq_len, _ = q.shape
    blocks = torch.arange(seq_len // size)
    index = DenseIndex(heads, seq_len, size, torch.empty(batch, heads, 0, dtype=torch.int32))
    tiles = block_tiles(Causal().rows(seq_len, "cpu"), index, blocks, blocks, batch, False)
    pieces = [Piece(k, v, tiles)]
    out, lse = eager.forward(q, pieces, None, SCALE, q.dtype)
    dq, [(dk, dv)] = eager.backward(Queries(q, d_out, out, lse), pieces, None, SCALE, q.dtype)
    return [out, lse, dq, dk, dv]


def _dense(qkv: list[Tensor], d_out: Tensor, shape: DenseShape) -> list[Tensor]:
    q, k, v = qkv
    out, lse = eager.dense_forward(q, k, v, shape, SCALE)
    grads = eager.dense_backward(Queries(q, d_out, out, lse), k, v, shape, SCALE)
    return [out, lse, *grads]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_causal_square_equals_tiles_to_the_bit(name, size):
    """This holds where eager takes as many queries at a time as a block of the tiles has."""
    torch.set_num_threads(1)
    qkv, d_out = _problem(*CASES[name])
    if qkv[0].shape[2] % size:
        pytest.skip("tiles want whole blocks")
    want = _over_tiles(qkv, d_out, size)
    got = _dense(qkv, d_out, DenseShape(causal=True, is_whole=True, block_size=size))
    for field, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), field


def _seen(shape: DenseShape, batch: int, q_len: int, k_len: int) -> Tensor:
    """bool [B, 1, Sq, Sk]: what a shape says, pair by pair."""
    if not shape.causal:
        return torch.ones(batch, 1, q_len, k_len, dtype=torch.bool)
    distance = torch.arange(q_len)[:, None] - torch.arange(k_len)
    seen = (distance >= 0) & (distance < (shape.window or q_len))
    seen = seen.expand(batch, 1, -1, -1)
    if shape.offsets is None:
        return seen
    lengths = shape.offsets.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).view(batch, 1, -1)
    return seen & (document[..., :, None] == document[..., None, :])


def _packed(offsets: list[int], window: int | None) -> DenseShape:
    offsets = torch.tensor(offsets, dtype=torch.int32)
    return DenseShape(True, True, is_packed=True, offsets=offsets, longest=200, window=window)


SHAPES = {
    "causal": DenseShape(causal=True, is_whole=True),
    "all keys": DenseShape(causal=False, is_whole=True),
    "documents": _packed([0, 50, 51, 200, 400], None),
    "window": _packed([0, 130, 200, 400], 21),
}


@pytest.mark.parametrize("name", SHAPES)
def test_dense_shapes(name):
    shape = SHAPES[name]
    qkv, d_out = _problem(torch.float64, (4, 2), 2, 200)
    seen = _seen(shape, 2, 200, 200).expand(-1, 4, -1, -1)
    want, grads = gradients(lambda *x: dense_attention(*x, seen, SCALE)[0], d_out, *qkv)
    lse = dense_attention(*qkv, seen, SCALE)[1]
    for a, b in zip(_dense(qkv, d_out, shape), (want, lse, *grads), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)
