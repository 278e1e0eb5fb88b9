"""MoBA: the selection against plain loops over documents, heads and tokens; and attend() on one rank,
where queries are gathered by chunk, against dense attention.
"""

import math
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import MIXED, Case, cases_of_masks, check_selection
from tests.reference import dense_attention, gradients, relative_error, structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import Dense, MoBA, moba
from titan_sparse.attention.patterns.moba import _largest
from titan_sparse.kernels import gathered as kernels
from titan_sparse.kernels.gathered import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 64
SMALL = 64 if DEVICE == "cuda" else 16
"""The smallest block of the kernels."""

SHORT = [50, 17, 16, 33, 15, 19]
CASES = cases_of_masks(MoBA(32, 2)) | {
    "own chunk alone": Case(MoBA(32, 1), Causal()),
    "everything": Case(MoBA(16, 99), Documents(MIXED)),
    "chunks beside blocks": Case(MoBA(19, 3), Documents(MIXED)),
    "chunks of a block": Case(MoBA(16, 3), Documents(SHORT)),
    "more than a word of chunks": Case(MoBA(16, 4), Causal(), 16 * 35, (2, 1)),
}


def _specification(case: Case, q: Tensor, k: Tensor, sequence: int, seen: Tensor) -> Tensor:
    """bool [S, S]: the pairs of tokens to be computed, of q and k [S, D]."""
    size = case.pattern.chunk_size
    top_k = case.pattern.top_k
    chosen = torch.zeros_like(seen)
    for first, stop in case.spans(sequence):
        for i in range(first, stop):
            own = (i - first) // size
            means = [k[first + c * size : first + (c + 1) * size].mean(0) for c in range(own)]
            gates = [float(q[i] @ mean) for mean in means]
            best = sorted(range(own), key=lambda c: -gates[c])[: top_k - 1]
            for c in [*best, own]:
                chosen[i, first + c * size : min(first + (c + 1) * size, stop)] = True
    return chosen & seen


@pytest.mark.parametrize("name", CASES)
def test_the_selection_is_the_specification(name):
    check_selection(CASES[name], _specification)


def test_equal_scores_are_taken_in_order_of_position():
    nothing = -math.inf
    gate = torch.tensor([[2.0, 1, 2, 2, nothing], [1, nothing, nothing, nothing, nothing]])
    assert _largest(gate, 2).tolist() == [
        [True, False, True, False, False],
        [True, False, False, False, False],
    ]


# Gathered queries.


class Gathered(NamedTuple):
    """documents: lengths by sequence; what is left of `seq_len` is padding. is_gathered: whether
    the kernels over gathered queries compute it."""

    pattern: MoBA
    documents: list[list[int]]
    mask: Mask | None = None
    heads: tuple[int, int] = (4, 2)
    seq_len: int = 256
    dtype: torch.dtype = torch.float32
    is_gathered: bool = True
    dim: int = 16
    size: int = SIZE

    @property
    def its_mask(self) -> Mask:
        return self.mask or Documents(self.documents)

    def tensors(self) -> list[Tensor]:
        heads, kv_heads = self.heads
        drawn = structured_qkv(len(self.documents), heads, kv_heads, self.seq_len, self.dim, seed=5)
        d_out = torch.randn(drawn[0].shape, generator=torch.Generator().manual_seed(0))
        return [x.to(DEVICE, self.dtype) for x in (d_out, *drawn)]


GATHERED = {
    "ragged, a chunk of no tile": Gathered(MoBA(72, 2), [[157]], Causal(), (1, 1), 157),
    "group of 3": Gathered(MoBA(64, 2), [[128]], Causal(), (3, 1), 128),
    "packed and padded": Gathered(MoBA(70, 2), [[175, 75], [64, 63]], heads=(2, 1)),
    "padding": Gathered(MoBA(64, 3), [[150], [0]], Causal(valid=(150, 0)), (1, 1), 192),
    "everything": Gathered(MoBA(64, 99), [[192]], Causal(), (1, 1), 192),
    "fp16, head_dim 96": Gathered(
        MoBA(64, 3), [[192]], Causal(), (1, 1), 192, dtype=torch.float16, dim=96
    ),
    "more than a word of chunks": Gathered(
        MoBA(SMALL, 2), [[34 * SMALL - 3]], heads=(1, 1), seq_len=34 * SMALL, size=SMALL
    ),
    "window": Gathered(
        MoBA(64, 3), [[192]], Causal() & SlidingWindow(150), (1, 1), 192, is_gathered=False
    ),
    "chunks beside blocks": Gathered(
        MoBA(SMALL + 3, 2),
        [[]],
        Documents([5 * SMALL - 5, 9, 6 * SMALL + 4]) & SlidingWindow(5 * SMALL + 10),
        (2, 1),
        12 * SMALL,
        is_gathered=False,
        size=SMALL,
    ),
    "own chunk alone, in the second word": Gathered(
        MoBA(SMALL, 1), [[34 * SMALL]], Causal(), (1, 1), 34 * SMALL, is_gathered=False, size=SMALL
    ),
    "one chunk": Gathered(MoBA(128, 4), [[128]], Causal(), (1, 1), 128, is_gathered=False),
}


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Record which passes the kernels over gathered queries computed."""
    steps: list[str] = []

    def counted(name: str):
        real = getattr(moba.GatheredQueries, name)

        def call(*args):
            steps.append(name)
            return real(*args)

        monkeypatch.setattr(moba.GatheredQueries, name, call)

    counted("forward")
    counted("backward")
    return steps


def _run(case: Gathered, **options) -> list[Tensor]:
    """out, lse, dq, dk and dv."""
    options = dict(mask=case.its_mask, pattern=case.pattern, block_size=case.size) | options
    d_out, *qkv = case.tensors()
    leaves = [x.requires_grad_() for x in qkv]
    out, aux = attend(*leaves, return_aux=True, **options)
    return [out.detach(), aux.lse, *torch.autograd.grad(out, leaves, d_out)]


def _wanted(case: Gathered) -> list[Tensor]:
    """Dense attention over the pairs that were selected."""
    d_out, *qkv = case.tensors()
    index = case.pattern.select(*qkv[:2], case.its_mask, block_size=case.size)
    seen = index.dense(case.its_mask).expand(len(d_out), case.heads[0], -1, -1).cpu()
    exact = [x.double().cpu() for x in qkv]
    out, grads = gradients(lambda *x: dense_attention(*x, seen)[0], d_out.double().cpu(), *exact)
    return [out, dense_attention(*exact, seen)[1], *grads]


def _assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        # Rows that see nothing have an lse of -inf.
        assert torch.equal(a.cpu().isfinite(), b.cpu().isfinite())
        assert relative_error(*(x.cpu().nan_to_num(0, neginf=0) for x in (a, b))) < tolerance


@pytest.mark.parametrize("name", GATHERED)
def test_dense_attention_over_what_was_selected(taken, name):
    case = GATHERED[name]
    tolerance = 2e-3 if case.dtype == torch.float16 else 1e-5
    want = _wanted(case)
    for backend in ("triton", "eager"):
        _assert_close(_run(case, backend=backend), want, tolerance)
    assert taken == (["forward", "backward"] if case.is_gathered else [])


def test_lists_cut_into_parts(monkeypatch):
    """The queries of a chunk are split over several programs, whose sums are added."""
    module = sys.modules["titan_sparse.kernels.gathered.kernel"]
    monkeypatch.setattr(module, "list_splits", lambda programs: 3)
    case = GATHERED["packed and padded"]
    _assert_close(_run(case, backend="triton"), _wanted(case), 1e-5)


def test_logits_far_below_zero():
    """Keys behind a chunk's end have logit 0, far above all others, and must not cause infinities."""
    case = GATHERED["ragged, a chunk of no tile"]
    d_out, q, k, v = case.tensors()
    q, k = 10 + q, -30 + k
    options = dict(pattern=case.pattern, block_size=SIZE)
    out, grads = gradients(lambda *x: attend(*x, backend="triton", **options), d_out, q, k, v)
    want, wanted = gradients(lambda *x: attend(*x, backend="eager", **options), d_out, q, k, v)
    _assert_close([out, *grads], [want, *wanted], 1e-2)


def test_other_ways_stay_as_they_are(taken):
    """This covers another backend, another pattern, and a part of the sequence."""
    case = GATHERED["group of 3"]
    _run(case, backend="eager")
    _run(case, backend="triton", pattern=Dense())
    assert taken == []
    # The two shares go by lists of blocks, the gradient is the whole's.
    parts = _run(case, backend="triton", recomputed=0.5)
    assert taken == ["backward"]
    _assert_close(parts, _wanted(case), 1e-5)


def test_any_number_of_heads_at_a_time(monkeypatch):
    """Lists are made, and sums kept, for any number of heads at a time.

    Results are equal to the bit, except dk and dv, which are sums over heads.
    """
    case = Gathered(MoBA(64, 2), [[128]], Causal(), seq_len=128)
    want = _run(case, backend="triton")
    # Bytes that hold two heads of lists, with 3 counts of 1 slot in 2 tiles, and one head of sums.
    monkeypatch.setattr(launch, "_LIST_BYTES", 2 * 8 * (128 + 6))
    monkeypatch.setattr(launch, "_TOTAL_BYTES", 4 * 128 * 16)
    assert len(launch.list_shares((1, 4, 128), 2, 2, 1)) == 2
    assert len(launch.total_shares((1, 2, 128, 16), 1)) == 2
    got = _run(case, backend="triton")
    for a, b in zip(got[:3], want[:3], strict=True):
        assert torch.equal(a, b)
    _assert_close(got[3:], want[3:], 1e-6)


@pytest.mark.parametrize("heads", [(1, 4), (4, 1)], ids=str)
def test_layers_with_different_heads_share_a_mask(monkeypatch, heads):
    """What one layer leaves with the mask has its own number of heads, which another would read past."""
    compute = kernels.forward

    def forward(q: Tensor, plan: kernels.Plan) -> tuple[Tensor, Tensor]:
        assert plan.own.tiles.by_query.full_count.shape[1] == q.shape[1]
        computed.append(q.shape[1])
        return compute(q, plan)

    computed: list[int] = []
    monkeypatch.setattr(kernels, "forward", forward)
    mask = Causal().rows(128)
    for number in heads:
        case = Gathered(MoBA(64, 2), [[128]], Causal(), (number, 1), seq_len=128)
        _, *qkv = case.tensors()
        attend(*qkv, mask=mask, pattern=case.pattern, block_size=case.size, backend="triton")
    assert computed == list(heads)


@pytest.mark.parametrize(
    "mask, wanted",
    [
        (Causal(), True),
        (Causal(valid=(40, 0)), True),
        (Documents([[30, 10], [48]]), True),
        (Causal() & SlidingWindow(48), True),
        (Causal() & SlidingWindow(47), False),
        (Documents([[30, 10], [48]]) & SlidingWindow(29), False),
    ],
)
def test_masks_that_cut_no_chunk(mask, wanted):
    assert moba.shows_the_past(mask.rows(48)) is wanted
