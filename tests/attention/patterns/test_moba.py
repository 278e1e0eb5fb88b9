"""MoBA: the selection against plain loops over documents, heads and tokens; kernels keep to each
query's choice.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import MIXED, MOBA, Case, cases_of_masks, check_selection
from tests.reference import dense_attention, gradients, structured_qkv
from titan_sparse.attention.backends import BACKENDS, base
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import MoBA
from titan_sparse.attention.patterns.moba import _largest
from titan_sparse.attention.tiles import block_tiles
from titan_sparse.kernels.block_sparse import Piece

eager = BACKENDS["eager"]
triton = BACKENDS["triton"]

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


@pytest.mark.parametrize(
    "block, blocks, last, pattern, documents",
    [
        (16, 34, 2, MoBA(16, 4), None),
        (32, 8, 5, MoBA(40, 2), [120, 9, 117]),
    ],
    ids=["more than a word of chunks", "chunks beside blocks"],
)
def test_kernels_keep_to_the_choice(block, blocks, last, pattern, documents):
    """The last query blocks against all keys: Triton kernels (without a GPU in the interpreter,
    which takes smaller blocks) and eager against dense attention."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        pattern = MoBA(64 // block * pattern.chunk_size, pattern.top_k)
        documents = documents and [240, 18, 234]
        block = 64
    seq_len = block * blocks
    mask = Documents(documents) if documents else Causal()
    q, k, v = (x.to(device, torch.float32) for x in structured_qkv(1, 2, 1, seq_len, 16, seed=2))
    index = pattern.select(q, k, mask, block_size=block)
    every = torch.arange(blocks, device=device)
    tiles = block_tiles(mask.rows(seq_len, device), index, every[-last:], every, 1, True)
    q = q[:, :, -last * block :]
    d_out = torch.randn_like(q)

    pieces = [Piece(k, v, tiles)]
    seen = index.dense(mask)[:, :, -last * block :].to(device)
    exact = [x.double() for x in (q, k, v)]
    want, grads = gradients(lambda *x: dense_attention(*x, seen, 0.25)[0], d_out.double(), *exact)
    wanted = (want, dense_attention(*exact, seen, 0.25)[1], *grads)
    for backend in (triton, eager):
        got_out, got_lse = backend.forward(q, pieces, 0.25, base.Sum(q.dtype))
        queries = base.Queries(q, d_out, got_out, got_lse)
        got_dq, [got_dkv] = backend.backward(queries, pieces, 0.25, base.Sum(q.dtype))
        got = (got_out, got_lse, got_dq, *got_dkv)
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
            assert (a - b).abs().nan_to_num(0).max() < 1e-4

    # The case is worth it: partial tiles, and fewer pairs than the mask allows.
    visible = mask.dense(seq_len, device)[:, None, -last * block :]
    assert (tiles.by_query.partial_count > 1).any()
    assert (seen != visible).any()
