"""Attention over 2, 3 and 4 processes against one: every layout, schedule, mask and pattern, forward and backward."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed import on_one_rank, run_processes
from tests.fake_step import fake_world
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.attention.schedules import rectangles

eager = BACKENDS["eager"]

BLOCK = 16
SEQ_LEN = 2 * 3 * 4 * BLOCK
MASKS = [
    Causal(),
    Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 70)),
    Documents([[201, 7, 1, 130], [90, 90, 90, 90]]) & SlidingWindow(100),
    Documents([[SEQ_LEN], [3, 200, 60, 17, 40]]),
]
PATTERNS = [
    Dense(),
    VerticalSlash(recall=0.8, sinks=3, local_slashes=1, max_verticals=60, dense_below=48),
]


def check_everything(
    axes: tuple[int, ...], masks=MASKS, patterns=PATTERNS, heads=(5, 1), every: int = 1
) -> None:
    """Compare all layouts and schedules of a cp mesh with one rank. Collective over its processes.

    every: with 2, every second combination of mask, pattern and context. Any two of the three still
    occur together.
    """
    names = ("cp_inter", "cp_intra") if len(axes) == 2 else ("cp",)
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=names)
    schedules = ("all_gather", "ring") + (("double_ring",) if len(axes) == 2 else ())
    full = structured_qkv(2, *heads, SEQ_LEN, 8, seed=3)
    d_out = torch.randn(
        full[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    contexts = [
        ContextParallel(mesh, layout, schedule, BLOCK)
        for layout, schedule in itertools.product(("contiguous", "zigzag", "striped"), schedules)
    ]
    contexts += [
        ContextParallel(mesh, layout, schedules[-1], BLOCK, "q") for layout in ("zigzag", "striped")
    ]
    for (i, mask), (j, pattern) in itertools.product(enumerate(masks), enumerate(patterns)):
        wanted = on_one_rank(_single, full, d_out, mask, pattern)
        for cp in contexts[(i + j) % every :: every]:
            for name, got, want in zip(
                ("out", "lse", "dq", "dk", "dv", "density", "recall"),
                _parallel(cp, full, d_out, mask, pattern),
                wanted,
                strict=True,
            ):
                gap = (got - want).abs().nan_to_num(0).max().item()
                assert torch.equal(got.isfinite(), want.isfinite()), (name, cp.key, pattern.key)
                assert gap < 1e-9, (
                    f"{name} off by {gap} with {cp.key}, {pattern.key}, rank {dist.get_rank()}"
                )


def _check_rectangles(axes: tuple[int, ...]) -> None:
    """Dense causal attention by a backend with a kernel for it, without tiles where the layout allows."""
    monkeypatch = pytest.MonkeyPatch()
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_inter", "cp_intra"))
    full = structured_qkv(2, 6, 2, SEQ_LEN, 8, seed=5)
    d_out = torch.randn(
        full[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6)
    )
    wanted = on_one_rank(_single, full, d_out, Causal(), Dense())
    for layout, schedule in itertools.product(("contiguous", "zigzag"), ("ring", "double_ring")):
        cp = ContextParallel(mesh, layout, schedule, BLOCK)
        used = []

        def noted(*args, run=rectangles.backward, used=used):
            used.append(args[1])
            return run(*args)

        monkeypatch.setattr(eager, "serves_dense", lambda q, shape: True)
        monkeypatch.setattr(rectangles, "backward", noted)
        got = _parallel(cp, full, d_out, Causal(), Dense())
        monkeypatch.undo()
        for name, x, want in zip(("out", "lse", "dq", "dk", "dv"), got, wanted):
            assert (x - want).abs().max() < 1e-9, (name, cp.key)
        computed = cp.size if layout == "zigzag" else cp.rank + 1
        groups_of_kv_heads = 2 if len(cp.windows) > 1 else 1
        assert len(used) == computed * groups_of_kv_heads, cp.key


@pytest.mark.parametrize("axes", [(1, 3), (2, 2)], ids=str)
def test_dense_rectangles(axes):
    run_processes(torch.Size(axes).numel(), _check_rectangles, axes)


def _single(full, d_out, mask, pattern):
    return _everything(full, d_out, mask, pattern, None)


def _parallel(cp, full, d_out, mask, pattern):
    local = [cp.shard(x, 2) for x in full]
    *tensors, density, recall = _everything(local, cp.shard(d_out, 2), mask, pattern, cp)
    return [*(cp.unshard(x, 2) for x in tensors), density, recall]


def _everything(qkv, d_out, mask, pattern, cp) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv, density and recall of one attention call."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    with recording(recall_rows=SEQ_LEN) as seen:
        out, aux = attend(*leaves, mask, pattern, cp, block_size=BLOCK, return_aux=True)
    gradients = torch.autograd.grad(out, leaves, d_out)
    return [out.detach(), aux.lse, *gradients, seen.density(), torch.stack(seen.recall)]


@pytest.mark.parametrize(
    "axes, every",
    [
        ((3,), 2),
        ((2, 2), 2),
        pytest.param((2,), 1, marks=pytest.mark.slow),
        pytest.param((3,), 1, marks=pytest.mark.slow),
        pytest.param((1, 3), 1, marks=pytest.mark.slow),
        pytest.param((2, 2), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parallel_equals_single(axes, every):
    heads = (6, 2) if axes == (2, 2) else (5, 1)
    arguments = (axes, MASKS, PATTERNS, heads, every)
    run_processes(torch.Size(axes).numel(), check_everything, *arguments)


def _check_groups_beside_each_other() -> None:
    """dp x cp: a context-parallel group that does not begin at global rank 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], "striped", "ring", BLOCK)
    full = structured_qkv(1, 2, 2, 4 * BLOCK, 8, seed=dist.get_rank() // 2)
    want = attend(*full, block_size=BLOCK)
    got = cp.unshard(attend(*[cp.shard(x, 2) for x in full], cp=cp), 2)
    assert (got - want).abs().max() < 1e-12


def test_groups_beside_each_other():
    run_processes(4, _check_groups_beside_each_other)


def test_refusals():
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with pytest.raises(ValueError, match="local"):
            ContextParallel(mesh, schedule="local")
        with pytest.raises(ValueError, match="double_ring"):
            ContextParallel(mesh, schedule="double_ring")
        with pytest.raises(ValueError, match="ascending"):
            ContextParallel(DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",)))
        cp = ContextParallel(mesh, block_size=BLOCK)
        with pytest.raises(ValueError, match="whole blocks"):
            attend(*structured_qkv(1, 1, 1, 24, 8), cp=cp)
        with pytest.raises(ValueError, match="multiple of 32"):
            cp.shard(torch.zeros(40), 0)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_shard_and_unshard_are_inverse_on_one_rank(layout):
    cp = ContextParallel(None, layout, "local", 8)
    x = torch.arange(2 * 32).view(2, 32)
    assert torch.equal(cp.unshard(cp.shard(x, 1), 1), x)
