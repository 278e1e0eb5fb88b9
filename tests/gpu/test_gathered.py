"""MoBA with gathered queries on a GPU: bf16 against fp64, what the host waits for, memory."""

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.gpu.errors import errors, exact, flash_errors, no_waits, problem, with_gradients
from titan_sparse.attention import attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask
from titan_sparse.attention.patterns import MoBA

DIM = 128
SEQ_LEN = 8192


class Case(NamedTuple):
    pattern: MoBA
    heads: tuple[int, int]
    mask: Mask = Causal()

    def run(self, qkv: list[Tensor], d_out: Tensor) -> list[Tensor]:
        """out, dq, dk and dv."""
        function = functools.partial(attend, mask=self.mask, pattern=self.pattern, backend="triton")
        return with_gradients(function, qkv, d_out)


CASES = {
    "causal": Case(MoBA(512, 4), (5, 1)),
    "packed": Case(MoBA(700, 3), (4, 2), Documents([5000, 300, 2800])),
    "many chunks": Case(MoBA(128, 12), (2, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_and_bits(name, monkeypatch):
    """At most twice the errors of torch's dense flash attention, the same bits twice, and nearly
    the same without gathered queries."""
    case = CASES[name]
    qkv, d_out = problem(case.heads, DIM, SEQ_LEN)
    got = case.run(qkv, d_out)
    want, _ = exact(qkv, d_out, case.pattern.select(*qkv[:2], case.mask).dense(case.mask))
    assert max(errors(got, want)) <= 2 * max(flash_errors(qkv, d_out))

    for a, b in zip(got, case.run(qkv, d_out), strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(BACKENDS["triton"], "GATHERS_QUERIES", False)
    by_blocks = case.run(qkv, d_out)
    assert not torch.equal(got[0], by_blocks[0])
    assert max(errors(got, by_blocks)) < 5e-3


def test_the_host_waits_for_nothing():
    case = CASES["causal"]
    inputs = problem(case.heads, DIM, SEQ_LEN)
    case = case._replace(mask=case.mask.rows(SEQ_LEN, "cuda"))
    case.run(*inputs)
    with no_waits():
        case.run(*inputs)


def test_memory_does_not_follow_top_k():
    """A partial result of every chosen pair would take eleven times the memory of q."""
    case = Case(MoBA(512, 12), (16, 2))
    (q, k, v), d_out = problem(case.heads, DIM, 65536)
    case.run([q, k, v], d_out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, *_ = case.run([q, k, v], d_out)
    torch.cuda.synchronize()
    # with_gradients() copies q, k and v.
    held = 2 * (q.nbytes + k.nbytes + v.nbytes) + out.nbytes
    extra = torch.cuda.max_memory_allocated() - before - held
    assert extra < 1.25 * (q.nbytes + k.nbytes + v.nbytes + out.nbytes)
