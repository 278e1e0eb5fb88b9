"""Sums over chunks with kernels that round their results to the inputs' dtype, as flex does.

Nothing is widened or rounded in a pass of its own. Sums stay fp32 until the last step: in the
forward, for dq, and for dk and dv on their way.
"""

import torch
from torch import Tensor

from tests.attention.context_parallel.against_one import mesh_of
from tests.distributed import run_processes
from tests.reference import dense_attention, gradients, structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import Sum, add, merge
from titan_sparse.attention.backends.eager import Eager
from titan_sparse.attention.context_parallel import group_cast_plan
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.attention.patterns import Dense, VerticalSlash

BLOCK, SEQ_LEN = 8, 192
PATTERNS = {
    "dense": Dense(),
    "vertical_slash": VerticalSlash(
        recall=0.7, sinks=3, local_slashes=1, max_verticals=24, max_slashes=4, dense_below=24
    ),
}


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


def _inputs() -> tuple[list[Tensor], Tensor]:
    qkv = structured_qkv(1, 4, 2, SEQ_LEN, 16, seed=1, dtype=torch.bfloat16)
    return qkv, torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(2)).bfloat16()


def _truth(mask, pattern) -> list[Tensor]:
    qkv, d_out = _inputs()
    index = pattern.select(*qkv[:2], mask, block_size=BLOCK)
    seen = index.dense(mask).expand(1, 4, -1, -1)
    exact = [x.double() for x in (d_out, *qkv)]
    out, grads = gradients(lambda *x: dense_attention(*x, seen)[0], *exact)
    return [out, *grads]


def _run(mask, pattern, cp: ContextParallel | None) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence."""
    qkv, d_out = _inputs()
    shard, unshard = (cp.shard, cp.unshard) if cp else (lambda x, _: x,) * 2
    leaves = [shard(x, 2).clone().requires_grad_() for x in qkv]
    out = attend(
        *leaves, mask, pattern, cp, backend="eager", **({} if cp else {"block_size": BLOCK})
    )
    found = [out.detach(), *torch.autograd.grad(out, leaves, shard(d_out, 2))]
    return [unshard(x, 2).double() for x in found]


def _check(schedule: str, pattern: str, **options) -> dict[str, list[torch.dtype]]:
    """The dtypes of out and dq after each step."""
    eager = BACKENDS["eager"]
    backend = BACKENDS["eager"] = Rounding()
    mesh = mesh_of((3, 1) if schedule == "double_ring" else (1, 3))
    mask = Documents([100, SEQ_LEN - 100])
    cp = ContextParallel(mesh, "striped", schedule, BLOCK, **options)
    want, alone = _truth(mask, PATTERNS[pattern]), _run(mask, PATTERNS[pattern], None)
    backend.seen |= {"out": [], "dq": []}
    got, sent = _run(mask, PATTERNS[pattern], cp), dict(cp.sent)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, alone, want, strict=True):
        # Each piece is rounded, and once their sum; a sum in bf16 is rounded more often.
        assert (a - c).norm() < 1.75 * (b - c).norm(), (schedule, options, pattern, name)
    BACKENDS["eager"] = eager
    cp.sent.clear()
    _run(mask, PATTERNS[pattern], cp)
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
    for pattern in PATTERNS:
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
