"""The Triton kernels over masks of slices, against their twin and dense attention; in the interpreter without a GPU."""

import pytest
import torch
from torch import Tensor

from tests.kernels.block_sparse_twin import attend_pieces
from tests.reference import dense_attention, gradients, relative_error, structured_qkv
from tests.slice_cases import Slice, counts, random_legal
from titan_sparse.attention import attend
from titan_sparse.attention.backends import BACKENDS, base
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.patterns.dense import DenseIndex
from titan_sparse.attention.tiles.slices import block_tiles
from titan_sparse.kernels.block_sparse import Piece
from titan_sparse.kernels.chunks import ChosenChunks

triton = BACKENDS["triton"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, DTYPE, TOLERANCE = (
    (64, torch.bfloat16, 2e-2) if DEVICE == "cuda" else (16, torch.float32, 2e-5)
)
S = 4 * BLOCK

WRITTEN: dict[str, list[Slice]] = {
    "random": random_legal(3, 9, S),
    "strips": [
        (0, 5, 0, S, "full"),
        (5, BLOCK + 3, 0, S - 7, "inv_causal"),
        (BLOCK + 3, S - 1, 0, S, "causal"),
    ],
    "triangles that make a square": [(0, S, 0, S, "causal"), (0, S - 1, 1, S, "inv_causal")],
    "rows that see nothing": [(3, S // 2, S // 2, S, "bi_causal"), (S - 9, S, 0, 9, "full")],
}


def _problem(batch: int, seq_len: int = S) -> tuple[list[Tensor], Tensor]:
    qkv = [x.to(DEVICE, DTYPE) for x in structured_qkv(batch, 2, 1, seq_len, 16)]
    generator = torch.Generator().manual_seed(2)
    d_out = torch.randn(qkv[0].shape, generator=generator)
    return qkv, d_out.to(DEVICE, DTYPE)


def _check(got: list[Tensor], qkv: list[Tensor], d_out: Tensor, seen: Tensor) -> None:
    """out, lse, dq, dk, dv against dense attention over bool [B, S, S]."""
    # [B, Hq, S, S]
    seen = seen[:, None].expand(-1, 2, -1, -1).to(DEVICE)
    exact = [x.double() for x in qkv]
    out, grads = gradients(lambda *x: dense_attention(*x, seen)[0], d_out.double(), *exact)
    _, lse = dense_attention(*exact, seen)

    is_blind = lse.isneginf()
    assert torch.equal(got[1].isneginf(), is_blind)
    assert not got[0][is_blind].any()
    names = ("out", "lse", "dq", "dk", "dv")
    for name, a, b in zip(names, got, (out, lse, *grads), strict=True):
        error = relative_error(a.nan_to_num(neginf=0), b.nan_to_num(neginf=0))
        assert error < TOLERANCE, name


def _attend(mask: Slices, qkv: list[Tensor], d_out: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, aux = attend(*leaves, mask, backend="triton", block_size=BLOCK, return_aux=True)
    return [out.detach(), aux.lse, *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_is_dense_attention(name):
    qkv, d_out = _problem(1)
    _check(
        _attend(Slices.of(WRITTEN[name]), qkv, d_out),
        qkv,
        d_out,
        counts(WRITTEN[name], S)[None] > 0,
    )


def test_a_ragged_length_and_a_mask_for_each_sequence():
    seq_len = S - 13
    written = [random_legal(seed, 7, seq_len) for seed in (5, 6)]
    qkv, d_out = _problem(2, seq_len)
    got = _attend(Slices.batch([Slices.of(x) for x in written]), qkv, d_out)
    _check(got, qkv, d_out, torch.stack([counts(x, seq_len) > 0 for x in written]))


@pytest.mark.parametrize("name, choosing", [("random", False), ("strips", False), ("strips", True)])
def test_kernels_equal_their_twin_on_some_blocks(name, choosing):
    """The blocks of one rank and the chunk of another; also where each query has chosen chunks of keys besides."""
    q_blocks, k_blocks = torch.tensor([3, 1], device=DEVICE), torch.tensor([0, 2, 3], device=DEVICE)
    index = DenseIndex(2, S, BLOCK, torch.empty(1, 2, 0, dtype=torch.int32, device=DEVICE))
    tiles = block_tiles(
        Slices.of(WRITTEN[name]).rows(S, DEVICE), index, q_blocks, k_blocks, 1, True
    )
    (q, k, v), d_out = _problem(1)
    q, d_out, k, v = (
        q[:, :, : 2 * BLOCK],
        d_out[:, :, : 2 * BLOCK],
        k[:, :, : 3 * BLOCK],
        v[:, :, : 3 * BLOCK],
    )
    if choosing:
        words = torch.randint(
            8, (1, 2, len(tiles.q_positions), 1), generator=torch.Generator().manual_seed(4)
        )
        tiles = tiles._replace(
            chosen=ChosenChunks(words.int().to(DEVICE), torch.full_like(tiles.start, 3), BLOCK + 9)
        )
    pieces = [Piece(k, v, tiles)]
    out, lse = triton.forward(q, pieces, None, 0.2, torch.float32)
    queries = base.Queries(q, d_out, out, lse)
    got_dq, [d_kv] = triton.backward(queries, pieces, None, 0.2, torch.float32)
    want, want_lse, *wanted = attend_pieces(q, d_out, pieces, 0.2)
    assert want.any() and torch.equal(lse.isneginf(), want_lse.isneginf())
    for a, b in zip((out, lse, got_dq, *d_kv), (want, want_lse, *wanted), strict=True):
        assert relative_error(a.nan_to_num(neginf=0), b.nan_to_num(neginf=0)) < TOLERANCE
