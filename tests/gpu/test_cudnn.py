"""The cudnn backend on a GPU: pieces by its own functions, and what surrounds it.

attend() with it: test_gradient_matrix.py. Several GPUs: test_context_parallel.py.
"""

import functools

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.gpu.errors import (
    LIMIT,
    causal_pairs,
    check,
    check_lse,
    errors,
    exact,
    flash_errors,
    problem,
    with_gradients,
)
from tests.reference import by_token
from titan_sparse.attention import attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.backends.cudnn import missing

_REASON = missing()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
cudnn = BACKENDS["cudnn"]
CAUSAL = DenseShape(causal=True)


def _of_piece(qkv: list[Tensor], d_out: Tensor, shape: DenseShape) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv] and lse by the backend's own functions."""
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5
    out, lse = cudnn.dense_forward(q, k, v, shape, scale)
    grads = cudnn.dense_backward(Queries(q, d_out, out, lse), k, v, shape, scale)
    return [out, *grads], lse


PIECES = {
    # name: (queries, keys, causal)
    "square": (1024, 1024, True),
    "ragged square": (1001, 1001, True),
    "short square": (77, 77, True),
    "more keys": (640, 1664, False),
    "more queries": (1664, 640, False),
    "ragged rectangle": (333, 1001, False),
    "few keys": (1024, 64, False),
    "the last queries": (300, 1001, True),
}


@pytest.mark.parametrize(
    "name, dim",
    [
        *((name, 128) for name in PIECES),
        *(("the last queries", dim) for dim in (64, 96, 256)),
        *(("ragged rectangle", dim) for dim in (64, 96, 256)),
    ],
)
def test_pieces(name, dim):
    q_len, k_len, causal = PIECES[name]
    qkv, d_out = problem((6, 2), dim, q_len, k_len, batch=2)
    got, lse = _of_piece(qkv, d_out, DenseShape(causal=causal))
    seen = causal_pairs(*qkv[:2])
    want, want_lse = exact(qkv, d_out, seen if causal else torch.ones_like(seen))
    check_lse(lse, want_lse)
    check(got, want, flash_errors(qkv, d_out))


@pytest.mark.parametrize("nothing", [torch.inf, -torch.inf])
def test_rows_that_see_nothing(nothing):
    """No NaN and no gradient from rows whose lse is infinite, though their d_out is not 0."""
    (q, k, v), d_out = problem((4, 2), 128, 512)
    scale = 128**-0.5
    out, lse = cudnn.dense_forward(q, k, v, CAUSAL, scale)
    lse[:, :, 400:] = nothing
    got = cudnn.dense_backward(Queries(q, d_out, out, lse), k, v, CAUSAL, scale)
    seen = causal_pairs(q, k)
    seen[:, :, 400:] = False
    seen[:, :, 400:, 0] = True  # something to see, of which d_out = 0 makes nothing
    d_out = d_out.index_fill(2, torch.arange(400, 512, device="cuda"), 0)
    want, _ = exact([q, k, v], d_out, seen)
    assert all(a.isfinite().all() for a in got)
    assert max(errors(got, want[1:])) < LIMIT
    assert (got[0][:, :, 400:] == 0).all()


@pytest.mark.parametrize("which", ["q", "k and v", "all"])
def test_layouts(which):
    """q, k and v with [B, S, H, D] in memory, as projections give them."""
    qkv, d_out = problem((6, 2), 128, 1024, batch=2)
    want, _ = exact(qkv, d_out, causal_pairs(*qkv[:2]))
    bounds = flash_errors(qkv, d_out)
    laid_out = [by_token(x) for x in qkv]
    if which == "q":
        laid_out[1:] = qkv[1:]
    elif which == "k and v":
        laid_out[0] = qkv[0]
    got, _ = _of_piece(laid_out, d_out, CAUSAL)
    check(got, want, bounds)


@pytest.mark.parametrize("batch", [1, 2])
def test_after_torchs_own_calls(batch):
    """torch caches plans by the layout of q, k and v: here it has one for
    another layout of d_out."""
    qkv, d_out = problem((6, 2), 128, 1152, batch=batch)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        run = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        with_gradients(run, qkv, by_token(d_out))
    got = with_gradients(functools.partial(attend, backend="cudnn"), qkv, d_out)
    want, _ = exact(qkv, d_out, causal_pairs(*qkv[:2]))
    check(got, want, flash_errors(qkv, d_out))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_compiled(share):
    """With a part of the sequence computed again: its later queries meet a
    rectangle and a square."""
    qkv, d_out = problem((8, 2), 128, 2048)
    run = functools.partial(attend, backend="cudnn", recomputed=share)
    got = with_gradients(torch.compile(run, fullgraph=True), qkv, d_out)
    want, _ = exact(qkv, d_out, causal_pairs(*qkv[:2]))
    check(got, want, flash_errors(qkv, d_out))
