"""Attention over 3 and 4 processes against one: every layout, schedule, mask and pattern, forward and
backward, with learned sinks and recomputed parts."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.attention.dense_twin import let_eager_serve_dense
from tests.attention.test_attend import sink_logits
from tests.distributed import on_one_rank, run_processes
from tests.fake_step import fake_world
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel import dense
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import Slices, sliding_window
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import Dense, VerticalSlash

eager = BACKENDS["eager"]

SEQ_LEN = 192
MASKS = [
    Causal(),
    Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 35)),
    Documents([[101, 7, 1, 60], [45, 45, 45, 45]]) & SlidingWindow(50),
    Documents([[SEQ_LEN], [3, 100, 30, 17, 20]]),
    sliding_window([101, 70], 30, sinks=5),
]
PATTERNS = [
    Dense(),
    VerticalSlash(recall=0.8, sinks=3, local_slashes=1, max_verticals=30, dense_below=24),
]
NAMES = ("out", "lse", "density", "recall", "dq", "dk", "dv", "dsinks")


def check_everything(
    axes: tuple[int, ...], masks=MASKS, patterns=PATTERNS, heads=(5, 1), every: int = 1
) -> None:
    """Compare all layouts and schedules of a cp mesh with one rank. Collective over its processes.

    every: with 4, every fourth combination of mask, pattern and context.
    """
    names = ("cp_inter", "cp_intra") if len(axes) == 2 else ("cp",)
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=names)
    # Few blocks a rank, as most time goes by tile.
    block = SEQ_LEN // mesh.size() // (4 if mesh.size() < 4 else 2)
    # Of ranks on two axes those schedules that tell the axes apart.
    schedules = ["double_ring", "group_cast"]
    if len(axes) == 1:
        schedules = ["all_gather", "ring", "group_cast"]
    full, d_out = _inputs(heads)
    ring = next(name for name in schedules if "ring" in name)
    cases = list(itertools.product(("contiguous", "zigzag", "striped"), schedules, ["auto"]))
    cases += [("zigzag", ring, "q"), ("striped", ring, "q")]
    cases += [("balanced", ring, "kv"), ("balanced", "group_cast", "kv")]
    cases += [("balanced", "ring", "q"), ("balanced", "all_gather", "auto")]
    contexts = [ContextParallel(mesh, *case[:2], block, case[2]) for case in cases]
    for (i, mask), (j, pattern) in itertools.product(enumerate(masks), enumerate(patterns)):
        if isinstance(mask, Slices) and pattern.dynamic:
            continue
        inputs = full if (i + j) % 2 else full[:3]
        wanted = on_one_rank(_everything, inputs, d_out, mask, pattern, None, block)
        for cp in contexts[(i + j * 2) % every :: every]:
            in_parts = cp.layout == "striped" and mask.rows(SEQ_LEN).causal
            for recomputed in (0.0, 0.4) if in_parts else (0.0,):
                got = _parallel(cp, inputs, d_out, mask, pattern, recomputed)
                for name, x, want in zip(NAMES, got, wanted):
                    gap = (x - want).abs().nan_to_num(0).max().item()
                    case = (name, gap, cp.key, pattern.key, recomputed)
                    assert torch.equal(x.isfinite(), want.isfinite()) and gap < 1e-9, case
                assert len(got) == len(wanted)


def _inputs(heads: tuple[int, int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and sinks, and the gradient of out."""
    full = [*structured_qkv(2, *heads, SEQ_LEN, 8, seed=3), sink_logits(heads[0])]
    generator = torch.Generator().manual_seed(4)
    return full, torch.randn(full[0].shape, dtype=torch.float64, generator=generator)


def _check_several_heads_at_once() -> None:
    """all_gather brings two of three KV heads together, and then the third one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    inputs, d_out = _inputs((6, 3))
    for mask, pattern, layout in zip(MASKS, PATTERNS, ("zigzag", "striped")):
        cp = ContextParallel(mesh, layout, "all_gather", 16)
        wanted = on_one_rank(_everything, inputs, d_out, mask, pattern, None, 16)
        got = _parallel(cp, inputs, d_out, mask, pattern)
        for name, x, want in zip(NAMES, got, wanted):
            assert (x - want).abs().nan_to_num(0).max() < 1e-9, (name, cp.key)


def _check_rectangles(axes: tuple[int, ...], heads: tuple[int, int]) -> None:
    """Dense causal attention by a backend with a kernel for it, without tiles where the layout allows.
    Two groups of KV heads travel, unless all heads go around one ring."""
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_inter", "cp_intra"))
    block = SEQ_LEN // (2 * mesh.size())
    (*full, _), d_out = _inputs(heads)
    wanted = on_one_rank(_everything, full, d_out, Causal(), Dense(), None, block)
    schedules = ("ring", "all_gather") if axes[0] == 1 else ("double_ring",)
    for layout, schedule in itertools.product(("contiguous", "zigzag"), schedules):
        cp = ContextParallel(mesh, layout, schedule, block)
        used = []

        def noted(*args, run=dense.backward, used=used):
            used.append(args[1])
            return run(*args)

        with pytest.MonkeyPatch.context() as patch:
            let_eager_serve_dense(patch)
            patch.setattr(eager, "DENSE_BY_CHUNK", True)
            patch.setattr(dense, "backward", noted)
            got = _parallel(cp, full, d_out, Causal(), Dense())
        for name, x, want in zip(NAMES, got, wanted):
            assert (x - want).abs().max() < 1e-9, (name, cp.key)
        computed = cp.size if layout == "zigzag" else cp.rank + 1
        in_groups = schedule == "all_gather" or cp.rings[0] > 1
        assert len(used) == computed * (2 if in_groups else 1), cp.key


def _parallel(cp, inputs, d_out, mask, pattern, recomputed=0.0):
    """The whole tensors of _everything() over the ranks."""
    table = None
    if cp.layout == "balanced":
        mask = cp.balance(mask.rows(SEQ_LEN))
        table = mask.table
    local = [cp.shard(x, 2, table) for x in inputs[:3]]
    out, lse, density, recall, *grads = _everything(
        [*local, *inputs[3:]],
        cp.shard(d_out, 2, table),
        mask,
        pattern,
        cp,
        cp.block_size,
        recomputed,
    )
    for d_sinks in grads[3:]:
        dist.all_reduce(d_sinks)
    out, lse, *grads[:3] = (cp.unshard(x, 2, table) for x in (out, lse, *grads[:3]))
    return [out, lse, density, recall, *grads]


def _everything(inputs, d_out, mask, pattern, cp, block: int, recomputed=0.0) -> list[torch.Tensor]:
    """NAMES of one attention call."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    options = dict(block_size=block, recomputed=recomputed, return_aux=True)
    with recording(recall_rows=SEQ_LEN) as seen:
        out, aux = attend(
            *leaves[:3], mask, pattern, cp, sinks=leaves[3] if leaves[3:] else None, **options
        )
    gradients = torch.autograd.grad(out, leaves, d_out)
    if cp is not None:
        assert len(seen.calls) == len(seen.work) == (2 if recomputed else 1)
        # Work of both parts, summed over the ranks.
        total = seen.by_rank().work.sum() / leaves[0].shape[0] / leaves[0].shape[1]
        torch.testing.assert_close(total, seen.visited[0].mean())
    return [out.detach(), aux.lse.detach(), seen.density(), torch.stack(seen.recall), *gradients]


def _check_groups_beside_each_other() -> None:
    """dp x cp: a context-parallel group that does not begin at global rank 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], "striped", "ring", 16)
    full = structured_qkv(1, 2, 2, 64, 8, seed=dist.get_rank() // 2)
    want = attend(*full, block_size=16)
    got = cp.unshard(attend(*[cp.shard(x, 2) for x in full], cp=cp), 2)
    assert (got - want).abs().max() < 1e-12


def _check_ranks(axes: tuple[int, ...]) -> None:
    heads = (6, 2) if axes == (2, 2) else (5, 1)
    check_everything(axes, MASKS, PATTERNS, heads, every=4)
    if len(axes) == 1:
        _check_rectangles((1, *axes), (6, 3))
        _check_several_heads_at_once()
    else:
        _check_rectangles(axes, (6, 2))
    if dist.get_world_size() == 4:
        _check_groups_beside_each_other()


@pytest.mark.parametrize("axes", [(3,), (2, 2)], ids=str)
def test_parallel_equals_single(axes):
    run_processes(torch.Size(axes).numel(), _check_ranks, axes)


def test_refusals():
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with pytest.raises(ValueError, match="local"):
            ContextParallel(mesh, schedule="local")
        with pytest.raises(ValueError, match="double_ring"):
            ContextParallel(mesh, schedule="double_ring")
        with pytest.raises(ValueError, match="ascending"):
            ContextParallel(DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",)))
        cp = ContextParallel(mesh, block_size=16)
        with pytest.raises(ValueError, match="whole blocks"):
            attend(*structured_qkv(1, 1, 1, 24, 8), cp=cp)
        with pytest.raises(ValueError, match="multiple of 32"):
            cp.shard(torch.zeros(40), 0)
