"""Sums over chunks with kernels that round their results to the inputs' dtype, as flex does.

Nothing is widened or rounded in a pass of its own. Sums stay fp32 until the last step: in the
forward, for dq, and for dk and dv on their way.
"""

import pytest
import torch

from tests.attention.context_parallel.against_one import mesh_of, over_ranks
from tests.attention.problems import PATTERNS, SEQ_LEN, problem
from tests.distributed import run_processes
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import Sum, add, merge
from titan_sparse.attention.backends.eager import Eager
from titan_sparse.attention.context_parallel import group_cast_plan
from titan_sparse.attention.masks.ranges import Documents

BLOCK = 8


class Rounding(Eager):
    """The eager backend with flex's rounding: a piece is rounded, and verticals continue from it.

    Records the dtypes of the out and dq that it returned.
    """

    def __init__(self):
        self.seen = {"out": [], "dq": []}

    def forward(self, q, pieces, scale, total):
        blocks, *verticals = pieces
        dtype, before = total
        out, lse = super().forward(q, [blocks], scale, Sum(q.dtype))
        if not verticals:
            return self._note("out", merge(before, out, lse, dtype))
        before = merge(before, out, lse, torch.float32)
        total = Sum(dtype, before)
        return self._note("out", super().forward(q, verticals, scale, total))

    def backward(self, queries, pieces, scale, total):
        blocks, *verticals = pieces
        dtype, dq = total
        piece_dq, gradients = super().backward(queries, [blocks], scale, Sum(queries.q.dtype))
        if not verticals:
            return self._note("dq", (add(dq, piece_dq, dtype), gradients))
        dq = add(dq, piece_dq, torch.float32)
        dq, d_verticals = super().backward(queries, verticals, scale, Sum(torch.float32, dq))
        return self._note("dq", (dq.to(dtype), gradients + d_verticals))

    def _note(self, name: str, result: tuple) -> tuple:
        self.seen[name].append(result[0].dtype)
        return result


def _check(schedule: str, pattern: str, **options) -> dict[str, list[torch.dtype]]:
    """The dtypes of out and dq after each step."""
    p = problem((4, 2), Documents([100, SEQ_LEN - 100]), PATTERNS[pattern], BLOCK)
    p = p._replace(inputs=[x.bfloat16() for x in p.inputs])
    want = p.wanted(p.seen())
    mesh = mesh_of((3, 1) if schedule == "double_ring" else (1, 3))
    cp = ContextParallel(mesh, "striped", schedule, BLOCK, **options)
    backend = Rounding()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "eager", backend)
        alone = p.results()
        backend.seen = {"out": [], "dq": []}
        got, sent = over_ranks(p, cp), dict(cp.sent)
    for name in ("out", "dq", "dk", "dv"):
        error, bound = ((x[name].double() - want[name]).norm() for x in (got, alone))
        # Each piece is rounded, and once their sum; a sum in bf16 is rounded more often.
        assert error < 1.75 * bound, (schedule, options, pattern, name)
    cp.sent.clear()
    over_ranks(p, cp)
    # Gradients in fp32 on the wire, as of a backend that does not round.
    assert sent == dict(cp.sent), (schedule, options, pattern)
    return backend.seen


def _check_sums(dtypes: list[torch.dtype], steps: int, case: tuple) -> None:
    """The first piece as computed or continued by verticals, then a sum in fp32, of which the last
    step of a forward rounds the result.
    """
    last = torch.bfloat16 if case[0] == "out" else torch.float32
    assert len(dtypes) == steps and dtypes[-1] == last, (dtypes, case)
    assert set(dtypes[1:-1]) <= {torch.float32} and (
        case[1] != "dense" or dtypes[0] == torch.bfloat16
    ), (dtypes, case)


def _check_all() -> None:
    for pattern in ("dense", "vertical_slash"):
        seen = _check("ring", pattern, backward_circulates="kv")
        for name, dtypes in seen.items():
            _check_sums(dtypes, 3, (name, pattern))
        _check("ring", pattern, backward_circulates="q")
        _check("double_ring", pattern)
        assert set(_check("all_gather", pattern)["out"]) == {torch.bfloat16}
        # All own blocks before the others', or half of them behind.
        for link, passes in ((0, 2), (10**9, 3)):
            group_cast_plan.LINK = link
            seen = _check("group_cast", pattern, overlap_stages=(1, 1))
            _check_sums(seen["out"], 2, ("out", pattern))
            _check_sums(seen["dq"], passes, ("dq", pattern, link))


def test_sums_over_three_processes():
    run_processes(3, _check_all)
