"""attend_cached(): one query a sequence, against attention over all keys at once in float64."""

import pytest
import torch
from torch import Tensor

from tests.distributed import run_processes
from tests.reference import DEVICE, attention_with_sinks, dense_attention
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.decode import Cached, attend_cached

KEYS = 50
ONE_RANK = ContextParallel(None, "contiguous", "local")


def _inputs(dtype: torch.dtype, device: str = DEVICE) -> tuple[Tensor, Cached]:
    """q [2, 6, 1, 16] and keys of 3 heads; the second sequence sees some of them."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 1, 16, generator=generator)
    keys, values = torch.randn(2, 2, 3, KEYS, 16, generator=generator)
    seen = torch.rand(2, KEYS, generator=generator) < 0.4
    seen[0] = True
    tensors = [tensor.to(device, dtype) for tensor in (q, keys, values)]
    return tensors[0], Cached(tensors[1], tensors[2], seen.to(device))


def _expected(
    q: Tensor, cached: Cached, scale: float = 0.25, sinks: Tensor | None = None
) -> Tensor:
    qkv = [x.double() for x in (q, cached.keys, cached.values)]
    seen = cached.seen[:, None, None]
    if sinks is None:
        return dense_attention(*qkv, seen, scale)[0]
    return attention_with_sinks(*qkv, sinks.double(), seen, scale)[0]


def _parts(cached: Cached, edges: list[int]) -> list[Cached]:
    parts = []
    for begin, end in zip([0, *edges], [*edges, KEYS]):
        keys = cached.keys[:, :, begin:end]
        parts.append(Cached(keys, cached.values[:, :, begin:end], cached.seen[:, begin:end]))
    return parts


@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
)
def test_keys_in_parts(dtype, tolerance):
    q, cached = _inputs(dtype)
    sinks = torch.tensor([0.5, -torch.inf, 3.0, 0.0, -2.0, 1.0], device=DEVICE, dtype=dtype)
    # A part without keys, and one of which nothing is seen.
    blind = cached._replace(seen=torch.zeros_like(cached.seen))
    parts = [blind, *_parts(cached, [13, 13, 30])]
    out = attend_cached(q, parts, ONE_RANK)
    assert out.dtype == dtype and out.shape == q.shape
    torch.testing.assert_close(out.double(), _expected(q, cached), atol=tolerance, rtol=tolerance)
    out = attend_cached(q, parts, ONE_RANK, scale=0.7, sinks=sinks)
    expected = _expected(q, cached, 0.7, sinks)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_autocast_changes_nothing():
    q, cached = _inputs(torch.float32)
    want = attend_cached(q, [cached], ONE_RANK)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(attend_cached(q, [cached], ONE_RANK), want)


def test_nothing_is_seen():
    """The output is zero, as from attend(), and has no NaN."""
    q, cached = _inputs(torch.float32)
    blind = cached._replace(seen=torch.zeros_like(cached.seen))
    for parts in ([], [blind]):
        assert (attend_cached(q, parts, ONE_RANK) == 0).all()


def _over_ranks() -> None:
    rank = torch.distributed.get_rank()
    mesh = torch.distributed.init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh)
    q, cached = _inputs(torch.float64, "cpu")
    sinks = torch.linspace(-1, 2, 6, dtype=torch.float64)
    # The second rank holds nothing.
    held = _parts(cached, [17, 17])
    out = attend_cached(q, [held[rank]] if rank != 1 else [], cp, sinks=sinks)
    torch.testing.assert_close(out, _expected(q, cached, sinks=sinks), atol=1e-12, rtol=0)
    # The same bits on all ranks: the next layer must go on from one value.
    assert (cp.all_gather(out) == out).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="gloo ranks on the CPU")
def test_keys_of_several_ranks():
    run_processes(3, _over_ranks)
