"""MoBA: the selection against plain loops over documents, heads and tokens.

tests/attention/patterns/test_moba_gathered.py tests that kernels keep to the choice of each query.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import MIXED, MOBA, Case, cases_of_masks, check_selection
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import MoBA
from titan_sparse.attention.patterns.moba import _largest

SHORT = [50, 17, 16, 33, 15, 19]
CASES = cases_of_masks(MOBA) | {
    "own chunk alone": Case(MoBA(32, 1), Causal()),
    "everything": Case(MoBA(16, 99), Documents(MIXED), MIXED),
    "chunks beside blocks": Case(MoBA(19, 3), Documents(MIXED), MIXED),
    "chunks of a block": Case(MoBA(16, 3), Documents(SHORT), [SHORT]),
    "more than a word of chunks": Case(MoBA(16, 4), Causal(), seq_len=16 * 35, heads=(2, 1)),
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
