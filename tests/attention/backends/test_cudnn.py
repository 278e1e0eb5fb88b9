"""The cudnn backend on the CPU: torch's two ops are there by their twins (cudnn_twin.py), in fp64."""

import functools
import itertools

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.attention import dense_twin
from tests.attention.backends.cudnn_twin import on_the_cpu
from tests.distributed import run_processes
from tests.reference import gradients, structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow

cudnn = BACKENDS["cudnn"]
eager = BACKENDS["eager"]

SCALE = 0.3
CAUSAL = DenseShape(causal=True)
FULL = DenseShape(causal=False)


@pytest.fixture
def calls(monkeypatch):
    """Record the calls to cuDNN. Its ops run here, and eager takes the place of the Triton kernels."""
    with on_the_cpu() as calls:
        _make_room(monkeypatch)
        yield calls


def _make_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cudnn, "refusal", lambda *case: None)
    patch.setattr(cudnn, "forward", eager.forward)
    patch.setattr(cudnn, "backward", eager.backward)


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


def _assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert a.shape == b.shape, name
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def _by_token(x: Tensor) -> Tensor:
    """The same numbers with [B, S, H, D] in memory, as a model's projections give them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


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
    _assert_close(_dense(cudnn, qkv, d_out, shape), _dense(dense_twin, qkv, d_out, shape))
    assert len(calls) == 2 * pieces


@pytest.mark.parametrize("layout", ["q", "all", "part"])
def test_layouts(calls, layout):
    """out and d_out come as [B, H, S, D]. q, k and v have the model's layout or are slices of a larger tensor."""
    qkv, d_out = _problem(16, 16)
    want = _dense(dense_twin, qkv, d_out, CAUSAL)
    q, k, v = qkv
    if layout in ("q", "all"):
        q = _by_token(q)
    if layout == "all":
        k, v = _by_token(k), _by_token(v)
    if layout == "part":
        q, k, v = (torch.cat([x, x], dim=2)[:, :, 16:] for x in qkv)
    _assert_close(_dense(cudnn, [q, k, v], d_out, CAUSAL), want)


@pytest.mark.parametrize("nothing", [torch.inf, -torch.inf])
def test_rows_that_see_nothing(calls, nothing):
    """Their lse may be plus or minus infinity. They contribute no gradient and no NaN."""
    (q, k, v), d_out = _problem(12, 12)
    out, lse, *_ = _dense(dense_twin, [q, k, v], d_out, CAUSAL)
    hidden_lse = lse.index_fill(2, torch.arange(8, 12), nothing)
    got = cudnn.dense_backward(Queries(q, d_out, out, hidden_lse), k, v, CAUSAL, SCALE)
    seen = d_out.index_fill(2, torch.arange(8, 12), 0)
    want = dense_twin.dense_backward(Queries(q, seen, out, lse), k, v, CAUSAL, SCALE)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)
    assert (got[0][:, :, 8:] == 0).all()


def _everything(backend: str, mask: Mask, qkv: list[Tensor], **options) -> list[Tensor]:
    """out, lse, dq, dk and dv of attend()."""
    d_out = torch.randn(
        qkv[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    run = functools.partial(attend, mask=mask, backend=backend, block_size=16, **options)
    lse = run(*qkv, return_aux=True)[1].lse
    out, grads = gradients(run, d_out, *qkv)
    return [out, lse, *grads]


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
    qkv = list(structured_qkv(2, 6, 2, tokens, 8, seed=1))
    got = _everything("cudnn", mask, qkv)
    computed = set(calls)
    _assert_close(got, _everything("eager", mask, qkv))
    expected = {(way, square, square, True) for way in ("forward", "backward")}
    assert computed == (expected if square else set())


def _check_rings(world: int) -> None:
    qkv = list(structured_qkv(2, 4, 2, 64 * world, 8, seed=5))
    shape = qkv[0].shape
    d_out = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    want, wanted = gradients(functools.partial(attend, backend="eager", block_size=16), d_out, *qkv)
    cases = list(itertools.product(("zigzag", "contiguous"), ("ring", "all_gather"), [(1, world)]))
    cases.append(("zigzag", "double_ring", (world, 1)))
    for layout, schedule, axes in cases:
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_inter", "cp_intra"))
        cp = ContextParallel(mesh, layout, schedule, 16)
        local = [cp.shard(x, 2) for x in qkv]
        with on_the_cpu() as calls, pytest.MonkeyPatch.context() as patch:
            _make_room(patch)
            run = functools.partial(attend, backend="cudnn", cp=cp)
            out, grads = gradients(run, cp.shard(d_out, 2), *local)
        for a, b in zip((out, *grads), (want, *wanted), strict=True):
            error = (cp.unshard(a, 2) - b).abs().max().item()
            assert error < 1e-9, (cp.key, error)
        steps = world if layout == "zigzag" else cp.rank + 1
        # One KV head of two at a time.
        groups = 1 if schedule == "ring" else 2
        assert len(calls) == 2 * steps * groups, (cp.key, calls)
        assert ("forward", 64, 64, True) in calls


def test_rings():
    """Each rank's keys are a square or a rectangle, with rings and with all_gather."""
    run_processes(2, _check_rings, 2)


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
