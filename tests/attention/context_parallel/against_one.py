"""Attention over the ranks of this process group against one rank: values, gradients, statistics,
and what was selected.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.attention.dense_twin import let_eager_serve_dense
from tests.attention.problems import RANGES, SEQ_LEN, Problem, assert_equal, problem
from tests.distributed import on_one_rank
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel import dense
from titan_sparse.attention.masks.ranges import Mask
from titan_sparse.attention.masks.slices import Slices, sliding_window
from titan_sparse.attention.observe import recording

MASKS = [
    *(RANGES[name] for name in ("causal", "padded", "windowed documents", "long and short")),
    sliding_window([101, 70], 30, sinks=5),
]


def by_one_rank(p: Problem) -> dict[str, Tensor]:
    """What one rank finds. Collective."""
    return on_one_rank(_results, p)


def over_ranks(p: Problem, cp: ContextParallel, recomputed: float = 0.0) -> dict[str, Tensor]:
    """The same of all tokens, of which each rank computes its blocks."""
    mask = p.mask
    table = None
    if cp.layout == "balanced":
        mask = cp.balance(mask.rows(SEQ_LEN))
        table = mask.table
    *qkv, d_out = (cp.shard(x, 2, table) for x in (*p.inputs[:3], p.d_out))
    local = Problem([*qkv, *p.inputs[3:]], mask, p.pattern, cp.block_size)
    found = _results(local, d_out, cp=cp, recomputed=recomputed)
    for name in ("out", "lse", "dq", "dk", "dv"):
        found[name] = cp.unshard(found[name], 2, table)
    if "dsinks" in found:
        dist.all_reduce(found["dsinks"])
    return found


def check(p: Problem, *contexts: ContextParallel, shares: tuple[float, ...] = (0.0,)) -> None:
    """Each context computes what one rank does, whatever share is computed again. Collective."""
    wanted = by_one_rank(p._replace(block=contexts[0].block_size))
    for cp, recomputed in itertools.product(contexts, shares):
        if recomputed and not _in_parts(cp, p.mask):
            continue
        case = f"{cp.key}, {p.mask}, {p.pattern.key}, {recomputed}"
        assert_equal(over_ranks(p, cp, recomputed), wanted, case)


def _in_parts(cp: ContextParallel, mask: Mask) -> bool:
    """Whether attention can be computed again in part."""
    has_whole_heads = cp.schedule == "ulysses" and cp.inter == 1
    has_all_parts = cp.layout == "striped" and cp.schedule != "ulysses"
    return mask.rows(SEQ_LEN).causal and (has_whole_heads or has_all_parts)


def _results(p: Problem, *d_out: Tensor, **options) -> dict[str, Tensor]:
    """By name what one attention call gives, and what is recorded of it."""
    with recording(recall_rows=SEQ_LEN) as seen:
        found = p.results(*d_out, **options)
    if "cp" in options:
        assert len(seen.calls) == len(seen.work) == (2 if options["recomputed"] else 1)
        # Work of both parts, summed over the ranks.
        total = seen.by_rank().work.sum() / p.inputs[0].shape[0] / p.inputs[0].shape[1]
        torch.testing.assert_close(total, seen.visited[0].mean())
    return found | {"density": seen.density(), "recall": torch.stack(seen.recall)}


def mesh_of(axes: tuple[int, ...]) -> DeviceMesh:
    names = ("cp_inter", "cp_intra") if len(axes) == 2 else ("cp",)
    return init_device_mesh("cpu", axes, mesh_dim_names=names)


def ways(axes: tuple[int, ...]) -> list[tuple[str, str, str]]:
    """All layouts and schedules, and what circulates in the backward."""
    # Of ranks on two axes those schedules that tell the axes apart.
    schedules = ["double_ring", "group_cast"]
    if len(axes) == 1:
        schedules = ["all_gather", "ring", "group_cast"]
    ring = next(name for name in schedules if "ring" in name)
    found = list(itertools.product(("contiguous", "zigzag", "striped"), schedules, ["auto"]))
    found += [("zigzag", ring, "q"), ("striped", ring, "q")]
    found += [("balanced", ring, "kv"), ("balanced", "group_cast", "auto")]
    return found + [("balanced", "ring", "q"), ("balanced", "all_gather", "auto")]


def check_everything(
    axes: tuple[int, ...], masks, patterns, heads, every: int = 1, of=None
) -> None:
    """Compare contexts on a cp mesh with one rank. Collective over its processes.

    every: with 4, every fourth combination of mask, pattern and context. of: ways().
    """
    mesh = mesh_of(axes)
    # Few blocks a rank, as most time goes by tile.
    block = SEQ_LEN // mesh.size() // (4 if mesh.size() < 4 else 2)
    contexts = []
    for layout, schedule, circulates in of or ways(axes):
        contexts.append(ContextParallel(mesh, layout, schedule, block, circulates))
    for (i, mask), (j, pattern) in itertools.product(enumerate(masks), enumerate(patterns)):
        if isinstance(mask, Slices) and pattern.dynamic:
            continue
        p = problem(heads, mask, pattern, sinks=(i + j) % 2 == 1)
        check(p, *contexts[(i + j * 2) % every :: every], shares=(0.0, 0.4))


def check_dense_kernels(cp: ContextParallel, heads: tuple[int, int]) -> int:
    """Compare dense causal attention by a backend with a kernel for it, without tiles where the
    layout allows, with one rank. Returns how many pieces that kernel computed in the backward."""
    p = problem(heads, block=cp.block_size)
    wanted = by_one_rank(p)
    pieces = []
    backward = dense.backward
    with pytest.MonkeyPatch.context() as patch:
        let_eager_serve_dense(patch)
        patch.setattr(BACKENDS["eager"], "DENSE_BY_CHUNK", True)
        patch.setattr(dense, "backward", lambda *args: pieces.append(args) or backward(*args))
        assert_equal(over_ranks(p, cp), wanted, cp.key)
    return len(pieces)


def check_groups_beside_each_other(schedule: str) -> None:
    """dp x cp: a context-parallel group that does not begin at global rank 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    cp = ContextParallel(mesh, "striped", schedule, 16)
    p = problem((4, 2), seed=dist.get_rank() // 2)
    assert_equal(over_ranks(p, cp), _results(p), cp.key)
