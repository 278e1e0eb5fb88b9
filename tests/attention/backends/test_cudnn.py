"""The cudnn backend on the CPU: torch's two ops are there by their twins, in fp64."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.attention import dense_twin
from tests.attention.problems import assert_equal, problem
from tests.reference import by_token
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow

cudnn = BACKENDS["cudnn"]
eager = BACKENDS["eager"]

SCALE = 0.3
CAUSAL = DenseShape(causal=True)
FULL = DenseShape(causal=False)


@contextmanager
def on_the_cpu() -> Iterator[list[tuple]]:
    """torch's two ops by the dense twin, with their names and schemas. Yields what they were called
    with: (name, queries, keys, is_causal)."""
    calls = []

    # The dispatcher leaves out arguments that have their default.
    def forward(
        q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
    ):
        _check_operands(q, k, v, is_causal)
        assert attn_bias is None and compute_log_sumexp and dropout_p == 0
        calls.append(("forward", q.shape[2], k.shape[2], is_causal))
        out, lse = dense_twin.dense_forward(q, k, v, DenseShape(is_causal), scale)
        seed = torch.zeros((), dtype=torch.int64)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], seed, seed, None

    def backward(
        d_out, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p,
        is_causal, *, scale=None,
    ):  # fmt: skip
        _check_operands(q, k, v, is_causal)
        batch, heads, q_len, _ = q.shape
        assert lse.shape == (batch, heads, q_len, 1) and lse.is_contiguous()
        assert (max_q, max_k, dropout_p) == (q_len, k.shape[2], 0)
        assert bias is None and cum_q is None and cum_k is None
        # A plan is found by the layout of q, k and v alone.
        assert q.stride()[1:] == out.stride()[1:] == d_out.stride()[1:]
        # No other caller has these strides.
        assert batch == 1 and q.stride(0) == 2 * heads * q.stride(1)
        calls.append(("backward", q_len, k.shape[2], is_causal))
        queries = Queries(q, d_out, out, lse[..., 0])
        return dense_twin.dense_backward(queries, k, v, DenseShape(is_causal), scale)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
        yield calls


def _check_operands(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    """What cuDNN requires. It counts the positions of a causal shape from the
    first query and key."""
    for x in (q, k, v):
        assert x.ndim == 4 and x.stride(-1) == 1
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    assert not is_causal or q.shape[2] == k.shape[2]


@pytest.fixture
def calls(monkeypatch):
    """Record the calls to cuDNN. Its ops run here, and eager takes the place
    of the Triton kernels."""
    with on_the_cpu() as calls:
        monkeypatch.setattr(cudnn, "refusal", lambda *case: None)
        monkeypatch.setattr(cudnn, "forward", eager.forward)
        monkeypatch.setattr(cudnn, "backward", eager.backward)
        yield calls


def _problem(q_len: int, k_len: int, heads: tuple[int, int] = (6, 2)) -> tuple[list[Tensor], ...]:
    """[q, k, v] and [d_out] of two sequences, in fp64."""
    g = torch.Generator().manual_seed(q_len)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, 8, generator=g, dtype=torch.float64)

    qkv = [normal(heads[0], q_len), normal(heads[1], k_len), normal(heads[1], k_len)]
    return qkv, normal(heads[0], q_len)


def _dense(backend, qkv: list[Tensor], d_out: Tensor, shape: DenseShape) -> list[Tensor]:
    q, k, v = qkv
    out, lse = backend.dense_forward(q, k, v, shape, SCALE)
    grads = backend.dense_backward(Queries(q, d_out, out, lse), k, v, shape, SCALE)
    return [out, lse, *grads]


assert_close = functools.partial(torch.testing.assert_close, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (5, 1)], ids=str)
@pytest.mark.parametrize(
    "shape, q_len, k_len, pieces",
    [
        (CAUSAL, 33, 33, 1),
        (CAUSAL, 1, 1, 1),
        (FULL, 20, 7, 1),
        (FULL, 7, 20, 1),
        # The last queries of more keys: a rectangle and a square.
        (CAUSAL, 9, 30, 2),
    ],
)
def test_squares_and_rectangles(calls, shape, q_len, k_len, pieces, heads):
    qkv, d_out = _problem(q_len, k_len, heads)
    assert_close(_dense(cudnn, qkv, d_out, shape), _dense(dense_twin, qkv, d_out, shape))
    assert len(calls) == 2 * pieces


@pytest.mark.parametrize("layout", ["q", "all", "part"])
def test_layouts(calls, layout):
    """out and d_out come as [B, H, S, D]. q, k and v have the model's layout or are
    slices of a larger tensor."""
    qkv, d_out = _problem(16, 16)
    want = _dense(dense_twin, qkv, d_out, CAUSAL)
    q, k, v = qkv
    if layout in ("q", "all"):
        q = by_token(q)
    if layout == "all":
        k, v = by_token(k), by_token(v)
    if layout == "part":
        q, k, v = (torch.cat([x, x], dim=2)[:, :, 16:] for x in qkv)
    assert_close(_dense(cudnn, [q, k, v], d_out, CAUSAL), want)


@pytest.mark.parametrize("nothing", [torch.inf, -torch.inf])
def test_rows_that_see_nothing(calls, nothing):
    """Their lse may be plus or minus infinity. They contribute no gradient and no NaN."""
    (q, k, v), d_out = _problem(12, 12)
    out, lse, *_ = _dense(dense_twin, [q, k, v], d_out, CAUSAL)
    hidden_lse = lse.index_fill(2, torch.arange(8, 12), nothing)
    got = cudnn.dense_backward(Queries(q, d_out, out, hidden_lse), k, v, CAUSAL, SCALE)
    seen = d_out.index_fill(2, torch.arange(8, 12), 0)
    want = dense_twin.dense_backward(Queries(q, seen, out, lse), k, v, CAUSAL, SCALE)
    assert_close(got, want)
    assert (got[0][:, :, 8:] == 0).all()


MASKS = {
    # name: (mask, tokens, tokens of the squares that cuDNN computes; 0 for tiles)
    "causal": (Causal(), 96, 96),
    "one token": (Causal(), 1, 16),
    "ragged": (Causal(), 77, 80),
    "padded": (Causal(valid=(96, 61)), 96, 96),
    "window": (Causal() & SlidingWindow(20), 96, 0),
    "documents": (Documents([50, 1, 40]), 96, 0),
    "a window that cuts nothing": (Causal() & SlidingWindow(200), 77, 80),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name, calls):
    """Plain causal attention of any length is one square. All other masks are computed by tiles."""
    mask, tokens, square = MASKS[name]
    p = problem((6, 2), mask, seq_len=tokens)
    got = p.results(backend="cudnn")
    computed = set(calls)
    assert_equal(got, p.results(backend="eager"), tolerance=1e-11)
    expected = {(way, square, square, True) for way in ("forward", "backward")}
    assert computed == (expected if square else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_ops_take_what_they_are_given(dtype):
    """Through torch's own schemas and shape functions, which this version brings."""
    q = torch.empty(2, 6, 32, 64, dtype=dtype, device="meta")
    kv = torch.empty(2, 2, 48, 64, dtype=dtype, device="meta")
    out, lse = cudnn.dense_forward(q, kv, kv, FULL, SCALE)
    assert out.shape == q.shape and out.dtype == dtype
    assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    grads = cudnn.dense_backward(Queries(q, q, out, lse), kv, kv, FULL, SCALE)
    assert [x.shape for x in grads] == [q.shape, kv.shape, kv.shape]
    assert {x.dtype for x in grads} == {dtype}
