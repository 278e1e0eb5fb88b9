"""MoBA: the selection against plain loops over documents, heads and tokens; and attend() on one
rank, where queries are gathered by chunk, against dense attention.
"""

import math
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import MIXED, Case, cases_of_masks, check_selection
from tests.attention.problems import NAMES, Problem
from tests.reference import DEVICE, relative_error, structured_qkv
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import Dense, MoBA, moba
from titan_sparse.attention.patterns.moba import _largest
from titan_sparse.kernels import gathered as kernels
from titan_sparse.kernels.gathered import launch

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
    pattern: MoBA
    mask: Mask = Causal()
    heads: tuple[int, int] = (1, 1)
    seq_len: int = 192
    batch: int = 1
    dim: int = 16
    size: int = SIZE
    dtype: torch.dtype = torch.float32

    def problem(self) -> Problem:
        drawn = structured_qkv(self.batch, *self.heads, self.seq_len, self.dim, seed=5)
        inputs = [x.to(DEVICE, self.dtype) for x in drawn]
        return Problem(inputs, self.mask, self.pattern, self.size)


GATHERED = {
    "ragged, a chunk of no tile": Gathered(MoBA(72, 2), seq_len=157),
    "group of 3": Gathered(MoBA(64, 2), heads=(3, 1), seq_len=128),
    "packed and padded": Gathered(
        MoBA(70, 2), Documents([[175, 75], [64, 63]]), (2, 1), 256, batch=2
    ),
    "padding": Gathered(MoBA(64, 3), Causal(valid=(150, 0)), batch=2),
    "everything": Gathered(MoBA(64, 99)),
    "fp16, head_dim 96": Gathered(MoBA(64, 3), dtype=torch.float16, dim=96),
    "more than a word of chunks": Gathered(
        MoBA(SMALL, 2), Documents([34 * SMALL - 3]), seq_len=34 * SMALL, size=SMALL
    ),
}
BY_BLOCKS = {
    "window": Gathered(MoBA(64, 3), Causal() & SlidingWindow(150)),
    "chunks beside blocks": Gathered(
        MoBA(SMALL + 3, 2),
        Documents([5 * SMALL - 5, 9, 6 * SMALL + 4]) & SlidingWindow(5 * SMALL + 10),
        (2, 1),
        12 * SMALL,
        size=SMALL,
    ),
    "own chunk alone, in the second word": Gathered(MoBA(SMALL, 1), seq_len=34 * SMALL, size=SMALL),
    "one chunk": Gathered(MoBA(128, 4), seq_len=128),
}
"""What the kernels over gathered queries leave to others."""


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


def _assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, b in want.items():
        a = got[name]
        # Rows that see nothing have an lse of -inf.
        assert torch.equal(a.isfinite(), b.isfinite())
        assert relative_error(*(x.nan_to_num(0, neginf=0) for x in (a, b))) < tolerance, name


@pytest.mark.parametrize("name", [*GATHERED, *BY_BLOCKS])
def test_dense_attention_over_what_was_selected(taken, name):
    p = (GATHERED | BY_BLOCKS)[name].problem()
    tolerance = 2e-3 if name.startswith("fp16") else 1e-5
    want = p.wanted(p.seen())
    for backend in ("triton", "eager"):
        _assert_close(p.results(backend=backend), want, tolerance)
    assert taken == (["forward", "backward"] if name in GATHERED else [])


def test_lists_cut_into_parts(monkeypatch):
    """The queries of a chunk are split over several programs, whose sums are added."""
    module = sys.modules["titan_sparse.kernels.gathered.kernel"]
    monkeypatch.setattr(module, "list_splits", lambda programs: 3)
    p = GATHERED["packed and padded"].problem()
    _assert_close(p.results(backend="triton"), p.wanted(p.seen()), 1e-5)


def test_logits_far_below_zero():
    """Keys behind a chunk's end have logit 0, far above all others, and must
    not cause infinities."""
    p = GATHERED["ragged, a chunk of no tile"].problem()
    q, k, v = p.inputs
    p = p._replace(inputs=[10 + q, -30 + k, v])
    got, want = (p.results(backend=backend) for backend in ("triton", "eager"))
    _assert_close(*({name: x[name] for name in NAMES[:5]} for x in (got, want)), 1e-2)


def test_other_ways_stay_as_they_are(taken):
    """This covers another backend, another pattern, and a part of the sequence."""
    p = GATHERED["group of 3"].problem()
    p.results(backend="eager")
    p._replace(pattern=Dense()).results(backend="triton")
    assert taken == []
    # The two shares go by lists of blocks, the gradient is the whole's.
    parts = p.results(backend="triton", recomputed=0.5)
    assert taken == ["backward"]
    _assert_close(parts, p.wanted(p.seen()), 1e-5)


def test_any_number_of_heads_at_a_time(monkeypatch):
    """Lists are made, and sums kept, for any number of heads at a time.

    Results are equal to the bit, except dk and dv, which are sums over heads.
    """
    p = Gathered(MoBA(64, 2), heads=(4, 2), seq_len=128).problem()
    want = p.results(backend="triton")
    # Bytes that hold two heads of lists, with 3 counts of 1 slot in 2 tiles, and one head of sums.
    monkeypatch.setattr(launch, "_LIST_BYTES", 2 * 8 * (128 + 6))
    monkeypatch.setattr(launch, "_TOTAL_BYTES", 4 * 128 * 16)
    assert len(launch.list_shares((1, 4, 128), 2, 2, 1)) == 2
    assert len(launch.total_shares((1, 2, 128, 16), 1)) == 2
    got = p.results(backend="triton")
    for name in ("out", "lse", "dq"):
        assert torch.equal(got[name], want[name])
    for name in ("dk", "dv"):
        assert relative_error(got[name], want[name]) < 1e-6


@pytest.mark.parametrize("heads", [(1, 4), (4, 1)], ids=str)
def test_layers_with_different_heads_share_a_mask(monkeypatch, heads):
    """What one layer leaves with the mask has its own number of heads, which
    another would read past."""
    compute = kernels.forward

    def forward(q: Tensor, plan: kernels.Plan) -> tuple[Tensor, Tensor]:
        assert plan.own.tiles.by_query.full_count.shape[1] == q.shape[1]
        computed.append(q.shape[1])
        return compute(q, plan)

    computed: list[int] = []
    monkeypatch.setattr(kernels, "forward", forward)
    mask = Causal().rows(128, torch.device(DEVICE))
    for number in heads:
        p = Gathered(MoBA(64, 2), mask, (number, 1), 128).problem()
        p.attend(*p.inputs, backend="triton")
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
