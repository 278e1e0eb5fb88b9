"""The flex backend against the eager one. The ops run as plain PyTorch, uncompiled; see `compiled`.

On a GPU: tests/gpu/test_gradient_matrix.py.
"""

import pytest
import torch
from torch import Tensor

from tests.reference import relative_error
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends import flex as module
from titan_sparse.attention.backends.base import Partial, Queries, Sum
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.tiles import block_tiles, vertical_tiles
from titan_sparse.kernels.block_sparse import Piece, Tiles
from titan_sparse.kernels.compact import pack

eager = BACKENDS["eager"]
flex = BACKENDS["flex"]
SCALE = 0.25


class Chosen(BlockIndex):
    """A random part of the block pairs, and random verticals."""

    def __init__(self, batch: int, heads: int, seq_len: int, block_size: int, verticals: int):
        g = torch.Generator().manual_seed(heads + seq_len)
        capacity = -(-verticals // block_size) * block_size
        order = torch.rand(batch, heads, seq_len, generator=g).argsort(-1)
        picked = order[..., :verticals].sort(-1).values
        picked = torch.nn.functional.pad(picked, (0, capacity - verticals), value=seq_len).int()
        super().__init__(seq_len, block_size, picked)
        blocks = seq_len // block_size
        self.pairs = torch.rand(batch, heads, blocks, blocks, generator=g) < 0.4

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        # [B, Hq, nq, nk]
        chosen = self.pairs[:, :, q_blocks][..., k_blocks]
        is_own = q_blocks[:, None] == k_blocks
        return chosen | is_own

    def covers(self, q_blocks: Tensor, verticals: Tensor) -> Tensor:
        # [B, Hq, nq, blocks and one for no vertical] and [B, Hq, nq, C]
        every = torch.arange(self.pairs.shape[-1])
        computed = torch.nn.functional.pad(self.selects(q_blocks, every), (0, 1))
        block = (verticals // self.block_size).long()[:, :, None]
        return computed.gather(3, block.expand(-1, -1, len(q_blocks), -1))


def _ragged(seq_len: int) -> list[Mask]:
    """Masks with the same shapes; the documents leave padding, whole blocks of it in one sequence."""
    unit = seq_len // 16
    lengths = [
        [5 * unit + 3, 9, unit - 1, 4 * unit],
        [1, 2 * unit, 8 * unit + 5, 3 * unit, unit // 2],
    ]
    documents = Documents(lengths)
    return [Causal(), documents, documents & SlidingWindow(unit + 5)]


def _tiles(mask: Mask, index: Chosen) -> list[Tiles]:
    """A rank's tiles against another rank's chunk, and against the verticals."""
    ranges = mask.rows(index.seq_len)
    numbers = torch.arange(index.seq_len // index.block_size)
    k_blocks = numbers[0::2]
    q_blocks = numbers[1::2]
    blocks = block_tiles(ranges, index, q_blocks, k_blocks, len(index.verticals), True)
    return [blocks, vertical_tiles(ranges, index, q_blocks, True)]


def _check_piece(piece: Piece, q: Tensor, d_out: Tensor, whole: Partial) -> None:
    """Forward, and backward with the out and lse of all pieces, against the eager backend."""
    out, lse = flex.forward(q, [piece], SCALE, Sum(q.dtype))
    want_out, want_lse = eager.forward(q, [piece], SCALE, Sum(q.dtype))
    assert out.dtype == q.dtype
    is_blind = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, is_blind)
    assert (out[is_blind] == 0).all()
    assert relative_error(out, want_out) <= 1e-6
    assert (lse - want_lse)[~is_blind].abs().max() <= 1e-5 * SCALE

    queries = Queries(q, d_out, *whole)
    dq, [d_kv] = flex.backward(queries, [piece], SCALE, Sum(q.dtype))
    want_dq, [want_d_kv] = eager.backward(queries, [piece], SCALE, Sum(q.dtype))
    # Keys whose dv is 0 are seen by nothing.
    is_unseen = (want_d_kv[1] == 0).all(-1)
    got, want = (dq, *d_kv), (want_dq, *want_d_kv)
    for a, b, nothing in zip(got, want, (is_blind, is_unseen, is_unseen), strict=True):
        assert a.shape == b.shape and a.dtype == q.dtype
        assert relative_error(a, b) <= 1e-6
        assert (a[nothing] == 0).all()


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


@pytest.mark.parametrize("heads, kv_heads, verticals, seq_len", [(4, 2, 37, 160), (3, 3, 16, 160)])
def test_pieces_uncompiled(compiled, heads, kv_heads, verticals, seq_len):
    torch.set_num_threads(1)
    index = Chosen(2, heads, seq_len, 16, verticals)
    g = torch.Generator().manual_seed(16)

    def draw(number_of_heads: int, tokens: int) -> Tensor:
        return torch.randn(2, number_of_heads, tokens, 16, generator=g, dtype=torch.float64)

    half, columns = seq_len // 2, index.verticals.shape[-1]
    q, d_out = draw(heads, half), draw(heads, half)
    kv = [
        (draw(kv_heads, half), draw(kv_heads, half)),
        (draw(heads, columns), draw(heads, columns)),
    ]
    for mask in _ragged(seq_len):
        pieces = []
        for tiles, (k, v) in zip(_tiles(mask, index), kv, strict=True):
            covered = _unlisted(tiles)
            if tiles.covered is not None:
                covered |= tiles.covered
            pieces.append(Piece(k, v, tiles._replace(covered=covered)))
        whole = eager.forward(q, pieces, SCALE, Sum(q.dtype))
        for piece in pieces:
            _check_piece(piece, q, d_out, whole)
    assert len(compiled) == 4, "two pieces forward and backward compile once, whatever the mask"
