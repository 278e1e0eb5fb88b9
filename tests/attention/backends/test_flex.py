"""The flex backend against the eager one. Without a GPU the ops run as plain PyTorch, uncompiled; see `compiled`."""

import pytest
import torch
from torch import Tensor

from tests.reference import relative_error
from titan_sparse.attention.backends import BACKENDS, flash
from titan_sparse.attention.backends import flex as module
from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.tiles.blocks import block_tiles, vertical_tiles
from titan_sparse.kernels.bits import pack
from titan_sparse.kernels.block_sparse import Piece, Tiles

eager = BACKENDS["eager"]
flex = BACKENDS["flex"]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Chosen(BlockIndex):
    """A random part of the block pairs, and random verticals."""

    def __init__(
        self, batch: int, heads: int, seq_len: int, block_size: int, verticals: int, device: str
    ):
        g = torch.Generator().manual_seed(heads + seq_len)
        capacity = -(-verticals // block_size) * block_size
        order = torch.rand(batch, heads, seq_len, generator=g).argsort(-1)
        picked = order[..., :verticals].sort(-1).values
        picked = torch.nn.functional.pad(picked, (0, capacity - verticals), value=seq_len).int()
        super().__init__(heads, seq_len, block_size, picked.to(device))
        blocks = seq_len // block_size
        self.pairs = (torch.rand(batch, heads, blocks, blocks, generator=g) < 0.4).to(device)

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        # [B, Hq, nq, nk]
        chosen = self.pairs[:, :, q_blocks][..., k_blocks]
        is_own = q_blocks[:, None] == k_blocks
        return chosen | is_own


def _ragged(seq_len: int) -> list[Mask]:
    """Masks with the same shapes; the documents leave padding, whole blocks of it in one sequence."""
    unit = seq_len // 16
    lengths = [
        [5 * unit + 3, 9, unit - 1, 4 * unit],
        [1, 2 * unit, 8 * unit + 5, 3 * unit, unit // 2],
    ]
    documents = Documents(lengths)
    return [Causal(), documents, documents & SlidingWindow(unit + 5)]


def _pieces(mask: Mask, index: Chosen) -> list[Tiles]:
    """A rank's tiles against another rank's chunk, and against the verticals."""
    device = index.verticals.device
    ranges = mask.rows(index.seq_len, device)
    numbers = torch.arange(index.seq_len // index.block_size, device=device)
    k_blocks = numbers[0::2]
    q_blocks = numbers[1::2]
    blocks = block_tiles(ranges, index, q_blocks, k_blocks, len(index.verticals), True)
    return [blocks, vertical_tiles(ranges, index, q_blocks, True)]


def _inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    verticals: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """q and d_out of half a sequence, and k and v of the other half and of the verticals."""
    g = torch.Generator().manual_seed(head_dim)

    def draw(number_of_heads: int, tokens: int) -> Tensor:
        shape = (batch, number_of_heads, tokens, head_dim)
        return torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype)

    kv = [
        (draw(kv_heads, seq_len // 2), draw(kv_heads, seq_len // 2)),
        (draw(heads, verticals), draw(heads, verticals)),
    ]
    return draw(heads, seq_len // 2), draw(heads, seq_len // 2), kv


def _flat(gradients: tuple[Tensor, list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
    """dq, and dk and dv of each piece, from what backward() returns."""
    dq, d_pieces = gradients
    return [dq, *(x for d_kv in d_pieces for x in d_kv)]


def _check_piece(
    tiles: Tiles,
    q: Tensor,
    d_out: Tensor,
    kv: tuple[Tensor, Tensor],
    whole: tuple[Tensor, Tensor],
    tolerance: float,
) -> None:
    """Forward, and backward with the out and lse of all pieces, against the eager backend."""
    scale = q.shape[-1] ** -0.5
    pieces = [Piece(*kv, tiles)]
    out, lse = flex.forward(q, pieces, None, scale)
    want_out, want_lse = eager.forward(q, pieces, None, scale)
    assert out.dtype == q.dtype
    assert lse.shape == want_lse.shape
    is_blind = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, is_blind), "rows that see nothing"
    assert (out[is_blind] == 0).all(), "rows that see nothing"
    assert relative_error(out, want_out) <= tolerance, "out"
    assert (lse - want_lse)[~is_blind].abs().max() <= 10 * tolerance * scale, "lse"

    whole_out, whole_lse = whole
    queries = Queries(q, d_out, whole_out.to(q.dtype), whole_lse)
    got = _flat(flex.backward(queries, pieces, None, scale))
    want = _flat(eager.backward(queries, pieces, None, scale))
    # Keys whose dv is 0 are seen by nothing.
    is_unseen = (want[2] == 0).all(-1)
    names = ("dq", "dk", "dv")
    is_nothing = (is_blind, is_unseen, is_unseen)
    for name, a, b, nothing in zip(names, got, want, is_nothing, strict=True):
        assert a.shape == b.shape, name
        assert a.dtype == q.dtype, name
        assert a.isfinite().all(), name
        error = relative_error(a, b)
        assert error <= tolerance, (name, error)
        assert (a[nothing] == 0).all(), f"{name} of what sees or is seen by nothing"


def _check(
    tiles: list[Tiles], q: Tensor, d_out: Tensor, kv: list[tuple[Tensor, Tensor]], tolerance: float
) -> None:
    scale = q.shape[-1] ** -0.5
    results = []
    for piece_tiles, (k, v) in zip(tiles, kv):
        results.append(eager.forward(q, [Piece(k, v, piece_tiles)], None, scale))
    (out_0, lse_0), (out_1, lse_1) = results
    lse = torch.logaddexp(lse_0, lse_1)
    finite_lse = lse.clamp(min=-1e30)
    share_0 = (lse_0 - finite_lse).exp()[..., None]
    share_1 = (lse_1 - finite_lse).exp()[..., None]
    whole = (out_0 * share_0 + out_1 * share_1, lse)
    for piece_tiles, piece_kv in zip(tiles, kv):
        _check_piece(piece_tiles, q, d_out, piece_kv, whole, tolerance)


def _unlisted(tiles: Tiles) -> Tensor:
    """Bits of [B, Hq, nq, Sk]: keys outside the listed tiles, which the uncompiled ops ignore."""
    met = torch.zeros(*tiles.by_query.full.shape[:3], tiles.by_key.full.shape[2], dtype=torch.bool)
    for count, table in zip(tiles.by_query[::2], tiles.by_query[1::2]):
        real = torch.arange(table.shape[-1]) < count[..., None]
        for place in real.nonzero().tolist():
            met[(*place[:3], table[tuple(place)])] = True
    return pack(~met.repeat_interleave(tiles.block_size, 3))


@pytest.fixture
def compiled(monkeypatch) -> list:
    """Run the traced ops uncompiled. The list grows by one for each op that would have been compiled."""
    graphs = []
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_compile", lambda graph, operands: graphs.append(graph) or graph)
    return graphs


@pytest.mark.parametrize(
    "heads, kv_heads, verticals, seq_len", [(4, 2, 37, 160), (3, 3, 16, 160), (2, 1, 20, 512)]
)
def test_pieces_uncompiled(compiled, heads, kv_heads, verticals, seq_len):
    torch.set_num_threads(1)
    size = 16
    index = Chosen(2, heads, seq_len, size, verticals, "cpu")
    q, d_out, kv = _inputs(
        2, heads, kv_heads, seq_len, index.verticals.shape[-1], 16, torch.float64, "cpu"
    )
    for mask in _ragged(seq_len):
        blocks, vertical_piece = _pieces(mask, index)
        unlisted = [_unlisted(x) for x in (blocks, vertical_piece)]
        blocks = blocks._replace(covered=unlisted[0])
        vertical_piece = vertical_piece._replace(covered=vertical_piece.covered | unlisted[1])
        _check([blocks, vertical_piece], q, d_out, kv, 1e-6)
    assert len(compiled) == 4, "two pieces forward and backward compile once, whatever the mask"


SHAPES = [
    ("FLASH", 16, 2, 64, 2048),
    ("FLASH", 16, 16, 64, 2048),
    ("FLASH", 32, 8, 96, 2048),
    ("FLASH", 32, 8, 128, 2048),
    # FlashAttention-4 had errors in its head_dim 64 gradients that grew with the length.
    *(("FLASH", 16, 2, dim, 16384) for dim in (64, 96, 128)),
    ("TRITON", 16, 2, 64, 2048),
    ("TRITON", 16, 16, 128, 2048),
]
"""Kernel, query heads, KV heads, head_dim and tokens."""


@pytest.fixture(params=["FLASH", "TRITON"])
def kernel(request, monkeypatch) -> str:
    """Run with each kind of kernel that this GPU has."""
    missing = flash.missing()
    if request.param == "FLASH" and missing:
        pytest.skip(missing)
    monkeypatch.setattr(module, "_kernel", lambda q: request.param)
    monkeypatch.setattr(module, "_compiled", {})
    return request.param


def _check_on_gpu(
    heads: int, kv_heads: int, head_dim: int, seq_len: int, dtype: torch.dtype, tolerance: float
) -> None:
    index = Chosen(2, heads, seq_len, 128, seq_len // 20 + 3, "cuda")
    q, d_out, kv = _inputs(
        2, heads, kv_heads, seq_len, index.verticals.shape[-1], head_dim, dtype, "cuda"
    )
    for mask in _ragged(seq_len):
        _check(_pieces(mask, index), q, d_out, kv, tolerance)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel, heads, kv_heads, head_dim, seq_len", SHAPES, indirect=["kernel"])
def test_pieces(kernel, heads, kv_heads, head_dim, seq_len):
    _check_on_gpu(heads, kv_heads, head_dim, seq_len, torch.bfloat16, 5e-3)
    assert len(module._compiled) == 4, (
        "two pieces forward and backward compile once, whatever the mask"
    )
