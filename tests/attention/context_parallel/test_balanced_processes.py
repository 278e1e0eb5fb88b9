"""The layout "balanced" over processes: its tables in use, refusals, and costs.

test_group.py compares attention in it, as in all layouts.
"""

import pytest
import torch
import torch.distributed as dist

from tests.attention.context_parallel.against_one import by_one_rank, mesh_of
from tests.attention.dense_twin import let_eager_serve_dense
from tests.attention.problems import PATTERNS, SEQ_LEN, problem
from tests.distributed import run_processes
from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.layouts import Costs
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns import Dense
from titan_sparse.config import Attention
from titan_sparse.training.attention import build_context_parallel

BLOCK = 16
DOCUMENTS = Documents([[100, 7, 1, 60], [20, 90, 30, 52]])
PATTERN = PATTERNS["vertical_slash"]


def test_refusals():
    """What needs a table, or has one that does not belong there."""
    with fake_world(2):
        mesh = mesh_of((2,))
        cp = ContextParallel(mesh, "balanced", "ring", BLOCK)
        striped = ContextParallel(mesh, "striped", "ring", BLOCK)
        ranges = DOCUMENTS.rows(SEQ_LEN)
        q, k, v = (x[:, :, : SEQ_LEN // cp.size] for x in problem((4, 2)).inputs)
        balanced = cp.balance(ranges)
        wrong = balanced._replace(table=balanced.table[:, 1:])
        for call, words in (
            (lambda: attend(q, k, v, ranges, cp=cp), "cp.balance"),
            (lambda: attend(q, k, v, wrong, cp=cp), "cp.balance"),
            (lambda: cp.shard(q, 2), "cp.balance"),
            (lambda: attend(q, k, v, balanced, cp=striped), '"striped"'),
            (lambda: attend(q, k, v, balanced, cp=cp, recomputed=0.5), 'layout "striped"'),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        assert striped.balance(ranges) is ranges and not striped.depends_on_mask


def _check_tables() -> None:
    """Batches run forward, then backward in the other order. Nothing is compiled anew for another
    table."""
    cp = ContextParallel(mesh_of((2,)), "balanced", "ring", BLOCK)
    problems = []
    for lengths in ([10, 170, 12], [90, 90], [30] * 6):
        problems.append(problem((4, 2), Documents(lengths), PATTERN))
    tables, results = [], []
    layer = torch.compile(
        lambda q, k, v, ranges: attend(q, k, v, ranges, PATTERN, cp),
        fullgraph=True,
        backend="aot_eager",
    )
    for p in problems:
        ranges = cp.balance(p.mask.rows(SEQ_LEN))
        *qkv, d_out = (cp.shard(x, 2, ranges.table) for x in (*p.inputs, p.d_out))
        leaves = [x.requires_grad_() for x in qkv]
        with torch._dynamo.config.patch(error_on_recompile=True):
            results.append((layer(*leaves, ranges), leaves, d_out))
        tables.append(ranges.table)
    assert not torch.equal(tables[0], tables[1])
    cases = list(zip(problems, tables, results, strict=True))
    for p, table, (out, leaves, d_out) in reversed(cases):
        wanted = by_one_rank(p)
        gradients = torch.autograd.grad(out, leaves, d_out)
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert (cp.unshard(gradient, 2, table) - wanted[name]).abs().max() < 1e-9
    # Masks of other layers share a table. Without holes there are no rectangles in this layout,
    # whatever the backend serves.
    for mask, pattern in ((problems[1].mask & SlidingWindow(30), PATTERN), (Causal(), Dense())):
        p = problem((4, 2), mask, pattern)
        ranges = mask.rows(SEQ_LEN)._replace(table=tables[0])
        wanted = by_one_rank(p)["out"]
        with pytest.MonkeyPatch.context() as patch:
            let_eager_serve_dense(patch)
            local = [cp.shard(x, 2, tables[0]) for x in p.inputs]
            got = cp.unshard(attend(*local, ranges, pattern, cp), 2, tables[0])
        assert (got - wanted).abs().max() < 1e-9


def _check_costs() -> None:
    """Ranks report an error when their costs differ: here one of two has another file."""
    mesh = mesh_of((2,))
    attention = Attention(layout="balanced")
    cp = build_context_parallel(attention, mesh, Costs(transfer=100_000))
    assert cp.bytes_sent == 0 and cp.costs.transfer == 100_000
    transfer = 280 + (dist.get_rank() == 1)
    with pytest.raises(ValueError, match=r"\[120, 280\], \[120, 281\]"):
        ContextParallel(mesh, "balanced", costs=Costs(transfer=transfer))


def _check_ranks() -> None:
    _check_costs()
    _check_tables()


def test_two_ranks():
    run_processes(2, _check_ranks)
