"""The flex backend against the eager one. The ops run as plain PyTorch, uncompiled; see `compiled`.

On a GPU: tests/gpu/test_gradient_matrix.py.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.test_block_sparse import Case
from tests.reference import relative_error
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends import flex as module
from titan_sparse.attention.backends.base import Partial, Queries, Sum
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.kernels.block_sparse import Piece, Tiles
from titan_sparse.kernels.compact import pack

eager = BACKENDS["eager"]
flex = BACKENDS["flex"]
SCALE = 0.25


LENGTHS = [[53, 9, 9, 40], [1, 20, 85, 30, 5]]
"""They leave padding, whole blocks of it in one sequence."""
MASKS = [Causal(), Documents(LENGTHS), Documents(LENGTHS) & SlidingWindow(15)]
"""With the same shapes."""


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


@pytest.mark.parametrize("heads, verticals", [((4, 2), 3), ((3, 3), 1)])
def test_pieces_uncompiled(compiled, heads, verticals):
    for mask in MASKS:
        case = Case(mask, heads, 16, 16, 10, 2, verticals, dtype=torch.float64, device="cpu")
        pieces = []
        for k, v, tiles in case.pieces():
            covered = _unlisted(tiles)
            if tiles.covered is not None:
                covered |= tiles.covered
            pieces.append(Piece(k, v, tiles._replace(covered=covered)))
        whole = eager.forward(case.q, pieces, SCALE, Sum(torch.float64))
        for piece in pieces:
            _check_piece(piece, case.q, case.d_out, whole)
    assert len(compiled) == 4, "two pieces forward and backward compile once, whatever the mask"
