"""Attention over the ranks of this process group against one rank: values, gradients, statistics, and
what was selected.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.attention.dense_twin import let_eager_serve_dense
from tests.attention.test_attend import sink_logits
from tests.distributed import on_one_rank
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel import dense
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.masks.slices import Slices, sliding_window
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash

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


class Problem(NamedTuple):
    """inputs: q, k, v of all tokens, and sinks where there are some."""

    inputs: list[Tensor]
    d_out: Tensor
    mask: Mask
    pattern: Pattern

    def on_one_rank(self, block_size: int) -> dict[str, Tensor]:
        """Collective."""
        return on_one_rank(_results, self, None, block_size)

    def over_ranks(self, cp: ContextParallel, recomputed: float = 0.0) -> dict[str, Tensor]:
        """The same of all tokens, of which each rank computes its blocks."""
        mask = self.mask
        table = None
        if cp.layout == "balanced":
            mask = cp.balance(mask.rows(SEQ_LEN))
            table = mask.table
        *qkv, d_out = (cp.shard(x, 2, table) for x in (*self.inputs[:3], self.d_out))
        local = Problem([*qkv, *self.inputs[3:]], d_out, mask, self.pattern)
        found = _results(local, cp, cp.block_size, recomputed)
        for name in ("out", "lse", "dq", "dk", "dv"):
            found[name] = cp.unshard(found[name], 2, table)
        if "dsinks" in found:
            dist.all_reduce(found["dsinks"])
        return found

    def check(self, *contexts: ContextParallel, shares: tuple[float, ...] = (0.0,)) -> None:
        """Each context computes what one rank does, whatever share is computed again. Collective."""
        wanted = self.on_one_rank(contexts[0].block_size)
        for cp, recomputed in itertools.product(contexts, shares):
            if recomputed and not _in_parts(cp, self.mask):
                continue
            case = f"{cp.key}, {self.mask}, {self.pattern.key}, {recomputed}"
            assert_equal(self.over_ranks(cp, recomputed), wanted, case)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], case: str) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        words = f"{name}, {case}: "
        # The density of a mask that allows nothing is not a number.
        torch.testing.assert_close(
            *(found[name], want),
            rtol=0,
            atol=1e-9,
            equal_nan=name == "density",
            msg=lambda text, words=words: words + text,
        )


def problem(
    heads: tuple[int, int],
    mask: Mask | None = None,
    pattern: Pattern | None = None,
    sinks: bool = False,
    seed: int = 3,
) -> Problem:
    """Two sequences in fp64; by default causal and dense."""
    inputs = structured_qkv(2, *heads, SEQ_LEN, 8, seed)
    generator = torch.Generator().manual_seed(4)
    d_out = torch.randn(inputs[0].shape, dtype=torch.float64, generator=generator)
    more = [sink_logits(heads[0])] if sinks else []
    return Problem([*inputs, *more], d_out, mask or Causal(), pattern or Dense())


def _in_parts(cp: ContextParallel, mask: Mask) -> bool:
    """Whether attention can be computed again in part."""
    has_whole_heads = cp.schedule == "ulysses" and cp.inter == 1
    has_all_parts = cp.layout == "striped" and cp.schedule != "ulysses"
    return mask.rows(SEQ_LEN).causal and (has_whole_heads or has_all_parts)


def _results(
    p: Problem, cp: ContextParallel | None, block_size: int, recomputed: float = 0.0
) -> dict[str, Tensor]:
    """By name what one attention call gives."""
    leaves = [x.clone().requires_grad_() for x in p.inputs]
    options = dict(block_size=block_size, recomputed=recomputed, return_aux=True)
    sinks = leaves[3] if leaves[3:] else None
    with recording(recall_rows=SEQ_LEN) as seen:
        out, aux = attend(*leaves[:3], p.mask, p.pattern, cp, sinks=sinks, **options)
    gradients = torch.autograd.grad(out, leaves, p.d_out)
    if cp is not None:
        assert len(seen.calls) == len(seen.work) == (2 if recomputed else 1)
        # Work of both parts, summed over the ranks.
        total = seen.by_rank().work.sum() / leaves[0].shape[0] / leaves[0].shape[1]
        torch.testing.assert_close(total, seen.visited[0].mean())
    found = {"out": out.detach(), "lse": aux.lse.detach(), "density": seen.density()}
    found["recall"] = torch.stack(seen.recall)
    found |= {f"index {number}": x for number, x in enumerate(aux.index.tensors())}
    return found | dict(zip(("dq", "dk", "dv", "dsinks"), gradients))


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
    found += [("balanced", ring, "kv"), ("balanced", "group_cast", "kv")]
    return found + [("balanced", "ring", "q"), ("balanced", "all_gather", "auto")]


def check_everything(
    axes: tuple[int, ...], masks=MASKS, patterns=PATTERNS, heads=(5, 1), every: int = 1, of=None
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
        p.check(*contexts[(i + j * 2) % every :: every], shares=(0.0, 0.4))


def check_dense_kernels(cp: ContextParallel, heads: tuple[int, int]) -> int:
    """Compare dense causal attention by a backend with a kernel for it, without tiles where the layout
    allows, with one rank. Returns how many pieces that kernel computed in the backward."""
    p = problem(heads)
    wanted = p.on_one_rank(cp.block_size)
    pieces = []
    backward = dense.backward
    with pytest.MonkeyPatch.context() as patch:
        let_eager_serve_dense(patch)
        patch.setattr(BACKENDS["eager"], "DENSE_BY_CHUNK", True)
        patch.setattr(dense, "backward", lambda *args: pieces.append(args) or backward(*args))
        assert_equal(p.over_ranks(cp), wanted, cp.key)
    return len(pieces)


def check_groups_beside_each_other(schedule: str) -> None:
    """dp x cp: a context-parallel group that does not begin at global rank 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    cp = ContextParallel(mesh, "striped", schedule, 16)
    full = structured_qkv(1, 4, 2, 64, 8, seed=dist.get_rank() // 2)
    got = cp.unshard(attend(*[cp.shard(x, 2) for x in full], cp=cp), 2)
    assert (got - attend(*full, block_size=16)).abs().max() < 1e-12
