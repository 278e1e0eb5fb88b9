"""Learned sinks and recomputed parts over 3 and 4 processes against one: every schedule."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.test_attend import sink_logits
from tests.distributed import run_processes
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.packed import sliding_window
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention

BLOCK = 16
SEQ_LEN = 3 * 4 * BLOCK
VERTICAL = VerticalSlash(recall=0.8, sinks=3, local_slashes=1, max_verticals=30, dense_below=24)
DOCUMENTS = Documents([[101, 7, 1, 70], [45, 45, 45, 49]])
CASES: list[tuple[Mask, Pattern]] = [
    (Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 40)), Dense()),
    (DOCUMENTS & SlidingWindow(50), VERTICAL),
    (sliding_window([101, 70], 30, sinks=5), Dense()),
    (Causal(), Dense()),
    (DOCUMENTS, XAttention(4, 0.7, 24)),
    (Causal(), MoBA(32, 2)),
]
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks", "density", "recall")


def _contexts(axes: tuple[int, ...]) -> list[ContextParallel]:
    names = ("cp_inter", "cp_intra") if len(axes) == 2 else ("cp",)
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=names)
    ring = "ring" if len(axes) == 1 else "double_ring"
    kinds = [
        ("striped", "all_gather", "kv"),
        ("striped", ring, "kv"),
        ("striped", ring, "q"),
        ("striped", "group_cast", "kv"),
        ("balanced", ring, "kv"),
        ("balanced", "group_cast", "kv"),
        ("balanced", "ring", "q"),
        ("balanced", "all_gather", "auto"),
    ]
    return [
        ContextParallel(mesh, layout, schedule, BLOCK, circulates)
        for layout, schedule, circulates in kinds
    ]


def _results(
    inputs: list[Tensor],
    d_out: Tensor,
    mask: Mask,
    pattern: Pattern,
    cp: ContextParallel | None = None,
    recomputed: float = 0.0,
) -> list[Tensor]:
    """NAMES, of the whole sequence; the sinks' gradient is summed over the ranks."""
    *qkv, sinks = inputs
    ranges = mask.rows(SEQ_LEN)
    if cp is not None:
        ranges = cp.balance(ranges)
        qkv = [cp.shard(x, 2, ranges.table) for x in qkv]
        d_out = cp.shard(d_out, 2, ranges.table)
    leaves = [x.clone().requires_grad_() for x in (*qkv, sinks)]
    with recording(recall_rows=SEQ_LEN) as seen:
        out, aux = attend(
            *leaves[:3],
            ranges,
            pattern,
            cp,
            block_size=BLOCK,
            return_aux=True,
            recomputed=recomputed,
            sinks=leaves[3],
        )
    *grads, d_sinks = torch.autograd.grad(out, leaves, d_out)
    by_token = [out.detach(), aux.lse.detach(), *grads]
    if cp is not None:
        by_token = [cp.unshard(x, 2, ranges.table) for x in by_token]
        dist.all_reduce(d_sinks)
        assert len(seen.calls) == len(seen.work) == (2 if recomputed else 1)
        # Work of both parts, summed over the ranks.
        total = seen.by_rank().work.sum() / len(qkv[0]) / qkv[0].shape[1]
        torch.testing.assert_close(total, seen.visited[0].mean())
    return [*by_token, d_sinks, seen.density()[0], seen.recall[0]]


def _check_ranks(axes: tuple[int, ...]) -> None:
    inputs = [*structured_qkv(2, 4, 1, SEQ_LEN, 8, seed=3), sink_logits(4)]
    generator = torch.Generator().manual_seed(4)
    d_out = torch.randn(inputs[0].shape, dtype=torch.float64, generator=generator)
    contexts = _contexts(axes)
    for number, (mask, pattern) in enumerate(CASES):
        want = _results(inputs, d_out, mask, pattern)
        # Every third context: each meets two of the six cases.
        for cp in contexts[number % 3 :: 3]:
            for recomputed in (0.0, 0.4) if cp.layout == "striped" else (0.0,):
                got = _results(inputs, d_out, mask, pattern, cp, recomputed)
                for name, a, b in zip(NAMES, got, want, strict=True):
                    assert (a - b).abs().max() < 1e-9, (name, cp.key, mask, pattern.key, recomputed)


@pytest.mark.parametrize("axes", [(3,), (2, 2)], ids=str)
def test_ranks_equal_one(axes):
    run_processes(torch.Size(axes).numel(), _check_ranks, axes)
